"""Refuses trajectories that cannot be trained as they were sampled: versions, room, roles, kept ids, routes, images."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from arl.api.errors import RoleError, TrajectoryError
from arl.api.settings.engines import PolicyRoles
from arl.api.train_engine import ModelLimits
from arl.api.types import ModelRequest, ModelResponse, Trajectory


def check_response(request: ModelRequest, response: ModelResponse) -> None:
    """Raise TrajectoryError for an engine's response under a grammar that does not say what it was sampled among."""
    if request.sampling.grammar is not None and response.output_ids and response.kept_ids is None:
        raise TrajectoryError(
            "the engine answered a request with a grammar, but its response has no kept_ids, which training needs to "
            "compute the same logprobs; an engine that cannot decode under a grammar must raise"
        )


def check_trajectory(trajectory: Trajectory, responses: Sequence[ModelResponse]) -> None:
    """Raise TrajectoryError if the trajectory trains one of these responses without its kept ids, or has no routes.

    responses: of its episode, those with kept ids or routes. One is found by its ids and logprobs, wherever it begins.
    """
    if trajectory.routes is None and trajectory.num_trained_tokens and any(r.routes is not None for r in responses):
        raise TrajectoryError(
            "arun_episode returned a trajectory without the routes of its responses: training would use other experts "
            "than the sampler did. Pass routes=response.routes for a prompt and its response; after several responses, "
            "let arl.Conversation make the trajectories, or set engine.replay_routing=false"
        )

    kept = trajectory.kept_ids
    is_bare = trajectory.loss_mask if kept is None else trajectory.loss_mask & (kept.index < 0)
    if not is_bare.any():
        return
    for response in responses:
        if response.kept_ids is None:
            continue
        is_constrained = response.kept_ids.index >= 0
        for start, stop in _places(response, trajectory):
            if (is_bare[start:stop] & is_constrained[: stop - start]).any():
                raise TrajectoryError(
                    f"arun_episode returned a trajectory whose tokens from {start} on were sampled under a grammar, "
                    "top_p, top_k or min_p, but without their kept_ids: training would compute other logprobs than the "
                    "sampler did; after n tokens of a prompt, pass "
                    "kept_ids=response.kept_ids.joined([n, response.kept_ids])"
                )


def check_images(trajectory: Trajectory, seen: Sequence[tuple[ModelRequest, ModelResponse]]) -> None:
    """Raise TrajectoryError if the trajectory trains a response after its request's tokens, but not its images.

    seen: of its episode, the requests with images, and their responses, which have tokens.
    """
    for request, response in seen:
        prompt = [*request.input_ids]
        for start, stop in _places(response, trajectory):
            first = start - len(prompt)
            is_trained = trajectory.loss_mask[start:stop].any()
            if first < 0 or not is_trained or trajectory.token_ids[first:start].tolist() != prompt:
                continue
            wanted = [(one.image, first + one.start, first + one.stop) for one in request.images]
            found = [(one.image, one.start, one.stop) for one in trajectory.images if first <= one.start < start]
            if found != wanted:
                raise TrajectoryError(
                    f"arun_episode returned a trajectory whose tokens from {start} on were sampled with "
                    "images in view, but without all of these in their places: training would compute "
                    "other logprobs than the sampler did; pass images=request.images for a prompt and its response, or "
                    "let arl.Conversation make the trajectories"
                )


def _places(response: ModelResponse, trajectory: Trajectory) -> Iterator[tuple[int, int]]:
    """Where the response's tokens lie: [start, stop), which may be cut at the trajectory's end."""
    import numpy as np

    ids, logprobs = np.array(response.output_ids, np.int32), np.array(response.output_logprobs, np.float32)
    begins = (trajectory.token_ids == ids[0]) & (trajectory.behavior_logprobs == logprobs[0])
    for start in begins.nonzero()[0].tolist():
        place = slice(start, start + len(ids))
        n = len(trajectory.token_ids[place])
        is_it = (trajectory.token_ids[place] == ids[:n]) & (trajectory.behavior_logprobs[place] == logprobs[:n])
        if is_it.all():
            yield start, start + n


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainedPolicies:
    """The policies of a run, as the end of an episode sees them."""

    roles: PolicyRoles
    limits: Mapping[str, ModelLimits]
    """Of each policy's model."""

    def limits_of(self, trajectory: Trajectory) -> ModelLimits:
        """Raises RoleError for a role that no policy plays."""
        return self.limits[self.roles.policy_of(trajectory.role)]

    def check_asked(self, trajectory: Trajectory, asked: Iterable[str]) -> None:
        """Raise RoleError if it trains a policy that the episode did not ask: another one sampled its tokens.

        asked: the roles of the episode's requests.
        """
        policy = self.roles.policy_of(trajectory.role)
        if trajectory.num_trained_tokens and policy not in {self.roles.policy_of(role) for role in asked}:
            raise RoleError(
                f"arun_episode returned a trajectory of the role {trajectory.role!r}, but asked for "
                f"{', '.join(sorted({*asked})) or 'none'} alone: the policy {policy} would be trained on tokens that "
                "it did not sample. Give the conversation (or ModelRequest) the role of its trajectory"
            )


def check_versions(trajectory: Trajectory, oldest_allowed: int, newest_allowed: int | None) -> None:
    oldest, newest = trajectory.oldest_version, trajectory.newest_version
    if oldest is not None and oldest < oldest_allowed:
        raise TrajectoryError(
            f"arun_episode returned a token of version {oldest}, but its group was admitted at version "
            f"{oldest_allowed}; train only on tokens sampled within the episode (loss_mask 0 for others)"
        )
    if newest is not None and newest_allowed is not None and newest > newest_allowed:
        raise TrajectoryError(
            f"arun_episode returned a token of version {newest}, but the newest weights are of version "
            f"{newest_allowed}; take versions from responses as they are, and share no server with another training"
        )


def check_room(trajectory: Trajectory, limits: ModelLimits) -> None:
    if frozenset(trajectory.arrays) != limits.arrays:
        has, needed = (", ".join(sorted(names)) or "none" for names in (trajectory.arrays, limits.arrays))
        raise TrajectoryError(
            f"arun_episode returned a trajectory with the arrays: {has}; the trained model needs: {needed} "
            "(Trajectory.arrays)"
        )
    ids, room = trajectory.token_ids, limits.context_length
    place = int(ids.argmax())
    if (highest := ids.item(place)) >= limits.vocab_size:
        raise TrajectoryError(
            f"arun_episode returned a trajectory with token_ids[{place}] = {highest}, but the model has "
            f"{limits.vocab_size} tokens (0 to {limits.vocab_size - 1}); encode prompts with the model's own tokenizer"
        )
    if room is not None and trajectory.loss_mask[room:].any():
        last = int(trajectory.loss_mask.nonzero()[0][-1]) + 1
        raise TrajectoryError(
            f"arun_episode returned a trajectory with {last} tokens up to the last trained one, but the model has room "
            f"for {room} (max_position_embeddings in its config.json); shorten its prompts, or end it sooner"
        )

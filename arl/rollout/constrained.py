"""Refuses trajectories that train tokens without what their responses say of them: kept ids, routes."""

from __future__ import annotations

from collections.abc import Sequence

from arl.api.errors import TrajectoryError
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
    import numpy as np

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
        ids, logprobs = np.array(response.output_ids, np.int32), np.array(response.output_logprobs, np.float32)
        is_constrained = response.kept_ids.index >= 0
        begins = (trajectory.token_ids == ids[0]) & (trajectory.behavior_logprobs == logprobs[0])
        for start in begins.nonzero()[0].tolist():
            seen = slice(start, start + len(ids))
            n = len(trajectory.token_ids[seen])
            is_it = (trajectory.token_ids[seen] == ids[:n]) & (trajectory.behavior_logprobs[seen] == logprobs[:n])
            if is_it.all() and (is_bare[seen] & is_constrained[:n]).any():
                raise TrajectoryError(
                    f"arun_episode returned a trajectory whose tokens from {start} on were sampled under a grammar, "
                    "top_p, top_k or min_p, but without their kept_ids: training would compute other logprobs than the "
                    "sampler did; after n tokens of a prompt, pass "
                    "kept_ids=response.kept_ids.joined([n, response.kept_ids])"
                )

"""From a tree of turns to trajectories: each path from the root to a leaf is one, and each turn is trained in one."""

from __future__ import annotations

from collections.abc import Container, Iterator, Mapping, Sequence
from dataclasses import dataclass

from arl.api.errors import TrajectoryError
from arl.api.types import NOT_SAMPLED, Trajectory, TurnSpan
from arl.workflow.dialogue import Turn


@dataclass(frozen=True, slots=True, kw_only=True)
class Path:
    """turns: from the root to a leaf. owned: those of them that are trained here, all of one temperature."""

    turns: tuple[Turn, ...]
    owned: tuple[Turn, ...]


def trajectories(
    turns: Sequence[Turn],
    reward: float,
    *,
    metrics: Mapping[str, float] | None = None,
    role: str = "agent",
    rewards: Mapping[str, float] | None = None,
    turn_rewards: Sequence[float] | None = None,
    states: Sequence[str | None] | None = None,
    cut_after: Turn | None = None,
) -> tuple[Trajectory, ...]:
    """One trajectory for each path; all have the outcome `reward`, which advantages count once for an episode.

    A turn that lies on several paths is trained in the first of them alone, with its process reward; in the others its
    tokens have loss_mask 0. Turns of one path that were sampled at different temperatures go to trajectories of their
    own. metrics are on the first trajectory alone, so that they are averaged over episodes.
    turn_rewards, states: for each of `turns`, in their order; see TurnSpan. cut_after: the turn that left no room for
    another.
    Raises TrajectoryError where these are not as many as turns, or nothing was sampled.
    """
    if not turns or any(turn.response is None for turn in turns):
        raise TrajectoryError("nothing was sampled, or a turn was demonstrated: there is no trajectory to train on")
    for name, given in (("turn_rewards", turn_rewards), ("states", states)):
        if given is not None and len(given) != len(turns):
            raise TrajectoryError(
                f"{name} has {len(given)} entries, but {len(turns)} turns were sampled; give one for each"
            )
    spans = {
        id(turn): (r, state)
        for turn, r, state in zip(turns, turn_rewards or [0.0] * len(turns), states or [None] * len(turns), strict=True)
    }
    made: list[Trajectory] = []
    for path in paths_of(turns):
        last = path.turns[-1]
        made.append(
            _trajectory(
                path,
                spans,
                reward=reward,
                rewards=rewards or {},
                metrics=metrics or {} if not made else {},
                role=role,
                is_truncated=_is_truncated(last) or last is cut_after,
            )
        )
    return tuple(made)


def paths_of(turns: Sequence[Turn]) -> Iterator[Path]:
    """In the order in which their leaves were said. A turn before them that is none of `turns`, as it was forgotten
    while another was about to follow it, is seen and not trained."""
    untaken = set(map(id, turns))
    parents = {id(_nearest(turn.parent, untaken)) for turn in turns}
    for leaf in (turn for turn in turns if id(turn) not in parents):
        path = leaf.path
        new = [turn for turn in path if id(turn) in untaken]
        untaken.difference_update(map(id, new))
        for temperature in dict.fromkeys(_temperature(turn) for turn in new):
            owned = tuple(turn for turn in new if _temperature(turn) == temperature)
            yield Path(turns=tuple(path[: path.index(owned[-1]) + 1]), owned=owned)


def _nearest(turn: Turn | None, among: Container[int]) -> Turn | None:
    """The turn, or the last one before it whose id is among these."""
    while turn is not None and id(turn) not in among:
        turn = turn.parent
    return turn


def _trajectory(
    path: Path,
    spans: Mapping[int, tuple[float, str | None]],
    *,
    reward: float,
    rewards: Mapping[str, float],
    metrics: Mapping[str, float],
    role: str,
    is_truncated: bool,
) -> Trajectory:
    token_ids: list[int] = []
    loss_mask: list[int] = []
    logprobs: list[float] = []
    versions: list[int] = []
    owned: list[TurnSpan] = []
    for turn in path.turns:
        assert turn.response is not None
        n, m = len(turn.given_ids), len(turn.output_ids)
        start = len(token_ids) + n
        is_owned = turn in path.owned
        token_ids += (*turn.given_ids, *turn.output_ids)
        loss_mask += (0,) * n + (int(is_owned),) * m
        logprobs += (0.0,) * n + turn.response.output_logprobs
        versions += (NOT_SAMPLED,) * n + turn.response.output_versions
        if is_owned:
            turn_reward, state = spans[id(turn)]
            owned.append(TurnSpan(start=start, stop=start + m, reward=turn_reward, state=state))
    return Trajectory(
        token_ids=tuple(token_ids),
        loss_mask=tuple(loss_mask),
        behavior_logprobs=tuple(logprobs),
        versions=tuple(versions),
        reward=reward,
        rewards=rewards,
        turns=tuple(owned),
        is_truncated=is_truncated,
        metrics=metrics,
        role=role,
        temperature=_temperature(path.owned[0]),
    )


def _temperature(turn: Turn) -> float:
    return turn.response.temperature if turn.response else 1.0


def _is_truncated(turn: Turn) -> bool:
    return turn.response is not None and turn.response.stop_reason == "length"

"""The workload of a run, from its event log: episodes with their turns, as simulated episodes take them."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from itertools import pairwise
from statistics import fmean, median
from typing import Any

from msgspec import structs

from arl.api.events import AttemptFailed, Event, TurnEnded
from arl.eventlog.records import EpisodeRecord, GroupRecord
from arl.eventlog.run_record import RunRecord
from arl.plan.workload import MeasuredEpisode, MeasuredTurn, Workload

OWN_S = 0.005
"""Shorter times between an answer and the next request are the controller's own, and no tool's."""
_CLOCKS_S = 1e-3
"""Two clocks may differ by so much."""
_ENOUGH = 0.5
"""At least this share of the groups that have ended is taken."""
_HOW: dict[str, Any] = {"finished": "finished", "rejected": "rejected", "failed": "failed", "timed_out": "failed"}


def measured_workload(run: RunRecord, life: int, calls: Sequence[Event], forwarded_share: float) -> Workload | None:
    """None without an episode that has ended. calls: the life's. forwarded_share: of the tokens, in training."""
    turns: defaultdict[str, list[TurnEnded]] = defaultdict(list)
    for call in calls:
        if isinstance(call, TurnEnded) and call.output > 0:
            turns[call.episode].append(call)
    failures: defaultdict[str, list[float]] = defaultdict(list)
    for number, record in run.system:
        if number == life and isinstance(record, AttemptFailed) and record.runs_again:
            failures[record.episode].append(record.t)
    kept = _share_kept(turns.values())
    measured: list[MeasuredEpisode] = []
    for group in _unbiased([group for group in run.groups if group.life == life]):
        for episode in group.episodes:
            if episode.episode.endswith("greedy") or episode.how not in _HOW or episode.ended is None:
                continue
            measured += _attempts(episode, group.group, turns[episode.episode], failures[episode.episode], kept)
    if not measured:
        return None
    return Workload(
        episodes=tuple(_with_shared_tokens(measured, forwarded_share)),
        num_examples=max(run.lives[life].num_examples, 1),
    )


def _unbiased(groups: Sequence[GroupRecord]) -> list[GroupRecord]:
    """Groups that have ended, in order of admission, up to the first that has not: later ones that have are short."""
    ended = [group for group in groups if group.outcome]
    first = next((i for i, group in enumerate(groups) if not group.outcome), len(groups))
    return ended[: max(first, round(_ENOUGH * len(ended)), 1)]


def _attempts(
    episode: EpisodeRecord, group: int, turns: Sequence[TurnEnded], failures: Sequence[float], kept: float
) -> Iterable[MeasuredEpisode]:
    """The attempts that failed, and the last one. failures: when an attempt failed that was not the last."""
    began = episode.began
    for ended in [*failures, episode.ended or 0.0]:
        own = sorted((turn for turn in turns if began <= turn.t <= ended + _CLOCKS_S), key=_begin)
        is_last = ended == episode.ended
        how = _HOW[episode.how] if is_last else "failed"
        if own or how != "finished":
            tokens = sum(part.tokens for part in episode.trajectories) if is_last else 0
            yield MeasuredEpisode(
                group=group,
                turns=tuple(_turns(own, ended, kept)),
                before_s=_waited(_begin(own[0]) - began) if own else 0.0,
                tokens=tokens,
                reward=(episode.reward or 0.0) if is_last else 0.0,
                how=how,
            )
        began = ended


def _begin(turn: TurnEnded) -> float:
    return turn.t - turn.seconds


def _waited(seconds: float) -> float:
    return seconds if seconds > OWN_S else 0.0


def _turns(turns: Sequence[TurnEnded], ended: float, kept: float) -> Iterable[MeasuredTurn]:
    """kept: the share of a turn that the next one finds cached."""
    before: TurnEnded | None = None
    for turn, next_begins in zip(turns, [*map(_begin, turns[1:]), ended], strict=True):
        cached = turn.cached
        if before is not None and not _is_cached(before, turn) and turn.prompt >= before.prompt + before.output:
            cached = max(cached, int(kept * (before.prompt + before.output)))
        yield MeasuredTurn(
            prompt_tokens=turn.prompt,
            cached_tokens=min(cached, turn.prompt),
            new_tokens=turn.output,
            tool_s=_waited(next_begins - turn.t),
        )
        before = turn


def _is_cached(before: TurnEnded, turn: TurnEnded) -> bool:
    """Whether what `before` computed could be used for `turn`: the same server, with the same weights."""
    return before.server == turn.server and before.newest == before.oldest == turn.oldest


def _share_kept(episodes: Iterable[Sequence[TurnEnded]]) -> float:
    """Of a turn's tokens, those that the next turn finds cached where server and weights are the same."""
    shares = [
        turn.cached / (before.prompt + before.output)
        for turns in episodes
        for before, turn in pairwise(sorted(turns, key=_begin))
        if _is_cached(before, turn) and turn.prompt >= before.prompt + before.output
    ]
    return min(median(shares), 1.0) if shares else 1.0


def _with_shared_tokens(episodes: Sequence[MeasuredEpisode], forwarded_share: float) -> Iterable[MeasuredEpisode]:
    """The tokens that are forwarded once for a group are those of its prompt."""
    sizes: defaultdict[int, int] = defaultdict(int)
    for episode in episodes:
        sizes[episode.group] += episode.tokens > 0
    several = {group: size for group, size in sizes.items() if size > 1}
    others = fmean((size - 1) / size for size in several.values()) if several else 1.0
    share = (1.0 - forwarded_share) / others
    for episode in episodes:
        shared = int(share * episode.tokens) if episode.group in several else 0
        yield structs.replace(episode, shared_tokens=min(max(shared, 0), episode.tokens))


def forwarded_share(steps: Sequence[Mapping[str, float]]) -> float:
    """The share of the trained batches' tokens that was forwarded; 1.0 if unknown."""
    whole = sum(step.get("tokens", 0.0) for step in steps)
    return sum(step.get("forwarded_tokens", 0.0) for step in steps) / whole if whole else 1.0

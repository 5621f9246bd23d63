"""A step of the trainer: what is known of it while it is open, and its log line."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from msgspec import structs

from arl.api.events import BatchTrained, Events, TokensCounted, TrainedSummary
from arl.api.types import Group, StepStats
from arl.rollout.episode_events import Candidate
from arl.training.metrics import RunTotals, batch_metrics, episode_rewards, reward_metrics
from arl.training.metrics_log import RunLog
from arl.training.token_log import ReportedBatch, named


@dataclass(slots=True, kw_only=True, eq=False)
class Step:
    """A batch from the start of its training until its log line. Times are of the monotonic clock."""

    groups: Sequence[Group]
    replayed: Sequence[Group]
    """Groups of earlier batches, trained with the new ones."""
    advantages: Sequence[float | None]
    """Of the trajectories of `groups`, then of those of `replayed`; see PreparedBatch."""
    began: float
    """When the wait for the batch began."""
    taken: float
    """When the wait ended."""
    call: asyncio.Future[ReportedBatch]
    trained: float | None = None
    """When training ended."""
    failed: list[Candidate] = field(default_factory=list[Candidate])
    """Failed episodes that trackers get with the step."""

    @property
    def is_trained(self) -> list[list[bool]]:
        """For each of `groups`, then each of `replayed`: whether the algorithm trained each of its trajectories."""
        left = iter(self.advantages)
        return [[next(left) is not None for _ in group.trajectories] for group in (*self.groups, *self.replayed)]


def log_step(
    log: RunLog,
    totals: RunTotals,
    step: Step,
    version: int,
    known: Mapping[str, float],
    tokens: TokensCounted,
) -> StepStats:
    """Log the step that led to `version`. It touches only its arguments, because the event loop goes on.

    known: metrics computed before.
    """
    rewards = episode_rewards(step.groups)
    numbers = batch_metrics(step.groups, version - 1, step.replayed, step.is_trained)
    metrics = {"version": version, **reward_metrics(rewards), **numbers, **known}
    stats = StepStats(
        version=version,
        reward=metrics["reward"],
        num_episodes=len(rewards),
        mean_staleness=numbers["staleness/mean"],
        max_staleness_seen=int(numbers["staleness/max"]),
        wait_s=known["time/wait_s"],
        train_s=known["time/train_s"],
        metrics=metrics,
        remark=log.health.remark(metrics),
    )
    totals.max_staleness_seen = max(totals.max_staleness_seen, stats.max_staleness_seen)  # a cancelled step counts, too
    log.step(stats, step.groups, step.advantages, step.failed)
    log.tokens(tokens)
    return stats


def report_step(events: Events, step: Step, version: int, seconds: float) -> None:
    """Give the event log the step that led to `version`."""
    reported = step.call.result()
    names = [name for group in step.groups for name in named(group)]
    events.emit(
        BatchTrained(
            version=version,
            groups=[group.group_id for group in step.groups],
            seconds=seconds,
            cpu_s=reported.cpu_s,
            trajectories=[TrainedSummary(*name[:2], *own) for name, own in zip(names, reported.numbers, strict=False)],
        )
    )
    images = {name[:2]: [placed.image for placed in name[2].images] for name in names if name[2].images}
    for tokens in reported.tokens:
        own = {image: None for row in tokens.rows for image in images.get(row, ())}
        events.keep(structs.replace(tokens, images=[*own]) if own else tokens)

"""Sentences about what looks wrong in a run, each with what to do about it. docs/algorithms.md explains the metrics."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from arl.eventlog.run_record import RunRecord
from arl.view.episode_table import Row, mean

_STEPS = 20
"""The last steps of a run, which rules look at."""
_EPISODES = 500
_GROUPS = 50

Severity = Literal["error", "warning", "note"]


@dataclass(frozen=True, slots=True)
class _Rule:
    """Holds when the mean of a metric over the last steps is above, or below, a bound. `{mean}` may stand in `text`."""

    metric: str
    is_bad: Callable[[float], bool]
    severity: Severity
    text: str
    advice: str


_RULES = (
    _Rule(
        "clip_fraction", lambda mean: mean > 0.3, "warning",
        "{mean:.0%} of the trained tokens were clipped in the last steps: a batch moves the policy too far.",
        "Use a smaller train.lr, or fewer algorithm.minibatches.",
    ),
    _Rule(
        "effective_sample_size", lambda mean: mean < 0.3, "warning",
        "The effective sample size was {mean:.2f} in the last steps: few tokens carry most of the weight.",
        "Use a smaller rollout.max_staleness, or a correction that bounds the weights more.",
    ),
    _Rule(
        "behavior_weight_zero", lambda mean: mean > 0.3, "warning",
        "{mean:.0%} of the trained tokens had weight 0 in the last steps: the correction left them out.",
        "Use a smaller rollout.max_staleness; check that sampler and trainer agree (behavior_kl_proximal).",
    ),
    _Rule(
        "truncated", lambda mean: mean > 0.3, "warning",
        "{mean:.0%} of the trajectories were cut by a length limit in the last steps.",
        "Allow more tokens (max_new_tokens, the context length), or reward shorter answers.",
    ),
    _Rule(
        "nonfinite_grads", lambda mean: mean > 0, "warning",
        "Gradients were not finite in the last steps, and their optimizer steps were skipped.",
        "Use a smaller train.lr, or train.dtype float32.",
    ),
    _Rule(
        "event_loop_lag_s", lambda mean: mean > 0.3, "warning",
        "The event loop was blocked for {mean:.2f} s at a time: a workflow computes on it.",
        "Move that work into a thread, or set rollout.num_workers.",
    ),
    _Rule(
        "servers/fenced", lambda mean: mean >= 0.5, "warning",
        "{mean:.1f} inference servers were fenced at the end of the last steps.",
        "See the servers below, and their logs.",
    ),
)  # fmt: skip


def findings(run: RunRecord, servers: Sequence[Row], lost: Mapping[str, int]) -> list[Row]:
    """Errors first."""
    rows = run.steps
    last = rows[-_STEPS:]
    found = [
        _told(rule, mean) for rule in _RULES if (mean := _mean(last, rule.metric)) is not None and rule.is_bad(mean)
    ]
    found += [one for check in (_entropy, _waiting, _bound, _rewards) if (one := check(run, rows)) is not None]
    found += [one for one in (_equal(run), _failing(run), _losses(lost)) if one is not None]
    if servers and all(server["state"] in ("fenced", "left") for server in servers):
        found.append(_finding("error", "No inference server serves.", "See the reasons below, and the servers' logs."))
    severities = ("error", "warning", "note")
    return sorted(found, key=lambda one: severities.index(one["severity"]))


def _finding(severity: Severity, text: str, advice: str) -> Row:
    return {"severity": severity, "text": text, "advice": advice}


def _told(rule: _Rule, mean: float) -> Row:
    return _finding(rule.severity, rule.text.format(mean=mean), rule.advice)


def _values(rows: Sequence[Mapping[str, Any]], metric: str) -> list[float]:
    values = (row.get(metric) for row in rows)
    return [float(value) for value in values if isinstance(value, int | float) and math.isfinite(value)]


def _mean(rows: Sequence[Mapping[str, Any]], metric: str) -> float | None:
    values = _values(rows, metric)
    return mean(values) if values else None


def _entropy(_: RunRecord, rows: list[Row]) -> Row | None:
    first, now = _mean(rows[:5], "entropy"), _mean(rows[-5:], "entropy")
    if len(rows) < 10 or first is None or now is None or now > first / 10:
        return None
    return _finding(
        "warning",
        f"The entropy fell from {first:.3g} to {now:.3g}: the policy hardly explores any more.",
        "If the reward stands still, too: a smaller train.lr, an entropy bonus, or examples that are harder.",
    )


def _waiting(_: RunRecord, rows: list[Row]) -> Row | None:
    waited, trained = (sum(_values(rows[-_STEPS:], f"time/{name}_s")) for name in ("wait", "train"))
    if len(rows) < 3 or waited < 0.8 * (waited + trained) or not waited:
        return None
    return _finding(
        "note",
        f"The trainer waits for batches {waited / (waited + trained):.0%} of the time.",
        "More servers, more episodes at once, or a larger rollout.max_staleness reduce the waiting.",
    )


def _bound(run: RunRecord, rows: list[Row]) -> Row | None:
    rollout = run.settings.get("rollout")
    bound = rollout.get("max_staleness") if isinstance(rollout, dict) else None
    values = _values(rows[-_STEPS:], "staleness/mean")
    if not isinstance(bound, int) or bound < 1 or len(values) < 5 or min(values) < bound - 0.1:
        return None
    return _finding(
        "note",
        f"Nearly all trained tokens are {bound} versions old, the most that is allowed: groups queue in the buffer.",
        "A smaller rollout.max_staleness costs no time then.",
    )


def _rewards(_: RunRecord, rows: list[Row]) -> Row | None:
    values, spread = _values(rows[-_STEPS:], "reward"), _values(rows[-_STEPS:], "reward_std")
    if len(values) < 5 or not spread or max(spread) > 0:
        return None
    return _finding(
        "error",
        f"All episodes of the last {len(values)} steps had the reward {values[-1]:g}: there is nothing to learn from.",
        "Read some episodes: the task may be too hard or too easy, or the reward may not see the answer.",
    )


def _equal(run: RunRecord) -> Row | None:
    """Groups whose episodes all had the same reward teach nothing to an algorithm that compares them."""
    ended = [group for group in run.groups[-4 * _GROUPS :] if group.ended is not None][-_GROUPS:]
    rewards = [[e.reward for e in group.episodes if e.reward is not None] for group in ended]
    several = [own for own in rewards if len(own) > 1]
    equal = [own for own in several if len(set(own)) == 1]
    if len(several) < 10 or len(equal) < 0.4 * len(several):
        return None
    low = sum(own[0] == min(map(min, several)) for own in equal)
    advice = "harder" if low < len(equal) / 2 else "easier"
    return _finding(
        "warning",
        f"{len(equal) / len(several):.0%} of the last {len(several)} groups had equal rewards: no signal.",
        f"Use {advice} examples, a curriculum, a larger rollout.group_size, or a reward with more grades.",
    )


def _failing(run: RunRecord) -> Row | None:
    ended = [e for e in run.episodes[-2 * _EPISODES :] if e.ended is not None][-_EPISODES:]
    failed = [e for e in ended if e.how in ("failed", "timed_out")]
    if len(failed) < 3 or len(failed) < 0.1 * len(ended):
        return None
    return _finding(
        "warning",
        f"{len(failed)} of the last {len(ended)} episodes failed.",
        "See the failures below: each cause has an example.",
    )


def _losses(lost: Mapping[str, int]) -> Row | None:
    if not any(lost.values()):
        return None
    return _finding(
        "note",
        f"The event log could not keep {lost['events']} records and the tokens of {lost['episodes']} episodes.",
        "More came than the disk took; log.events.tokens: some keeps fewer.",
    )

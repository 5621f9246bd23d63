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
_GROUPS = 200
_WINDOW = 10
"""Steps whose mean reward is compared with that of others."""
_NO_AIMS = frozenset({"episode/context_full"})
"""Metrics that should fall."""

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
        "effective_sample_size", lambda mean: mean < 0.5, "warning",
        "The effective sample size was {mean:.2f} in the last steps: few tokens carry most of the weight.",
        "Use a smaller rollout.max_staleness, or a correction that bounds the weights more.",
    ),
    _Rule(
        "behavior_weight_zero", lambda mean: mean > 0.3, "warning",
        "{mean:.0%} of the trained tokens had weight 0 in the last steps: the correction left them out.",
        "Use a smaller rollout.max_staleness; check that sampler and trainer agree (behavior_kl_proximal).",
    ),
    _Rule(
        "nonfinite_grads", lambda mean: mean > 0, "warning",
        "Gradients were not finite in the last steps, and their optimizer steps were skipped.",
        "Use a smaller train.lr, or train.dtype float32.",
    ),
    _Rule(
        "event_loop_lag_s", lambda mean: mean > 1, "warning",
        "The event loop was blocked for {mean:.2f} s at a time: a workflow computes on it.",
        "Move that work into a thread, or set rollout.num_workers.",
    ),
    _Rule(
        "event_loop_lag_s", lambda mean: 0.3 < mean <= 1, "note",
        "The event loop was blocked for up to {mean:.2f} s: by a workflow, or because no core was to spare.",
        "If it is the workflow: move that work into a thread, or set rollout.num_workers.",
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
    found += [one for check in _CHECKS if (one := check(run, rows)) is not None]
    found += [one for one in (_failing(run), _losses(lost)) if one is not None]
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


def _range(rows: Sequence[Row]) -> tuple[float, float]:
    """The lowest and the highest reward of an episode, in all steps; (0, 0) if that is not known."""
    return min(_values(rows, "reward_min"), default=0.0), max(_values(rows, "reward_max"), default=0.0)


def _is_solved(rows: Sequence[Row]) -> bool:
    """Whether nearly all episodes of the last steps had the highest reward of the run, and others once had not."""
    low, high = _range(rows)
    now = _mean(rows[-_STEPS:], "reward")
    return now is not None and high > low and now >= low + 0.9 * (high - low)


def _entropy(_: RunRecord, rows: list[Row]) -> Row | None:
    """The policy of a solved task need not explore."""
    first, now = _mean(rows[:5], "entropy"), _mean(rows[-_STEPS:], "entropy")
    if len(rows) < _STEPS or first is None or now is None or now > first / 5 or _is_solved(rows):
        return None
    return _finding(
        "warning",
        f"The entropy fell from {first:.3g} to {now:.3g} nats: the policy hardly explores any more.",
        "Begin again with a smaller train.lr, fewer updates of each batch (algorithm.epochs, minibatches), or an "
        "entropy bonus (algorithm.entropy).",
    )


def _fallen(_: RunRecord, rows: list[Row]) -> Row | None:
    low, high = _range(rows)
    rewards = _values(rows, "reward")
    windows = [mean(rewards[k : k + _WINDOW]) for k in range(len(rewards) - _WINDOW + 1)]
    if len(windows) <= _WINDOW or max(windows) - windows[-1] < 0.2 * (high - low) or high == low:
        return None
    best = windows.index(max(windows))
    return _finding(
        "warning",
        f"The reward fell to {windows[-1]:.3g}; in steps {best + 1} to {best + _WINDOW} it was {windows[best]:.3g}.",
        "See what moved before it fell: entropy, effective_sample_size, behavior_kl_proximal, lengths. Go on from an "
        "earlier checkpoint with a smaller train.lr or rollout.max_staleness.",
    )


def _hacked(_: RunRecord, rows: list[Row]) -> Row | None:
    """Shares that fall while the reward rises: a part of the reward, or a metric of the workflow that only watches."""
    low, high = _range(rows)
    before, now = _mean(rows[:5], "reward"), _mean(rows[-_STEPS:], "reward")
    if len(rows) < _STEPS or before is None or now is None or now - before < 0.1 * (high - low) or high == low:
        return None
    for name in sorted(name for name in rows[0] if name.startswith(("reward/", "episode/")) and name not in _NO_AIMS):
        values = _values(rows, name)
        first, last = _mean(rows[:5], name), _mean(rows[-_STEPS:], name)
        if first is None or last is None or min(values) < 0 or max(values) > 1 or first < 0.1 or last > first / 2:
            continue
        return _finding(
            "warning",
            f"The reward rose from {before:.3g} to {now:.3g}, and {name} fell from {first:.3g} to {last:.3g}.",
            "If both should rise, the reward pays for something else than you want: read the episodes with the highest "
            "rewards.",
        )
    return None


def _held_out(run: RunRecord, rows: list[Row]) -> Row | None:
    low, high = _range(rows)
    values = _values(run.evaluations, "reward")
    before, now = _mean(rows[:5], "reward"), _mean(rows[-_STEPS:], "reward")
    if len(values) < 3 or before is None or now is None or now < before or high == low:
        return None
    if max(values) - values[-1] < 0.2 * (high - low) or _fallen(run, rows) is not None:
        return None
    return _finding(
        "warning",
        f"The held-out reward fell from {max(values):.3g} to {values[-1]:.3g}, and that of training did not.",
        "The policy learns its examples by heart, or the evaluation scores something else: use more examples, or go "
        "back to the best checkpoint.",
    )


def _truncated(_: RunRecord, rows: list[Row]) -> Row | None:
    first, now = _mean(rows[:3], "truncated"), _mean(rows[-_STEPS:], "truncated")
    if first is None or now is None or now <= 0.3:
        return None
    allow = "Otherwise allow more tokens (max_new_tokens, the context length)."
    text = f"A length limit cut {now:.0%} of the trajectories in the last steps, and {first:.0%} in the first ones"
    if first > 0.3:
        return _finding(
            "warning",
            f"{text}.",
            "Read how an episode ends. If the model goes on after its answer, the chat template or the token that ends "
            f"a turn (eos_token) is not the one that it was fine-tuned with. {allow}",
        )
    return _finding(
        "warning",
        f"{text}: they have grown.",
        f"Read some. If length does not help, the reward pays for it: change it, or see algorithm.overlong. {allow}",
    )


def _distance(_: RunRecord, rows: list[Row]) -> Row | None:
    """Between the policy that sampled the tokens and the one that trains on them."""
    last = rows[-_STEPS:]
    kl, staleness = _mean(last, "behavior_kl_proximal"), _mean(last, "staleness/mean")
    fresh = _mean(last, "staleness_0/behavior_kl_proximal")
    if staleness == 0:
        fresh = kl
    if fresh is not None and fresh > 0.05:
        return _finding(
            "warning",
            f"Sampler and trainer disagree about fresh tokens: behavior_kl_proximal is {fresh:.2g} at staleness 0.",
            "It should be near 0. Compare their weights, precision and temperature; algorithm.preset icepop or mis "
            "leaves out what they disagree on.",
        )
    if kl is None or staleness is None or kl <= 0.1:
        return None
    return _finding(
        "warning",
        f"The policy was {kl:.2g} nats (behavior_kl_proximal) away from the sampler of its tokens, which were "
        f"{staleness:.3g} versions old.",
        "Use a smaller rollout.max_staleness or a smaller train.lr, and a correction that bounds the weights "
        "(algorithm.correction).",
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


def _equal(run: RunRecord, rows: list[Row]) -> Row | None:
    """Groups whose episodes all had the same reward teach nothing to an algorithm that compares them."""
    ended = [group for group in run.groups[-4 * _GROUPS :] if group.outcome == "kept"][-_GROUPS:]
    rewards = [[e.reward for e in group.episodes if e.reward is not None] for group in ended]
    several = [own for own in rewards if len(own) > 1]
    equal = [own for own in several if len(set(own)) == 1]
    if len(several) < 10 or len(equal) < 0.4 * len(several):
        return None
    share, (lowest, highest) = len(equal) / len(several), (pick(map(pick, several)) for pick in (min, max))
    low, high = (sum(own[0] == bound for own in equal) / len(equal) for bound in (lowest, highest))
    if _is_solved(rows):
        return _finding(
            "note",
            f"{share:.0%} of the last {len(several)} groups had equal rewards, nearly all of them the highest.",
            "Read some. If they are good and held-out rewards as high, the run is done. Otherwise use harder examples.",
        )
    use = "Use harder" if high > low else "Read some: the reward may miss right answers. Otherwise use easier"
    which = f"{low:.0%} of these the lowest, {high:.0%} the highest" if lowest < highest else f"all {lowest:g}"
    return _finding(
        "warning" if share >= 0.7 else "note",
        f"{share:.0%} of the last {len(several)} groups had equal rewards, and taught nothing: {which}.",
        f"{use} examples, a curriculum, a larger rollout.group_size, or a reward with more grades; "
        "algorithm.dynamic_sampling replaces such groups.",
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


_CHECKS = (_rewards, _fallen, _hacked, _held_out, _entropy, _truncated, _distance, _equal, _waiting, _bound)
"""Each looks at the run and its steps."""

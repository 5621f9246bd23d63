"""What looks wrong in a run's numbers, each with what to do about it: rules of thumb, looked up in a Digest.

`arl view` and `arl top` show findings whole; the line of a step ends in the `remark` of one, which HealthLine chooses.
docs/healthy.md shows good and bad runs and what the rules say about them; docs/algorithms.md explains the metrics.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Literal

from arl.observe.health.digest import Digest, Row, mean, mean_of, number, values

_FEW = 20
"""Some rules need at least this many steps."""
_WINDOW = 10
"""The number of late steps over which entropies are averaged."""
_TRIPLED, _NATS = 3.0, 0.5
"""An entropy has risen if it has grown by this factor, and to this many nats. Of the runs in docs/healthy.md only the
collapsed one's did, when it had lost its reward; the starved one's grew by 1.7. Below half a nat a policy is sure."""
_EQUAL = 0.7
"""Share of groups with equal rewards. The healthy run and the quickstart go beyond it as they solve their tasks; the
starved run was above 0.85 from the first steps on, at a reward near the lowest."""
_LONGER = 1.5
"""Times. In docs/presets.md runs at 1.8 collapsed."""
_SAMPLE_SIZE = 0.75
"""Effective sample size. At max_staleness 16 five runs that learned were above 0.86 in every 20 steps, and one that
collapsed ended at 0.65 (docs/figures.md); runs with fresher tokens are above 0.97."""
_FRESH, _EXACT = 0.02, 1e-4
"""Of behavior_kl_proximal at staleness 0. bfloat16 on both sides costs some 0.001 to 0.01. In float32 on both sides the
first step has 1e-10; later ones may have responses that rest on keys and values of older weights."""
_MOSTLY_RIGHT = 0.75
"""Level of reward from which equal groups are mostly right ones."""
_FAILED = 0.1
"""Share of episodes. Healthy runs have none; from a tenth on, the length bias of what is left matters."""
_NO_AIM = re.compile(
    "error|fail|malformed|invalid|unread|killed|timed_?out|timeout|truncat|penal|repeat|repetit|"
    "(context_full|tool_calls|turns|teacher_kl)$",
    re.IGNORECASE,
)
"""Words in names of metrics that may fall: mishaps, penalties and counts. The weights of rewards are not logged."""

Severity = Literal["error", "warning", "note"]
SEVERITIES: tuple[Severity, ...] = ("error", "warning", "note")


@dataclass(frozen=True, slots=True, kw_only=True)
class Symptom:
    """What looks wrong in a run, and what to do about it."""

    kind: str
    """Equal if the same symptom is found again with other numbers."""
    severity: Severity
    text: str
    advice: str
    remark: str = ""
    """A few words for the line of a step; empty for what the line leaves out."""


_RULES: tuple[tuple[str, Callable[[float], bool], Severity, str, str, str], ...] = (
    (
        "clip_fraction", lambda mean: mean > 0.3, "warning",
        "{mean:.0%} of the trained tokens were clipped in the last steps: a batch moves the policy too far.",
        "Use a smaller train.optimizer.lr, or fewer algorithm.minibatches.",
        "{mean:.0%} of the tokens are clipped",
    ),
    (
        "effective_sample_size", lambda mean: mean < _SAMPLE_SIZE, "warning",
        "The effective sample size was {mean:.2f} in the last steps: few tokens carry most of the weight.",
        "Use a smaller rollout.max_staleness or train.optimizer.lr, or tighter algorithm.rejections with outward.",
        "importance weights: the effective sample size is {mean:.2f}",
    ),
    (
        "behavior_weight_zero", lambda mean: mean > 0.3, "warning",
        "{mean:.0%} of the trained tokens had weight 0 in the last steps: algorithm.rejections left them out.",
        "Use a smaller rollout.max_staleness; check that sampler and trainer agree (behavior_kl_proximal).",
        "{mean:.0%} of the tokens have weight 0",
    ),
    (
        "nonfinite_grads", lambda mean: mean > 0, "warning",
        "Gradients were not finite in the last steps, and their optimizer steps were skipped.",
        "Use a smaller train.optimizer.lr, or train.dtype float32.",
        "gradients are not finite",
    ),
    (  # a note: the lag alone cannot tell a workflow from a busy machine
        "event_loop_lag_s", lambda mean: mean > 0.3, "note",
        "The event loop was blocked for up to {mean:.2f} s: by a workflow, or because no core was to spare.",
        "If it is the workflow: move that work into a thread, or set rollout.num_workers.", "",
    ),
    (
        "servers/fenced", lambda mean: mean >= 0.5, "warning",
        "{mean:.1f} inference servers were fenced at the end of the last steps.",
        "See the servers below, and their logs.",
        "{mean:.1f} servers are fenced",
    ),
)  # fmt: skip
"""Each holds when the mean of a metric over the last steps is bad: (metric, whether it is, and a Symptom's severity,
text, advice and remark, in which `{mean}` may stand)."""


def remarks(run: Digest) -> list[Symptom]:
    """The symptoms in the numbers, the most important first."""
    found = [one for check in _CHECKS if (one := check(run)) is not None]
    for metric, is_bad, severity, text, advice, remark in _RULES:
        if (value := mean_of(run.last, metric)) is not None and is_bad(value):
            told, few = text.format(mean=value), remark.format(mean=value)
            found.append(Symptom(kind=metric, severity=severity, text=told, advice=advice, remark=few))
    return sorted(found, key=lambda one: SEVERITIES.index(one.severity))


def _rewards(run: Digest) -> Symptom | None:
    """Where two players share out a reward, the means of episodes are equal, and their groups are not."""
    found, spread = values(run.last, "reward"), values(run.last, "reward_std")
    if len(found) < 5 or not spread or max(spread) > 0 or run.is_solved or _is_taught_by_tokens(run):
        return None
    if min(values(run.last, "equal_groups"), default=1.0) < 1:
        return None
    return Symptom(
        kind="rewards",
        severity="error",
        text=f"All episodes of the last {len(found)} steps had the reward {found[-1]:g}: "
        "there is nothing to learn from.",
        advice="Read some episodes: the task may be too hard or too easy, or the reward may not see the answer.",
        remark=f"all rewards are {found[-1]:g}",
    )


def _failures(run: Digest) -> Symptom | None:
    """By the totals of the steps, which count from the beginning of the run."""
    rows = [*run.late][-_FEW - 1 :]
    before = {} if run.num_steps < len(rows) + 1 else rows[0]
    failed, trained = (
        (number(rows[-1].get(name)) or 0.0) - (number(before.get(name)) or 0.0) if rows else 0.0
        for name in ("episodes_failed", "episodes_trained")
    )
    if failed < 3 or failed < _FAILED * (failed + trained):
        return None
    return Symptom(
        kind="failures",
        severity="warning",
        text=f"{failed / (failed + trained):.0%} of the episodes of the last steps failed.",
        advice="See logs/episodes.log.",
        remark=f"{failed / (failed + trained):.0%} of the episodes failed",
    )


def _fallen(run: Digest) -> Symptom | None:
    if (fall := run.fall) is None or not run.is_much(fall.best - fall.now, fall.error):
        return None
    return Symptom(
        kind="fall",
        severity="warning",
        text=f"The reward fell to {fall.now:.3g}; in {fall.steps} it was {fall.best:.3g}.",
        advice="See what moved before it fell: entropy, effective_sample_size, behavior_kl_proximal, lengths. Go on "
        "from an earlier checkpoint with a smaller train.optimizer.lr or rollout.max_staleness.",
        remark=f"the reward fell from {fall.best:.2f} to {fall.now:.2f}",
    )


def _hacked(run: Digest) -> Symptom | None:
    """Shares that fall while the reward rises: a part of the reward, or a metric of the workflow that only watches."""
    before, now = run.before, run.now
    if run.num_steps < _FEW or before is None or now is None or not now - before >= 0.1 * run.range > 0:
        return None
    for name in sorted({name for row in run.first for name in row if name.startswith(("reward/", "episode/"))}):
        first, last = mean_of(run.first, name), mean_of(run.last, name)
        if first is None or last is None or first < 0.1 or last > first / 2 or _NO_AIM.search(name):
            continue
        if not all(0 <= value <= 1 for value in values([*run.first, *run.late], name)):
            continue
        return Symptom(
            kind="hacked",
            severity="warning",
            text=f"The reward rose from {before:.3g} to {now:.3g}, and {name} fell from {first:.3g} to {last:.3g}.",
            advice="If both should rise, the reward pays for something else than you want: read the episodes with the "
            "highest rewards.",
            remark=f"the reward rose, and {name} fell from {first:.2f} to {last:.2f}",
        )
    return None


def _held_out(run: Digest) -> Symptom | None:
    """Of few examples, the mean reward differs from one evaluation to the next."""
    known = [(reward, row) for row in run.evaluations if (reward := number(row.get("reward"))) is not None]
    if len(known) < 3 or run.before is None or run.now is None or run.now < run.before or _fallen(run):
        return None
    (best, best_row), (last, last_row) = max(known, key=lambda one: one[0]), known[-1]
    errors = [number(row.get("standard_error")) for row in (best_row, last_row)]
    if None in errors:  # of one example, or an older arl
        variance = sum(max((reward - run.low) * (run.high - reward), 0.0) for reward in (best, last))
        error = math.sqrt(variance / max(number(last_row.get("num_episodes")) or math.inf, 1.0))
    else:
        error = math.hypot(*(one for one in errors if one is not None))
    if not run.is_much(best - last, error):
        return None
    return Symptom(
        kind="held out",
        severity="warning",
        text=f"The held-out reward fell from {best:.3g} to {last:.3g}, and that of training did not.",
        advice="The policy learns its examples by heart, or the evaluation scores something else: use more examples, "
        "or go back to the best checkpoint.",
        remark=f"the held-out reward fell from {best:.2f} to {last:.2f}",
    )


def _truncated(run: Digest) -> Symptom | None:
    first, now = mean_of(run.first[:3], "truncated"), mean_of(run.last, "truncated")
    if first is None or now is None or now <= 0.3:
        return None
    allow = "Otherwise allow more tokens (max_new_tokens, the context length)."
    text = f"A length limit cut {now:.0%} of the trajectories in the last steps, and {first:.0%} in the first ones"
    has_grown = first <= 0.3
    template = (
        "Read how an episode ends. If the model goes on after its answer, the chat template or the token that ends a "
        f"turn (eos_token) is not the one that it was fine-tuned with. {allow}"
    )
    pays = f"Read some. If length does not help, the reward pays for it: change it, or see algorithm.overlong. {allow}"
    return Symptom(
        kind="truncated",
        severity="warning",
        text=f"{text}: they have grown." if has_grown else f"{text}.",
        advice=pays if has_grown else template,
        remark=f"{now:.0%} of the trajectories are cut by a length limit",
    )


def _entropy_fell(run: Digest) -> Symptom | None:
    """The policy of a solved task need not explore, and one that learns explores less and less.

    A group that differs now and then throws a collapsed policy about: so this looks for the lowest of the late steps.
    """
    first, late = mean_of(run.first[:3], "entropy"), values(run.late, "entropy")
    means = [mean(late[k : k + _WINDOW]) for k in range(len(late) - _WINDOW + 1)]
    if run.num_steps < _FEW or first is None or not means or run.is_solved:
        return None
    lowest = min(means)
    if lowest > first / 5 or lowest >= first:
        return None
    return Symptom(
        kind="entropy fell",
        severity="warning" if lowest <= first / 10 else "note",
        text=f"The entropy fell from {first:.3g} to {lowest:.3g} nats: the policy hardly explores any more.",
        advice="Begin again with a smaller train.optimizer.lr, fewer updates of each batch (algorithm.epochs, "
        "minibatches), or an entropy bonus (algorithm.entropy).",
        remark=f"the entropy fell from {first:.2g} to {lowest:.2g}",
    )


def _entropy_rose(run: Digest) -> Symptom | None:
    first, late = mean_of(run.first[:3], "entropy"), values(run.late, "entropy")[-_WINDOW:]
    if first is None or len(late) < _WINDOW or mean(late) < max(_TRIPLED * first, _NATS):
        return None
    return Symptom(
        kind="entropy rose",
        severity="warning",
        text=f"The entropy rose from {first:.3g} to {mean(late):.3g} nats: the policy becomes unsure of its tokens.",
        advice="Read some episodes. If they have become noise, use a smaller train.optimizer.lr or entropy bonus "
        "(algorithm.entropy); if they have become long, see what the reward pays for.",
        remark=f"the entropy rose from {first:.2g} to {mean(late):.2g}",
    )


def _fresh(run: Digest) -> Symptom | None:
    """Fresh tokens come from the weights that are trained, so a difference there is a fault of sampler or trainer."""
    began, now = (mean(found) if (found := _of_fresh(rows)) else None for rows in (run.first[:1], run.last))
    paths = (("train", "dtype"), ("engine", "dtype"))  # embedded servers and trainer may both compute in float32
    is_exact = run.setting("engine", "kind") == "local" and all(run.setting(*path) == "float32" for path in paths)
    limit = _EXACT if is_exact and began is not None and began > _EXACT else _FRESH
    if now is None or now <= limit:
        return None
    if began is not None and began > min(limit, now / 2):
        when = "They already disagreed in the first step, before any weights were loaded"
        causes = "another temperature, undeclared truncation of the samples, or another precision"
    else:
        when = "They agreed in the first step, before weights were loaded"
        causes = "a load that leaves out some layers, wrong version labels, or a prefix cache that a load did not flush"
    return Symptom(
        kind="distance",
        severity="warning",
        text=f"Sampler and trainer disagree about fresh tokens: behavior_kl_proximal is {now:.2g} at staleness 0. "
        f"{when}: the likely causes are {causes}.",
        advice="Run `arl doctor SCRIPT` with this run's settings: it names the cause, and what to change. "
        "algorithm.preset icepop or mis leaves out what they disagree on.",
        remark=f"sampler and trainer disagree about fresh tokens: KL {now:.2g} (arl doctor names the cause)",
    )


def _of_fresh(rows: Iterable[Row]) -> list[float]:
    """behavior_kl_proximal of fresh tokens: of all tokens, where all are fresh."""
    name, found = "behavior_kl_proximal", list[float]()
    for row in rows:
        of_all = number(row.get(name)) if number(row.get("staleness/mean")) == 0 else None
        value = number(row.get(f"staleness_0/{name}"))
        found += [one for one in (of_all if value is None else value,) if one is not None]
    return found


def _distance(run: Digest) -> Symptom | None:
    """Between the policy that sampled the tokens and the one that trains on them."""
    kl, staleness = (mean_of(run.last, name) for name in ("behavior_kl_proximal", "staleness/mean"))
    if _fresh(run) is not None:
        return None
    if kl is None or staleness is None or kl <= 0.1:
        return None
    return Symptom(
        kind="distance",
        severity="warning",
        text=f"The policy was {kl:.2g} nats (behavior_kl_proximal) away from the sampler of its tokens, which were "
        f"{staleness:.3g} versions old.",
        advice="Use a smaller rollout.max_staleness or a smaller train.optimizer.lr, and weights with an upper bound "
        "(algorithm.weights).",
        remark=f"the policy is {kl:.2g} nats away from the sampler of its tokens",
    )


def _equal_groups(run: Digest) -> Symptom | None:
    """Groups whose episodes all had the same reward teach nothing to an algorithm that compares them."""
    share = mean_of(run.last, "equal_groups")
    if share is None or share < _EQUAL or run.level >= _MOSTLY_RIGHT or not compares_episodes(run):
        return None
    return Symptom(
        kind="equal groups",
        severity="warning",
        text=f"{share:.0%} of the groups of the last steps had equal rewards, and taught nothing.",
        advice="Read some: the reward may miss right answers. Otherwise use easier or harder examples, a curriculum, a "
        "larger rollout.group_size, or a reward with more grades; algorithm.dynamic_sampling replaces such groups.",
        remark=f"{share:.0%} of the groups have equal rewards",
    )


def _long_losses(run: Digest) -> Symptom | None:
    """Where tokens weigh equally, pushes away from long losing episodes outweigh those towards short winning ones."""
    winning, losing = (mean_of(run.last, f"length/{outcome}_tokens") for outcome in ("winning", "losing"))
    aggregation = run.setting("algorithm", "aggregation")
    if not winning or losing is None or losing < _LONGER * winning or run.is_solved or not compares_episodes(run):
        return None
    if aggregation not in ("token_mean", "sequence_sum"):
        return None
    times = losing / winning
    return Symptom(
        kind="long losses",
        severity="note",
        text=f"Losing episodes had {times:.1f} times the trained tokens of winning ones in the last steps. With "
        f"algorithm.aggregation {aggregation} each token weighs the same, so losses weigh more than wins.",
        advice="If the entropy rises or the reward falls, set algorithm.aggregation to sequence_mean, which weighs "
        "episodes equally; docs/presets.md compares them.",
        remark=f"losing episodes are {times:.1f} times as long as winning ones (docs/presets.md)",
    )


def _waiting(run: Digest) -> Symptom | None:
    waited, trained = (sum(values(run.last, f"time/{name}_s")) for name in ("wait", "train"))
    if len(run.last) < 3 or waited < 0.8 * (waited + trained) or not waited:
        return None
    share = waited / (waited + trained)
    return Symptom(
        kind="waiting",
        severity="note",
        text=f"The trainer waits for batches {share:.0%} of the time.",
        advice="More servers, more episodes at once, or a larger rollout.max_staleness reduce the waiting.",
        remark=f"the trainer waits for episodes {share:.0%} of the time",
    )


def _bound(run: Digest) -> Symptom | None:
    bound, found = run.setting("rollout", "max_staleness"), values(run.last, "staleness/mean")
    if not isinstance(bound, int) or bound < 1 or len(found) < 5 or min(found) < bound - 0.1:
        return None
    return Symptom(
        kind="bound",
        severity="note",
        text=f"Nearly all trained tokens are {bound} versions old, the most that is allowed: groups queue in the "
        "buffer.",
        advice="A smaller rollout.max_staleness costs no time then.",
    )


def _is_taught_by_tokens(run: Digest) -> bool:
    """Whether a teacher rewards each token. The rewards of episodes need not differ then."""
    kind = run.setting("algorithm", "advantage", "kind")
    return kind == "distillation" or bool(values(run.last, "episode/teacher_kl"))


def compares_episodes(run: Digest) -> bool:
    """Whether advantages compare the rewards of a group's episodes: so they do by default."""
    kind, baseline, by_parts = (
        run.setting("algorithm", "advantage", name) for name in ("kind", "baseline", "separate_rewards")
    )
    does_not = kind in ("rejection", "gae") or baseline in ("none", "greedy") or bool(by_parts)
    return not does_not and not _is_taught_by_tokens(run)


_CHECKS = (
    _rewards, _failures, _fallen, _hacked, _held_out, _entropy_fell, _entropy_rose, _truncated, _fresh, _distance,
    _equal_groups, _long_losses, _waiting, _bound,
)  # fmt: skip
"""The most important first."""


# The line of a step

_SURE = 3
"""Steps before the first remark: one batch may be an odd one."""
_AGAIN = 50
"""Steps until a remark that still holds is repeated: twice in a run of the default length."""
_EACH, _SELDOM = 200, 10
"""After so many steps, only each tenth is looked at, since that takes the longer the longer the run is."""


class HealthLine:
    """Reads a run's steps as they end, and says what has begun to look wrong: one remark at a time, each one rarely.

    What looks wrong are the findings that `arl view` shows, if a few words can tell them.
    """

    def __init__(self, settings: object = None) -> None:
        """settings: the run's, section by section."""
        self._digest = Digest(settings)
        self._told: dict[str, int] = {}
        """Kind of finding -> the step in which it was told last."""
        self._newest = 0

    def resume(self, steps: Iterable[Row], evaluations: Iterable[Row]) -> None:
        """Read what a continued run has trained, without a word."""
        for row in steps:
            self._add(row)
        self._digest.evaluations.extend(evaluations)

    def evaluated(self, evaluation: Row) -> None:
        self._digest.evaluations.append(evaluation)

    def remark(self, metrics: Row) -> str:
        """Of the step with these metrics; empty if there is nothing to say. A step counts once."""
        if not self._add(metrics):
            return ""
        step = self._digest.num_steps
        if step < _SURE or (step > _EACH and step % _SELDOM):
            return ""
        for one in remarks(self._digest):
            if one.remark and step - self._told.get(one.kind, -_AGAIN) >= _AGAIN:
                self._told[one.kind] = step
                return one.remark
        return ""

    def _add(self, metrics: Row) -> bool:
        version = metrics.get("version")
        if not isinstance(version, int) or version <= self._newest:
            return False
        self._newest = version
        self._digest.add(metrics)
        return True

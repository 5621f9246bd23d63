"""Sentences about what looks wrong in a run, each with what to do about it. docs/algorithms.md explains the metrics."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from arl.eventlog.records import EpisodeRecord
from arl.eventlog.run_record import RunRecord
from arl.view.digest import Digest, digest_of, mean_of, number, values
from arl.view.episode_table import Row, mean

_FEW = 20
"""Steps that are too few for what needs time."""
_LATE, _WINDOW = 50, 10
"""Late steps, and those of them that a mean entropy is of."""
_EPISODES = 500
_GROUPS = 200
_NO_AIM = re.compile(
    "error|fail|malformed|invalid|unread|killed|timed_?out|timeout|truncat|penal|repeat|repetit|"
    "(context_full|tool_calls|turns|teacher_kl)$",
    re.IGNORECASE,
)
"""In the names of metrics that may well fall: mishaps, penalties and counts. The weights of rewards are not logged."""

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
        "Use a smaller train.optimizer.lr, or fewer algorithm.minibatches.",
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
        "Use a smaller train.optimizer.lr, or train.dtype float32.",
    ),
    _Rule(  # a note: the lag alone cannot tell a workflow from a busy machine
        "event_loop_lag_s", lambda mean: mean > 0.3, "note",
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
    """Errors first. servers: as `arl.view.health` lists them. lost: records ("events") and "episodes"."""
    digest = digest_of(run)
    known = ((rule, mean_of(digest.last, rule.metric)) for rule in _RULES)
    found = [_told(rule, value) for rule, value in known if value is not None and rule.is_bad(value)]
    found += [one for check in _CHECKS if (one := check(digest)) is not None]
    found += [one for one in (_failing(run), _losses(lost)) if one is not None]
    if servers and all(server["state"] in ("fenced", "left") for server in servers):
        found.append(_finding("error", "No inference server serves.", "See the reasons below, and the servers' logs."))
    severities = ("error", "warning", "note")
    return sorted(found, key=lambda one: severities.index(one["severity"]))


def _finding(severity: Severity, text: str, advice: str) -> Row:
    return {"severity": severity, "text": text, "advice": advice}


def _told(rule: _Rule, mean: float) -> Row:
    return _finding(rule.severity, rule.text.format(mean=mean), rule.advice)


def _entropy(run: Digest) -> Row | None:
    """The policy of a solved task need not explore, and one that learns explores less and less.

    A group that differs now and then throws a collapsed policy about: so this looks for the lowest of the late steps.
    """
    first, late = mean_of(run.first[:3], "entropy"), values(run.rows[-_LATE:], "entropy")
    means = [mean(late[k : k + _WINDOW]) for k in range(len(late) - _WINDOW + 1)]
    if len(run.rows) < _FEW or first is None or not means or run.is_solved:
        return None
    lowest = min(means)
    if lowest > first / 5 or lowest >= first:
        return None
    agree = _equal(run)
    return _finding(
        "warning" if lowest <= first / 10 or (agree and agree["severity"] == "warning") else "note",
        f"The entropy fell from {first:.3g} to {lowest:.3g} nats: the policy hardly explores any more.",
        "Begin again with a smaller train.optimizer.lr, fewer updates of each batch (algorithm.epochs, minibatches), "
        "or an entropy bonus (algorithm.entropy).",
    )


def _fallen(run: Digest) -> Row | None:
    if (fall := run.fall) is None or not run.is_much(fall.best - fall.now, fall.error):
        return None
    return _finding(
        "warning",
        f"The reward fell to {fall.now:.3g}; in {fall.steps} it was {fall.best:.3g}.",
        "See what moved before it fell: entropy, effective_sample_size, behavior_kl_proximal, lengths. Go on from an "
        "earlier checkpoint with a smaller train.optimizer.lr or rollout.max_staleness.",
    )


def _hacked(run: Digest) -> Row | None:
    """Shares that fall while the reward rises: a part of the reward, or a metric of the workflow that only watches."""
    before, now = run.before, run.now
    if len(run.rows) < _FEW or before is None or now is None or not now - before >= 0.1 * run.range > 0:
        return None
    for name in sorted({name for row in run.first for name in row if name.startswith(("reward/", "episode/"))}):
        first, last = mean_of(run.first, name), mean_of(run.last, name)
        if first is None or last is None or first < 0.1 or last > first / 2 or _NO_AIM.search(name):
            continue
        if not all(0 <= value <= 1 for value in values(run.rows, name)):
            continue
        return _finding(
            "warning",
            f"The reward rose from {before:.3g} to {now:.3g}, and {name} fell from {first:.3g} to {last:.3g}.",
            "If both should rise, the reward pays for something else than you want: read the episodes with the highest "
            "rewards.",
        )
    return None


def _held_out(run: Digest) -> Row | None:
    """Of few examples, the mean reward differs from one evaluation to the next."""
    known = [(reward, row) for row in run.record.evaluations if (reward := number(row.get("reward"))) is not None]
    if len(known) < 3 or run.before is None or run.now is None or run.now < run.before or _fallen(run):
        return None
    best, last = max(reward for reward, _ in known), known[-1][0]
    variance = sum(max((reward - run.low) * (run.high - reward), 0.0) for reward in (best, last))
    examples = number(known[-1][1].get("num_episodes")) or math.inf
    if not run.is_much(best - last, math.sqrt(variance / max(examples, 1.0))):
        return None
    return _finding(
        "warning",
        f"The held-out reward fell from {best:.3g} to {last:.3g}, and that of training did not.",
        "The policy learns its examples by heart, or the evaluation scores something else: use more examples, or go "
        "back to the best checkpoint.",
    )


def _truncated(run: Digest) -> Row | None:
    first, now = mean_of(run.first[:3], "truncated"), mean_of(run.last, "truncated")
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


def _distance(run: Digest) -> Row | None:
    """Between the policy that sampled the tokens and the one that trains on them."""
    last = run.last
    kl, staleness = mean_of(last, "behavior_kl_proximal"), mean_of(last, "staleness/mean")
    fresh = mean_of(last, "staleness_0/behavior_kl_proximal")
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
        "Use a smaller rollout.max_staleness or a smaller train.optimizer.lr, and a correction that bounds the weights "
        "(algorithm.correction).",
    )


def _waiting(run: Digest) -> Row | None:
    waited, trained = (sum(values(run.last, f"time/{name}_s")) for name in ("wait", "train"))
    if len(run.rows) < 3 or waited < 0.8 * (waited + trained) or not waited:
        return None
    return _finding(
        "note",
        f"The trainer waits for batches {waited / (waited + trained):.0%} of the time.",
        "More servers, more episodes at once, or a larger rollout.max_staleness reduce the waiting.",
    )


def _bound(run: Digest) -> Row | None:
    bound, found = run.setting("rollout", "max_staleness"), values(run.last, "staleness/mean")
    if not isinstance(bound, int) or bound < 1 or len(found) < 5 or min(found) < bound - 0.1:
        return None
    return _finding(
        "note",
        f"Nearly all trained tokens are {bound} versions old, the most that is allowed: groups queue in the buffer.",
        "A smaller rollout.max_staleness costs no time then.",
    )


def _rewards(run: Digest) -> Row | None:
    """Where two players share out a reward, the means of episodes are equal, and their groups are not."""
    found, spread = values(run.last, "reward"), values(run.last, "reward_std")
    if len(found) < 5 or not spread or max(spread) > 0 or run.is_solved or _is_taught_by_tokens(run):
        return None
    if min(values(run.last, "equal_groups"), default=1.0) < 1:
        return None
    return _finding(
        "error",
        f"All episodes of the last {len(found)} steps had the reward {found[-1]:g}: there is nothing to learn from.",
        "Read some episodes: the task may be too hard or too easy, or the reward may not see the answer.",
    )


def _is_taught_by_tokens(run: Digest) -> bool:
    """Whether a teacher rewards each token. The rewards of episodes need not differ then."""
    kind = run.setting("algorithm", "advantage", "kind")
    return kind == "distillation" or bool(values(run.last, "episode/teacher_kl"))


def _compares(run: Digest) -> bool:
    """Whether advantages compare the rewards of a group's episodes: so they do by default."""
    kind, baseline, by_parts = (
        run.setting("algorithm", "advantage", name) for name in ("kind", "baseline", "separate_rewards")
    )
    does_not = kind in ("rejection", "gae") or baseline in ("none", "greedy") or bool(by_parts)
    return not does_not and not _is_taught_by_tokens(run)


def _are_equal(episodes: Sequence[EpisodeRecord]) -> bool:
    """Whether all had the same reward: within each role, as one role's reward may be another's loss."""
    parts = {(part.role, part.reward) for episode in episodes for part in episode.trajectories}
    outcomes = parts or {("", episode.reward) for episode in episodes}
    return len(outcomes) == len({role for role, _ in outcomes})


def _equal(run: Digest) -> Row | None:
    """Groups whose episodes all had the same reward teach nothing to an algorithm that compares them."""
    kept = [group for group in run.record.groups[-4 * _GROUPS :] if group.outcome == "kept"][-_GROUPS:]
    ended = ([e for e in group.episodes if e.reward is not None] for group in kept)
    several = [episodes for episodes in ended if len(episodes) > 1]
    equal = [episodes[0].reward for episodes in several if _are_equal(episodes)]
    if len(several) < 10 or len(equal) < 0.4 * len(several) or not _compares(run):
        return None
    rewards = [episode.reward for episodes in several for episode in episodes if episode.reward is not None]
    share, lowest, highest = len(equal) / len(several), min(rewards), max(rewards)
    low, high = (equal.count(bound) / len(equal) for bound in (lowest, highest))
    text = f"{share:.0%} of the last {len(several)} groups had equal rewards"
    if run.is_solved:
        return _finding(
            "note",
            f"{text}, {high:.0%} of these the highest.",
            "Read some. If they are good and held-out rewards as high, the run is done. Otherwise use harder examples.",
        )
    which = f"{low:.0%} of these the lowest, {high:.0%} the highest" if lowest < highest else f"all {lowest:g}"
    are_right = lowest < highest and highest >= run.high and high >= 0.9
    easier = "Read some: the reward may miss right answers. Otherwise use easier"
    harder = (
        "Use harder" if are_right else "If entropy is low, too, the policy has stopped exploring. Otherwise use harder"
    )
    return _finding(
        "warning" if share >= 0.7 and not are_right else "note",
        f"{text}, and taught nothing: {which}.",
        f"{harder if high > low else easier} examples, a curriculum, a larger rollout.group_size, or a "
        "reward with more grades; algorithm.dynamic_sampling replaces such groups.",
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

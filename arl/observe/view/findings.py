"""Sentences about what looks wrong in a run, each with what to do about it. docs/algorithms.md explains the metrics."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from arl.observe.events.records import EpisodeRecord
from arl.observe.events.run_record import RunRecord
from arl.observe.health.digest import Digest
from arl.observe.health.rules import SEVERITIES, Symptom, compares_episodes, remarks
from arl.observe.view.episode_table import Row

_EPISODES = 500
_GROUPS = 200


def findings(run: RunRecord, servers: Sequence[Row], lost: Mapping[str, int]) -> list[Row]:
    """Errors first. servers: as `arl.observe.view.health` lists them. lost: records ("events") and "episodes"."""
    digest = Digest(run.settings, run.steps, run.evaluations)
    found = {one.kind: one for one in remarks(digest)}
    if run.groups:  # episodes tell more of these than totals do
        found = {kind: one for kind, one in found.items() if kind not in ("equal groups", "failures")}
    equal = _equal(run, digest)
    own = (equal, _failing(run), _losses(lost), _unserved(servers))
    found |= {one.kind: one for one in own if one is not None}
    if equal is not None and equal.severity == "warning" and "entropy fell" in found:
        found["entropy fell"] = replace(found["entropy fell"], severity="warning")
    ordered = sorted(found.values(), key=lambda one: SEVERITIES.index(one.severity))
    return [{"severity": one.severity, "text": one.text, "advice": one.advice} for one in ordered]


def _are_equal(episodes: Sequence[EpisodeRecord]) -> bool:
    """Whether all had the same reward: within each role, as one role's reward may be another's loss."""
    parts = {(part.role, part.reward) for episode in episodes for part in episode.trajectories}
    outcomes = parts or {("", episode.reward) for episode in episodes}
    return len(outcomes) == len({role for role, _ in outcomes})


def _equal(run: RunRecord, digest: Digest) -> Symptom | None:
    """Groups whose episodes all had the same reward teach nothing to an algorithm that compares them."""
    kept = [group for group in run.groups[-4 * _GROUPS :] if group.outcome == "kept"][-_GROUPS:]
    ended = ([e for e in group.episodes if e.reward is not None] for group in kept)
    several = [episodes for episodes in ended if len(episodes) > 1]
    equal = [episodes[0].reward for episodes in several if _are_equal(episodes)]
    if len(several) < 10 or len(equal) < 0.4 * len(several) or not compares_episodes(digest):
        return None
    rewards = [episode.reward for episodes in several for episode in episodes if episode.reward is not None]
    share, lowest, highest = len(equal) / len(several), min(rewards), max(rewards)
    low, high = (equal.count(bound) / len(equal) for bound in (lowest, highest))
    text = f"{share:.0%} of the last {len(several)} groups had equal rewards"
    if digest.is_solved:
        return Symptom(
            kind="equal groups",
            severity="note",
            text=f"{text}, {high:.0%} of these the highest.",
            advice="Read some. If they are good and held-out rewards as high, the run is done. Otherwise use harder "
            "examples.",
        )
    which = f"{low:.0%} of these the lowest, {high:.0%} the highest" if lowest < highest else f"all {lowest:g}"
    are_right = lowest < highest and highest >= digest.high and high >= 0.9
    easier = "Read some: the reward may miss right answers. Otherwise use easier"
    harder = (
        "Use harder" if are_right else "If entropy is low, too, the policy has stopped exploring. Otherwise use harder"
    )
    return Symptom(
        kind="equal groups",
        severity="warning" if share >= 0.7 and not are_right else "note",
        text=f"{text}, and taught nothing: {which}.",
        advice=f"{harder if high > low else easier} examples, a curriculum, a larger rollout.group_size, or a "
        "reward with more grades; algorithm.dynamic_sampling replaces such groups.",
    )


def _failing(run: RunRecord) -> Symptom | None:
    ended = [e for e in run.episodes[-2 * _EPISODES :] if e.ended is not None][-_EPISODES:]
    failed = [e for e in ended if e.how in ("failed", "timed_out")]
    if len(failed) < 3 or len(failed) < 0.1 * len(ended):
        return None
    return Symptom(
        kind="failures",
        severity="warning",
        text=f"{len(failed)} of the last {len(ended)} episodes failed.",
        advice="See the failures below: each cause has an example.",
    )


def _losses(lost: Mapping[str, int]) -> Symptom | None:
    if not any(lost.values()):
        return None
    return Symptom(
        kind="losses",
        severity="note",
        text=f"The event log could not keep {lost['events']} records and the tokens of {lost['episodes']} episodes.",
        advice="More came than the disk took; log.events.tokens: sampled keeps fewer.",
    )


def _unserved(servers: Sequence[Row]) -> Symptom | None:
    if not servers or any(server["state"] not in ("fenced", "left") for server in servers):
        return None
    return Symptom(
        kind="servers",
        severity="error",
        text="No inference server serves.",
        advice="See the reasons below, and the servers' logs.",
    )

"""RolloutTotals: how episodes and groups ended, added up over a run."""

from __future__ import annotations

from dataclasses import asdict, dataclass

from arl.api.types import Group
from arl.rollout.episode import Episode
from arl.rollout.group import GroupRun
from arl.rollout.ledger import GroupOutcome
from arl.rollout.watches import Fruitless


@dataclass(slots=True, kw_only=True)
class RolloutTotals:
    """Episodes by how they ended, counted since the beginning of the run: trained, rejected, dropped or surplus.

    Times are sums, in seconds. Greedy episodes (baselines) count only in `episodes_retried` and in their own two.
    """

    episodes_trained: int = 0
    episodes_rejected: int = 0
    """Returned None, or belonged to a group that was rejected."""
    episodes_dropped: int = 0
    """Failed, or belonged to a group that was dropped."""
    episodes_surplus: int = 0
    """Over-sampled: neither rejected nor failed, and not kept."""
    episodes_failed: int = 0
    """Those among the dropped that raised or timed out."""
    episodes_retried: int = 0
    """Attempts that failed and were followed by another."""
    groups_finished: int = 0
    """Groups handed to the buffer."""
    groups_returned: int = 0
    """Finished groups of a checkpoint that ran again, as no batch of changed settings could hold them in time."""
    straggler_groups: int = 0
    """Groups cut because they kept the trainer waiting."""
    straggler_episodes: int = 0
    """Their episodes that were cut while running."""
    straggler_s: float = 0.0
    """How long these had run by then."""
    overtaken_episodes: int = 0
    """Episodes cut while running because enough others of their group had finished."""
    overtaken_s: float = 0.0
    finished_episodes: int = 0
    """Episodes that returned trajectories."""
    finished_s: float = 0.0
    baselines_finished: int = 0
    baselines_missing: int = 0
    """Greedy episodes that failed or were rejected, and their groups with them."""

    def count_episode(self, episode: Episode) -> None:
        self.episodes_retried += episode.attempts - 1
        self.episodes_failed += episode.error is not None
        if episode.is_finished:
            self.finished_episodes += 1
            self.finished_s += episode.elapsed_s

    def count_baseline(self, episode: Episode) -> None:
        self.episodes_retried += episode.attempts - 1
        self.baselines_finished += episode.is_finished
        self.baselines_missing += not episode.is_finished

    def count_cancelled(self, run: GroupRun, elapsed_s: float) -> None:
        """Count an episode that was cancelled after `elapsed_s`, if its group is the reason."""
        if run.is_cut:
            self.straggler_episodes += 1
            self.straggler_s += elapsed_s
        elif run.is_full:
            self.overtaken_episodes += 1
            self.overtaken_s += elapsed_s

    def count_group(self, run: GroupRun, judged: Group | Fruitless) -> None:
        """Count the episodes that will not be trained; those that a cut group never ended are dropped."""
        num_kept = len(run.kept)
        surplus = 0 if run.is_cut else len(run.episodes) - num_kept - run.num_rejected - run.num_failed
        is_group = isinstance(judged, Group)
        is_rejected = not is_group and judged.outcome is GroupOutcome.REJECTED
        rejected = run.num_rejected + (num_kept if is_rejected else 0)
        trained = num_kept if is_group else 0
        self.groups_finished += is_group
        self.episodes_surplus += surplus
        self.episodes_rejected += rejected
        self.episodes_dropped += len(run.episodes) - trained - rejected - surplus

    def counters(self) -> dict[str, float]:
        """For logs: sums of seconds become means over their episodes, where there are any."""
        totals = asdict(self)
        counters = {name: value for name, value in totals.items() if not name.endswith("_s")}
        for kind in ("finished", "straggler", "overtaken"):
            if number := totals[f"{kind}_episodes"]:
                counters[f"{kind}_episode_s"] = totals[f"{kind}_s"] / number
        return counters

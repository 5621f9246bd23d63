"""RolloutTotals: how episodes and groups ended, added up over a run."""

from __future__ import annotations

from dataclasses import asdict, dataclass

from arl.api.types import Group
from arl.rollout.episode import Episode
from arl.rollout.group import GroupRun
from arl.rollout.ledger import Outcome
from arl.rollout.watches import Fruitless


@dataclass(slots=True, kw_only=True)
class RolloutTotals:
    """Episodes by how they ended, counted since the beginning of the run: trained, rejected, dropped or surplus.

    episodes_rejected: returned None, or belonged to a group that was rejected. episodes_dropped: failed, or belonged
    to a group that was dropped. episodes_surplus: over-sampled, and neither rejected nor failed nor kept.
    episodes_failed: those among the dropped that raised or timed out.
    episodes_retried: attempts that failed and were followed by another. groups_finished: groups handed to the buffer.
    groups_returned: finished groups of a checkpoint that run again, since rollout.batch_size or max_staleness, changed
    after it, leave no batch that could hold them in time.
    straggler_groups: groups cut because they kept the trainer waiting; straggler_episodes and straggler_s: their
    episodes that were cut while running, and the seconds these had run by then. overtaken_episodes and overtaken_s: the
    same for episodes of which enough others finished first. finished_episodes and finished_s: the
    same for episodes that returned trajectories. All times in seconds, summed.
    baselines_finished and baselines_missing: greedy episodes that finished, and that failed or were rejected, so that
    their groups were dropped or rejected; they are in none of the above but episodes_retried.
    """

    episodes_trained: int = 0
    episodes_rejected: int = 0
    episodes_dropped: int = 0
    episodes_surplus: int = 0
    episodes_failed: int = 0
    episodes_retried: int = 0
    groups_finished: int = 0
    groups_returned: int = 0
    straggler_groups: int = 0
    straggler_episodes: int = 0
    straggler_s: float = 0.0
    overtaken_episodes: int = 0
    overtaken_s: float = 0.0
    finished_episodes: int = 0
    finished_s: float = 0.0
    baselines_finished: int = 0
    baselines_missing: int = 0

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
        """An episode that was cancelled after so long, if its group is the reason."""
        if run.is_cut:
            self.straggler_episodes += 1
            self.straggler_s += elapsed_s
        elif run.is_full:
            self.overtaken_episodes += 1
            self.overtaken_s += elapsed_s

    def count_group(self, run: GroupRun, judged: Group | Fruitless) -> None:
        """The episodes of a group that will not be trained; in one that was cut, those that never ended are dropped."""
        num_kept = len(run.kept)
        surplus = 0 if run.is_cut else len(run.episodes) - num_kept - run.num_rejected - run.num_failed
        is_group = isinstance(judged, Group)
        is_rejected = not is_group and judged.outcome is Outcome.REJECTED
        rejected = run.num_rejected + (num_kept if is_rejected else 0)
        trained = num_kept if is_group else 0
        self.groups_finished += is_group
        self.episodes_surplus += surplus
        self.episodes_rejected += rejected
        self.episodes_dropped += len(run.episodes) - trained - rejected - surplus

    def counters(self) -> dict[str, float]:
        """For logs: seconds as means over the episodes that they are of, where there are any."""
        totals = asdict(self)
        counters = {name: value for name, value in totals.items() if not name.endswith("_s")}
        for kind in ("finished", "straggler", "overtaken"):
            if number := totals[f"{kind}_episodes"]:
                counters[f"{kind}_episode_s"] = totals[f"{kind}_s"] / number
        return counters

"""Replay: groups that were trained and may be trained again, for as long as they are within max_staleness."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from arl.api.types import Group
from arl.rollout.buffer import check_staleness


class Replay:
    """Adds groups of earlier batches to later ones, where one of their trajectories was good enough.

    num_groups: the most that a batch gets. min_reward: a group is kept if one of its trajectories has a reward above
    it. Trained at version t, with tokens of version v, it is in reach of the batches t + 1 to v + max_staleness,
    so no more than max_staleness batches of groups are held. Which ones a batch gets follows from what was trained
    before: those whose oldest token is newest, and of these those admitted last, as they are the least stale.
    A batch has a group once; several batches may have the same one.
    """

    def __init__(self, num_groups: int = 0, *, min_reward: float = 0.0, max_staleness: int = 0) -> None:
        self._num_groups = num_groups
        self._min_reward = min_reward
        self._max_staleness = max_staleness
        self._kept: dict[int, Group] = {}

    @property
    def groups(self) -> tuple[Group, ...]:
        """What is kept, for a checkpoint."""
        return tuple(self._kept.values())

    def add(self, groups: Iterable[Group], version: int) -> None:
        """Keep what may be of use, of a batch that was trained and made `version`; forget what has become too old."""
        if not self._num_groups:
            return
        self._kept |= {group.group_id: group for group in groups if self._is_good(group)}
        self._kept = {number: group for number, group in self._kept.items() if self._is_fresh(group, version)}

    def take(self, version: int) -> list[Group]:
        """The groups to add to the batch for `version`, least stale first; they stay here.

        Raises StalenessError if a token is older than max_staleness allows, which only a defect of this class could
        cause.
        """
        fresh = [group for group in self._kept.values() if self._is_fresh(group, version)]
        chosen = sorted(fresh, key=lambda group: (group.oldest_version, group.group_id), reverse=True)
        chosen = chosen[: self._num_groups]
        check_staleness(chosen, version, self._max_staleness)
        return chosen

    def restore(self, groups: Sequence[Group], version: int) -> None:
        """Put a checkpoint's groups back; those that the settings of this run would not keep are left out."""
        self.add(groups, version)

    def _is_good(self, group: Group) -> bool:
        return any(trajectory.total_reward > self._min_reward for trajectory in group.trajectories)

    def _is_fresh(self, group: Group, version: int) -> bool:
        return version - group.oldest_version <= self._max_staleness

"""A batch, split into what each policy is trained on; and numbers of each policy's trajectories, put together again."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import compress
from statistics import fmean
from typing import TypeVar

from arl.api.settings.engines import PolicyRoles
from arl.api.types import Group
from arl.training.token_log import named

T = TypeVar("T")


def share_of(policy: str, groups: Sequence[Group], roles: PolicyRoles) -> list[Group]:
    """The groups with the trajectories of one policy's roles alone; a group without any stays, as it keeps its place in
    a minibatch. Raises RoleError for a role that no policy plays.
    """
    return [_own(group, policy, roles) for group in groups]


def _own(group: Group, policy: str, roles: PolicyRoles) -> Group:
    is_own = [roles.policy_of(trajectory.role) == policy for trajectory in group.trajectories]
    return replace(
        group,
        trajectories=tuple(compress(group.trajectories, is_own)),
        episode_indices=tuple(compress(group.episode_indices, is_own)),
        greedy_rewards={role: r for role, r in group.greedy_rewards.items() if roles.by_role.get(role) == policy},
    )


@dataclass(frozen=True, slots=True)
class Shares:
    """Groups of a batch, and whose each of their trajectories is."""

    groups: Sequence[Group]
    owners: Sequence[str]
    """The policy of each trajectory, in order."""

    @classmethod
    def of(cls, groups: Sequence[Group], roles: PolicyRoles) -> Shares:
        return cls(groups, [roles.policy_of(t.role) for group in groups for t in group.trajectories])

    def joined(self, by_policy: Mapping[str, Sequence[T]]) -> list[T]:
        """One value for each trajectory, in order, from the values that each policy has for its own."""
        left = {policy: iter(values) for policy, values in by_policy.items()}
        return [next(left[owner]) for owner in self.owners]

    def rewards(self) -> dict[str, float]:
        """The mean reward of each policy's trajectories, if it has any."""
        rewards = [t.reward for group in self.groups for t in group.trajectories]
        own: dict[str, list[float]] = {}
        for owner, reward in zip(self.owners, rewards, strict=True):
            own.setdefault(owner, []).append(reward)
        return {name: fmean(values) for name, values in own.items()}

    def count(self, policy: str) -> int:
        """How many trajectories are the policy's."""
        return self.owners.count(policy)

    def names(self, policy: str) -> dict[tuple[str, int], tuple[str, int]]:
        """How the policy's learner names its trajectories (by episode, and number there) -> how the run does."""
        counts: dict[str, int] = {}
        found: dict[tuple[str, int], tuple[str, int]] = {}
        for (episode, number), owner in zip(self._names(), self.owners, strict=True):
            if owner == policy:
                found[episode, counts.get(episode, 0)] = episode, number
                counts[episode] = counts.get(episode, 0) + 1
        return found

    def _names(self) -> Iterator[tuple[str, int]]:
        return ((episode, number) for group in self.groups for episode, number, _ in named(group))

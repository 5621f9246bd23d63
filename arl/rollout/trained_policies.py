"""What each of several policies can train: its roles, and the limits of its model."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from arl.api.engine import ModelLimits
from arl.api.errors import RoleError
from arl.api.policy_config import PolicyRoles
from arl.api.types import Trajectory


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainedPolicies:
    """The policies of a run, as the end of an episode sees them."""

    roles: PolicyRoles
    limits: Mapping[str, ModelLimits]
    """Of each policy's model."""

    def limits_of(self, trajectory: Trajectory) -> ModelLimits:
        """Raises RoleError for a role that no policy plays."""
        return self.limits[self.roles.policy_of(trajectory.role)]

    def check_asked(self, trajectory: Trajectory, asked: Iterable[str]) -> None:
        """Raise RoleError if it trains a policy that the episode did not ask: another one sampled its tokens.

        asked: the roles of the episode's requests.
        """
        policy = self.roles.policy_of(trajectory.role)
        if trajectory.num_trained_tokens and policy not in {self.roles.policy_of(role) for role in asked}:
            raise RoleError(
                f"arun_episode returned a trajectory of the role {trajectory.role!r}, but asked for "
                f"{', '.join(sorted({*asked})) or 'none'} alone: the policy {policy} would be trained on tokens that "
                "it did not sample. Give the conversation (or ModelRequest) the role of its trajectory"
            )

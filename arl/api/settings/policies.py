"""Several policies in one run: the settings of each, and the roles that it plays.

A run without policies has one, which plays all roles.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from pydantic import Field, PositiveFloat, field_validator

from arl.api.errors import ConfigError, RoleError
from arl.api.settings.engines import (
    AdapterWeightsConfig,
    DiskWeightsConfig,
    EngineConfig,
    RunningServersConfig,
    WeightsConfig,
)
from arl.api.settings.sections import Section

_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_-]*")


class PolicyConfig(Section):
    """One of several policies: the weights that play some roles, with a trainer of their own."""

    roles: tuple[str, ...] = Field(min_length=1)
    """The roles that it plays. Each role of the workflow belongs to one policy."""
    model: str | None = None
    """The model that it begins from. Unset: the run's `model`. With weights.transport=adapter all share that one."""
    lr: PositiveFloat | None = None
    """Its peak learning rate. Unset: train.optimizer.lr."""
    device: str | None = None
    """The device of its trainer and of its embedded servers. Unset: train.device and engine.device. With
    weights.transport=adapter, which has policies share servers, of its trainer alone."""
    addresses: tuple[str, ...] = ()
    """The servers that it has to itself, where servers run already. Unset: engine.addresses."""

    @field_validator("roles", mode="before")
    @classmethod
    def _one_role(cls, given: object) -> object:
        return (given,) if isinstance(given, str) else given


@dataclass(frozen=True, slots=True)
class PolicyRoles:
    """Which policy plays each role."""

    by_role: Mapping[str, str]
    """Role -> the name of its policy."""

    @classmethod
    def of(cls, policies: Mapping[str, PolicyConfig]) -> PolicyRoles:
        return cls({role: name for name, policy in policies.items() for role in policy.roles})

    def policy_of(self, role: str) -> str:
        """Raises RoleError for a role that no policy plays."""
        if role not in self.by_role:
            known = ", ".join(f"{role} ({policy})" for role, policy in self.by_role.items())
            raise RoleError(
                f"no policy plays the role {role!r:.80}; the roles and their policies are: {known}. Add it to one of "
                "policies.NAME.roles, or give the agent one of these roles"
            )
        return self.by_role[role]

    def check(self, declared: Iterable[str]) -> None:
        """Raise ConfigError unless each of a workflow's roles has a policy, and each policy plays one of them."""
        roles = frozenset(declared)
        for role in sorted(roles):
            self.policy_of(role)
        for name in dict.fromkeys(self.by_role.values()):
            own = [role for role, policy in self.by_role.items() if policy == name]
            if not roles & set(own):
                raise ConfigError(
                    f"the policy {name} would never be asked: it plays {', '.join(own)}, and the roles of the workflow "
                    f"are {', '.join(sorted(roles)) or 'none'}; change policies.{name}.roles, or remove this policy"
                )


def policies_flaw(
    policies: Mapping[str, PolicyConfig], engine: EngineConfig, weights: WeightsConfig, refused: Mapping[str, bool]
) -> str | None:
    """Why these policies cannot be trained in one run with these settings; None if they can.

    refused: settings that are for runs of one policy -> whether they are set.
    """
    for name in policies:
        if not _NAME.fullmatch(name):
            return f"a policy is named {name!r:.80}; a name has letters, digits, - and _, as it names a directory"
    role, number = Counter(role for policy in policies.values() for role in policy.roles).most_common(1)[0]
    if number > 1:
        names = [name for name, policy in policies.items() if role in policy.roles]
        return f"the role {role!r:.80} is claimed {number} times, by policies {', '.join(names)}; leave it to one"
    if not isinstance(weights, DiskWeightsConfig | AdapterWeightsConfig):
        return (
            f"weights.transport is {weights.transport}, which brings the weights of one policy; with several "
            "use disk (each has its own servers) or adapter (they share servers)"
        )
    setting = next((setting for setting, is_set in refused.items() if is_set), None)
    if setting is not None:
        return f"{setting} is for runs of one policy, and this one has {len(policies)}; leave it out"
    return _servers_flaw(policies, engine, isinstance(weights, AdapterWeightsConfig))


def _servers_flaw(policies: Mapping[str, PolicyConfig], engine: EngineConfig, shared: bool) -> str | None:
    """shared: all policies are adapters on the same servers."""
    running = isinstance(engine, RunningServersConfig)
    for name, policy in policies.items():
        if policy.model is not None and shared:
            return (
                f"policies.{name}.model is set, but with weights.transport=adapter all policies are adapters of "
                "`model`; leave it out, or use weights.transport=disk"
            )
        if policy.addresses and (shared or not running):
            why = "policies share servers" if shared else f"arl starts the servers of engine.kind={engine.kind}"
            return f"policies.{name}.addresses is set, but {why}; leave it out"
    if shared or not isinstance(engine, RunningServersConfig):
        return None
    if engine.servers_file is not None:
        return "engine.servers_file names servers of one policy; name each policy's in policies.NAME.addresses"
    taken = Counter(address.rstrip("/") for p in policies.values() for address in p.addresses or engine.addresses)
    address, number = taken.most_common(1)[0]
    if number > 1:
        return f"{address} would serve {number} policies, and holds one's weights; give each policy its own addresses"
    for name, policy in policies.items():
        if engine.min_servers > (number := len(policy.addresses or engine.addresses)):
            return f"engine.min_servers is {engine.min_servers}, but policies.{name} has {number} of them; lower it"
    return None

"""A node of a Ray cluster, and how nodes are asked."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterNode:
    """A node, as Ray knows it."""

    node_id: str
    name: str
    address: str
    total: Mapping[str, float]
    free: Mapping[str, float]
    is_here: bool = False
    """This process is on it."""


class Ask(Protocol):
    """Calls a method of NodeProbe on nodes, on all at once. Returns the values, or the exceptions, by node id."""

    def __call__(self, method: str, arguments: Mapping[str, tuple[Any, ...]], /) -> Mapping[str, Any]: ...

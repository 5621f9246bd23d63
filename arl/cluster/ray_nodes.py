"""The nodes of the Ray cluster that this process is in, and a probe on each. Nothing stays there."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from typing import Any, Protocol

from arl.cluster import node_probe

_START_TIMEOUT_S = 60.0
"""How long a node may take to start the probe's process."""
_ANSWER_TIMEOUT_S = 20.0


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


def ray_nodes() -> list[ClusterNode]:
    """All nodes that are alive, by name, but this process's first."""
    import ray
    from ray._private import state

    here, free = ray.get_runtime_context().get_node_id(), dict[str, Any]()
    with suppress(AttributeError):  # Ray has no public function for the free resources of each node
        free = state.available_resources_per_node()
    found = [
        ClusterNode(
            node_id=node["NodeID"],
            name=node.get("NodeManagerHostname") or node["NodeManagerAddress"],
            address=node["NodeManagerAddress"],
            total=node["Resources"],
            free=free.get(node["NodeID"], node["Resources"]),
            is_here=node["NodeID"] == here,
        )
        for node in ray.nodes()
        if node["Alive"]
    ]
    names = [node.name for node in found]
    doubled = {name for name in names if names.count(name) > 1}
    # Several nodes of one machine, or machines of one name.
    apart = [replace(one, name=f"{one.name} ({one.address})") if one.name in doubled else one for one in found]
    return sorted(apart, key=lambda node: (not node.is_here, node.name))


@contextmanager
def probes(nodes: list[ClusterNode]) -> Iterator[Ask]:
    """Probes on these nodes, each a process that ends with the block."""
    import ray
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    cloudpickle: Any = ray.cloudpickle  # pyright: ignore[reportAttributeAccessIssue] (not in its stubs)
    cloudpickle.register_pickle_by_value(node_probe)  # a node may not have arl
    try:
        actor: Any = ray.remote(node_probe.NodeProbe)
        actors = {
            node.node_id: actor.options(
                num_cpus=0,
                max_concurrency=4,
                scheduling_strategy=NodeAffinitySchedulingStrategy(node.node_id, soft=False),
            ).remote()
            for node in nodes
        }
    finally:
        cloudpickle.unregister_pickle_by_value(node_probe)
    started = set[str]()

    def ask(method: str, arguments: Mapping[str, tuple[Any, ...]]) -> Mapping[str, Any]:
        refs = {i: getattr(actors[i], method).remote(*own) for i, own in arguments.items()}
        limit_s = _ANSWER_TIMEOUT_S if started.issuperset(refs) else _START_TIMEOUT_S
        until = time.monotonic() + limit_s
        answers = {i: _answer(ref, until, limit_s) for i, ref in refs.items()}
        started.update(i for i, answer in answers.items() if not isinstance(answer, Exception))
        return answers

    try:
        yield ask
    finally:
        for one in actors.values():
            ray.kill(one)


def _answer(ref: Any, until: float, limit_s: float) -> Any:
    import ray
    from ray.exceptions import GetTimeoutError, RayTaskError

    try:
        return ray.get(ref, timeout=max(until - time.monotonic(), 0.01))
    except GetTimeoutError:
        return TimeoutError(f"no answer within {limit_s:g} s")
    except RayTaskError as error:
        return RuntimeError(str(error.cause))
    except Exception as error:  # noqa: BLE001 - the node died, or could not start a process: Ray has many errors
        return RuntimeError(f"{type(error).__name__}: {str(error).strip().splitlines()[0] if str(error) else ''}")

"""What is wrong with the nodes of a Ray cluster for a run: room, versions, clocks, directories, the network.

Nodes answer through `Ask`, all at once. A finding about a node is a mistake where the run needs the node: it would get
a rank now, or has a server. It is a warning where the node only could get a rank.
"""

from __future__ import annotations

import secrets
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from itertools import permutations
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from msgspec.structs import replace

from arl.api.events import Finding, PlacedPart, SharedPath
from arl.api.settings.engines import (
    DeltaWeightsConfig,
    DistributedWeightsConfig,
    RunningServersConfig,
    ServerProcessesConfig,
    StartedServersConfig,
)
from arl.api.settings.run import Config
from arl.cluster.node_probe import NodeProbe
from arl.cluster.placement import beside_policy, is_cuda, num_engines, rank_names
from arl.cluster.ray_nodes import Ask, ClusterNode
from arl.runtime.http.server import addresses_of, is_here

_CLOCK_WARNING_S, _CLOCK_MISTAKE_S = 5.0, 3600.0
_TOLD = 16
"""How many nodes one finding names, and how many pairs of nodes are named."""
Link = tuple[str, str]
"""The ids of two nodes: from, to."""
_NEEDED = ("torch", "transformers", "ray", "arl")


@dataclass(slots=True, kw_only=True)
class NodeReport:
    """The answers of the nodes."""

    num_nodes: int = 0
    ranks: list[PlacedPart] = field(default_factory=list[PlacedPart])
    """Where Ray would place the ranks now."""
    servers: list[PlacedPart] = field(default_factory=list[PlacedPart])
    """Where it would place the servers that arl starts there."""
    shared: list[SharedPath] = field(default_factory=list[SharedPath])
    findings: list[Finding] = field(default_factory=list[Finding])
    hosts: dict[str, str] = field(default_factory=dict[str, str])
    """Server -> the name of its node."""
    notes: dict[str, str] = field(default_factory=dict[str, str])
    """Server -> what was not checked, and why."""


def check_nodes(config: Config, nodes: Sequence[ClusterNode], ask: Ask) -> NodeReport:
    """Ask all nodes everything. Writes files into the directories to be shared, and removes them again."""
    return _Check(config, nodes, ask).report()


def predicted(
    config: Config, nodes: Sequence[ClusterNode], *, is_free: bool = True, num_ranks: int | None = None
) -> list[ClusterNode] | None:
    """A node for each rank, this one first and then those with the most room; None if there is no room.

    is_free: counts what nobody else uses now, else everything. num_ranks: of each engine, if not train.num_ranks.
    """
    servers = Counter(node.node_id for node in predicted_servers(config, nodes, is_free=is_free) or ())
    room = {node.node_id: _places(config, node, is_free=is_free, beside=servers[node.node_id]) for node in nodes}
    order = sorted(nodes, key=lambda node: (not node.is_here, -room[node.node_id]))
    if not config.train.is_over_ray:
        return [node for node in nodes if node.is_here][:1]
    places = [node for node in order for _ in range(room[node.node_id])]
    needed = (num_ranks or config.train.num_ranks) * num_engines(config)
    return places[:needed] if len(places) >= needed else None


def predicted_servers(
    config: Config, nodes: Sequence[ClusterNode], *, is_free: bool = True
) -> list[ClusterNode] | None:
    """A node for each server that arl starts on the cluster: those with the most room, and not this one if others have
    enough; None if there is no room.
    """
    engine = config.engine
    if not isinstance(engine, StartedServersConfig) or not engine.on_ray:
        return []
    room = {node.node_id: _fits(engine.bundle, node.free if is_free else node.total) for node in nodes}
    order = sorted(nodes, key=lambda node: -room[node.node_id])
    everywhere = [node for node in order for _ in range(room[node.node_id])]
    elsewhere = [node for node in everywhere if not node.is_here]
    places = elsewhere if len(elsewhere) >= engine.num_servers else everywhere
    return places[: engine.num_servers] if len(places) >= engine.num_servers else None


def _places(config: Config, node: ClusterNode, *, is_free: bool = False, beside: int = 0) -> int:
    """How many ranks a node can hold. beside: servers there."""
    there = node.free if is_free else node.total
    if beside and isinstance(config.engine, StartedServersConfig):
        of_servers = config.engine.bundle
        there = {name: amount - beside * of_servers.get(name, 0.0) for name, amount in there.items()}
    return _fits(_bundle(config), there)


def _fits(bundle: Mapping[str, float], there: Mapping[str, float]) -> int:
    """How many bundles there is room for."""
    return int(min(there.get(name, 0.0) // amount for name, amount in bundle.items()))


def _bundle(config: Config) -> dict[str, float]:
    return {"CPU": float(config.train.num_threads)} | ({"GPU": 1.0} if is_cuda(config) else {})


class _Check:
    def __init__(self, config: Config, nodes: Sequence[ClusterNode], ask: Ask) -> None:
        self._config, self._nodes, self._ask = config, nodes, ask
        self._by_id = {node.node_id: node for node in nodes}
        self._places = predicted(config, nodes)
        given = config.engine.addresses if isinstance(config.engine, RunningServersConfig) else ()
        self._servers = {url: self._node_of(url) for url in given}
        """Each by its address, or by a name if arl starts it on the cluster."""
        on_ray = predicted_servers(config, nodes) or predicted_servers(config, nodes, is_free=False) or []
        self._servers |= {f"server {number}": node for number, node in enumerate(on_ray)}
        by_rank = {node.node_id for node in self._places or nodes if _places(config, node)}
        self._needed = by_rank | {node.node_id for node in self._servers.values() if node}
        self._facts: dict[str, dict[str, Any]] = {}
        self._found = NodeReport()

    def report(self) -> NodeReport:
        found, config, nodes = self._found, self._config, self._nodes
        found.num_nodes = len(nodes)
        found.hosts = {url: node.name for url, node in self._servers.items() if node}
        device = "a GPU" if is_cuda(config) else "cpu"
        places = self._places or predicted(config, nodes, is_free=False) or []
        found.ranks = [
            PlacedPart(part="trainer", name=name, host=node.name, address=node.address, device=device)
            for name, node in zip(rank_names(config), places, strict=False)
        ]
        engine = config.engine
        if isinstance(engine, StartedServersConfig) and engine.on_ray:
            gpus = int(engine.bundle.get("GPU", 0))
            device = f"{gpus} GPU{'s' * (gpus > 1)}" if gpus else "cpu"
            server = PlacedPart(part="server", address="a free port", device=device)
            found.servers = [replace(server, host=node.name) for node in self._servers.values() if node]
        found.findings += [*self._room(), *self._room_of_servers()]
        for node_id, answer in self._ask("facts", {node.node_id: () for node in nodes}).items():
            if isinstance(answer, Exception):
                node = self._by_id[node_id]
                text = f"{node.name} ({node.address}) ran no task of this run: {answer}"
                found.findings += self._judged(node_id, f"{text}; restart Ray there, or remove the node")
            else:
                self._facts[node_id] = answer
        found.findings += [*self._versions(), *self._clocks(), *self._gpus()]
        self._look()
        if isinstance(config.weights, DistributedWeightsConfig):
            why = "not checked whether it reaches rank 0: its host is no node of the Ray cluster"
            found.notes = {url: why for url, node in self._servers.items() if node is None}
        found.findings += self._network()
        return found

    def _node_of(self, url: str) -> ClusterNode | None:
        addresses, here = addresses_of(url), is_here(url)
        host = urlsplit(url).hostname
        fits = (node for node in self._nodes if node.address in addresses or node.name == host)
        return next(fits, next((node for node in self._nodes if here and node.is_here), None))

    def _judged(
        self, node_id: str, text: str, *, is_mistake: bool = True, ends_start: bool = True
    ) -> Iterator[Finding]:
        """A finding about a node, if the run needs it, or could use it. is_mistake: where the run needs it."""
        is_needed = node_id in self._needed
        if is_needed or _places(self._config, self._by_id[node_id]):
            yield Finding(text=text, is_mistake=is_needed and is_mistake, ends_start=ends_start)

    def _room(self) -> Iterator[Finding]:
        if self._places is not None:
            return
        config, bundle = self._config, _bundle(self._config)
        count = config.train.num_ranks * num_engines(config)
        beside = "".join(f" with {of}'s" for of in beside_policy(config))
        fewer = config.train.rank_counts(config.rollout.batch_size)[1:]
        fewer = next((n for n in fewer if predicted(config, self._nodes, num_ranks=n) is not None), None)
        is_mistake = predicted(config, self._nodes, is_free=False) is None and fewer is None
        what = f"{count} ranks{beside} need {self._lack(bundle)}"
        if fewer is not None:
            what += f"; {fewer} rank(s) train until it has (train.min_ranks)"
        elif not is_mistake:
            what += "; a run waits some minutes for it"
        advice = "set train.num_ranks or train.num_threads lower, or add nodes"
        yield Finding(text=f"{what}; {advice}", is_mistake=is_mistake, ends_start=False)

    def _room_of_servers(self) -> Iterator[Finding]:
        config, engine = self._config, self._config.engine
        if predicted_servers(config, self._nodes) is not None or not isinstance(engine, StartedServersConfig):
            return
        yield Finding(
            text=f"{engine.num_servers} servers need {self._lack(engine.bundle)}; a run waits engine.startup_timeout_s="
            f"{engine.startup_timeout_s:g} s for it; set engine.num_servers lower, or add nodes",
            is_mistake=predicted_servers(config, self._nodes, is_free=False) is None,
            ends_start=False,
        )

    def _lack(self, bundle: Mapping[str, float]) -> str:
        """What each of some parts needs, and what the nodes have of it."""
        amounts = " and ".join(f"{amount:g} {name}(s)" for name, amount in bundle.items())
        there = "; ".join(
            f"{node.name} has "
            + " and ".join(f"{node.free.get(name, 0):g} of {node.total.get(name, 0):g} {name}s" for name in bundle)
            for node in self._nodes[:_TOLD]
        )
        there += f"; and {len(self._nodes) - _TOLD} more nodes" if len(self._nodes) > _TOLD else ""
        return f"{amounts} each, and the Ray cluster has no room for them: {there} free"

    def _versions(self) -> Iterator[Finding]:
        here = NodeProbe().facts()
        for node_id, facts in self._facts.items():
            for text, is_mistake in differences(here, facts, self._by_id[node_id].name):
                yield from self._judged(node_id, text, is_mistake=is_mistake)

    def _clocks(self) -> Iterator[Finding]:
        before = time.time()
        clocks = self._ask("clock", dict.fromkeys(self._facts, ()))
        after = time.time()
        for node_id, clock in clocks.items():
            if isinstance(clock, Exception):
                continue
            ahead_s = clock - after if clock > after else min(clock - before, 0.0)
            if judged := clock_text(self._by_id[node_id].name, ahead_s):
                text, is_mistake = judged
                yield from self._judged(node_id, text, is_mistake=is_mistake, ends_start=False)

    def _gpus(self) -> Iterator[Finding]:
        if not is_cuda(self._config):
            return
        declared = {node.node_id: int(node.total.get("GPU", 0)) for node in self._nodes}
        with_gpus = {node_id: facts for node_id, facts in self._facts.items() if declared[node_id]}
        machines = Counter(facts["machine"] for facts in with_gpus.values())
        for node_id, facts in with_gpus.items():
            node, shown = self._by_id[node_id], facts["num_gpus"]
            if 0 < shown < declared[node_id]:
                text = f"Ray was started with {declared[node_id]} GPUs on {node.name}, which shows {shown}: two ranks"
                yield from self._judged(node_id, f"{text} would share one; start Ray there with fewer (--num-gpus)")
            if machines[facts["machine"]] > 1:
                text = f"{node.name} ({node.address}) is one of {machines[facts['machine']]} Ray nodes on one machine"
                yield from self._judged(node_id, f"{text}, whose ranks would share GPUs; start one Ray node there")
        engine, here = self._config.engine, next((node for node in self._nodes if node.is_here), None)
        if not isinstance(engine, ServerProcessesConfig) or engine.on_ray or not engine.gpus_per_server or here is None:
            return
        if here.node_id in self._needed and engine.first_gpu < declared[here.node_id]:
            yield Finding(
                text=f"Ray may give a rank each of the first {declared[here.node_id]} GPUs of this node, {here.name}, "
                f"and arl starts servers from GPU {engine.first_gpu} on: start Ray here with fewer GPUs (ray start "
                "--num-gpus), and set engine.first_gpu to that number"
            )

    def _look(self) -> None:
        """Whether nodes see the directories that the run needs there, and the model's files."""
        config, weights, found = self._config, self._config.weights, self._found
        logging = {node.node_id for node in self._servers.values() if node and config.engine_on_ray}
        runs = {i: "write" for i in self._facts if i in logging or _places(config, self._by_id[i])}
        mirrors = {url.rstrip("/") for url in weights.mirrors} if isinstance(weights, DeltaWeightsConfig) else set()
        loads = {url: node for url, node in self._servers.items() if url.rstrip("/") not in mirrors}
        unseen_by = list[str]()
        if not isinstance(weights, DistributedWeightsConfig):  # servers read the trainer's files
            readers = {node.node_id: "read" for node in loads.values() if node and node.node_id in self._facts}
            unknown = [url for url, node in loads.items() if node is None]
            if weights.directory is not None:
                rank_0 = (self._places or self._nodes)[0].node_id
                writers = {node_id: "write" for node_id in runs if node_id == rank_0}
                self._seen("weights.directory", weights.directory, readers | writers, unknown)
            elif any(node is None or not node.is_here for node in (*loads.values(), *(self._places or ())[:1])):
                runs, unseen_by = readers | runs, unknown  # snapshots go to run_dir
        self._seen("run_dir", config.run_dir, runs, unseen_by)
        if not (model := Path(config.model)).is_dir():
            return
        own, seen = NodeProbe().files(str(model.absolute())), dict[str, str]()
        for node_id, answer in self._ask("files", {i: (str(model.absolute()),) for i in runs}).items():
            node = self._by_id[node_id].name
            seen[node] = "yes" if answer == own else "no" if answer is None else "another one"
            if answer != own:
                what = "does not see" if answer is None else "has other files in"
                remedy = "copy the model there, or put it on storage that nodes share"
                found.findings += self._judged(node_id, f"{node} {what} the model's directory {model}: {remedy}")
        found.shared.append(SharedPath(name="model", path=str(model.absolute()), seen=seen))

    def _seen(self, name: str, path: Path, kinds: Mapping[str, str], unknown: Sequence[str] = ()) -> None:
        path = Path(path).absolute()
        try:
            answers = seen_from(path, kinds, self._ask)
        except OSError as error:
            self._found.findings.append(local_finding(name, path, error))
            return
        named = {self._by_id[node_id].name: answer for node_id, answer in answers.items()}
        named |= {urlsplit(url).hostname or url: "not checked (no node of the Ray cluster)" for url in unknown}
        self._found.shared.append(SharedPath(name=name, path=str(path), seen=named))
        for node_id, answer in answers.items():
            node = self._by_id[node_id].name
            what = "is not seen" if answer == "no" else f"could not be looked at ({answer})"
            text = f"{path} ({name}) {what} on {node}: set {name} to storage that all nodes share, at the same path"
            if answer == "read only":
                text = f"{node} sees {path} ({name}), but may not write there: let the user of Ray write on that node"
            if answer != "yes":
                self._found.findings += self._judged(node_id, text)

    def _network(self) -> Iterator[Finding]:
        """Whether the nodes of ranks reach each other; and those of servers rank 0's, if it sends them weights."""
        weights, places = self._config.weights, self._places or [node for node in self._nodes if node.is_here]
        if not places:
            return
        zero, ranks = places[0].node_id, list(dict.fromkeys(node.node_id for node in places))
        hosts = list(dict.fromkeys(node.node_id for node in self._servers.values() if node))
        links = list(permutations(ranks, 2))
        if isinstance(weights, DistributedWeightsConfig):
            links += [link for host in hosts if host != zero for link in ((host, zero), (zero, host))]
        links = [link for link in links if set(link) <= self._facts.keys()]
        addresses = {node.node_id: node.address for node in self._nodes}
        if server := next((one for one, other in links if other == zero and one in hosts), None):
            at = getattr(weights, "address", None)  # where a server meets rank 0
            at = at or self._ask("address_towards", {zero: (addresses[server],)})[zero]
            addresses[zero] = addresses[zero] if isinstance(at, Exception) else at
        names = dict[str, str]()
        for node in self._nodes:
            roles = [url for url, of in self._servers.items() if of is node] + ["rank 0"] * (node.node_id == zero)
            names[node.node_id] = " on ".join(filter(None, (" and ".join(roles), node.name)))
        yield from _network_findings(unreached(self._ask, links, addresses), names)


def differences(here: Mapping[str, Any], there: Mapping[str, Any], name: str) -> Iterator[tuple[str, bool]]:
    """The differences between a node's packages and this machine's, each with whether it is a mistake."""

    def release(version: str) -> list[str]:
        return version.split(".")[:2]

    own_arl, their_arl = here["versions"]["arl"], there["versions"]["arl"]
    if there["sources"] is None:
        yield f"{name} has no arl: install this version, {own_arl}, in the environment of Ray there", True
        return
    if here["python"] != there["python"]:
        is_mistake = release(here["python"]) != release(there["python"])
        yield f"{name} has Python {there['python']}, this machine {here['python']}: use the same", is_mistake
    for package in _NEEDED:
        own, other = here["versions"][package], there["versions"][package]
        if own == other:
            continue
        is_mistake = package == "arl" or other is None or own is None or release(own) != release(other)
        install = "install it there" if other is None else "install the same"
        yield f"{name} has {package} {other or '(none)'}, this machine {own}: {install}", is_mistake
    if own_arl == their_arl and here["sources"] != there["sources"]:
        yield f"{name} has arl {their_arl}, too, but with other source files: install the same", False


def clock_text(name: str, ahead_s: float) -> tuple[str, bool] | None:
    """A sentence about a node's clock, and whether it is a mistake; None if it is right."""
    if abs(ahead_s) <= _CLOCK_WARNING_S:
        return None
    is_mistake, way = abs(ahead_s) >= _CLOCK_MISTAKE_S, "ahead of" if ahead_s > 0 else "behind"
    breaks = (
        "certificates (TLS) and tokens may count as expired or not yet valid"
        if is_mistake
        else "times in logs will not fit together"
    )
    said = f"the clock of {name} is {abs(ahead_s):.0f} s {way} this machine's: set both by NTP (chrony, timesyncd)"
    return f"{said}. Training compares no clocks of two machines, but {breaks}", is_mistake


# Whether nodes reach each other: each tries listeners on the others, all at once


def unreached(ask: Ask, links: Sequence[Link], addresses: Mapping[str, str]) -> dict[Link, str]:
    """The links that do not work, and why. addresses: at which each node is tried."""

    def fine(answers: Mapping[str, Any]) -> dict[str, Any]:
        return {node_id: answer for node_id, answer in answers.items() if not isinstance(answer, Exception)}

    listening = fine(ask("listens", {to: (addresses[to],) for _, to in links}))
    tries: dict[str, list[str]] = {}
    for one, other in dict.fromkeys(links):
        if other in listening:
            tries.setdefault(one, []).append(other)
    places = {one: ([(addresses[to], *listening[to]) for to in others],) for one, others in tries.items()}
    return {
        (one, to): f"at {addresses[to]}: {reason}"
        for one, said in fine(ask("reaches_all", places)).items()
        for to, reason in zip(tries[one], said, strict=True)
        if reason
    }


def _network_findings(faults: Mapping[Link, str], names: Mapping[str, str]) -> Iterator[Finding]:
    """A mistake for each pair of nodes. names: what a node is called, and what is on it."""
    texts, told = list[str](), set[Link]()
    for (one, other), reason in faults.items():
        back = faults.get((other, one))
        if back is None:
            texts.append(f"{names[one]} does not reach {names[other]} ({reason})")
        elif (other, one) not in told:
            texts.append(f"{names[one]} and {names[other]} do not reach each other ({reason}; {back})")
        told.add((one, other))
    way = "let connections through between these machines, in both directions and at all ports"
    own = ", or set weights.address to an address of rank 0's node that servers reach"
    for text in texts[:_TOLD]:
        yield Finding(text=f"{text}: {way}{own if '://' in text and 'rank 0' in text else ''}")
    if len(texts) > _TOLD:
        yield Finding(text=f"{len(texts) - _TOLD} more pairs of nodes do not reach each other")


# Whether machines see a directory of this one: a real file is written there, looked for, and removed again


def seen_from(directory: Path, kinds: Mapping[str, str], ask: Ask) -> dict[str, str]:
    """How each node sees the directory: yes, no, read only, or why it did not answer.

    kinds: node id -> read or write. Leaves no file and no directory behind. Raises OSError if this process cannot write
    there.
    """
    with written(directory) as token:
        marks = {node_id: token.with_name(f"{token.name}-{number}") for number, node_id in enumerate(kinds)}
        asked = {node_id: (str(token), str(marks[node_id]), kind) for node_id, kind in kinds.items()}
        try:
            answers = ask("looks_for", asked)
        finally:
            answered = {node_id: mark.exists() for node_id, mark in marks.items()}
            for mark in marks.values():
                with suppress(OSError):
                    mark.unlink(missing_ok=True)
    said = {node_id: str(answer) for node_id, answer in answers.items()}
    # A node that writes into a directory of its own, at the same path, is not seen here.
    unseen = [i for i, answer in said.items() if answer == "yes" and kinds[i] == "write" and not answered[i]]
    return said | dict.fromkeys(unseen, "no")


@contextmanager
def written(directory: Path) -> Iterator[Path]:
    """A new file in the directory, which is made if it is not there; both are removed again. Raises OSError."""
    missing = [path for path in (directory, *directory.parents) if not path.exists()]
    directory.mkdir(parents=True, exist_ok=True)
    token = directory / f".seen-{secrets.token_hex(6)}"
    try:
        token.touch()
        yield token
    finally:
        with suppress(OSError):
            token.unlink(missing_ok=True)
        for path in missing:
            with suppress(OSError):  # something came in meanwhile
                path.rmdir()


def local_finding(name: str, path: Path, error: OSError) -> Finding:
    reason = "it is a file" if isinstance(error, FileExistsError | NotADirectoryError) else error.strerror or str(error)
    return Finding(text=f"{name} is {path}, where this machine cannot write: {reason}; set it to another directory")

"""What runs where: the table at the start of a run, and what the settings alone say of it, with their mistakes.

settings --> planned_trainer, planned_servers --+
nodes    --> node_checks -----------------------+--> PlacementTable --> console, event log, --dry-run
servers, mirrors, the trainer's ranks ----------+
"""

from __future__ import annotations

import glob
import html
import logging
import os
import socket
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any
from urllib.parse import urlsplit

import msgspec

from arl.api.errors import ConfigError
from arl.api.events import Finding, PlacedPart, RunPlaced, SharedPath, gpus_text, ranges_text
from arl.api.settings.engines import DeltaWeightsConfig, LocalEngineConfig, RunningServersConfig, ServerProcessesConfig
from arl.api.settings.run import Config
from arl.runtime.http.server import is_here

_ADVICE = "the same script with --dry-run shows all of the placement, and starts nothing"
_SHOWN_SERVERS = 2
_SHOWN_NODES = 8
"""Machines that a line names one by one."""
_MEMORY_FLAGS = {"sglang": "--mem-fraction-static", "vllm": "--gpu-memory-utilization"}
"""What limits the memory of servers that arl starts."""

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class PlacementTable:
    """What runs where, and what is wrong with it. Its text is the table."""

    parts: Sequence[PlacedPart]
    shared: Sequence[SharedPath] = ()
    findings: Sequence[Finding] = ()

    @property
    def mistakes(self) -> list[str]:
        return [one.text for one in self.findings if one.is_mistake]

    @property
    def warnings(self) -> list[str]:
        return [one.text for one in self.findings if not one.is_mistake]

    @property
    def is_one_machine(self) -> bool:
        return len({part.host for part in self.parts if part.host}) <= 1 and not any(
            part.part in ("ray", "mirror") or (part.part == "server" and not part.host) for part in self.parts
        )

    def record(self) -> RunPlaced:
        return RunPlaced(parts=list(self.parts), shared=list(self.shared), findings=list(self.findings))

    def rows(self) -> dict[str, Any]:
        """For machines."""
        return {
            "parts": msgspec.to_builtins(list(self.parts)),
            "shared": msgspec.to_builtins(list(self.shared)),
            "mistakes": self.mistakes,
            "warnings": self.warnings,
        }

    def tell(self, show: Callable[..., None]) -> None:
        """Show the table, and log what is wrong with it. show: Display.tell."""
        show("placement", self.brief(), **self.rows())
        for finding in self.findings:
            logger.log(logging.ERROR if finding.is_mistake else logging.WARNING, "%s", finding.text)

    def brief(self) -> str:
        """One line for a run on one machine; else the table without findings, which the log has."""
        if not self.is_one_machine:
            return "\n".join(self._lines())
        groups = _alike(parts := self.parts[1:])
        servers = [part for part in parts if part.part == "server"]
        if len(servers) > _SHOWN_SERVERS:  # in one entry
            groups = [*_alike([part for part in parts if part.part != "server"]), servers]
        return f"on {self.parts[0].host}: " + ", ".join(map(_said, groups))

    def __str__(self) -> str:
        lines = self._lines()
        for title, texts in (("mistakes", self.mistakes), ("warnings", self.warnings)):
            lines += [f"{title}:"] * bool(texts) + [f"  {number}. {text}" for number, text in enumerate(texts, 1)]
        return "\n".join(lines)

    def __repr__(self) -> str:
        return str(self)

    def _repr_html_(self) -> str:
        """For a notebook."""
        return f"<pre>{html.escape(str(self))}</pre>"

    def _lines(self) -> list[str]:
        rows = list[tuple[str, ...]]()
        for parts in _alike(self.parts):
            first = parts[0]
            process = "" if first.pid is None or len(parts) > 1 else f"process {first.pid}"
            note = "; ".join(filter(None, (process, first.note)))
            rows.append((_name(parts), first.host, first.address, _devices(parts), note))
        lines = ["what runs where:", *_aligned(rows)]
        if self.shared:
            lines += ["what must be shared:"]
            lines += _aligned([(path.name, path.path, _seen(path.seen)) for path in self.shared])
        return lines


def check(findings: Sequence[Finding]) -> None:
    """Raises ConfigError with the mistakes that keep a run from starting, if there are any."""
    if texts := [one.text for one in findings if one.is_mistake and one.ends_start]:
        raise ConfigError("\n".join([*texts, _ADVICE]))


# Its text


def _alike(parts: Sequence[PlacedPart]) -> list[list[PlacedPart]]:
    """Neighbours that one line shows: ranks of a role on a host; servers of one host on the same device."""

    def kind(part: PlacedPart) -> tuple[str, ...]:
        role, is_rank, _ = part.name.partition(" rank ")
        if is_rank:
            return part.part, role, part.host, part.address, part.device.partition(" ")[0], part.note
        is_free = part.part == "server" and part.address == "a free port"
        own = part.device if is_free else f"{part.address} {part.pid} {part.name}"
        return part.part, part.host, own

    return [list(run) for _, run in groupby(parts, kind)]


def _name(parts: Sequence[PlacedPart]) -> str:
    first, count = parts[0], len(parts)
    role, is_rank, _ = first.name.partition(" rank ")
    if is_rank:
        return f"{role} rank{'s' * (count > 1)} {ranges_text([int(part.name.rpartition(' ')[2]) for part in parts])}"
    if first.part == "server" and count > 1:
        return f"{count} servers"
    return " ".join(filter(None, (first.part, first.name)))


def _devices(parts: Sequence[PlacedPart]) -> str:
    named = dict.fromkeys(part.device for part in parts)
    numbers = [name.removeprefix("GPU ") for name in named]
    return gpus_text([int(one) for one in numbers]) if all(one.isdigit() for one in numbers) else ", ".join(named)


def _said(parts: Sequence[PlacedPart]) -> str:
    """A part in one phrase, for the line of a run on one machine."""
    first = parts[0]
    if first.part == "workers":
        return first.note
    on = f" on {_devices(parts)}" if first.device else ""
    where = first.address if first.part == "server" and len(parts) == 1 else ""
    more = ", ".join(filter(None, (where, f"process {first.pid}" if first.pid and len(parts) == 1 else "")))
    return f"{_name(parts)}{on}" + (f" ({more})" if more else "")


def _aligned(rows: Sequence[Sequence[str]]) -> list[str]:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = ("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True) if width) for row in rows)
    return [f"  {line}".rstrip() for line in lines]


def _seen(seen: dict[str, str]) -> str:
    by_answer: dict[str, list[str]] = {}
    for node, answer in seen.items():
        by_answer.setdefault(answer, []).append(node)

    def listed(names: Sequence[str]) -> str:
        more = len(names) - _SHOWN_NODES
        return ", ".join(names[:_SHOWN_NODES]) + (f" and {more} more" if more > 0 else "")

    return "; ".join(f"{answer}: {listed(nodes)}" for answer, nodes in by_answer.items())


# What the settings say: which parts run on this machine, and which would share a GPU


def controller_part() -> PlacedPart:
    return PlacedPart(part="controller", host=socket.gethostname(), address=own_address(), pid=os.getpid())


def planned_trainer(config: Config) -> list[PlacedPart]:
    """The trainer on this machine, a row for each rank."""
    train, host = config.train, socket.gethostname()
    if train.num_ranks == 1:
        roles = config.algorithm.trained_models if num_engines(config) > 1 else [""]
        device = gpus_text([_own_gpu(train.device)]) if is_cuda(config) else "cpu"
        return [PlacedPart(part="trainer", name=role, host=host, device=device) for role in roles]
    gpus = _gpus_of_ranks(config)
    devices = [gpus_text([gpu]) for gpu in gpus] if gpus else ["cpu"] * (train.num_ranks * num_engines(config))
    return [
        PlacedPart(
            part="trainer", name=name, host=host, device=device if isinstance(device, str) else gpus_text([device])
        )
        for name, device in zip(rank_names(config), devices, strict=True)
    ]


def planned_servers(config: Config) -> list[PlacedPart]:
    """The servers that arl starts on this machine; none if they run already, or on the nodes of a cluster."""
    engine, host = config.engine, socket.gethostname()
    if isinstance(engine, RunningServersConfig) or engine.on_ray:
        return []
    if isinstance(engine, LocalEngineConfig):
        device = gpus_text([_own_gpu(engine.device)]) if engine.device.startswith("cuda") else engine.device
        devices = [device] * engine.num_servers
    else:
        devices = [gpus_text(gpus) or "cpu" for gpus in _gpus_of_servers(engine)]
    return [PlacedPart(part="server", host=host, address="a free port", device=device) for device in devices]


def beside_parts(config: Config) -> list[PlacedPart]:
    """Workers and mirrors."""
    host, parts = socket.gethostname(), list[PlacedPart]()
    if count := config.rollout.num_workers:
        parts.append(PlacedPart(part="workers", host=host, note=f"{count} process{'es' * (count > 1)} for episodes"))
    if isinstance(config.weights, DeltaWeightsConfig):
        for address in dict.fromkeys(config.weights.mirrors.values()):
            served = [server for server, mirror in config.weights.mirrors.items() if mirror == address]
            note = f"of {', '.join(served)}"
            parts.append(PlacedPart(part="mirror", host=urlsplit(address).hostname or "", address=address, note=note))
    return parts


def gpu_mistakes(config: Config, num_gpus: int | None = None) -> list[Finding]:
    """Two parts on a GPU, and GPUs that this machine does not have.

    num_gpus: that this process may use; None if that is not known. Ranks of a cluster get their GPUs from Ray.
    """
    train, engine, found = config.train, config.engine, list[str]()
    on_cluster = train.ray_address is not None
    ranks = [] if on_cluster or not is_cuda(config) else _gpus_of_ranks(config) or [_own_gpu(train.device)]
    servers = _gpus_of_servers(engine) if isinstance(engine, ServerProcessesConfig) and not engine.on_ray else []
    if train.num_ranks > 1 and is_cuda(config) and ":" in train.device:
        found.append(
            f"train.device is {train.device}, one GPU, and train.num_ranks is {train.num_ranks}: each rank needs a GPU "
            "of its own; set train.device to cuda"
        )
    shared = sorted(set(ranks) & {gpu for gpus in servers for gpu in gpus})
    if isinstance(engine, ServerProcessesConfig) and shared and not engine.colocated:
        trainers, flag = sorted(set(ranks)), _MEMORY_FLAGS[engine.protocol]
        if not any(argument.startswith(flag) for argument in engine.arguments):
            found.append(
                f"the trainer has {gpus_text(trainers)}, and arl starts servers on {gpus_text(shared)}, too: set "
                f"engine.first_gpu to {trainers[-1] + 1}, let both take turns (engine.colocated), or limit the "
                f"servers' memory by {flag} in engine.arguments"
            )
    if num_gpus is not None:
        found += _missing(config, num_gpus, ranks, servers)
    return [Finding(text=text) for text in found]


def _missing(config: Config, num_gpus: int, ranks: Sequence[int], servers: Sequence[Sequence[int]]) -> Iterator[str]:
    there = f"this machine shows {num_gpus} GPU(s) to this process"
    if ranks and max(ranks) >= num_gpus:
        count = config.train.num_ranks
        what = f"train.num_ranks is {count}" if count > 1 else f"train.device is {config.train.device}"
        beside = "".join(f", and as many ranks for {of}" for of in beside_policy(config)) if count > 1 else ""
        yield f"{what}{beside}, and {there}; set it lower, to cpu, or train.ray_address to a cluster with more GPUs"
    if servers and any(servers) and max(map(max, servers)) >= num_gpus:
        yield (
            f"{len(servers)} servers with engine.gpus_per_server={len(servers[0])} from engine.first_gpu="
            f"{servers[0][0]} on need {gpus_text([gpu for gpus in servers for gpu in gpus])}, and {there}; start fewer"
        )
    device = config.engine.device if isinstance(config.engine, LocalEngineConfig) else "cpu"
    if device.startswith("cuda") and _own_gpu(device) >= num_gpus:
        yield f"engine.device is {device}, and {there}; set it to cpu, or to a GPU that is there"


def shared_gpus(ranks: Sequence[PlacedPart], gpus: Sequence[str]) -> list[Finding]:
    """Ranks that have one GPU together. gpus: each rank's, by a name that is the same everywhere; empty if unknown."""
    named = {gpu: [rank for rank, own in zip(ranks, gpus, strict=True) if own == gpu] for gpu in gpus if gpu}
    return [
        Finding(
            text=f"{' and '.join(rank.name for rank in same)} are on one GPU of {same[0].host} ({gpu}): start one Ray "
            "node on each machine, with as many GPUs as it has (ray start --num-gpus)"
        )
        for gpu, same in named.items()
        if len(same) > 1
    ]


def is_cuda(config: Config) -> bool:
    return config.train.device.startswith("cuda")


def num_engines(config: Config) -> int:
    """The policy's, and that of a model beside it."""
    return len(config.algorithm.trained_models)


def beside_policy(config: Config) -> list[str]:
    """What is trained beside the policy, in words."""
    return [f"the {role.replace('_', ' ')}" for role in config.algorithm.trained_models[1:]]


def rank_names(config: Config) -> list[str]:
    return [f"{role} rank {rank}" for role in config.algorithm.trained_models for rank in range(config.train.num_ranks)]


def _own_gpu(device: str) -> int:
    return int(device.partition(":")[2] or 0)


def _gpus_of_ranks(config: Config) -> list[int]:
    """A GPU of this machine for each rank of all engines; empty for one rank, on a CPU or a cluster."""
    if config.train.num_ranks == 1 or not is_cuda(config) or config.train.ray_address is not None:
        return []
    return list(range(config.train.num_ranks * num_engines(config)))


def _gpus_of_servers(engine: ServerProcessesConfig) -> list[range]:
    size = engine.gpus_per_server
    starts = (engine.first_gpu + index * size for index in range(engine.num_servers))
    return [range(start, start + size) for start in starts]


# This machine


def visible_gpus() -> int | None:
    """How many NVIDIA GPUs this process may use; None where that cannot be told without torch."""
    if "CUDA_VISIBLE_DEVICES" in os.environ:
        return len([one for one in os.environ["CUDA_VISIBLE_DEVICES"].split(",") if one.strip() not in ("", "-1")])
    if found := len(glob.glob("/dev/nvidia[0-9]*")):
        return found
    return None if any(map(os.path.exists, ("/dev/kfd", "/dev/dxg", "/dev/nvhost-gpu"))) else 0


def own_address() -> str:
    """This machine's address towards others, found without sending anything; loopback without a network."""
    for family, other in ((socket.AF_INET, "192.0.2.1"), (socket.AF_INET6, "2001:db8::1")):
        try:
            with socket.socket(family, socket.SOCK_DGRAM) as probe:
                probe.connect((other, 9))
                return str(probe.getsockname()[0])
        except OSError:
            continue
    return "127.0.0.1"


def hostname_of(url: str) -> str:
    """The name of a server's host: this machine's own, if the server is here."""
    return socket.gethostname() if is_here(url) else urlsplit(url).hostname or ""

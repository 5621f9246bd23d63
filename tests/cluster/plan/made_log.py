"""The event log of a made-up run: what known costs would have written, computed token by token."""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from heapq import heappop, heappush
from itertools import count
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import orjson

from arl.api import events
from arl.api.settings.run import EventsConfig
from arl.cluster.plan.costs import (
    Costs,
    DecodeCosts,
    MeasuredEpisode,
    MeasuredTurn,
    PrefillCosts,
    PublishCosts,
    TrainerCosts,
    Workload,
)
from arl.engine.local.scheduler import IterationTimes
from arl.observe.events.writer import EventLog

T0 = 1_700_000_000.0


def known_costs(**changes: Any) -> Costs:
    turn = MeasuredTurn(prompt_tokens=20, new_tokens=30)
    costs: dict[str, Any] = {
        "decode": DecodeCosts(points=((1, 0.0021), (64, 0.0021 + 63 * 1e-4)), max_running_requests=64),
        "prefill": PrefillCosts(per_token_s=5e-5, per_request_s=4e-4),
        "trainer": TrainerCosts(base_s=0.05, per_token_s=8e-5, snapshot_s=0.01),
        "publish": PublishCosts(transfer_s=0.08, load_s=0.03),
        "workload": Workload(episodes=(MeasuredEpisode(group=0, turns=(turn,), tokens=50),)),
    }
    return Costs(**costs | changes)


@dataclass(slots=True, eq=False)
class Request:
    episode: str
    number: int
    prompt: int
    cached: int
    output: int
    asked: float
    then: Callable[[float], None]
    got: int = 0


@dataclass(eq=False)
class Server:
    """Iterations, one after another: all that run get a token, and prompts are read within the same iteration."""

    costs: Costs
    address: str
    running: list[Request] = field(default_factory=list)
    waiting: deque[Request] = field(default_factory=deque)
    busy: list[tuple[float, float]] = field(default_factory=list)
    is_computing: bool = False
    to_load: int | None = None
    times: IterationTimes = field(default_factory=lambda: IterationTimes(is_alone=True))

    def iteration(self) -> tuple[float, list[Request]]:
        """How long it takes, and whose prompts it reads."""
        decode, prefill = self.costs.decode, self.costs.prefill
        room, read, tokens = decode.max_running_requests - len(self.running), list[Request](), 0
        while self.waiting and len(read) < room and tokens < 512:
            read.append(self.waiting.popleft())
            tokens += max(read[-1].prompt - read[-1].cached, 1)
        seconds = prefill.per_token_s * tokens + prefill.per_request_s * len(read)
        held = sum(r.prompt + r.got for r in self.running)
        if self.running:
            seconds += float(decode.iteration_s(np.array(len(self.running)), held / len(self.running)))
        self.times.add(len(self.running), held, tokens, len(read), seconds)
        return seconds, read


class MadeRun:
    """Runs groups of two turns, with a tool between them, and trains batches. `write` writes its log."""

    def __init__(
        self,
        costs: Costs,
        *,
        steps: int = 5,
        batch_size: int = 4,
        group_size: int = 8,
        ahead: int = 3,
        num_servers: int = 1,
        latency_s: float = 0.0,
        tokens: tuple[int, int] = (10, 60),
        tells_iterations: bool = False,
    ) -> None:
        """ahead: batches of groups that run, or wait for the trainer. tokens: of an answer. A request costs the
        controller 0.2 ms, an episode 0.3 ms."""
        self.costs, self.draw, self.steps = costs, random.Random(0), steps
        self.batch_size, self.group_size = batch_size, group_size
        self.latency_s, self.cpu, self.tokens = latency_s, (2e-4, 3e-4), tokens
        self.room = ahead * batch_size
        self.tells_iterations = tells_iterations
        self.servers = [Server(costs, f"http://127.0.0.1:{7000 + i}") for i in range(num_servers)]
        self.records: list[events.Event] = []
        self.metrics: list[dict[str, float]] = []
        self.training: list[tuple[float, float]] = []
        self.controller: list[tuple[float, float]] = []
        self._due: list[tuple[float, int, Callable[[float], None]]] = []
        self._numbers = count()
        self._groups, self._version, self._is_training = 0, 0, False
        self._left: dict[int, int] = {}
        self._held: dict[int, int] = {}
        self._finished: list[int] = []
        self._admit(0.0)
        while self._due and self._version < steps:
            t, _, call = heappop(self._due)
            call(t)

    def _at(self, t: float, call: Callable[[float], None]) -> None:
        heappush(self._due, (t, next(self._numbers), call))

    def _admit(self, t: float) -> None:
        while len(self._left) + len(self._finished) < self.room:
            group, self._groups = self._groups, self._groups + 1
            self._left[group], self._held[group] = self.group_size, 0
            self.records.append(events.GroupAdmitted(t=t, group=group, epoch=0, row=group, stamp=self._version))
            for index in range(self.group_size):
                self._begin(f"{group}.{index}", t)

    def _begin(self, episode: str, began: float) -> None:
        self.records.append(events.EpisodeBegan(t=began, episode=episode))
        self.controller.append((began, self.cpu[1] / 2))
        server = min(self.servers, key=lambda s: len(s.running) + len(s.waiting))
        sizes = [self.draw.randint(*self.tokens) for _ in range(2)]

        def first_answered(t: float) -> None:
            tool_s = self.draw.lognormvariate(-2.0, 0.8) + 0.01
            prompt = 20 + sizes[0] + 15
            request = Request(episode, 2, prompt, 19 + sizes[0], sizes[1], t + tool_s, last_answered)
            self._at(t + tool_s, lambda now: self._ask(server, request, now))

        def last_answered(t: float) -> None:
            tokens = 20 + sum(sizes) + 15
            part = events.TrajectorySummary(reward=1.0, tokens=tokens, trained=sum(sizes), turns=2)
            self.records.append(
                events.EpisodeEnded(
                    t=t, episode=episode, how="finished", began=T0 + began, reward=1.0, trajectories=[part]
                )
            )
            self.controller.append((t, self.cpu[1] / 2))
            self._end_in_group(int(episode.partition(".")[0]), tokens, t)

        self._ask(server, Request(episode, 1, 20, 0, sizes[0], began, first_answered), began)

    def _ask(self, server: Server, request: Request, t: float) -> None:
        self.controller.append((t, self.cpu[0] / 2))

        def arrive(now: float) -> None:
            server.waiting.append(request)
            self._compute(server, now)

        self._at(t + self.latency_s, arrive)

    def _compute(self, server: Server, t: float) -> None:
        if server.is_computing:
            return
        if server.to_load is not None:
            self._load(server, server.to_load, t)
        elif server.running or server.waiting:
            seconds, read = server.iteration()
            server.is_computing = True
            server.busy.append((t, t + seconds))
            self._at(t + seconds, lambda now: self._ended(server, read, now))

    def _ended(self, server: Server, read: list[Request], t: float) -> None:
        server.is_computing = False
        for request in (*server.running, *read):
            request.got += 1
        done = [request for request in (*server.running, *read) if request.got == request.output]
        server.running = [request for request in (*server.running, *read) if request.got < request.output]
        for request in done:
            self.controller.append((t, self.cpu[0] / 2))
            self.records.append(
                events.TurnEnded(
                    t=t, episode=request.episode, rid=f"{request.episode}-{request.number}", server=server.address,
                    seconds=t - request.asked, prompt=request.prompt, output=request.output, cached=request.cached,
                    oldest=self._version, newest=self._version, stop="length",
                )
            )  # fmt: skip
            request.then(t)
        self._compute(server, t)

    def _load(self, server: Server, version: int, t: float) -> None:
        server.to_load, server.is_computing = None, True
        self.records.append(events.ServerPaused(t=t, server=server.address))
        if self.tells_iterations:
            told = {"t": t, "server": server.address, **server.times.report()}
            self.records.append(msgspec.convert(told, events.ServerWorked))

        def loaded(now: float) -> None:
            server.is_computing = False
            self.records.append(events.ServerResumed(t=now, server=server.address))
            self._compute(server, now)

        server.busy.append((t, t + self.costs.publish.load_s))
        self._at(t + self.costs.publish.load_s, loaded)

    def _end_in_group(self, group: int, tokens: int, t: float) -> None:
        self._left[group] -= 1
        self._held[group] += tokens
        if not self._left[group]:
            del self._left[group]
            self._finished.append(group)
            self.records.append(events.GroupEnded(t=t, group=group, outcome="kept"))
            self._train(t)

    def _train(self, t: float) -> None:
        if self._is_training or len(self._finished) < self.batch_size:
            return
        self._is_training = True
        batch, self._finished = self._finished[: self.batch_size], self._finished[self.batch_size :]
        tokens = sum(self._held[group] for group in batch)
        seconds = self.costs.trainer.step_s(tokens, self.batch_size * self.group_size, 1)
        self.training.append((t, t + seconds))

        def trained(now: float) -> None:
            self._is_training, self._version = False, self._version + 1
            version = self._version
            self.records.append(
                events.BatchTrained(t=now, version=version, groups=batch, seconds=seconds, cpu_s=seconds)
            )
            self.records.append(events.SnapshotTaken(t=now, version=version, seconds=self.costs.trainer.snapshot_s))
            self.metrics.append({"version": version, "tokens": tokens, "forwarded_tokens": tokens})
            self._admit(now)
            for server in self.servers:
                self._at(
                    now + self.costs.publish.transfer_s, lambda at, server=server: self._publish(server, version, at)
                )
            self._train(now)

        self._at(t + seconds, trained)

    def _publish(self, server: Server, version: int, t: float) -> None:
        server.to_load = version
        self._compute(server, t)

    def write(
        self,
        run_dir: Path,
        *,
        wall: Callable[[float], float] = lambda t: t,
        has_cpu_times: bool = True,
        resumed_from: int = 0,
        warm_up_s: float = 0.0,
        **others: Any,
    ) -> None:
        """wall: what a clock on the wall shows when the processes have worked so many seconds. warm_up_s: seconds that
        the first step is said to have taken longer. others: settings."""
        most_running = self.costs.decode.max_running_requests
        settings: dict[str, Any] = {
            "rollout": {"batch_size": self.batch_size, "group_size": self.group_size, "max_staleness": 2},
            "engine": {"kind": "local", "device": "cpu", "num_threads": 1, "max_running_requests": most_running},
            "train": {"device": "cpu", "num_threads": 1, "num_ranks": 1},
            **others,
        }  # fmt: skip
        last = max(record.t for record in self.records)
        with EventLog(run_dir, EventsConfig()).open() as log:
            log.emit(
                events.RunBegan(
                    t=T0 + wall(0.0),
                    version=resumed_from,
                    arl="0",
                    host="h",
                    pid=1,
                    cores=2,
                    workflow="W",
                    num_examples=100,
                    settings=settings,
                )
            )
            for record in self.records:
                log.emit(_moved(record, wall, resumed_from, warm_up_s))
            for i in range(int(2 * last) + 2 if has_cpu_times else 0):
                log.emit(self._used(wall, 0.5 * i))
        lines = [orjson.dumps(row | {"version": row["version"] + resumed_from}) for row in self.metrics]
        (run_dir / "metrics.jsonl").write_bytes(b"\n".join([*lines, b""]))

    def _used(self, wall: Callable[[float], float], worked: float) -> events.CpuUsed:
        spans = {server.address: server.busy for server in self.servers} | {"trainer": self.training}
        return events.CpuUsed(
            t=T0 + wall(worked),
            controller=1.0 + sum(seconds for t, seconds in self.controller if t <= worked),
            processes={name: sum(max(min(b, worked) - a, 0.0) for a, b in own) for name, own in spans.items()},
        )


def _moved(record: events.Event, wall: Callable[[float], float], resumed_from: int, warm_up_s: float) -> events.Event:
    """The record with the times of the clock on the wall, and the versions of a run that was resumed."""
    from msgspec import structs

    values: dict[str, Any] = {"t": T0 + wall(record.t)}
    if (seconds := getattr(record, "seconds", None)) is not None:
        values["seconds"] = wall(record.t) - wall(max(record.t - seconds, 0.0))
    if isinstance(record, events.BatchTrained | events.SnapshotTaken):
        values["version"] = record.version + resumed_from
    if isinstance(record, events.BatchTrained) and record.version == 1:
        values |= {"seconds": values["seconds"] + warm_up_s, "cpu_s": 0.0}
    if isinstance(record, events.EpisodeEnded):
        values["began"] = T0 + wall(record.began - T0)
    return structs.replace(record, **values)

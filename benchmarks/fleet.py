"""One controller over hundreds of servers: what each of them costs it, while requests come at one rate.

    python benchmarks/fleet.py [--servers 1 50 100 200 500] [--rate 200] [--seconds 10] [--ill 0.1] [--updates]
                               [--twice] [--profile]

The servers speak SGLang's protocol without a model, many in each of `--processes` processes: each answers a request
after half to one and a half of `--answer-s` with `--tokens` tokens. A share `--ill` of them refuses connections, hangs,
takes 1.5 s for every answer, or dies in its first update and comes back 3 s later. The engine follows a servers file,
as a run does.

Printed for each number of servers: how long entering the engine took; the CPU time of this process for a second, and
its ratio to that with the first number in the same run; how late a 5 ms timer fires. --updates brings new weights to
all servers every 2 s meanwhile, which each takes 50 ms to load. --twice measures in the opposite order, too.
"""

from __future__ import annotations

import argparse
import asyncio
import cProfile
import gc
import json
import logging
import pstats
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Any, cast

import httptools

from arl.api.engine import DiskWeights
from arl.api.errors import ArlError
from arl.api.settings.engines import ClientConfig
from arl.api.types import ModelRequest, SamplingParams
from arl.engine.client.membership import RosterFiles
from arl.engine.client.remote_engine import RemoteInferenceEngine
from arl.runtime.http.server import allow_many_connections, bind

ILLS = ("refuses", "hangs", "slow", "dies")
_SLOW_S, _LOAD_S, _AWAY_S = 1.5, 0.05, 3.0


class Fake:
    """One server. ill: one of ILLS, or empty."""

    def __init__(self, ill: str, answer_s: float) -> None:
        self.ill = ill
        self.answer_s = answer_s
        self.label = "default"
        self.answer: dict[int, bytes] = {}
        self.connections: set[Talk] = set()
        self.is_away = False

    def answer_to(self, path: str, body: bytes) -> tuple[float, bytes]:
        """How long it takes, and the answer."""
        delay_s = _SLOW_S if self.ill == "slow" else 0.0
        match path:
            case "/generate":
                delay_s += self.answer_s * random.uniform(0.5, 1.5)
                return delay_s, self._generated(json.loads(body)["sampling_params"]["max_new_tokens"])
            case "/model_info":
                return delay_s, json.dumps({"model_path": "m", "weight_version": self.label}).encode()
            case "/update_weights_from_disk":
                if self.ill == "dies" and self.label == "default":
                    self.die()
                self.label = json.loads(body)["weight_version"]
                self.answer.clear()
                return delay_s + _LOAD_S, b'{"success": true}'
            case _:
                return delay_s, b"{}"

    def die(self) -> None:
        self.is_away, self.ill = True, ""
        for connection in [*self.connections]:
            connection.transport.abort()
        asyncio.get_running_loop().call_later(_AWAY_S, self.come_back)

    def come_back(self) -> None:
        self.is_away, self.label = False, "default"

    def _generated(self, num_tokens: int) -> bytes:
        if num_tokens not in self.answer:
            ids = list(range(100, 100 + num_tokens))
            meta = {
                "finish_reason": {"type": "length"},
                "output_token_logprobs": [[-0.6931471824645996, token, None] for token in ids],
                "weight_version": self.label,
                "weight_versions": [{"version": self.label, "start": 0, "end": num_tokens}],
            }
            self.answer[num_tokens] = json.dumps({"text": "", "output_ids": ids, "meta_info": meta}).encode()
        return self.answer[num_tokens]


class Talk(asyncio.Protocol):
    """A connection to a Fake: one request at a time."""

    def __init__(self, fake: Fake) -> None:
        self.fake = fake
        self.parser = httptools.HttpRequestParser(self)
        self.path, self.body = "", b""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast("asyncio.Transport", transport)
        self.fake.connections.add(self)
        if self.fake.is_away:
            self.transport.abort()

    def connection_lost(self, exc: Exception | None) -> None:
        self.fake.connections.discard(self)

    def data_received(self, data: bytes) -> None:
        self.parser.feed_data(data)

    def on_url(self, url: bytes) -> None:
        self.path, self.body = url.decode(), b""

    def on_body(self, piece: bytes) -> None:
        self.body += piece

    def on_message_complete(self) -> None:
        if self.fake.ill == "hangs":
            return
        delay_s, answer = self.fake.answer_to(self.path, self.body)
        data = b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n%b" % (
            len(answer),
            answer,
        )
        asyncio.get_running_loop().call_later(delay_s, self.transport.write, data)


def serve(ills: Sequence[str], answer_s: float) -> None:
    """A Fake for each of `ills`; print the ports first."""

    async def main() -> None:
        allow_many_connections()
        loop, ports = asyncio.get_running_loop(), list[int]()
        for ill in ills:
            listener, fake = bind("127.0.0.1", 0), Fake(ill, answer_s)
            ports.append(listener.getsockname()[1])
            if ill == "refuses":
                listener.close()
            else:
                await loop.create_server(lambda fake=fake: Talk(fake), sock=listener)
        print(json.dumps(ports), flush=True)
        await asyncio.Event().wait()

    asyncio.run(main())


@contextmanager
def fakes(number: int, answer_s: float, num_processes: int = 2, share_ill: float = 0.0) -> Iterator[list[str]]:
    """The addresses of so many servers."""
    num_ill = round(share_ill * number)
    ills = [ILLS[i % len(ILLS)] for i in range(num_ill)] + [""] * (number - num_ill)
    processes = list[subprocess.Popen[str]]()
    try:
        for first in range(min(num_processes, number)):
            command = [sys.executable, __file__, "--serve", json.dumps(ills[first::num_processes])]
            command += ["--answer-s", str(answer_s)]
            processes.append(subprocess.Popen(command, stdout=subprocess.PIPE, text=True))
        ports = [json.loads(process.stdout.readline()) for process in processes if process.stdout]
        yield [f"http://127.0.0.1:{port}" for of_process in ports for port in of_process]
    finally:
        for process in processes:
            process.kill()
            process.wait()


@dataclass(frozen=True, kw_only=True)
class Figures:
    servers: int
    serving: int
    start_s: float
    cpu: float
    """Seconds of this process's CPU time for a second."""
    lags: Sequence[float]
    """Sorted, in seconds."""
    requests: int
    failed: int
    updates_s: Sequence[float]

    def lag_ms(self, share: float) -> float:
        return 1000 * self.lags[min(len(self.lags) - 1, int(share * len(self.lags)))]


class Requests:
    """Requests at one rate, updates, and a clock beside them."""

    def __init__(self, engine: RemoteInferenceEngine, args: argparse.Namespace) -> None:
        self.engine = engine
        self.rate = args.rate
        self.sampling = SamplingParams(max_new_tokens=args.tokens)
        self.lags, self.updates_s = list[float](), list[float]()
        self.done = self.failed = 0

    async def keep_asking(self) -> None:
        began, sent = now(), 0
        async with asyncio.TaskGroup() as group:
            while True:
                while sent < (now() - began) * self.rate:
                    group.create_task(self.ask(str(sent % 997)))
                    sent += 1
                await asyncio.sleep(0.01)

    async def ask(self, session: str) -> None:
        try:
            request = ModelRequest(input_ids=[1] * 64, sampling=self.sampling, session_id=session)
            await self.engine.agenerate(request)
            self.done += 1
        except ArlError:
            self.failed += 1

    async def keep_updating(self) -> None:
        for version in count(1):
            began = now()
            await self.engine.update_weights(DiskWeights(version=version, directory=Path("/weights")))
            self.updates_s.append(now() - began)
            await asyncio.sleep(2.0)

    async def clock(self) -> None:
        while True:
            due = now() + 0.005
            await asyncio.sleep(0.005)
            self.lags.append(now() - due)


now = time.perf_counter


async def measure(addresses: Sequence[str], args: argparse.Namespace, profile: cProfile.Profile) -> Figures:
    allow_many_connections()
    with tempfile.TemporaryDirectory() as directory:
        named = Path(directory) / "servers.txt"
        named.write_text("".join(f"{address}\n" for address in addresses))
        files = RosterFiles(run_dir=Path(directory), named=named, needs_all=False)
        config = ClientConfig(request_timeout_s=60.0, update_timeout_s=5.0)
        entered = now()
        async with RemoteInferenceEngine(addresses, config, files=files) as engine, asyncio.TaskGroup() as group:
            start_s, load = now() - entered, Requests(engine, args)
            tasks = [group.create_task(task) for task in (load.keep_asking(), load.clock())]
            if args.updates:
                tasks.append(group.create_task(load.keep_updating()))
            await asyncio.sleep(args.warm_s)
            load.lags.clear()
            gc.collect()
            gc.freeze()
            gc.disable()
            if args.profile:
                profile.enable()
            began, cpu_began, done_before = now(), time.process_time(), load.done
            await asyncio.sleep(args.seconds)
            seconds, cpu_s = now() - began, time.process_time() - cpu_began
            profile.disable()
            gc.enable()
            serving, done = int(engine.counters()["servers/serving"]), load.done - done_before
            for task in tasks:
                task.cancel()
    return Figures(
        servers=len(addresses),
        serving=serving,
        start_s=start_s,
        cpu=cpu_s / seconds,
        lags=sorted(load.lags),
        requests=done,
        failed=load.failed,
        updates_s=load.updates_s,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--servers", type=int, nargs="+", default=[1, 50, 100, 200, 500])
    for name, default in (("rate", 200.0), ("seconds", 10.0), ("warm-s", 3.0), ("answer-s", 0.2), ("ill", 0.0)):
        parser.add_argument(f"--{name}", type=float, default=default)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--processes", type=int, default=2)
    for name in ("updates", "twice", "profile"):
        parser.add_argument(f"--{name}", action="store_true")
    parser.add_argument("--serve", type=json.loads, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.serve is not None:
        return serve(args.serve, args.answer_s)
    logging.disable(logging.WARNING)
    print(f"{args.rate:g} requests/s, {args.ill:.0%} ill" + ", an update every 2 s" * args.updates)
    head = (
        "servers",
        "serving",
        "start",
        "CPU/s",
        "ratio",
        "lag p50",
        "p99",
        "max (ms)",
        "requests",
        "failed",
        "update",
    )
    print("".join(f"{name:>10}" for name in head))
    base: dict[int, float] = {}
    for turn, number in enumerate([*args.servers, *(reversed(args.servers) if args.twice else ())]):
        profile = cProfile.Profile(time.process_time)
        with fakes(number, args.answer_s, args.processes, args.ill) as addresses:
            found = asyncio.run(measure(addresses, args, profile))
        part = turn // len(args.servers)
        base.setdefault(part, found.cpu)
        row: list[Any] = [found.servers, found.serving, f"{found.start_s:.2f} s", f"{1000 * found.cpu:.0f} ms"]
        row += [f"{found.cpu / base[part]:.2f}", *(f"{found.lag_ms(share):.1f}" for share in (0.5, 0.99, 1.0))]
        row += [found.requests, found.failed, f"{max(found.updates_s, default=0.0):.2f} s"]
        print("".join(f"{cell!s:>10}" for cell in row), flush=True)
        if args.profile:
            pstats.Stats(profile).sort_stats("tottime").print_stats(25)


if __name__ == "__main__":
    main()

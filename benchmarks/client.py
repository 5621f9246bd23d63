"""What one agenerate call costs in CPU time, in the process that calls and in the server's.

    python benchmarks/client.py [--calls 6000] [--concurrency 1 64 1000] [--prompt-tokens 20] [--new-tokens 4]
                                [--repeats 3] [--json] [--turns] [--profile]

The server is a process of its own: the embedded server's HTTP side, with a scheduler that samples at once behind it.
The client's figure is of building a request, sending it, reading and checking the answer. Beside it stands the least
that this machine needs for such a request and its answer as JSON over HTTP: the same bytes over a bare asyncio
protocol. The lag is how late a 5 ms timer fires meanwhile.

--json: speak JSON over HTTP, as with a stock SGLang server, in the place of frames over a WebSocket.
--turns: each call extends the prompt and the answer of the one before by 100 tokens, as the turns of an episode do; the
prompt is an int32 array, else a list.
"""

from __future__ import annotations

import argparse
import asyncio
import cProfile
import json
import os
import pstats
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable
from concurrent.futures import Future
from itertools import count
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np

from arl.api.settings.engines import ClientConfig
from arl.api.types import ModelRequest, SamplingParams, new_id
from arl.engine.client.remote_engine import RemoteInferenceEngine
from arl.engine.local import app
from arl.engine.local.generate import Inflight
from arl.engine.local.sequences import Job
from arl.runtime.http.server import allow_many_connections, bind, serving

_NEW_IN_TURN = 100


class Instant:
    """A scheduler that samples at once, without a model."""

    def __init__(self) -> None:
        sizes = {"context_length": 1 << 20, "vocab_size": 1 << 20}
        nothing = {"tokenizer": None, "config": None, "tower": None, "routers": None, "eos_ids": frozenset[int]()}
        adapters = SimpleNamespace(loaded={})
        self.runner = SimpleNamespace(
            is_scorer=False,
            stored_form=SimpleNamespace(shapes={}),
            adapters=adapters,
            released=(),
            held_bytes=0,
            **sizes,
            **nothing,
        )
        self.batch = SimpleNamespace(weight_version="default", num_running=0, num_waiting=0)
        self.is_alive, self.is_paused, self.prefill_tokens = True, False, 512
        self.deliver: Callable[[list[Job]], None] = lambda jobs: None

    def submit(self, job: Job) -> None:
        num_tokens = job.sampling.max_new_tokens
        job.output_ids = list(range(100, 100 + num_tokens))
        job.output_logprobs = [-0.6931471824645996] * num_tokens
        job.versions = ["default"] * num_tokens
        job.finish_reason = {"type": "length", "length": num_tokens}
        self.deliver([job])

    def abort(self, rid: str | None) -> None:
        pass

    def resume(self) -> Future[None]:
        resumed: Future[None] = Future()
        resumed.set_result(None)
        return resumed


def serve(args: argparse.Namespace) -> None:
    """The embedded server's application in front of an Instant; print the port first."""

    async def main() -> None:
        allow_many_connections()
        scheduler: Any = Instant()
        inflight = Inflight(asyncio.get_running_loop(), scheduler)
        scheduler.deliver = inflight.deliver
        if args.json:
            app.FORMAT = None  # the client is told of no frames
        settings = {"model_path": "m", "device": "cpu", "update_timeout_s": 1.0, "context_length": 1 << 20}
        application = app.build_app(inflight, settings, None)
        async with serving(application, bind("127.0.0.1", 0)) as port:
            print(port, flush=True)
            await asyncio.Event().wait()

    asyncio.run(main())


class Bare(asyncio.Protocol):
    """A connection that sends a request and takes whatever comes, until a whole answer is there."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport: Any = transport
        self.answer: asyncio.Future[None] | None = None
        self.data = b""

    def data_received(self, data: bytes) -> None:
        self.data += data
        head, end, body = self.data.partition(b"\r\n\r\n")
        if end and len(body) >= int(head.lower().partition(b"content-length: ")[2].split(b"\r\n")[0]):
            self.data = b""
            if self.answer is not None:
                self.answer.set_result(None)


async def bare_call(port: int, args: argparse.Namespace) -> Callable[[], Awaitable[object]]:
    """A function that makes the same request as agenerate, without reading the answer."""
    loop, idle = asyncio.get_running_loop(), list[Bare]()
    sampling = {"max_new_tokens": args.new_tokens, "temperature": 1.0, "top_p": 1.0, "top_k": -1, "min_p": 0.0}
    payload = {"rid": "R" * 34, "input_ids": prompt_of(args), "sampling_params": sampling, "return_logprob": True}
    body = json.dumps(payload).encode()
    request = b"POST /generate HTTP/1.1\r\nHost: a\r\nContent-Length: %d\r\n\r\n%b" % (len(body), body)
    before, _, after = request.partition(b"R" * 34)
    numbers = count()

    async def call() -> None:
        bare = idle.pop() if idle else (await loop.create_connection(Bare, "127.0.0.1", port))[1]
        bare.answer = loop.create_future()
        bare.transport.write(b"%b%034d%b" % (before, next(numbers), after))
        await bare.answer
        idle.append(bare)

    return call


def prompt_of(args: argparse.Namespace) -> list[int]:
    return [(7919 * place) % args.vocabulary for place in range(args.prompt_tokens)]


def agenerate_call(engine: RemoteInferenceEngine, args: argparse.Namespace) -> Callable[[], Awaitable[object]]:
    sampling, prompt = SamplingParams(max_new_tokens=args.new_tokens), prompt_of(args)
    idle: list[tuple[str, Any]] = []

    async def call() -> None:
        await engine.agenerate(ModelRequest(input_ids=prompt, sampling=sampling))

    async def turn() -> None:
        session, tokens = idle.pop() if idle else (new_id(), np.array(prompt, dtype=np.int32))
        response = await engine.agenerate(ModelRequest(input_ids=tokens, sampling=sampling, session_id=session))
        idle.append((session, np.concatenate([tokens, response.output_ids, prompt[:_NEW_IN_TURN]], dtype=np.int32)))

    return turn if args.turns else call


async def run(call: Callable[[], Awaitable[object]], args: argparse.Namespace, concurrency: int, server: int) -> str:
    """Make the calls, `concurrency` at once; returns the line of the table."""
    costs, rates, lags = list[tuple[float, float]](), list[float](), list[float]()
    per_worker = max(1, args.calls // concurrency)

    async def worker() -> None:
        for _ in range(per_worker):
            await call()

    async def clock() -> None:
        while True:
            due = time.perf_counter() + 0.005
            await asyncio.sleep(0.005)
            lags.append(time.perf_counter() - due)

    async with asyncio.TaskGroup() as workers:  # connections are opened here
        for _ in range(concurrency):
            workers.create_task(call())  # type: ignore[arg-type]
    for _ in range(args.repeats):
        started, mine, others = time.perf_counter(), time.process_time(), cpu_s(server)
        async with asyncio.TaskGroup() as group:
            ticking = group.create_task(clock())
            async with asyncio.TaskGroup() as workers:
                for _ in range(concurrency):
                    workers.create_task(worker())
            ticking.cancel()
        done = per_worker * concurrency
        costs.append(((time.process_time() - mine) / done, (cpu_s(server) - others) / done))
        rates.append(done / (time.perf_counter() - started))
    client, there = min(costs)
    lag = 1000 * sorted(lags)[int(len(lags) * 0.99)]
    return f"{1e6 * client:9.0f} µs {1e6 * there:9.0f} µs {max(rates):9,.0f}/s {lag:9.1f} ms"


def cpu_s(pid: int) -> float:
    """The CPU time that a process has used."""
    user, system = Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2].split()[11:13]
    return (int(user) + int(system)) / os.sysconf("SC_CLK_TCK")


async def measure(port: int, args: argparse.Namespace, server: int) -> None:
    allow_many_connections()
    print(f"{args.prompt_tokens} prompt and {args.new_tokens} new tokens; CPU time per call")
    print(f"{'at once':>8}  {'':10} {'client':>12} {'server':>12} {'calls':>11} {'lag p99':>12}")
    async with RemoteInferenceEngine([f"http://127.0.0.1:{port}"], ClientConfig()) as engine:
        for concurrency in args.concurrency:
            for name, call in (("bare", await bare_call(port, args)), ("agenerate", agenerate_call(engine, args))):
                print(f"{concurrency:8}  {name:10} {await run(call, args, concurrency, server)}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, default in (("calls", 6000), ("prompt-tokens", 20), ("new-tokens", 4), ("vocabulary", 150_000)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--concurrency", type=int, nargs="*", default=[1, 64, 1000])
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--json", action="store_true", help="JSON over HTTP")
    parser.add_argument("--turns", action="store_true", help="each call extends the last one's prompt and answer")
    parser.add_argument("--profile", action="store_true", help="show where the client spends its time")
    parser.add_argument("--serve", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.serve:
        return serve(args)
    command = [sys.executable, __file__, "--serve", *["--json"] * args.json]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as server:
        try:
            port = int(server.stdout.readline()) if server.stdout else 0
            profile = cProfile.Profile(time.process_time)
            if args.profile:
                profile.enable()
            asyncio.run(measure(port, args, server.pid))
            profile.disable()
        finally:
            server.kill()
    if args.profile:
        pstats.Stats(profile).sort_stats("tottime").print_stats(45)


if __name__ == "__main__":
    main()

"""How many agenerate calls one process gets through HTTP, against a server process that answers at once.

    python benchmarks/client.py [--calls 6000] [--concurrency 256] [--prompt-tokens 64] [--new-tokens 16] [--repeats 5]

The server is a process of its own with nothing behind its protocol, so the figure is of the client: building a
request, sending it, reading and checking the answer. The lag is how late a 5 ms timer fires meanwhile.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import subprocess
import sys
import time
from dataclasses import dataclass

from aiohttp import web

from arl.api.engine_config import ClientConfig
from arl.api.types import ModelRequest, SamplingParams
from arl.engine.client.sglang import RemoteSGLangEngine


def serve() -> None:
    """Answer every /generate with `max_new_tokens` tokens; print the port first."""

    async def generate(request: web.Request) -> web.Response:
        body = json.loads(await request.read())
        count = body["sampling_params"]["max_new_tokens"]
        if count not in answers:
            meta = {
                "finish_reason": {"type": "length", "length": count},
                "output_token_logprobs": [[-0.6931471805599453, 100 + i, None] for i in range(count)],
                "weight_version": "default",
                "weight_versions": [{"version": "default", "start": 0, "end": count}],
            }
            answers[count] = json.dumps({"text": "x" * count, "meta_info": meta}).encode()
        return web.Response(body=answers[count], content_type="application/json")

    async def acknowledge(request: web.Request) -> web.Response:
        return web.json_response({"model_path": "m", "weight_version": "default"})

    async def main() -> None:
        app = web.Application(client_max_size=1 << 28)
        app.router.add_post("/generate", generate)
        app.router.add_route("*", "/{name:.+}", acknowledge)
        runner = web.AppRunner(app, access_log=None)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0, backlog=4096).start()
        print(runner.addresses[0][1], flush=True)
        await asyncio.Event().wait()

    answers: dict[int, bytes] = {}
    asyncio.run(main())


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """Calls per second of each repeat, by the wall clock and by this process's CPU time; event loop lags in s."""

    rates: list[float]
    cpu_rates: list[float]
    lags: list[float]


async def measure(address: str, args: argparse.Namespace) -> Measured:
    request = ModelRequest(
        input_ids=list(range(args.prompt_tokens)), sampling=SamplingParams(max_new_tokens=args.new_tokens)
    )
    measured = Measured(rates=[], cpu_rates=[], lags=[])
    async with RemoteSGLangEngine([address], ClientConfig()) as engine:

        async def worker(calls: int) -> None:
            for _ in range(calls):
                await engine.agenerate(request)

        async def clock() -> None:
            while True:
                due = time.perf_counter() + 0.005
                await asyncio.sleep(0.005)
                measured.lags.append(time.perf_counter() - due)

        async with asyncio.TaskGroup() as group:
            ticking = group.create_task(clock())
            for _ in range(args.repeats):
                started, cpu_started = time.perf_counter(), time.process_time()
                async with asyncio.TaskGroup() as workers:
                    for _ in range(args.concurrency):
                        workers.create_task(worker(args.calls // args.concurrency))
                done = args.calls // args.concurrency * args.concurrency
                measured.rates.append(done / (time.perf_counter() - started))
                measured.cpu_rates.append(done / (time.process_time() - cpu_started))
            ticking.cancel()
    return measured


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, default in (("calls", 6000), ("concurrency", 256), ("prompt-tokens", 64), ("new-tokens", 16)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--serve", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.serve:
        return serve()
    with subprocess.Popen([sys.executable, __file__, "--serve"], stdout=subprocess.PIPE, text=True) as server:
        try:
            port = int(server.stdout.readline()) if server.stdout else 0
            measured = asyncio.run(measure(f"http://127.0.0.1:{port}", args))
        finally:
            server.kill()
    rates, lags = sorted(measured.rates), sorted(measured.lags)
    print(f"{args.concurrency} concurrent calls of {args.prompt_tokens} prompt and {args.new_tokens} new tokens")
    print(f"agenerate calls/s: best {rates[-1]:,.0f}, median {rates[len(rates) // 2]:,.0f}; ", end="")
    print(f"{max(measured.cpu_rates):,.0f} per second of the client's CPU time")
    print(f"event loop lag: p50 {1000 * lags[len(lags) // 2]:.1f} ms, p99 {1000 * lags[int(len(lags) * 0.99)]:.1f} ms")


if __name__ == "__main__":
    main()

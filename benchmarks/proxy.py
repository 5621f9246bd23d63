"""What the OpenAI endpoint costs: how many episodes one process holds, and what a call takes longer than without it.

    python benchmarks/proxy.py [--episodes 2000] [--rate 200] [--seconds 20] [--delay-ms 50] [--prompt-chars 500]

Three processes: a server that speaks SGLang's /generate and /v1/chat/completions and answers each call after a fixed
delay; the controller, with the proxy and the engine that asks this server; and the programs, plain aiohttp clients.

Held: every episode makes its call at once, and the server answers when all of them are with it. Added: calls at a fixed
rate, by turns to the proxy and to the server's own endpoint, a second each; episodes of four turns. There the server
renders and tokenizes the messages, as every server does; behind the proxy it gets tokens. `--bare` leaves that out.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import resource
import statistics
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

import aiohttp
from aiohttp import web

from arl.api.settings.engines import ClientConfig
from arl.endpoint.proxy import OpenAIProxy
from arl.engine.client.remote_engine import RemoteInferenceEngine
from arl.engine.tiny import tiny_tokenizer
from arl.runtime.http.server import allow_many_connections
from arl.workflow.chat_template import ChatTemplate

SAID = "The answer to this is forty-two, as far as I can tell."
NUM_TURNS = 4
CHAT = "/v1/chat/completions"


def serve(delay_s: float, *, is_bare: bool) -> None:
    """Answer after the delay, or, where a call asks for it by its temperature 2, when `hold` calls are there."""
    tokenizer = tiny_tokenizer()
    template = ChatTemplate(tokenizer)
    ids = [*tokenizer.encode(SAID), tokenizer.eos_token_id]
    meta = {
        "finish_reason": {"type": "stop"},
        "output_token_logprobs": [[-0.5, token, None] for token in ids],
        "weight_version": "default",
    }
    generated = json.dumps({"text": SAID, "meta_info": meta}).encode()
    message = {"role": "assistant", "content": SAID}
    choice = {"index": 0, "message": message, "finish_reason": "stop", "logprobs": None}
    completed = json.dumps({"id": "c", "object": "chat.completion", "choices": [choice]}).encode()
    waiting: list[asyncio.Event] = []

    async def generate(request: web.Request) -> web.Response:
        body = json.loads(await request.read())
        if body["sampling_params"].get("temperature") != 2:
            await asyncio.sleep(delay_s)
            return web.Response(body=generated, content_type="application/json")
        waiting.append(released := asyncio.Event())
        await released.wait()
        return web.Response(body=generated, content_type="application/json")

    async def chat(request: web.Request) -> web.Response:
        body = json.loads(await request.read())
        if not is_bare:
            template.encode(template.render(body["messages"]))
        await asyncio.sleep(delay_s)
        return web.Response(body=completed, content_type="application/json")

    async def held(request: web.Request) -> web.Response:
        return web.json_response(len(waiting))

    async def release(request: web.Request) -> web.Response:
        for event in waiting:
            event.set()
        return web.json_response(len(waiting))

    async def acknowledge(request: web.Request) -> web.Response:
        return web.json_response({"weight_version": "default", "model_path": "none"})

    async def main() -> None:
        app = web.Application(client_max_size=1 << 28)
        for path, answer in (("/generate", generate), (CHAT, chat), ("/held", held), ("/release", release)):
            app.router.add_post(path, answer)
        app.router.add_route("*", "/{name:.*}", acknowledge)
        runner = web.AppRunner(app, access_log=None)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0, backlog=4096).start()
        print(runner.addresses[0][1], flush=True)
        await asyncio.Event().wait()

    allow_many_connections()
    asyncio.run(main())


def control(server: str) -> None:
    """Open as many episodes as each line of the input says; print their URLs and keys, and at its end what was done."""

    async def main() -> None:
        lags: list[float] = []
        loop = asyncio.get_running_loop()

        async def clock() -> None:
            while True:
                due = loop.time() + 0.005
                await asyncio.sleep(0.005)
                lags.append(loop.time() - due)

        async with (
            RemoteInferenceEngine([server], ClientConfig()) as engine,
            OpenAIProxy(tiny_tokenizer()) as proxy,
            AsyncExitStack() as episodes,
            asyncio.TaskGroup() as group,
        ):
            ticking = group.create_task(clock())
            sessions = []
            while line := await asyncio.to_thread(sys.stdin.readline):
                if line.strip() == "lag":
                    lags.sort()
                    shares = [1000 * lags[int(len(lags) * share)] if lags else 0.0 for share in (0.5, 0.99)]
                    print(json.dumps([*shares, time.process_time()]), flush=True)
                    lags.clear()
                    continue
                new = [await episodes.enter_async_context(proxy.episode(engine)) for _ in range(int(line))]
                sessions += new
                print(json.dumps([[session.base_url, session.api_key] for session in new]), flush=True)
            ticking.cancel()
            made = [session.trajectories(1.0) for session in sessions]
            turns = sum(len(t.turns) for trajectories in made for t in trajectories)
            peak_mb = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss >> 10
            print(json.dumps([sum(map(len, made)), turns, peak_mb]), flush=True)

    asyncio.run(main())


class Controller:
    """The controller's process, as the programs' one sees it."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self._process = process

    async def ask(self, line: str) -> Any:
        assert self._process.stdin
        assert self._process.stdout
        self._process.stdin.write(f"{line}\n")
        self._process.stdin.flush()
        return json.loads(await asyncio.to_thread(self._process.stdout.readline))

    def end(self) -> Any:
        assert self._process.stdin
        assert self._process.stdout
        self._process.stdin.close()
        return json.loads(self._process.stdout.readline())


def body(prompt: str, turn: int, **more: Any) -> bytes:
    """The call that follows `turn` answered ones."""
    messages: list[dict[str, str]] = [{"role": "user", "content": prompt}]
    for _ in range(turn):
        messages += [{"role": "assistant", "content": SAID}, {"role": "user", "content": "Are you sure?"}]
    return json.dumps({"model": "m", "messages": messages, **more}).encode()


async def call(client: aiohttp.ClientSession, url: str, key: str, data: bytes) -> float:
    """Seconds until the answer was read."""
    headers = {"Authorization": f"Bearer {key}", "Content-Type": "application/json"}
    started = time.perf_counter()
    async with client.post(url, data=data, headers=headers) as response:
        answer = json.loads(await response.read())
    took = time.perf_counter() - started
    assert response.status == 200, answer
    assert answer["choices"][0]["message"]["content"] == SAID
    return took


async def hold(client: aiohttp.ClientSession, controller: Controller, server: str, args: argparse.Namespace) -> None:
    episodes = await controller.ask(str(args.episodes))
    *_, cpu_before = await controller.ask("lag")
    started = time.perf_counter()
    async with asyncio.TaskGroup() as group:
        for url, key in episodes:
            data = body("x" * args.prompt_chars, 0, temperature=2)
            group.create_task(call(client, f"{url}/chat/completions", key, data))
        held = 0
        while held < args.episodes:
            await asyncio.sleep(0.05)
            async with client.post(f"{server}/held") as response:
                held = await response.json()
        all_there = time.perf_counter()
        async with client.post(f"{server}/release") as response:
            await response.read()
    ended = time.perf_counter()
    p50, p99, cpu = await controller.ask("lag")
    print(f"{held} episodes with a call in flight at once: all there after {all_there - started:.1f} s, ", end="")
    print(
        f"all answered {ended - all_there:.1f} s later; controller: loop lag p50 {p50:.1f} ms, p99 {p99:.1f} ms, ",
        end="",
    )
    print(f"{cpu - cpu_before:.1f} s of CPU")


async def at_rate(rate: float, calls: Sequence[AsyncIterator[float] | Any]) -> list[float]:
    """Start a call every 1/rate s, whether or not earlier ones are answered."""
    loop = asyncio.get_running_loop()
    began = loop.time()
    async with asyncio.TaskGroup() as group:
        tasks = []
        for i, one in enumerate(calls):
            await asyncio.sleep(max(0.0, began + i / rate - loop.time()))
            tasks.append(group.create_task(one))
    return [task.result() for task in tasks]


async def add(client: aiohttp.ClientSession, controller: Controller, server: str, args: argparse.Namespace) -> None:
    proxied: list[float] = []
    direct: list[float] = []
    num_calls = args.rate // NUM_TURNS * NUM_TURNS
    cpu_before = 0.0
    for second in range(args.seconds + 1):
        if second == 1:  # the first second opened connections
            *_, cpu_before = await controller.ask("lag")
        episodes = await controller.ask(str(num_calls // NUM_TURNS))
        prompts = [f"{second} {i} " + "what is this? " * (args.prompt_chars // 14) for i in range(len(episodes))]
        plan = [(turn, i) for turn in range(NUM_TURNS) for i in range(len(episodes))]
        by_proxy = [
            call(client, f"{episodes[i][0]}/chat/completions", episodes[i][1], body(prompts[i], turn))
            for turn, i in plan
        ]
        straight = [call(client, f"{server}{CHAT}", "none", body(prompts[i], turn)) for turn, i in plan]
        halves = [(by_proxy, proxied), (straight, direct)]
        for calls, times in halves if second % 2 else halves[::-1]:
            took = await at_rate(args.rate, calls)
            times += took if second else []
    p50, p99, cpu = await controller.ask("lag")
    print(f"{len(proxied)} calls each at {args.rate}/s, {args.prompt_chars} characters and up to {NUM_TURNS} turns:")
    for name, times in (("through the proxy", proxied), ("direct", direct)):
        print(f"  {name:18} median {1000 * statistics.median(times):.2f} ms, p99 {_p99_ms(times):.2f} ms")
    print(f"  added: median {1000 * (statistics.median(proxied) - statistics.median(direct)):.2f} ms, ", end="")
    print(f"p99 {_p99_ms(proxied) - _p99_ms(direct):.2f} ms; controller: loop lag p50 {p50:.1f} ms, ", end="")
    print(f"p99 {p99:.1f} ms, {1000 * (cpu - cpu_before) / len(proxied):.2f} ms of CPU a call")


def _p99_ms(times: Sequence[float]) -> float:
    return 1000 * sorted(times)[int(len(times) * 0.99)]


@asynccontextmanager
async def programs() -> AsyncIterator[aiohttp.ClientSession]:
    allow_many_connections()
    connector = aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(connector=connector, timeout=aiohttp.ClientTimeout(total=300)) as client:
        yield client


async def measure(controller: Controller, server: str, args: argparse.Namespace) -> None:
    async with programs() as client:
        await add(client, controller, server, args)
    async with programs() as client:
        await hold(client, controller, server, args)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    numbers = {"episodes": 2000, "rate": 200, "seconds": 20, "delay-ms": 50, "prompt-chars": 500}
    for name, default in numbers.items():
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--bare", action="store_true", help="the server neither renders nor tokenizes")
    parser.add_argument("--serve", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--control", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.serve:
        return serve(args.delay_ms / 1000, is_bare=args.bare)
    if args.control:
        return control(args.control)
    this = [sys.executable, __file__]
    with subprocess.Popen(
        [*this, "--serve", "--delay-ms", str(args.delay_ms), *(["--bare"] if args.bare else [])],
        stdout=subprocess.PIPE,
        text=True,
    ) as server:
        assert server.stdout
        url = f"http://127.0.0.1:{int(server.stdout.readline())}"
        pipe = subprocess.PIPE
        with subprocess.Popen([*this, "--control", url], stdin=pipe, stdout=pipe, text=True) as process:
            try:
                controller = Controller(process)
                asyncio.run(measure(controller, url, args))
                trajectories, turns, peak_mb = controller.end()
                print(f"recorded: {trajectories} trajectories of {turns} turns; controller's peak {peak_mb} MB")
            finally:
                process.kill()
                server.kill()


if __name__ == "__main__":
    main()

"""A small server that speaks SGLang's protocol without a model, whose failures and pace a test decides."""

import asyncio
import json
from base64 import b64encode
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any, Self, TypeVar

import numpy as np
import pytest
from aiohttp import web

from arl.api.engine import ServedModel
from arl.api.settings.engines import ClientConfig
from arl.api.types import ModelRequest, ModelResponse, SamplingParams
from arl.engine.client import remote_engine
from arl.engine.client.remote_engine import RemoteInferenceEngine

T = TypeVar("T")


def token_at(position: int) -> int:
    """The token that every such server samples at an absolute position, whatever came before."""
    return 5 + (position * 7) % 26


def logprob_at(position: int) -> float:
    return -0.125 * (1 + position % 8)


def experts_at(positions: Sequence[int]) -> np.ndarray:
    """int32[positions, 2 layers, 3 experts per token]: the routes of tokens of a mixture of 40 experts."""
    return (np.array(positions, np.int32)[:, None] + np.arange(6, dtype=np.int32)).reshape(-1, 2, 3) % 40


def letter(token_id: int) -> str:
    return chr(ord("a") + (token_id - 5) % 26)


@dataclass(eq=False)
class Run:
    """A request being generated."""

    payload: dict[str, Any]
    labels: list[str] = field(default_factory=list[str])
    finish: dict[str, Any] | None = None
    done: asyncio.Event = field(default_factory=asyncio.Event)

    @property
    def start(self) -> int:
        return len(self.payload["input_ids"])

    @property
    def ids(self) -> list[int]:
        return [token_at(self.start + i) for i in range(len(self.labels))]

    @property
    def text(self) -> str:
        return "".join(map(letter, self.ids))

    def step(self, label: str) -> None:
        params = self.payload["sampling_params"]
        self.labels.append(label)
        if any(stop in self.text for stop in params.get("stop", ())) or self.ids[-1] in params.get(
            "stop_token_ids", ()
        ):
            self.end({"type": "stop"})
        elif len(self.labels) >= params["max_new_tokens"]:
            self.end({"type": "length"})

    def end(self, finish: dict[str, Any]) -> None:
        self.finish = finish
        self.done.set()


class Server:
    """`faults` are taken by the next requests, in order: "reset", "hang", or an HTTP status such as 500.

    Requests are answered at once if `is_automatic`, else as the test calls `advance`.
    `distortions` are taken by the next answers, in order, and change them.
    `info` is what /model_info says, `tells` what other paths do (dicts are JSON, strings text, numbers a status).
    `lost` are names of calls, each of which is left without an answer once.
    `routes`: whether answers have routes, as `experts_at` makes them, when they are asked for.
    `adapters` are those that it has loaded, with their directories; it samples the same under each.
    `requests` holds every /generate body, `calls` every other call, `aborted` the rids told to /abort_request.
    """

    def __init__(self) -> None:
        self.label = "default"
        self.is_automatic = True
        self.routes = True
        self.sends_spans = True
        self.faults: deque[str | int] = deque()
        self.distortions: deque[Callable[[dict[str, Any]], object]] = deque()
        self.error_body: dict[str, Any] = {"error": {"message": "it broke"}}
        self.is_healthy = True
        self.is_silent = False
        self.lost: list[str] = []
        self.load_works = True
        self.adapters: dict[str, str] = {}
        self.info: dict[str, Any] = {"model_path": "m"}
        self.tells: dict[str, Any] = {}
        self.load_gate = asyncio.Event()
        self.load_gate.set()
        self.resume_gate = asyncio.Event()
        self.resume_gate.set()
        self.abort_gate = asyncio.Event()
        self.abort_gate.set()
        self.requests: list[dict[str, Any]] = []
        self.headers: list[dict[str, str]] = []
        self.calls: list[tuple[str, dict[str, Any]]] = []
        self.aborted: list[str] = []
        self.running: list[Run] = []
        self.pause_mode: str | None = None
        self._resumed = asyncio.Event()
        self._resumed.set()
        self._changed = asyncio.Event()
        self._runner: web.AppRunner | None = None
        self._port = 0

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.stop()

    @property
    def address(self) -> str:
        return f"http://127.0.0.1:{self._port}"

    def names(self, *, without: tuple[str, ...] = ("health", "model_info")) -> list[str]:
        return [name for name, _ in self.calls if name not in without]

    async def start(self) -> None:
        """Listen, on the port of the last time if there was one."""
        app = web.Application()
        app.router.add_post("/generate", self._generate)
        app.router.add_route("*", "/{name:.+}", self._control)
        self._runner = web.AppRunner(app, shutdown_timeout=0.0, handler_cancellation=True)
        await self._runner.setup()
        site = web.TCPSite(self._runner, "127.0.0.1", self._port)
        await site.start()
        self._port = self._runner.addresses[0][1]

    async def stop(self) -> None:
        """Stop as a killed process does: connections are reset."""
        for run in self.running:
            run.done.set()
        if self._runner is not None:
            await self._runner.cleanup()
        self._runner = None

    async def until(self, condition: Callable[[], bool]) -> None:
        """Wait until something the server knows holds."""
        while not condition():
            await self._changed.wait()

    async def begin(self, group: asyncio.TaskGroup, call: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
        """Start a call in the group; returns when one request more runs here."""
        count = len(self.running)
        task = group.create_task(call)
        await self.until(lambda: len(self.running) > count)
        return task

    def advance(self, num_tokens: int = 1) -> None:
        """Sample tokens for every running request."""
        for run in [*self.running]:
            for _ in range(num_tokens):
                if run.finish is None:
                    run.step(self.label)

    def abort_running(self) -> None:
        """Abort everything, as some other client might."""
        for run in self.running:
            if run.finish is None:
                run.end({"type": "abort", "message": "Abort"})

    def _notify(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()

    async def _generate(self, request: web.Request) -> web.StreamResponse:
        payload = await request.json()
        self.requests.append(payload)
        self.headers.append(dict(request.headers))
        self._notify()
        fault = self.faults.popleft() if self.faults else None
        if isinstance(fault, int):
            return web.json_response(self.error_body, status=fault)
        if fault == "reset":
            return self._reset(request)
        if (adapter := payload.get("lora_path")) and adapter not in self.adapters:
            message = (
                f"Got LoRA adapter that has never been loaded: {adapter}\nAll loaded adapters: {[*self.adapters]}."
            )
            return web.json_response({"error": {"message": message}}, status=400)
        run = Run(payload)
        self.running.append(run)
        self._notify()
        try:
            if fault == "hang":
                await asyncio.Event().wait()
            await self._resumed.wait()
            while self.is_automatic and run.finish is None:
                run.step(self.label)
            await run.done.wait()
        finally:
            self.running.remove(run)
            self._notify()
        if run.finish is None:
            return self._reset(request)
        return web.json_response(self._answer(run))

    def _reset(self, request: web.Request) -> web.StreamResponse:
        assert request.transport is not None
        request.transport.abort()
        return web.Response()

    def _answer(self, run: Run) -> dict[str, Any]:
        logprobs = [[logprob_at(run.start + i), token, None] for i, token in enumerate(run.ids)]
        meta: dict[str, Any] = {
            "id": run.payload["rid"],
            "finish_reason": run.finish,
            "completion_tokens": len(run.ids),
            "output_token_logprobs": logprobs,
            "weight_version": run.labels[-1] if run.labels else self.label,
        }
        if run.payload.get("return_routed_experts") and self.routes:
            places = range(run.payload["routed_experts_start_len"], run.start + len(run.ids) - 1)
            meta["routed_experts"] = b64encode(experts_at(places).tobytes()).decode()
        if self.sends_spans:
            meta["weight_versions"] = [
                {"version": label, "start": i, "end": i + 1} for i, label in enumerate(run.labels)
            ]
        answer = {"text": run.text, "output_ids": run.ids, "meta_info": meta}
        if self.distortions:
            self.distortions.popleft()(answer)
        return answer

    async def _control(self, request: web.Request) -> web.StreamResponse:
        name = request.match_info["name"]
        body = await request.json() if request.can_read_body else {}
        self.calls.append((name, body))
        self._notify()
        act = getattr(self, f"_on_{name.replace('/', '_')}", None)
        is_lost = name in self.lost
        if is_lost:
            self.lost.remove(name)
        if self.is_silent or is_lost:
            await asyncio.Event().wait()
        if not self.is_healthy:
            return web.json_response({"error": {"message": "unwell"}}, status=503)
        told = self.tells.get(name)
        if isinstance(told, int):
            return web.json_response({"detail": "told so"}, status=told)
        if isinstance(told, str):
            return web.Response(text=told, content_type="text/html")
        return web.json_response(told if told is not None else await act(body) if act else {})

    async def _on_model_info(self, body: dict[str, Any]) -> dict[str, Any]:
        return {**self.info, "weight_version": self.label}

    async def _on_pause_generation(self, body: dict[str, Any]) -> dict[str, Any]:
        self.pause_mode = body["mode"]
        self._resumed.clear()
        if self.pause_mode == "abort":
            self.abort_running()
        return {"status": "ok"}

    async def _on_continue_generation(self, body: dict[str, Any]) -> dict[str, Any]:
        await self.resume_gate.wait()
        self.pause_mode = None
        self._resumed.set()
        return {"status": "ok"}

    async def _on_update_weights_from_disk(self, body: dict[str, Any]) -> dict[str, Any]:
        await self.load_gate.wait()
        if not self.load_works:
            return {"success": False, "message": "no such weights"}
        self.label = body["weight_version"]
        return {"success": True, "message": "loaded"}

    async def _on_update_weight_version(self, body: dict[str, Any]) -> dict[str, Any]:
        self.label = body["new_version"]
        return {"success": True}

    async def _on_v1_models(self, body: dict[str, Any]) -> dict[str, Any]:
        cards = [{"id": "m", "parent": None}, *({"id": name, "parent": "m"} for name in self.adapters)]
        return {"data": cards}

    async def _on_load_lora_adapter(self, body: dict[str, Any]) -> dict[str, Any]:
        await self.load_gate.wait()
        if not self.load_works or body["lora_name"] in self.adapters:
            raise self._refusal("its rank is too large" if not self.load_works else "it is already loaded")
        self.adapters[body["lora_name"]] = body["lora_path"]
        return {"success": True, "error_message": "", "loaded_adapters": self.adapters}

    async def _on_unload_lora_adapter(self, body: dict[str, Any]) -> dict[str, Any]:
        """Like SGLang, which waits for the requests that name it."""
        if self.adapters.pop(body["lora_name"], None) is None:
            raise self._refusal("it does not exist")
        await self.until(lambda: all(run.payload.get("lora_path") != body["lora_name"] for run in self.running))
        return {"success": True, "error_message": "", "loaded_adapters": self.adapters}

    def _refusal(self, message: str) -> web.HTTPBadRequest:
        body = {"success": False, "error_message": message, "loaded_adapters": self.adapters}
        return web.HTTPBadRequest(text=json.dumps(body), content_type="application/json")

    async def _on_abort_request(self, body: dict[str, Any]) -> dict[str, Any]:
        self.aborted.append(body["rid"])
        self._notify()
        await self.abort_gate.wait()
        for run in self.running:
            if run.payload["rid"] == body["rid"] and run.finish is None:
                run.end({"type": "abort", "message": "Abort"})
        return {}


@asynccontextmanager
async def over(
    *servers: Server,
    api_key: str | None = None,
    version: int = 0,
    model: ServedModel | None = None,
    max_retries: int = 3,
    **settings: Any,
) -> AsyncIterator[RemoteInferenceEngine]:
    """An engine over these servers, with settings of ClientConfig; they have forgotten the calls of its start."""
    addresses = [server.address for server in servers]
    config = ClientConfig(**{"request_timeout_s": 20.0, **settings})
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(remote_engine, "_MAX_RETRIES", max_retries)
        async with RemoteInferenceEngine(addresses, config, api_key=api_key, version=version, model=model) as engine:
            for server in servers:
                server.calls.clear()
            yield engine


def ask(num_tokens: int = 4, *, session: str | None = None, **sampling: Any) -> ModelRequest:
    """A request with a prompt of three tokens."""
    params = SamplingParams(max_new_tokens=num_tokens, **sampling)
    return ModelRequest(input_ids=[9, 8, 7], sampling=params, session_id=session)


def assert_seamless(response: ModelResponse, num_tokens: int, prompt_length: int = 3) -> None:
    """The tokens and logprobs are those of an answer that nothing interrupted."""
    positions = range(prompt_length, prompt_length + num_tokens)
    assert response.output_ids == tuple(map(token_at, positions))
    assert response.output_logprobs == tuple(map(logprob_at, positions))


async def when(holds: Callable[[], object]) -> None:
    """Wait until this holds, of what wakes nobody."""
    async with asyncio.timeout(30):
        while not holds():  # noqa: ASYNC110
            await asyncio.sleep(0.002)


async def turns() -> None:
    """Let all happen that waits for nothing but a turn of the event loop."""
    for _ in range(20):
        await asyncio.sleep(0)


async def outcome(call: Awaitable[object]) -> object:
    """The call's result, or the error that it raised."""
    try:
        return await call
    except Exception as error:  # noqa: BLE001 - the error is what is looked at
        return error

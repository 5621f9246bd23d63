"""Steering the server: abort, pause, continue, flush, new weights."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, get_args

import torch
from aiohttp import web

from arl.api.config import PauseMode
from arl.engine.local.body import ApiError, Body, MalformedError, shown
from arl.engine.local.endpoint import Serving, json_response, read_body
from arl.engine.local.received_weights import GroupAddress, WeightReceiver, WeightsError, named, read_directory

_HARMLESS = frozenset((
    "http_worker_ipc", "is_async", "keep_pause", "recapture_cuda_graph", "rid", "selector", "token_step",
    "torch_empty_cache",
))  # fmt: skip
_DEFAULT_GROUP = "weight_update_group"


class Control:
    """The endpoints that act on requests, as one family: abort, pause, continue, flush."""

    def __init__(self, serving: Serving) -> None:
        self._serving = serving

    async def abort_request(self, request: web.Request) -> web.StreamResponse:
        body = await read_body(request)
        rid, everything = body.text("rid", None), body.flag("abort_all")
        body.finish(frozenset(("abort_message", "finished_reason")))
        if everything or rid:
            self._serving.inflight.abort(self._serving.scheduler, None if everything else rid)
        return web.Response()

    async def pause_generation(self, request: web.Request) -> web.StreamResponse:
        body = await read_body(request)
        mode = body.text("mode", "abort")
        if mode not in get_args(PauseMode):
            raise MalformedError(f"mode is {shown(mode)}; it must be one of {', '.join(get_args(PauseMode))}")
        body.finish()
        await _done(self._serving.scheduler.pause(mode))
        return json_response({"message": "Generation paused successfully.", "status": "ok"})

    async def continue_generation(self, request: web.Request) -> web.StreamResponse:
        (await read_body(request)).finish(_HARMLESS)
        await _done(self._serving.scheduler.resume())
        return json_response({"message": "Generation continued successfully.", "status": "ok"})

    async def flush_cache(self, request: web.Request) -> web.StreamResponse:
        await _done(self._serving.scheduler.flush_cache())
        return web.Response(text="Cache flushed.\n")


async def _done(future: Future[Any]) -> None:
    """Wait for what the model thread does; it is done also when the client that asked for it has gone away."""
    await asyncio.shield(asyncio.wrap_future(future))


class Weights:
    """The endpoints that change weights. All work on them is done on one thread of its own, in the order of the calls.

    So a client that goes away in the middle of a call does not stop what it began, and the event loop goes on.
    """

    def __init__(self, serving: Serving, working: ThreadPoolExecutor, device: str, update_timeout_s: float) -> None:
        self._serving = serving
        self._working = working
        self._form = serving.scheduler.stored_form
        self._timeout_s = update_timeout_s
        self._receiver = WeightReceiver(self._form.shapes, device, update_timeout_s)

    async def _do(self, work: Callable[[], str]) -> web.Response:
        """Run `work` on the weights' thread and answer with its message."""
        try:
            message = await asyncio.get_running_loop().run_in_executor(self._working, work)
        except WeightsError as error:
            raise ApiError(str(error)) from None
        return json_response({"success": True, "message": message})

    def _load(self, tensors: dict[str, torch.Tensor], weight_version: str | None, flush_cache: bool) -> None:
        parameters = self._form.parameters(tensors)
        loading = self._serving.scheduler.load(parameters.items, weight_version, flush_cache)
        try:
            loading.result(self._timeout_s)
        except TimeoutError:
            raise WeightsError(f"the weights were not loaded within {self._timeout_s} s") from None
        except Exception as error:  # what a model says of weights it cannot take is for the caller to read
            raise WeightsError(f"loading failed, and the old weights stay: {error}") from error

    def _abort_if_asked(self, body: Body) -> None:
        if body.flag("abort_all_requests"):
            self._serving.inflight.abort(self._serving.scheduler, None)

    async def update_from_disk(self, request: web.Request) -> web.StreamResponse:
        body = await read_body(request)
        path, load_format = body.text("model_path"), body.text("load_format", "auto")
        weight_version, flush = body.text("weight_version", None), body.flag("flush_cache", True)
        if load_format not in ("auto", "safetensors"):
            raise ApiError(f"load_format is {shown(load_format)}; this server reads safetensors (auto) alone")
        self._abort_if_asked(body)
        body.finish(_HARMLESS)

        def work() -> str:
            self._load(read_directory(path, self._form.shapes, self._form.is_tied), weight_version, flush)
            suffix = f" Weight version updated to {weight_version}." if weight_version else ""
            return f"Succeeded to update model weights.{suffix}"

        return await self._do(work)

    async def init_group(self, request: web.Request) -> web.StreamResponse:
        body = await read_body(request)
        at = GroupAddress(
            address=body.text("master_address"),
            port=body.integer("master_port"),
            rank=body.integer("rank_offset"),
            world_size=body.integer("world_size"),
            name=body.text("group_name", _DEFAULT_GROUP),
            backend=body.text("backend", "nccl"),
        )
        body.finish(_HARMLESS)
        if not 0 < at.rank < at.world_size:
            raise ApiError(f"rank_offset is {at.rank}; it must be between 1 and world_size - 1 = {at.world_size - 1}")

        def work() -> str:
            self._receiver.join(at)
            return "Succeeded to initialize custom process group."

        return await self._do(work)

    async def destroy_group(self, request: web.Request) -> web.StreamResponse:
        body = await read_body(request)
        name = body.text("group_name", _DEFAULT_GROUP)
        body.finish(_HARMLESS)

        def work() -> str:
            self._receiver.leave(name)
            return "Succeeded to destroy custom process group."

        return await self._do(work)

    async def begin_update(self, request: web.Request) -> web.StreamResponse:
        (await read_body(request)).finish(_HARMLESS)

        def work() -> str:
            self._receiver.begin()
            return "Success"

        return await self._do(work)

    async def update_from_distributed(self, request: web.Request) -> web.StreamResponse:
        body = await read_body(request)
        expected = _expected(body)
        group = body.text("group_name", _DEFAULT_GROUP)
        weight_version, flush = body.text("weight_version", None), body.flag("flush_cache", True)
        load_format = body.text("load_format", "auto")
        if load_format not in ("auto", "flattened_bucket"):
            raise ApiError(f"load_format is {shown(load_format)}; it must be auto or flattened_bucket")
        self._abort_if_asked(body)
        body.finish(_HARMLESS)

        def work() -> str:
            self._receiver.receive(group, expected, in_one=load_format == "flattened_bucket")
            self._receiver.mark(weight_version, flush)
            return "Succeeded to receive parameters; end_weight_update() applies them."

        return await self._do(work)

    async def end_update(self, request: web.Request) -> web.StreamResponse:
        (await read_body(request)).finish(_HARMLESS)

        def work() -> str:
            ended = self._receiver.end()
            if ended.tensors:
                self._load(ended.tensors, ended.weight_version, ended.flush_cache)
            return "Success"

        return await self._do(work)

    async def update_version(self, request: web.Request) -> web.StreamResponse:
        body = await read_body(request)
        new_version = body.text("new_version")
        if body.flag("abort_all_requests", True):
            self._serving.inflight.abort(self._serving.scheduler, None)
        body.finish(_HARMLESS)

        def work() -> str:
            self._load({}, new_version, flush_cache=False)
            return f"Weight version updated to {new_version}"

        await self._do(work)
        message = f"Weight version updated to {new_version}"
        return json_response({"success": True, "message": message, "new_version": new_version})


def _expected(body: Body) -> list[tuple[str, str, list[int]]]:
    names, dtypes, shapes = (body.value(name) for name in ("names", "dtypes", "shapes"))
    if not all(isinstance(values, list) for values in (names, dtypes, shapes)):
        raise MalformedError("names, dtypes and shapes must be lists, with one entry for each tensor")
    if not len(names) == len(dtypes) == len(shapes):
        raise ApiError(f"names, dtypes and shapes have {len(names)}, {len(dtypes)} and {len(shapes)} entries")
    if not all(isinstance(item, str) for item in [*names, *dtypes]):
        raise MalformedError("names and dtypes must hold strings")
    for name, shape in zip(names, shapes, strict=True):
        if not isinstance(shape, list) or not all(type(size) is int and size >= 0 for size in shape):
            raise MalformedError(f"the shape of {name} is {shown(shape)}; it must be a list of sizes")
    if repeated := sorted({name for name in names if names.count(name) > 1}):
        raise ApiError(f"names holds {named(repeated)} more than once")
    return list(zip(names, dtypes, shapes, strict=True))


# The endpoints that load and unload adapters, while requests go on. They answer, and refuse, as SGLang does.


class AdapterCalls:
    """Files are read on `reading`, and what was read is taken over by the model thread between two steps."""

    def __init__(self, serving: Serving, reading: ThreadPoolExecutor) -> None:
        self._scheduler = serving.scheduler
        self._reading = reading

    async def load(self, request: web.Request) -> web.StreamResponse:
        body = await read_body(request)
        name, path = body.text("lora_name"), body.text("lora_path")
        body.flag("pinned")  # nothing is evicted here
        body.finish(frozenset(("http_worker_ipc", "lora_id", "rid")))
        if not name:
            raise MalformedError("lora_name is empty; requests could not name it")

        def work() -> None:
            adapter = self._scheduler.adapters.read(name, path)
            self._scheduler.load_adapter(adapter).result()

        return await self._answer(asyncio.get_running_loop().run_in_executor(self._reading, work))

    async def unload(self, request: web.Request) -> web.StreamResponse:
        """At once: requests that name it already keep it to their end."""
        body = await read_body(request)
        name = body.text("lora_name")
        body.finish(frozenset(("http_worker_ipc", "lora_id", "rid")))
        return await self._answer(asyncio.shield(asyncio.wrap_future(self._scheduler.unload_adapter(name))))

    async def _answer(self, done: asyncio.Future[None]) -> web.StreamResponse:
        error_message = ""
        try:
            await done
        except WeightsError as error:
            error_message = str(error)
        answer = {
            "success": not error_message,
            "error_message": error_message,
            "loaded_adapters": self._scheduler.adapters.loaded,
        }
        return json_response(answer, 400 if error_message else 200)

"""Steering the server: abort, pause, continue, flush, new weights, adapters."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Annotated, Any, Literal

import torch
from aiohttp import web
from pydantic import Field, NonNegativeInt

from arl.api.config import PauseMode
from arl.engine.local.endpoint import Serving
from arl.engine.local.received_weights import GroupAddress, WeightReceiver, WeightsError, named, read_directory
from arl.web.bodies import RequestBody, RequestError
from arl.web.server import json_response

_IGNORED = (
    "http_worker_ipc", "is_async", "keep_pause", "recapture_cuda_graph", "rid", "selector", "token_step",
    "torch_empty_cache",
)  # fmt: skip
_ADAPTER_IGNORED = ("http_worker_ipc", "lora_id", "pinned", "rid")  # nothing is evicted here
_DEFAULT_GROUP = "weight_update_group"


class AbortBody(RequestBody, takes_empty=True, ignored=("abort_message", "finished_reason")):
    rid: str | None = None
    abort_all: bool = False


class PauseBody(RequestBody, takes_empty=True):
    mode: PauseMode = "abort"


class PlainBody(RequestBody, takes_empty=True, ignored=_IGNORED):
    """The body of a call without parameters."""


class Control:
    """The endpoints that act on requests."""

    def __init__(self, serving: Serving) -> None:
        self._serving = serving

    async def abort_request(self, body: AbortBody) -> web.Response:
        if body.abort_all or body.rid:
            self._serving.inflight.abort(self._serving.scheduler, None if body.abort_all else body.rid)
        return web.Response()

    async def pause_generation(self, body: PauseBody) -> Any:
        await _done(self._serving.scheduler.pause(body.mode))
        return {"message": "Generation paused successfully.", "status": "ok"}

    async def continue_generation(self, body: PlainBody) -> Any:
        await _done(self._serving.scheduler.resume())
        return {"message": "Generation continued successfully.", "status": "ok"}

    async def flush_cache(self, request: web.Request) -> web.StreamResponse:
        await _done(self._serving.scheduler.flush_cache())
        return web.Response(text="Cache flushed.\n")


async def _done(future: Future[Any]) -> None:
    """Wait for the model thread. It finishes the work even if the client has gone away."""
    await asyncio.shield(asyncio.wrap_future(future))


class UpdateBody(RequestBody, takes_empty=True, ignored=_IGNORED):
    """The fields that every call with weights may have."""

    weight_version: str | None = None
    flush_cache: bool = True
    """Has no effect: new weights drop the prefixes of old ones in any case."""
    abort_all_requests: bool = False


class DiskBody(UpdateBody, takes_empty=True, ignored=_IGNORED):
    model_path: str
    load_format: Literal["auto", "safetensors"] = "auto"


class DistributedBody(UpdateBody, takes_empty=True, ignored=_IGNORED):
    """The tensors of one call, in broadcast order."""

    names: list[str]
    dtypes: list[str]
    shapes: list[list[NonNegativeInt]]
    group_name: str = _DEFAULT_GROUP
    load_format: Literal["auto", "flattened_bucket"] = "auto"

    def expected(self) -> list[tuple[str, str, list[int]]]:
        """(name, dtype, shape) of each tensor. Raises RequestError."""
        names, dtypes, shapes = self.names, self.dtypes, self.shapes
        if not len(names) == len(dtypes) == len(shapes):
            raise RequestError(f"names, dtypes and shapes have {len(names)}, {len(dtypes)} and {len(shapes)} entries")
        if repeated := sorted({name for name in names if names.count(name) > 1}):
            raise RequestError(f"names holds {named(repeated)} more than once")
        return list(zip(names, dtypes, shapes, strict=True))


class GroupBody(RequestBody, takes_empty=True, ignored=_IGNORED):
    group_name: str = _DEFAULT_GROUP


class JoinBody(GroupBody, takes_empty=True, ignored=_IGNORED):
    master_address: str
    master_port: int
    rank_offset: int
    world_size: int
    backend: str = "nccl"

    def address(self) -> GroupAddress:
        """Raises RequestError for a rank that the group does not have."""
        if not 0 < self.rank_offset < self.world_size:
            raise RequestError(
                f"rank_offset is {self.rank_offset}; it must be between 1 and world_size - 1 = {self.world_size - 1}"
            )
        return GroupAddress(
            address=self.master_address,
            port=self.master_port,
            rank=self.rank_offset,
            world_size=self.world_size,
            name=self.group_name,
            backend=self.backend,
        )


class VersionBody(RequestBody, takes_empty=True, ignored=_IGNORED):
    new_version: str
    abort_all_requests: bool = True


class Weights:
    """The endpoints that change weights. One thread, `working`, does all their work in the order of the calls.

    So a client that goes away during a call does not stop its work, and the event loop never blocks.
    """

    def __init__(self, serving: Serving, working: ThreadPoolExecutor, device: str, update_timeout_s: float) -> None:
        self._serving = serving
        self._working = working
        self._form = serving.scheduler.runner.stored_form
        self._timeout_s = update_timeout_s
        self._receiver = WeightReceiver(self._form.shapes, device, update_timeout_s)

    async def _do(self, message: str, work: Callable[[], None], *, abort_all: bool = False) -> Any:
        """Run `work` on the weights' thread and answer with its message of success."""
        if abort_all:
            self._serving.inflight.abort(self._serving.scheduler, None)
        try:
            await asyncio.get_running_loop().run_in_executor(self._working, work)
        except WeightsError as error:
            raise RequestError(str(error)) from None
        return {"success": True, "message": message}

    def _load(self, tensors: dict[str, torch.Tensor], weight_version: str | None) -> None:
        parameters = self._form.parameters(tensors)
        loading = self._serving.scheduler.load(parameters.items, weight_version)
        try:
            loading.result(self._timeout_s)
        except TimeoutError:
            raise WeightsError(f"the weights were not loaded within {self._timeout_s} s") from None
        except Exception as error:  # the caller reads why the model cannot take the weights
            raise WeightsError(f"loading failed, and the old weights stay: {error}") from error

    async def update_from_disk(self, body: DiskBody) -> Any:
        def work() -> None:
            tensors = read_directory(body.model_path, self._form.shapes, self._form.is_tied)
            self._load(tensors, body.weight_version)

        suffix = f" Weight version updated to {body.weight_version}." if body.weight_version else ""
        message = f"Succeeded to update model weights.{suffix}"
        return await self._do(message, work, abort_all=body.abort_all_requests)

    async def init_group(self, body: JoinBody) -> Any:
        at = body.address()
        return await self._do("Succeeded to initialize custom process group.", lambda: self._receiver.join(at))

    async def destroy_group(self, body: GroupBody) -> Any:
        message = "Succeeded to destroy custom process group."
        return await self._do(message, lambda: self._receiver.leave(body.group_name))

    async def begin_update(self, body: PlainBody) -> Any:
        return await self._do("Success", self._receiver.begin)

    async def update_from_distributed(self, body: DistributedBody) -> Any:
        expected = body.expected()

        def work() -> None:
            in_one = body.load_format == "flattened_bucket"
            self._receiver.receive(body.group_name, expected, body.weight_version, in_one=in_one)

        message = "Succeeded to receive parameters; end_weight_update() applies them."
        return await self._do(message, work, abort_all=body.abort_all_requests)

    async def end_update(self, body: PlainBody) -> Any:
        def work() -> None:
            tensors, weight_version = self._receiver.end()
            if tensors:
                self._load(tensors, weight_version)

        return await self._do("Success", work)

    async def update_version(self, body: VersionBody) -> Any:
        def work() -> None:
            self._load({}, body.new_version)

        message = f"Weight version updated to {body.new_version}"
        answer = await self._do(message, work, abort_all=body.abort_all_requests)
        return {**answer, "new_version": body.new_version}


class UnloadAdapterBody(RequestBody, takes_empty=True, ignored=_ADAPTER_IGNORED):
    lora_name: Annotated[str, Field(min_length=1)]


class LoadAdapterBody(UnloadAdapterBody, takes_empty=True, ignored=_ADAPTER_IGNORED):
    lora_path: str


class AdapterCalls:
    """The endpoints that load and unload adapters while requests go on. They answer, and refuse, as SGLang does.

    The thread `reading` reads their files; the model thread takes the adapters over between two steps.
    """

    def __init__(self, serving: Serving, reading: ThreadPoolExecutor) -> None:
        self._scheduler = serving.scheduler
        self._reading = reading

    async def load(self, body: LoadAdapterBody) -> web.StreamResponse:
        def work() -> None:
            adapter = self._scheduler.runner.adapters.read(body.lora_name, body.lora_path)
            self._scheduler.load_adapter(adapter).result()

        return await self._answer(asyncio.get_running_loop().run_in_executor(self._reading, work))

    async def unload(self, body: UnloadAdapterBody) -> web.StreamResponse:
        """Answers at once: requests that name it already keep it to their end."""
        return await self._answer(asyncio.shield(asyncio.wrap_future(self._scheduler.unload_adapter(body.lora_name))))

    async def _answer(self, done: asyncio.Future[None]) -> web.StreamResponse:
        error_message = ""
        try:
            await done
        except WeightsError as error:
            error_message = str(error)
        answer = {
            "success": not error_message,
            "error_message": error_message,
            "loaded_adapters": self._scheduler.runner.adapters.loaded,
        }
        return json_response(answer, 400 if error_message else 200)

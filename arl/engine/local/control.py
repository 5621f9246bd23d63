"""Steering the server: abort, pause, continue, flush, new weights, adapters."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from typing import Annotated, Any, Literal

import torch
from aiohttp import web
from pydantic import Field

from arl.api.engine import WeightGroup
from arl.api.settings.engines import PauseMode
from arl.engine.local.generate import Inflight
from arl.engine.local.memory import PARTS, MemoryPart
from arl.engine.local.model_thread import Scheduler
from arl.engine.local.weight_receiver import WeightReceiver, WeightsError, named, read_directory
from arl.runtime.http.bodies import Name, RequestBody, RequestError
from arl.runtime.http.server import json_response

_TENSORS = Field(max_length=1 << 17, fail_fast=True)
"""Models with experts stored one by one have some 50,000."""
_Shape = Annotated[list[Annotated[int, Field(ge=0, le=1 << 48)]], Field(max_length=8)]
_MAX_RANKS = 4096


class EmptyBody(RequestBody):
    """The body of a call without parameters."""


class AbortBody(RequestBody):
    rid: Name


class PauseBody(RequestBody):
    mode: PauseMode = "abort"


class MemoryBody(RequestBody):
    tags: Annotated[list[MemoryPart], Field(max_length=len(PARTS))] | None = None
    """None, or an empty list: all."""


class Control:
    def __init__(self, scheduler: Scheduler, inflight: Inflight) -> None:
        self._scheduler = scheduler
        self._inflight = inflight

    async def abort_request(self, body: AbortBody) -> Any:
        self._inflight.abort(self._scheduler, body.rid)
        return web.Response()

    async def pause_generation(self, body: PauseBody) -> Any:
        work = await _done(self._scheduler.pause(body.mode))
        return {"message": "Generation paused successfully.", "status": "ok", "work": work}

    async def continue_generation(self, body: EmptyBody) -> Any:
        await _done(self._scheduler.resume())
        return {"message": "Generation continued successfully.", "status": "ok"}

    async def release_memory(self, body: MemoryBody) -> Any:
        await _done(self._scheduler.release_memory(body.tags or PARTS))

    async def resume_memory(self, body: MemoryBody) -> Any:
        await _done(self._scheduler.resume_memory(body.tags or PARTS))

    async def flush_cache(self, body: EmptyBody) -> Any:
        await _done(self._scheduler.flush_cache())
        return web.Response(text="Cache flushed.\n")


async def _done(future: Future[Any]) -> Any:
    """Wait for the model thread. It finishes the work even if the client has gone away."""
    return await asyncio.shield(asyncio.wrap_future(future))


class UpdateBody(RequestBody, takes_empty=True, ignored=("flush_cache",)):
    """The fields of calls with weights. New weights always drop the prefixes of old ones: flush_cache has no effect."""

    weight_version: Name


class DiskBody(UpdateBody):
    model_path: Name


class DistributedBody(UpdateBody):
    """The tensors of one call, in the order in which they lie in its one broadcast."""

    names: Annotated[list[Name], _TENSORS]
    dtypes: Annotated[list[Name], _TENSORS]
    shapes: Annotated[list[_Shape], _TENSORS]
    group_name: Name
    load_format: Literal["flattened_bucket"]

    def expected(self) -> list[tuple[str, str, list[int]]]:
        """(name, dtype, shape) of each tensor. Raises RequestError."""
        names, dtypes, shapes = self.names, self.dtypes, self.shapes
        if not len(names) == len(dtypes) == len(shapes):
            raise RequestError(f"names, dtypes and shapes have {len(names)}, {len(dtypes)} and {len(shapes)} entries")
        if repeated := sorted(name for name, count in Counter(names).items() if count > 1):
            raise RequestError(f"names holds {named(repeated)} more than once")
        return list(zip(names, dtypes, shapes, strict=True))


class GroupBody(RequestBody):
    group_name: Name


class JoinBody(GroupBody):
    master_address: Name
    master_port: Annotated[int, Field(ge=1, le=65535)]
    rank_offset: int
    world_size: Annotated[int, Field(le=_MAX_RANKS)]
    backend: Name

    def group(self) -> WeightGroup:
        """Raises RequestError for a rank that the group does not have."""
        if not 0 < self.rank_offset < self.world_size:
            raise RequestError(f"rank_offset={self.rank_offset} must be above 0 and below world_size={self.world_size}")
        return WeightGroup(
            name=self.group_name,
            address=self.master_address,
            port=self.master_port,
            world_size=self.world_size,
            backend=self.backend,
        )


class UnloadAdapterBody(RequestBody):
    lora_name: Annotated[Name, Field(min_length=1)]


class LoadAdapterBody(UnloadAdapterBody, takes_empty=True):
    lora_path: Name


class Weights:
    """The endpoints that change weights and adapters. One thread does the work with files and trainers, in order.

    So a client that goes away does not stop the work that it asked for, and the event loop never blocks.
    """

    def __init__(self, scheduler: Scheduler, device: str, update_timeout_s: float) -> None:
        self._scheduler = scheduler
        self._working = ThreadPoolExecutor(1, "updating")
        self._form = scheduler.runner.stored_form
        self._timeout_s = update_timeout_s
        self._receiver = WeightReceiver(self._form.shapes, device, update_timeout_s)

    def _start(self, work: Callable[[], None]) -> asyncio.Future[None]:
        return asyncio.get_running_loop().run_in_executor(self._working, work)

    async def _do(self, message: str, work: Callable[[], None]) -> Any:
        try:
            await self._start(work)
        except WeightsError as error:
            raise RequestError(str(error)) from None
        return {"success": True, "message": message}

    def _load(self, tensors: Mapping[str, torch.Tensor], weight_version: str) -> None:
        loading = self._scheduler.load(self._form.parameters(tensors), weight_version)
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

        return await self._do("Succeeded to update model weights.", work)

    async def init_group(self, body: JoinBody) -> Any:
        join = partial(self._receiver.join, body.group(), body.rank_offset)
        return await self._do("Succeeded to initialize custom process group.", join)

    async def destroy_group(self, body: GroupBody) -> Any:
        """At once, also while a call waits in the group: that fails."""
        self._receiver.interrupt(body.group_name)
        message = "Succeeded to destroy custom process group."
        return await self._do(message, lambda: self._receiver.leave(body.group_name))

    async def begin_update(self, body: EmptyBody) -> Any:
        return await self._do("Success", self._receiver.begin)

    async def update_from_distributed(self, body: DistributedBody) -> Any:
        expected = body.expected()
        message = "Succeeded to receive parameters; end_weight_update() applies them."
        return await self._do(message, lambda: self._receiver.receive(body.group_name, expected, body.weight_version))

    async def end_update(self, body: EmptyBody) -> Any:
        def work() -> None:
            tensors, weight_version = self._receiver.end()
            if tensors:
                self._load(tensors, weight_version)

        return await self._do("Success", work)

    async def load_adapter(self, body: LoadAdapterBody) -> Any:
        """Requests go on meanwhile: the model thread takes the adapter over between two steps."""

        def work() -> None:
            adapter = self._scheduler.runner.adapters.read(body.lora_name, body.lora_path)
            self._scheduler.load_adapter(adapter).result()

        return await self._adapters_after(self._start(work))

    async def unload_adapter(self, body: UnloadAdapterBody) -> Any:
        """Answers at once: requests that name it already keep it to their end."""
        unloading = asyncio.wrap_future(self._scheduler.unload_adapter(body.lora_name))
        return await self._adapters_after(asyncio.shield(unloading))

    async def _adapters_after(self, done: asyncio.Future[None]) -> Any:
        """Answers, and refuses, as SGLang does."""
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

"""The HTTP application: every path, steering, new weights and adapters, and the shape of errors."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from typing import Annotated, Any, Literal, TypeVar

import torch
from aiohttp import web
from pydantic import Field

from arl.api.engine import WeightGroup
from arl.api.errors import EngineClosedError
from arl.api.settings.engines import PauseMode
from arl.api.version import __version__
from arl.engine.frames import FORMAT, PATH
from arl.engine.local.frame_server import FrameServer
from arl.engine.local.generate import ClassifyBody, GenerateBody, Generation, Inflight, TokenizeBody
from arl.engine.local.runner import PARTS, MemoryPart
from arl.engine.local.weight_receiver import WeightReceiver, WeightsError, named, read_directory
from arl.runtime.http.bodies import BodyError, Name, RequestBody, RequestError, parse
from arl.runtime.http.server import ErrorShape, answering, body_of, boundary, json_response, require_key

_MAX_BODY_BYTES = 32 << 20
"""A prompt of a million tokens takes 8 MiB; aiohttp's default limit is 1 MiB. Parsing blocks the event loop."""
_MAX_BYTES_WITH_IMAGES = 128 << 20
"""For models that take images, some MiB each."""
_MAX_RANKS = 4096

B = TypeVar("B", bound=RequestBody)

_Tensors = Field(max_length=1 << 17, fail_fast=True)
"""Models with experts stored one by one have some 50,000."""
_Shape = Annotated[list[Annotated[int, Field(ge=0, le=1 << 48)]], Field(max_length=8)]


class EmptyBody(RequestBody):
    """The body of a call without parameters."""


class AbortBody(RequestBody):
    rid: Name


class PauseBody(RequestBody):
    mode: PauseMode = "abort"


class MemoryBody(RequestBody):
    tags: Annotated[list[MemoryPart], Field(max_length=len(PARTS))] | None = None
    """None, or an empty list: all."""


class UpdateBody(RequestBody, takes_empty=True, ignored=("flush_cache",)):
    """The fields of calls with weights. New weights always drop the prefixes of old ones: flush_cache has no effect."""

    weight_version: Name


class DiskBody(UpdateBody):
    model_path: Name


class DistributedBody(UpdateBody):
    """The tensors of one call, in the order in which they lie in its one broadcast."""

    names: Annotated[list[Name], _Tensors]
    dtypes: Annotated[list[Name], _Tensors]
    shapes: Annotated[list[_Shape], _Tensors]
    group_name: Name
    load_format: Literal["flattened_bucket"]


class GroupBody(RequestBody):
    group_name: Name


class JoinBody(GroupBody):
    master_address: Name
    master_port: Annotated[int, Field(ge=1, le=65535)]
    rank_offset: int
    world_size: Annotated[int, Field(le=_MAX_RANKS)]
    backend: Name


class UnloadAdapterBody(RequestBody):
    lora_name: Annotated[Name, Field(min_length=1)]


class LoadAdapterBody(UnloadAdapterBody, takes_empty=True):
    lora_path: Name


class Control:
    """What the server says of itself, and how it is steered: abort, pause, continue, memory, cache."""

    def __init__(self, inflight: Inflight, settings: Mapping[str, Any]) -> None:
        self._inflight = inflight
        self._scheduler = inflight.scheduler
        self._settings = settings

    async def health(self, body: EmptyBody) -> Any:
        return web.Response(status=200 if self._scheduler.is_alive else 503)

    async def model_info(self, body: EmptyBody) -> Any:
        model = self._scheduler.runner
        return {
            "model_path": self._settings["model_path"],
            "is_generation": not model.is_scorer,
            "has_image_understanding": model.tower is not None,
            "vocab_size": model.vocab_size,
            "weight_version": self._scheduler.batch.weight_version,
            "frames": FORMAT,
            "model_type": getattr(model.config, "model_type", None),
            "architectures": getattr(model.config, "architectures", None),
        }

    async def server_info(self, body: EmptyBody) -> Any:
        model = self._scheduler.runner
        memory = {"released": sorted(model.released), "held_bytes": model.held_bytes}
        state: dict[str, Any] = {"is_paused": self._scheduler.is_paused, **memory, **self._load()}
        if model.tower is not None:
            state["images_computed"] = model.tower.num_computed
        routes = {"enable_return_routed_experts": model.routers is not None}
        return {**self._settings, **routes, "version": __version__, "internal_states": [state]}

    def _load(self) -> dict[str, int]:
        batch = self._scheduler.batch
        return {"num_running_reqs": batch.num_running, "num_waiting_reqs": batch.num_waiting}

    async def loads(self, body: EmptyBody) -> Any:
        return {"loads": [self._load()]}

    async def models(self, body: EmptyBody) -> Any:
        name, model = self._settings["model_path"], self._scheduler.runner
        card = {"id": name, "object": "model", "root": name, "parent": None, "max_model_len": model.context_length}
        own = {"object": "model", "parent": name, "max_model_len": None}
        adapters = [{"id": adapter, "root": path, **own} for adapter, path in model.adapters.loaded.items()]
        return {"object": "list", "data": [card, *adapters]}

    async def abort_request(self, body: AbortBody) -> Any:
        self._inflight.abort(body.rid)
        return web.Response()

    async def pause_generation(self, body: PauseBody) -> Any:
        work = await _done(self._scheduler.pause(body.mode))
        return {"message": "Generation paused successfully.", "status": "ok", "work": work}

    async def continue_generation(self, body: EmptyBody) -> Any:
        await _done(self._scheduler.resume())
        return {"message": "Generation continued successfully.", "status": "ok"}

    async def release_memory(self, body: MemoryBody) -> Any:
        """Requests wait until all is there again. Refused while some run."""
        await _done(self._scheduler.ask(lambda: self._scheduler.batch.release(body.tags or PARTS)))

    async def resume_memory(self, body: MemoryBody) -> Any:
        """After that of the weights, an update has to bring all of them."""
        await _done(self._scheduler.ask(lambda: self._scheduler.runner.resume(body.tags or PARTS)))

    async def flush_cache(self, body: EmptyBody) -> Any:
        await _done(self._scheduler.ask(self._scheduler.batch.flush))
        return web.Response(text="Cache flushed.\n")


async def _done(future: Future[Any]) -> Any:
    """Wait for the model thread. It finishes the work even if the client has gone away."""
    return await asyncio.shield(asyncio.wrap_future(future))


class Weights:
    """The endpoints that change weights and adapters. One thread does the work with files and trainers, in order.

    So a client that goes away does not stop the work that it asked for, and the event loop never blocks.
    """

    def __init__(self, inflight: Inflight, device: str, update_timeout_s: float) -> None:
        self._scheduler = inflight.scheduler
        self._working = ThreadPoolExecutor(1, "updating")
        self._form = self._scheduler.runner.stored_form
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
        parameters = self._form.parameters(tensors)
        try:
            loading = self._scheduler.ask(lambda: self._scheduler.batch.load(parameters, weight_version))
            loading.result(self._timeout_s)
        except TimeoutError:
            raise WeightsError(f"the weights were not loaded within {self._timeout_s} s") from None
        except Exception as error:  # the caller reads why the model cannot take the weights
            raise WeightsError(f"loading failed, and the old weights stay: {error}") from error

    async def update_from_disk(self, body: DiskBody) -> Any:
        def work() -> None:
            tensors = read_directory(body.model_path, self._form.shapes, self._form.tied)
            self._load(tensors, body.weight_version)

        return await self._do("Succeeded to update model weights.", work)

    async def init_group(self, body: JoinBody) -> Any:
        rank, size = body.rank_offset, body.world_size
        if not 0 < rank < size:
            raise RequestError(f"rank_offset={rank} must be above 0 and below world_size={size}")
        group = WeightGroup(
            name=body.group_name,
            address=body.master_address,
            port=body.master_port,
            world_size=size,
            backend=body.backend,
        )
        join = partial(self._receiver.join, group, rank)
        return await self._do("Succeeded to initialize custom process group.", join)

    async def destroy_group(self, body: GroupBody) -> Any:
        """At once, also while a call waits in the group: that fails."""
        self._receiver.interrupt(body.group_name)
        leave = partial(self._receiver.leave, body.group_name)
        return await self._do("Succeeded to destroy custom process group.", leave)

    async def begin_update(self, body: EmptyBody) -> Any:
        return await self._do("Success", self._receiver.begin)

    async def update_from_distributed(self, body: DistributedBody) -> Any:
        names, dtypes, shapes = body.names, body.dtypes, body.shapes
        if not len(names) == len(dtypes) == len(shapes):
            raise RequestError(f"names, dtypes and shapes have {len(names)}, {len(dtypes)} and {len(shapes)} entries")
        if repeated := sorted(name for name, count in Counter(names).items() if count > 1):
            raise RequestError(f"names holds {named(repeated)} more than once")
        expected = list(zip(names, dtypes, shapes, strict=True))
        receive = partial(self._receiver.receive, body.group_name, expected, body.weight_version)
        return await self._do("Succeeded to receive parameters; end_weight_update() applies them.", receive)

    async def end_update(self, body: EmptyBody) -> Any:
        def work() -> None:
            tensors, weight_version = self._receiver.end()
            if tensors:
                self._load(tensors, weight_version)

        return await self._do("Success", work)

    async def load_adapter(self, body: LoadAdapterBody) -> Any:
        """Requests go on meanwhile: the model thread takes the adapter over between two steps."""
        adapters = self._scheduler.runner.adapters

        def work() -> None:
            adapter = adapters.read(body.lora_name, body.lora_path)
            self._scheduler.ask(lambda: adapters.add(adapter)).result()

        return await self._adapters_after(self._start(work))

    async def unload_adapter(self, body: UnloadAdapterBody) -> Any:
        """Answers at once: requests that name it already keep it to their end."""
        adapters = self._scheduler.runner.adapters
        return await self._adapters_after(_done(self._scheduler.ask(lambda: adapters.remove(body.lora_name))))

    async def _adapters_after(self, done: Awaitable[None]) -> Any:
        """Answers, and refuses, as SGLang does."""
        message = ""
        try:
            await done
        except WeightsError as error:
            message = str(error)
        loaded = self._scheduler.runner.adapters.loaded
        answer = {"success": not message, "error_message": message, "loaded_adapters": loaded}
        return json_response(answer, 400 if message else 200)


def build_app(inflight: Inflight, settings: Mapping[str, Any], api_key: str | None) -> web.Application:
    """The application. settings: what the server was started with; device, model_path, update_timeout_s are used."""
    control, generation = Control(inflight, settings), Generation(inflight)
    weights = Weights(inflight, settings["device"], settings["update_timeout_s"])
    key = [require_key(api_key)] if api_key else []
    most_bytes = _MAX_BODY_BYTES if inflight.scheduler.runner.tower is None else _MAX_BYTES_WITH_IMAGES
    unknown_path = boundary(lambda error: {"detail": error.message})  # or a method that the path does not have
    app = web.Application(middlewares=[unknown_path, *key], client_max_size=most_bytes)

    def add(
        route: str, body: type[B], answer: Callable[[B], Awaitable[Any]], shape: ErrorShape = _control_error
    ) -> None:
        """route: method and path. answer: gives an object to send as JSON, or a whole response."""

        async def handle(request: web.Request) -> web.StreamResponse:
            content = await answer(parse(body, await body_of(request)))
            return content if isinstance(content, web.StreamResponse) else json_response(content)

        method, path = route.split()
        app.router.add_route(method, path, answering(handle, shape, {EngineClosedError: 503}))

    frame_server = FrameServer(inflight, generation, _generate_error)
    app.on_shutdown.append(frame_server.close)
    app.router.add_route("GET", PATH, answering(frame_server.handle, _control_error))
    add("GET /health", EmptyBody, control.health)
    add("GET /model_info", EmptyBody, control.model_info)
    add("GET /server_info", EmptyBody, control.server_info)
    add("GET /v1/loads", EmptyBody, control.loads)
    add("GET /v1/models", EmptyBody, control.models)
    add("POST /generate", GenerateBody, generation.generate, _generate_error)
    add("POST /classify", ClassifyBody, generation.classify, _generate_error)
    add("POST /tokenize", TokenizeBody, generation.tokenize, _generate_error)
    add("POST /abort_request", AbortBody, control.abort_request)
    add("POST /pause_generation", PauseBody, control.pause_generation)
    add("POST /continue_generation", EmptyBody, control.continue_generation)
    add("POST /release_memory_occupation", MemoryBody, control.release_memory)
    add("POST /resume_memory_occupation", MemoryBody, control.resume_memory)
    add("POST /flush_cache", EmptyBody, control.flush_cache)
    add("POST /update_weights_from_disk", DiskBody, weights.update_from_disk)
    add("POST /init_weights_update_group", JoinBody, weights.init_group)
    add("POST /destroy_weights_update_group", GroupBody, weights.destroy_group)
    add("POST /begin_weight_update", EmptyBody, weights.begin_update)
    add("POST /update_weights_from_distributed", DistributedBody, weights.update_from_distributed)
    add("POST /end_weight_update", EmptyBody, weights.end_update)
    add("POST /load_lora_adapter", LoadAdapterBody, weights.load_adapter)
    add("POST /unload_lora_adapter", UnloadAdapterBody, weights.unload_adapter)
    return app


# Errors. SGLang has one shape for every malformed body; other errors have the endpoint's shape.


def _generate_error(error: RequestError) -> Mapping[str, Any]:
    if isinstance(error, BodyError) and (error.param or "").startswith("sampling_params."):
        return {"error": error.message}
    return _malformed(error) or {"error": {"message": error.message}}


def _control_error(error: RequestError) -> Mapping[str, Any]:
    return _malformed(error) or {"success": False, "message": error.message}


def _malformed(error: RequestError) -> Mapping[str, Any] | None:
    if not isinstance(error, BodyError) or error.code != "invalid_value":
        return None
    return {"object": "error", "message": error.message, "type": "Bad Request", "param": None, "code": error.status}

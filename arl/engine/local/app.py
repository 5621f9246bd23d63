"""The HTTP application: every path, the shape of its errors, and the server's information about itself."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from typing import Any, TypeVar

from aiohttp import web

from arl.api.errors import EngineClosedError
from arl.api.version import __version__
from arl.engine.frames import FORMAT, PATH
from arl.engine.local.control import (
    AbortBody,
    Control,
    DiskBody,
    DistributedBody,
    EmptyBody,
    GroupBody,
    JoinBody,
    LoadAdapterBody,
    MemoryBody,
    PauseBody,
    UnloadAdapterBody,
    Weights,
)
from arl.engine.local.frame_server import FrameServer
from arl.engine.local.generate import ClassifyBody, GenerateBody, Generation, Inflight, TokenizeBody
from arl.engine.local.model_thread import Scheduler
from arl.runtime.http.bodies import BodyError, RequestBody, RequestError, parse
from arl.runtime.http.server import ErrorShape, Handler, answering, body_of, boundary, json_response, require_key

_MAX_BODY_BYTES = 32 << 20
"""A prompt of a million tokens takes 8 MiB; aiohttp's default limit is 1 MiB. Parsing blocks the event loop."""
_MAX_BYTES_WITH_IMAGES = 128 << 20
"""For models that take images, some MiB each."""

B = TypeVar("B", bound=RequestBody)


class Info:
    def __init__(self, scheduler: Scheduler, settings: Mapping[str, Any]) -> None:
        self._scheduler = scheduler
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
            "weight_version": self._scheduler.weight_version,
            "frames": FORMAT,
            "model_type": getattr(model.config, "model_type", None),
            "architectures": getattr(model.config, "architectures", None),
        }

    async def server_info(self, body: EmptyBody) -> Any:
        memory = self._scheduler.runner.occupation
        state: dict[str, Any] = {
            "is_paused": self._scheduler.is_paused,
            "released": sorted(memory.released),
            "held_bytes": memory.held_bytes,
            **self._load(),
        }
        if (tower := self._scheduler.runner.tower) is not None:
            state["images_computed"] = tower.num_computed
        routes = {"enable_return_routed_experts": self._scheduler.runner.routers is not None}
        return {**self._settings, **routes, "version": __version__, "internal_states": [state]}

    def _load(self) -> dict[str, int]:
        return {"num_running_reqs": self._scheduler.num_running, "num_waiting_reqs": self._scheduler.num_waiting}

    async def loads(self, body: EmptyBody) -> Any:
        return {"loads": [self._load()]}

    async def models(self, body: EmptyBody) -> Any:
        name, model = self._settings["model_path"], self._scheduler.runner
        card = {"id": name, "object": "model", "root": name, "parent": None, "max_model_len": model.context_length}
        own = {"object": "model", "parent": name, "max_model_len": None}
        adapters = [{"id": adapter, "root": path, **own} for adapter, path in model.adapters.loaded.items()]
        return {"object": "list", "data": [card, *adapters]}


def build_app(
    scheduler: Scheduler, inflight: Inflight, settings: Mapping[str, Any], api_key: str | None
) -> web.Application:
    """The application. settings: what the server was started with; device, model_path, update_timeout_s are used."""
    info, control, generation = Info(scheduler, settings), Control(scheduler, inflight), Generation(scheduler, inflight)
    weights = Weights(scheduler, settings["device"], settings["update_timeout_s"])
    key = [require_key(api_key)] if api_key else []
    most_bytes = _MAX_BODY_BYTES if scheduler.runner.tower is None else _MAX_BYTES_WITH_IMAGES
    app = web.Application(middlewares=[boundary(path_error), *key], client_max_size=most_bytes)

    def add(method: str, path: str, body: type[B], answer: Callable[[B], Awaitable[Any]], shape: ErrorShape) -> None:
        app.router.add_route(method, path, answering(asked(body, answer), shape, {EngineClosedError: 503}))

    frame_server = FrameServer(scheduler, inflight, generation, generate_error)
    app.on_shutdown.append(frame_server.close)
    app.router.add_route("GET", PATH, answering(frame_server.handle, control_error))
    add("GET", "/health", EmptyBody, info.health, control_error)
    add("GET", "/model_info", EmptyBody, info.model_info, control_error)
    add("GET", "/server_info", EmptyBody, info.server_info, control_error)
    add("GET", "/v1/loads", EmptyBody, info.loads, control_error)
    add("GET", "/v1/models", EmptyBody, info.models, control_error)
    add("POST", "/generate", GenerateBody, generation.generate, generate_error)
    add("POST", "/classify", ClassifyBody, generation.classify, generate_error)
    add("POST", "/tokenize", TokenizeBody, generation.tokenize, generate_error)
    add("POST", "/abort_request", AbortBody, control.abort_request, control_error)
    add("POST", "/pause_generation", PauseBody, control.pause_generation, control_error)
    add("POST", "/continue_generation", EmptyBody, control.continue_generation, control_error)
    add("POST", "/release_memory_occupation", MemoryBody, control.release_memory, control_error)
    add("POST", "/resume_memory_occupation", MemoryBody, control.resume_memory, control_error)
    add("POST", "/flush_cache", EmptyBody, control.flush_cache, control_error)
    add("POST", "/update_weights_from_disk", DiskBody, weights.update_from_disk, control_error)
    add("POST", "/init_weights_update_group", JoinBody, weights.init_group, control_error)
    add("POST", "/destroy_weights_update_group", GroupBody, weights.destroy_group, control_error)
    add("POST", "/begin_weight_update", EmptyBody, weights.begin_update, control_error)
    add("POST", "/update_weights_from_distributed", DistributedBody, weights.update_from_distributed, control_error)
    add("POST", "/end_weight_update", EmptyBody, weights.end_update, control_error)
    add("POST", "/load_lora_adapter", LoadAdapterBody, weights.load_adapter, control_error)
    add("POST", "/unload_lora_adapter", UnloadAdapterBody, weights.unload_adapter, control_error)
    return app


def asked(body: type[B], answer: Callable[[B], Awaitable[Any]]) -> Handler:
    """A handler that reads a body and sends the answer of `answer`: an object to send as JSON, or a whole response."""

    async def handle(request: web.Request) -> web.StreamResponse:
        content = await answer(parse(body, await body_of(request)))
        return content if isinstance(content, web.StreamResponse) else json_response(content)

    return handle


# Errors. SGLang has one shape for every malformed body; other errors have the endpoint's shape.


def generate_error(error: RequestError) -> Mapping[str, Any]:
    if isinstance(error, BodyError) and (error.param or "").startswith("sampling_params."):
        return {"error": error.message}
    return _malformed(error) or {"error": {"message": error.message}}


def control_error(error: RequestError) -> Mapping[str, Any]:
    return _malformed(error) or {"success": False, "message": error.message}


def path_error(error: RequestError) -> Mapping[str, Any]:
    """An unknown path, or a method that the path does not have."""
    return {"detail": error.message}


def _malformed(error: RequestError) -> Mapping[str, Any] | None:
    if not isinstance(error, BodyError) or error.code != "invalid_value":
        return None
    return {"object": "error", "message": error.message, "type": "Bad Request", "param": None, "code": error.status}

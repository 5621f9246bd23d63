"""The HTTP application: every path, the shape of its errors, and the server's information about itself."""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from importlib.metadata import version
from typing import Any

from aiohttp import web

from arl.api.errors import EngineClosedError
from arl.api.types import SamplingParams
from arl.engine.local.control import (
    AbortBody,
    AdapterCalls,
    Control,
    DiskBody,
    DistributedBody,
    GroupBody,
    JoinBody,
    LoadAdapterBody,
    PauseBody,
    PlainBody,
    UnloadAdapterBody,
    VersionBody,
    Weights,
)
from arl.engine.local.endpoint import Serving, asked, control_error, generate_error, openai_error, path_error
from arl.engine.local.generate import ClassifyBody, Generate, classifying
from arl.engine.local.job import Job, TextError
from arl.engine.local.openai import OpenAI, TokenizeBody
from arl.web.bodies import RequestError
from arl.web.server import ErrorShape, Handler, answering, boundary, json_response, require_key

Paths = Mapping[str, Handler]

_MAX_BODY_BYTES = 1 << 30
"""A batch of long prompts is many megabytes; aiohttp's own limit is one."""
_HEALTH_TIMEOUT_S = 20.0
_NO_LANGUAGE_MODEL = "this server has a reward model, which scores sequences and generates none; ask POST /classify"
_NO_REWARD_MODEL = (
    "this server has a language model; /classify is for reward models, that is, model directories whose architecture "
    "is one ForSequenceClassification"
)


class Info:
    """The endpoints that only read."""

    def __init__(self, serving: Serving, settings: dict[str, Any]) -> None:
        self._serving = serving
        self._settings = settings

    async def health(self, request: web.Request) -> web.StreamResponse:
        return web.Response(status=200 if self._serving.scheduler.is_alive else 503)

    async def health_generate(self, request: web.Request) -> web.StreamResponse:
        """200 if one token can be generated in time. A paused server is healthy if its model thread lives."""
        scheduler = self._serving.scheduler
        if not scheduler.is_alive or scheduler.is_paused:
            return await self.health(request)
        rid = f"HEALTH_CHECK_{uuid.uuid4().hex}"
        job = Job(rid=rid, input_ids=[0], sampling=SamplingParams(max_new_tokens=1, temperature=0.0))
        try:
            with self._serving.inflight.submit(scheduler, {rid: [job]}) as following:
                await asyncio.wait_for(following.finish(), _HEALTH_TIMEOUT_S)
        except (TimeoutError, RequestError):
            return web.Response(status=503)
        return await self.health(request)

    async def model_info(self, request: web.Request) -> web.StreamResponse:
        scheduler = self._serving.scheduler
        return json_response(
            {
                "model_path": self._serving.model_path,
                "served_model_name": self._serving.served_model_name,
                "tokenizer_path": self._serving.model_path,
                "is_generation": not scheduler.runner.is_scorer,
                "vocab_size": scheduler.runner.vocab_size,
                "weight_version": scheduler.weight_version,
                "load_format": "auto",
                "has_image_understanding": False,
                "has_audio_understanding": False,
                "model_type": getattr(scheduler.runner.config, "model_type", None),
                "architectures": getattr(scheduler.runner.config, "architectures", None),
            }
        )

    async def server_info(self, request: web.Request) -> web.StreamResponse:
        scheduler = self._serving.scheduler
        state = {"weight_version": scheduler.weight_version, "is_paused": scheduler.is_paused, **self._load()}
        return json_response({**self._settings, "version": version("arl"), "internal_states": [state]})

    def _load(self) -> dict[str, int]:
        scheduler = self._serving.scheduler
        return {"num_running_reqs": scheduler.num_running, "num_waiting_reqs": scheduler.num_waiting}

    async def loads(self, request: web.Request) -> web.StreamResponse:
        load = {"timestamp": time.time(), "dp_rank": 0, **self._load()}
        return json_response({"version": version("arl"), "loads": [load]})

    async def models(self, request: web.Request) -> web.StreamResponse:
        name, scheduler = self._serving.served_model_name, self._serving.scheduler
        card = {
            "id": name,
            "object": "model",
            "created": int(time.time()),
            "owned_by": "arl",
            "root": name,
            "parent": None,
            "max_model_len": scheduler.runner.context_length,
        }
        own = {"parent": name, "max_model_len": None}
        adapters = [{**card, "id": id, "root": root, **own} for id, root in scheduler.runner.adapters.loaded.items()]
        return json_response({"object": "list", "data": [card, *adapters]})


def refusing(sentence: str) -> Handler:
    """Replaces an endpoint that this kind of model cannot answer."""

    async def refuse(request: web.Request) -> web.StreamResponse:
        raise RequestError(sentence)

    return refuse


def build_app(serving: Serving, settings: dict[str, Any], api_key: str | None) -> web.Application:
    """The application over one scheduler.

    settings: what the server was started with, for /server_info; this function uses `device` and `update_timeout_s`.
    """
    control, info = Control(serving), Info(serving, settings)
    updating = ThreadPoolExecutor(1, "updating")
    app = web.Application(
        middlewares=[boundary(path_error), *([require_key(api_key)] if api_key else [])],
        client_max_size=_MAX_BODY_BYTES,
    )
    asks: Paths = {
        "/health": info.health,
        "/health_generate": info.health_generate,
        "/model_info": info.model_info,
        "/get_model_info": info.model_info,
        "/server_info": info.server_info,
        "/get_server_info": info.server_info,
        "/v1/loads": info.loads,
        "/v1/models": info.models,
        "/flush_cache": control.flush_cache,
    }
    _add(app, ("GET",), asks, control_error)
    _add(app, ("POST",), {"/flush_cache": control.flush_cache, **_requests(control)}, control_error)
    _add(app, ("POST",), _weights(serving, updating, settings), control_error)
    completes, answers = _models(serving)
    _add(app, ("POST",), completes, openai_error)
    _add(app, ("POST", "PUT"), answers, generate_error)
    return app


def _add(app: web.Application, methods: tuple[str, ...], paths: Paths, shape: ErrorShape) -> None:
    for path, handler in paths.items():
        for method in methods:
            answer = answering(handler, shape, {TextError: 400, EngineClosedError: 503})
            app.router.add_route(method, path, answer)


def _requests(control: Control) -> Paths:
    return {
        "/abort_request": asked(AbortBody, control.abort_request),
        "/pause_generation": asked(PauseBody, control.pause_generation),
        "/continue_generation": asked(PlainBody, control.continue_generation),
    }


def _weights(serving: Serving, updating: ThreadPoolExecutor, settings: dict[str, Any]) -> Paths:
    weights = Weights(serving, updating, settings["device"], settings["update_timeout_s"])
    adapters = AdapterCalls(serving, updating)
    return {
        "/update_weights_from_disk": asked(DiskBody, weights.update_from_disk),
        "/init_weights_update_group": asked(JoinBody, weights.init_group),
        "/destroy_weights_update_group": asked(GroupBody, weights.destroy_group),
        "/begin_weight_update": asked(PlainBody, weights.begin_update),
        "/update_weights_from_distributed": asked(DistributedBody, weights.update_from_distributed),
        "/end_weight_update": asked(PlainBody, weights.end_update),
        "/update_weight_version": asked(VersionBody, weights.update_version),
        "/load_lora_adapter": asked(LoadAdapterBody, adapters.load),
        "/unload_lora_adapter": asked(UnloadAdapterBody, adapters.unload),
    }


def _models(serving: Serving) -> tuple[Paths, Paths]:
    """The endpoints that run the model, in OpenAI's protocol and in SGLang's."""
    openai = OpenAI(serving)
    is_scorer, no_language_model = serving.scheduler.runner.is_scorer, refusing(_NO_LANGUAGE_MODEL)
    completes = {
        "/v1/chat/completions": no_language_model if is_scorer else openai.chat,
        "/v1/completions": no_language_model if is_scorer else openai.completions,
        "/tokenize": asked(TokenizeBody, openai.tokenize),
    }
    answers = {
        "/generate": no_language_model if is_scorer else Generate(serving),
        "/classify": asked(ClassifyBody, classifying(serving)) if is_scorer else refusing(_NO_REWARD_MODEL),
    }
    return completes, answers

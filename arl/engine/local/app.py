"""The HTTP application: every path, and the shape in which its errors are told."""

from __future__ import annotations

from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from aiohttp import web

from arl.engine.local.control import AdapterCalls, Control, Weights
from arl.engine.local.endpoint import (
    MAX_BODY_BYTES,
    Handler,
    Serving,
    answering,
    control_error,
    generate_error,
    not_found_as_json,
    openai_error,
)
from arl.engine.local.generate import Classify, Generate, Info, refusing
from arl.engine.local.openai import OpenAI
from arl.web.server import require_key

Paths = Mapping[str, Handler]

_NO_LANGUAGE_MODEL = "this server has a reward model, which scores sequences and generates none; ask POST /classify"
_NO_REWARD_MODEL = (
    "this server has a language model; /classify is for reward models, that is, model directories whose architecture "
    "is one ForSequenceClassification"
)


def build_app(
    serving: Serving, updating: ThreadPoolExecutor, settings: dict[str, Any], api_key: str | None
) -> web.Application:
    """The application over one scheduler.

    updating: the one thread on which weights are received and loaded. settings: what the server was started with, as
    /server_info tells it; `device` and `update_timeout_s` are used here.
    """
    generate, control, info, openai = Generate(serving), Control(serving), Info(serving, settings), OpenAI(serving)
    weights = Weights(serving, updating, settings["device"], settings["update_timeout_s"])
    adapters = AdapterCalls(serving, updating)
    app = web.Application(
        middlewares=[not_found_as_json, *([require_key(api_key)] if api_key else [])], client_max_size=MAX_BODY_BYTES
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
    steers: Paths = {
        "/flush_cache": control.flush_cache,
        "/abort_request": control.abort_request,
        "/pause_generation": control.pause_generation,
        "/continue_generation": control.continue_generation,
        "/update_weights_from_disk": weights.update_from_disk,
        "/init_weights_update_group": weights.init_group,
        "/destroy_weights_update_group": weights.destroy_group,
        "/begin_weight_update": weights.begin_update,
        "/update_weights_from_distributed": weights.update_from_distributed,
        "/end_weight_update": weights.end_update,
        "/update_weight_version": weights.update_version,
        "/load_lora_adapter": adapters.load,
        "/unload_lora_adapter": adapters.unload,
    }
    is_scorer = serving.scheduler.is_scorer
    no_language_model, no_reward_model = refusing(_NO_LANGUAGE_MODEL), refusing(_NO_REWARD_MODEL)
    completes: Paths = {
        "/v1/chat/completions": no_language_model if is_scorer else openai.chat,
        "/v1/completions": no_language_model if is_scorer else openai.completions,
        "/tokenize": openai.tokenize,
    }
    answers: Paths = {
        "/generate": no_language_model if is_scorer else generate,
        "/classify": Classify(serving) if is_scorer else no_reward_model,
    }
    for path, handler in asks.items():
        app.router.add_get(path, answering(handler, control_error))
    for path, handler in steers.items():
        app.router.add_post(path, answering(handler, control_error))
    for path, handler in completes.items():
        app.router.add_post(path, answering(handler, openai_error))
    for path, handler in answers.items():
        app.router.add_post(path, answering(handler, generate_error))
        app.router.add_put(path, answering(handler, generate_error))
    return app

"""What the server tells of itself."""

from __future__ import annotations

import asyncio
import time
import uuid
from importlib.metadata import version
from typing import Any

from aiohttp import web

from arl.api.types import SamplingParams
from arl.engine.local.body import ApiError
from arl.engine.local.endpoint import Serving, json_response
from arl.engine.local.job import Job

_HEALTH_TIMEOUT_S = 20.0


class Info:
    """The endpoints that are asked and change nothing."""

    def __init__(self, serving: Serving, settings: dict[str, Any]) -> None:
        self._serving = serving
        self._settings = settings

    async def health(self, request: web.Request) -> web.StreamResponse:
        return web.Response(status=200 if self._serving.scheduler.is_alive else 503)

    async def health_generate(self, request: web.Request) -> web.StreamResponse:
        """200 if one token can be generated in time. A paused server is taken to be well if its thread lives."""
        scheduler = self._serving.scheduler
        if not scheduler.is_alive or scheduler.is_paused:
            return await self.health(request)
        rid = f"HEALTH_CHECK_{uuid.uuid4().hex}"
        job = Job(rid=rid, input_ids=[0], sampling=SamplingParams(max_new_tokens=1, temperature=0.0))
        try:
            with self._serving.inflight.submit(scheduler, {rid: [job]}) as following:
                await asyncio.wait_for(following.finish(), _HEALTH_TIMEOUT_S)
        except (TimeoutError, ApiError):
            return web.Response(status=503)
        return await self.health(request)

    async def model_info(self, request: web.Request) -> web.StreamResponse:
        config = self._serving.scheduler.model_config
        return json_response(
            {
                "model_path": self._serving.model_path,
                "served_model_name": self._serving.served_model_name,
                "tokenizer_path": self._serving.model_path,
                "is_generation": not self._serving.scheduler.is_scorer,
                "vocab_size": self._serving.limits.vocab_size,
                "weight_version": self._serving.scheduler.weight_version,
                "load_format": "auto",
                "has_image_understanding": False,
                "has_audio_understanding": False,
                "model_type": getattr(config, "model_type", None),
                "architectures": getattr(config, "architectures", None),
            }
        )

    async def server_info(self, request: web.Request) -> web.StreamResponse:
        scheduler = self._serving.scheduler
        state = {"weight_version": scheduler.weight_version, "is_paused": scheduler.is_paused, **self._load()}
        return json_response({**self._settings, "version": version("arl"), "internal_states": [state]})

    def _load(self) -> dict[str, int]:
        load = self._serving.scheduler.load_stats
        return {"num_running_reqs": load.running, "num_waiting_reqs": load.queued}

    async def loads(self, request: web.Request) -> web.StreamResponse:
        load = {"timestamp": time.time(), "dp_rank": 0, **self._load()}
        return json_response({"version": version("arl"), "loads": [load]})

    async def models(self, request: web.Request) -> web.StreamResponse:
        name = self._serving.served_model_name
        card = {
            "id": name,
            "object": "model",
            "created": int(time.time()),
            "owned_by": "arl",
            "root": name,
            "parent": None,
            "max_model_len": self._serving.limits.context_length,
        }
        loaded = self._serving.scheduler.adapters.loaded.items()
        adapters = [{**card, "id": id, "root": root, "parent": name, "max_model_len": None} for id, root in loaded]
        return json_response({"object": "list", "data": [card, *adapters]})

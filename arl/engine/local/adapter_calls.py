"""The endpoints that load and unload adapters, while requests go on. They answer, and refuse, as SGLang does."""

from __future__ import annotations

import asyncio
from concurrent.futures import ThreadPoolExecutor

from aiohttp import web

from arl.engine.local.body import MalformedError
from arl.engine.local.endpoint import Serving, json_response, read_body
from arl.engine.local.received_weights import WeightsError


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

"""SGLang's HTTP protocol, spoken to one server: stock SGLang, or arl's embedded server, which has frames besides.

docs/sglang_protocol.md records what the two answer.
"""

from __future__ import annotations

import asyncio
import logging
import math
import re
from base64 import b64decode
from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import lru_cache
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import orjson

from arl.api.engine import TensorSpec, WeightGroup
from arl.api.errors import (
    ArlError,
    NoSuchPathError,
    PromptTooLongError,
    RefusedRequestError,
    ServerError,
    ServerFailedError,
)
from arl.api.events import ServerWorked
from arl.api.images import PlacedImage
from arl.api.routed_experts import Routes
from arl.api.sampling_mask import KeptIds
from arl.api.settings.engines import RELEASED, PauseMode
from arl.api.types import SamplingParams, new_id
from arl.engine.client.frame_client import FrameClient
from arl.engine.client.server_client import (
    CONNECT_TIMEOUT_S,
    MIXTURE,
    MOST_KEPT,
    NONSENSE,
    Answer,
    GenerateCall,
    Greeting,
    ServerClient,
    SharedFaultError,
    Spawn,
    UnfitServerError,
    count_of,
    described,
    scored,
    spans_of,
)
from arl.engine.frames import FORMAT, PATH, Result
from arl.runtime.http.client import Connections, NotConnectedError, Reply, encoded

_PROMPT_TOO_LONG = re.compile(r"context length|maximum allowed length|longer than the model", re.IGNORECASE)
_NO_ADAPTER = re.compile(r"lora adapter", re.IGNORECASE)
"""A server that refuses a request for its adapter was started again: this engine names only what it has loaded."""

_IN_THE_FRAME = frozenset(("rid", "input_ids", "return_logprob", "stream"))
KEEPS_IMAGES = "SGLANG_VLM_CACHE_SIZE_MB"
"""The environment variable with the size of SGLang's cache of what the tower made of images. No update of the weights
empties it, so that images would be seen with old weights: it has to be 0."""
_MAX_CACHED_BYTES = 1024
_MEMORY = {"tags": ["kv_cache", "weights"]}
_IDLE_POLL_S = 0.05

logger = logging.getLogger(__name__)


class SGLangClient(ServerClient):
    program = "SGLang"
    memory_flag = "--enable-memory-saver"
    path_hint = "is it an SGLang server? engine.kind=vllm is for vLLM"

    def __init__(
        self, connections: Connections, address: str, api_key: str | None = None, spawn: Spawn | None = None
    ) -> None:
        """spawn: see ServerClient; without it, calls of /generate are HTTP requests."""
        super().__init__(connections, address, api_key, spawn)
        self.takes_frames = False
        """It speaks arl.engine.frames; until `describe` has asked, it does not."""
        self.is_embedded = False
        """It is arl's own; until `describe` has asked, it is not."""
        self.most_kept: int | None = None
        """How many kept ids of a token it can list; None if it is SGLang and too old to, or until it was asked."""
        self._frames: FrameClient | None = None
        self._opening = asyncio.Lock()

    async def aclose(self) -> None:
        self._spawn = None  # from now on no connection for frames is opened: nobody would close it
        if self._frames is not None:
            await self._frames.aclose()
        await super().aclose()

    async def generate(self, call: GenerateCall) -> Answer:
        frames = await self._frame_client() if self.takes_frames else None
        payload = self._payload(call)
        num_image_bytes = sum(len(placed.image.data) for placed in call.images)
        if frames is not None and frames.fits(call.rid, len(call.input_ids), num_image_bytes):
            answer = await self._ask_in_frames(frames, payload, call.images)
        else:
            if call.images:
                payload["image_data"] = [placed.image.data_url for placed in call.images]
                if self.is_embedded:
                    payload["image_places"] = [(placed.start, placed.stop) for placed in call.images]
                else:
                    payload |= {"input_ids": call.contracted("SGLang"), "return_prompt_token_ids": True}
            answer = await self.call("POST", "/generate", payload)
        try:
            if isinstance(answer, Result):
                return _answer_of(answer)
            body = answer.json_object()
            if call.images:
                call.check_prompt(self.address, body)
            return _parse_answer(body)
        except NONSENSE as error:
            what = f"{self.address} answered /generate with what cannot be trained on ({type(error).__name__}: {error})"
            message = f"{what}; it must be SGLang and return output_token_logprobs"
            raise UnfitServerError(message) from error

    def _payload(self, call: GenerateCall) -> dict[str, Any]:
        named: dict[str, Any] = {} if call.adapter is None else {"lora_path": call.adapter}
        if call.wants_kept_ids:
            named["return_sampling_mask"] = True
        if call.sampling.grammar is not None and self.is_embedded:
            named["continued_tokens"] = call.num_continued
        if call.routes_from is not None:
            named |= {"return_routed_experts": True, "routed_experts_start_len": call.routes_from}
        most_kept = self.most_kept if call.wants_kept_ids and not self.is_embedded else None
        return {
            "rid": call.rid,
            "input_ids": call.input_ids,
            "sampling_params": _sampling_params(call.sampling, call.max_new_tokens, most_kept),
            "return_logprob": True,
            "stream": False,
            "extra_key": call.cache_key,
            **named,
        }

    def check_kept_ids(self, sampling: SamplingParams) -> None:
        if self.is_embedded:
            return
        if (most := self.most_kept) is None:
            what = "top_p, top_k and min_p need" if sampling.grammar is None else "constrained requests need"
            without = ", or engine.replay_truncation=false, which trains by the logprobs of the whole distribution"
            raise ServerError(
                f"{self.address} does not say among which tokens it samples, and training needs to know: {what} SGLang "
                f"0.5.23 or newer{without if sampling.grammar is None else ''}"
            )
        if sampling.top_k > most:
            raise ServerError(
                f"top_k is {sampling.top_k}, but {self.address} lists at most {most} tokens among which it samples: "
                f"use a smaller top_k, or start it with --sampling-mask-max-tokens {sampling.top_k}"
            )

    async def _ask_in_frames(
        self, frames: FrameClient, payload: Mapping[str, Any], images: Sequence[PlacedImage]
    ) -> Result:
        settings = encoded({name: value for name, value in payload.items() if name not in _IN_THE_FRAME})
        try:
            result = await frames.generate(payload["rid"], payload["input_ids"], settings, images)
        except ConnectionError as error:
            failure = self._unreached("/generate", error)
            shared = SharedFaultError(str(failure))
            raise (failure if frames.takes_blame() else shared) from error
        if result.status == 200:
            return result
        path = "/generate"
        raise self.error_of(Reply(url=self.url + path, path=path, status=result.status, headers=(), body=result.head))

    async def _frame_client(self) -> FrameClient | None:
        """The connection for frames, opened if there is none; None if the server, or something before it, refuses."""
        if self._frames is not None and self._frames.is_open:
            return self._frames
        async with self._opening:
            if (self._frames is None or not self._frames.is_open) and self._spawn is not None and self.takes_frames:
                try:
                    self._frames = await FrameClient.opened(self._base, self._api_key, CONNECT_TIMEOUT_S)
                except OSError as error:
                    raise self._unreached(PATH, NotConnectedError(str(error))) from error
                self.takes_frames = self._frames is not None
                if self._frames is not None:
                    await self._begin(self._frames)
        return self._frames

    async def _begin(self, frames: FrameClient) -> None:
        """Let it run beside; or to its end, which is here, if the client was closed meanwhile, or its engine ends."""
        running = frames.run()
        with suppress(RuntimeError):  # a TaskGroup that ends takes no more tasks
            if self._spawn is not None:
                self._spawn(running)
                return
        await frames.aclose()
        await running

    async def score(self, token_ids: Sequence[int], adapter: str | None = None) -> list[float]:
        payload = {
            "rid": f"arl-score-{(key := new_id())}",
            "input_ids": [*token_ids],
            "sampling_params": {"max_new_tokens": 0, "temperature": 1.0},
            "return_logprob": True,
            "logprob_start_len": 0,
            "stream": False,
            "extra_key": key,
            **({} if adapter is None else {"lora_path": adapter}),
        }
        meta = (await self.call("POST", "/generate", payload)).json_object().get("meta_info") or {}
        entries = (meta.get("input_token_logprobs") or [])[1:]
        return scored(self.address, [entry[0] for entry in entries], len(token_ids))

    async def abort(self, rid: str) -> None:
        await self._post("abort_request", {"rid": rid})

    async def pause(self, mode: PauseMode) -> ServerWorked | None:
        told = (await self._post("pause_generation", {"mode": mode})).get("work")
        try:
            return msgspec.convert({"server": self.address, **told}, ServerWorked) if told else None
        except (msgspec.ValidationError, TypeError) as error:  # another version of arl; it is for statistics alone
            logger.debug("%s says what it has done in a way that makes no sense: %s", self.address, error)
            return None

    async def resume(self) -> None:
        await self._post("continue_generation", {})

    async def release_memory(self) -> None:
        """Stock SGLang ends itself if it is told to while a batch runs. Its label says what follows, before it does."""
        if not self.is_embedded:
            while True:
                try:
                    await self.call("POST", "/flush_cache")  # which it does once it runs nothing
                    break
                except (ServerFailedError, NoSuchPathError):
                    raise
                except ServerError:
                    await asyncio.sleep(_IDLE_POLL_S)
            await self._label(RELEASED)
        await self.call("POST", "/release_memory_occupation", _MEMORY)

    async def resume_memory(self) -> None:
        await self.call("POST", "/resume_memory_occupation", _MEMORY)
        if not self.is_embedded:  # what it holds is nothing yet; and a second call would end it
            await self._label(MIXTURE)

    async def _label(self, label: str) -> None:
        await self._do("update_weight_version", {"new_version": label, "abort_all_requests": False})

    async def load_directory(self, directory: Path, *, version: int, flush_cache: bool) -> None:
        body = {
            "model_path": str(directory),
            "weight_version": str(version),
            "flush_cache": flush_cache,
            "abort_all_requests": False,
        }
        answer = await self._post("update_weights_from_disk", body)
        if not answer.get("success", False):
            raise ServerError(f"{self.address} did not load {directory}: {answer.get('message', answer)}")

    async def join_group(self, group: WeightGroup) -> None:
        body = {
            "master_address": group.address,
            "master_port": group.port,
            "rank_offset": 1,
            "world_size": group.world_size,
            "group_name": group.name,
            "backend": group.backend,
        }
        await self._do("init_weights_update_group", body)

    async def leave_group(self, name: str) -> None:
        await self._do("destroy_weights_update_group", {"group_name": name})

    async def begin_update(self) -> None:
        await self._do("begin_weight_update", {})

    async def receive(
        self, specs: Sequence[TensorSpec], group: WeightGroup, *, version: int | None, flush_cache: bool
    ) -> None:
        body = {
            "names": [spec.name for spec in specs],
            "dtypes": [spec.dtype for spec in specs],
            "shapes": [list(spec.shape) for spec in specs],
            "group_name": group.name,
            "load_format": "flattened_bucket",
            "weight_version": MIXTURE if version is None else str(version),
            "flush_cache": flush_cache,
            "abort_all_requests": False,
        }
        await self._do("update_weights_from_distributed", body)

    async def end_update(self) -> None:
        await self._do("end_weight_update", {})

    async def _add_adapter(self, name: str, directory: Path) -> None:
        await self._do("load_lora_adapter", {"lora_name": name, "lora_path": str(directory), "pinned": False})

    async def _remove_adapter(self, name: str) -> None:
        """Until the requests that name it have ended, SGLang loads no other adapter."""
        await self._do("unload_lora_adapter", {"lora_name": name})

    async def describe(self, *, sets_going: bool) -> Greeting:
        info = await self._model_info()
        self.is_embedded = self.continues_grammars = "frames" in info
        if sets_going:
            if info.get("weight_version") == RELEASED:
                await self.resume_memory()
            await self.resume()
            await self.check_health()
        if info.get("has_image_understanding") is True and not self.is_embedded:
            logger.warning(
                "%s keeps what its tower made of images when it gets new weights, unless it was started with the "
                "environment variable %s=0, as are the servers that arl starts",
                self.address,
                KEEPS_IMAGES,
            )
        settings = await self.look_up("server_info") or await self.look_up("get_server_info")
        models = (await self.look_up("v1/models")).get("data") or [{}]
        self.num_ranks = int(settings.get("tp_size") or 1)
        self.takes_frames = info.get("frames") == FORMAT
        self.most_kept = int(settings.get("sampling_mask_max_tokens") or 0) or None
        # The tokens of one step, for a server that launches the next step before it has read the last one.
        runs_ahead = settings.get("disable_overlap_schedule") is False
        num_late = int(settings.get("speculative_num_draft_tokens") or 1)
        return Greeting(
            address=self.address,
            label=str(info.get("weight_version", "default")),
            num_late=num_late if runs_ahead else 0,
            unreached=_unreached(settings),
            device=_device(settings),
            returns_routes=settings.get("enable_return_routed_experts") is True,
            is_exact=settings.get("dtype") == "float32",
            releases_memory=self.is_embedded or settings.get("enable_memory_saver") is True,
            traits={
                "model type": info.get("model_type"),
                "vocabulary's size": info.get("vocab_size"),
                "architecture": info.get("architectures"),
                **await described(self, str(info["model_path"]), models[0].get("max_model_len")),
            },
        )

    async def check_alive(self) -> None:
        await self._model_info()

    async def check_health(self) -> None:
        """SGLang samples a token before it answers."""
        await self.call("GET", "/health")

    async def weight_label(self) -> str:
        return str((await self._model_info()).get("weight_version", "default"))

    async def _model_info(self) -> dict[str, Any]:
        info = (await self.call("GET", "/model_info")).json_object()
        if "model_path" not in info:
            raise ServerError(f"{self.address} is not an SGLang server: GET /model_info gave no model_path")
        return info

    async def _do(self, path: str, payload: dict[str, Any]) -> None:
        answer = await self._post(path, payload)
        if not answer.get("success", True):
            reason = answer.get("message") or answer.get("error_message") or answer
            raise ServerError(f"{self.address} refused /{path}: {reason}")

    async def _post(self, path: str, payload: dict[str, Any]) -> dict[str, Any]:
        return (await self.call("POST", f"/{path}", payload)).json_object()

    def error_of(self, reply: Reply) -> ArlError:
        if reply.status == 400 and _PROMPT_TOO_LONG.search(reply.reason):
            return PromptTooLongError(f"{self.address}: {reply.reason}")
        if reply.status == 400 and reply.path == "/generate" and _NO_ADAPTER.search(reply.reason):
            return UnfitServerError(f"{self.address} lost an adapter: {reply.reason}")
        if reply.status == 400 and reply.path == "/generate":
            return RefusedRequestError(f"{self.address} refused the request: {reply.reason}")
        return super().error_of(reply)


def _parse_answer(body: dict[str, Any]) -> Answer:
    meta = body["meta_info"]
    is_abort = meta["finish_reason"]["type"] == "abort"
    # An abort before the first token has no logprobs at all.
    entries = meta.get("output_token_logprobs") or [] if is_abort else meta["output_token_logprobs"]
    ids, logprobs = [entry[1] for entry in entries], [entry[0] for entry in entries]
    if (entries or not is_abort) and len(body.get("output_ids", ids)) != len(ids):
        raise ValueError(f"{len(ids)} logprobs for {len(body['output_ids'])} output_ids")
    kept_ids = None
    if (masks := meta.get("output_token_sampling_mask")) is not None:
        # The other logprobs are of the distribution before top_k, top_p and min_p.
        kept_ids, logprobs = KeptIds.of(masks), meta["output_token_sampling_logprobs"]
    experts = None
    if (encoded_experts := meta.get("routed_experts")) is not None:
        experts = np.frombuffer(b64decode(encoded_experts, validate=True), "<i4")
    return _answer(meta, ids, logprobs, text=body.get("text") or "", kept_ids=kept_ids, experts=experts)


@lru_cache(maxsize=256)
def _cached_meta(head: bytes) -> dict[str, Any]:
    """The JSON of a result's head: the same for many results. To be read alone."""
    return orjson.loads(head)


def _answer_of(result: Result) -> Answer:
    is_short = len(result.head) <= _MAX_CACHED_BYTES
    meta = _cached_meta(result.head) if is_short else orjson.loads(result.head)
    kept_ids = KeptIds.decode(result.kept_ids) if result.kept_ids else None
    experts = Routes.decode(result.routes).experts if result.routes else None
    meta = {**meta, "e2e_latency": result.microseconds / 1e6}
    ids, logprobs = result.ids.tolist(), result.logprobs.tolist()
    return _answer(meta, ids, logprobs, text=meta.get("text") or "", kept_ids=kept_ids, experts=experts)


def _answer(meta: Mapping[str, Any], ids: list[int], logprobs: list[float], **parts: Any) -> Answer:
    took_s = meta.get("e2e_latency")
    return Answer(
        output_ids=ids,
        output_logprobs=logprobs,
        finish=meta["finish_reason"]["type"],
        label=str(meta.get("weight_version", "")),
        spans=spans_of(meta.get("weight_versions")),
        cached_tokens=count_of(meta.get("cached_tokens")),
        server_s=took_s if type(took_s) is float and 0 < took_s < math.inf else 0.0,
        **parts,
    )


_UNREACHED = {
    "dp_size": "start one server for each replica, and name them all",
    "pp_size": "split the model by tensor parallelism (--tp-size) instead",
    "tokenizer_worker_num": "a pause reaches only one of them: leave the option out",
}
"""Settings of SGLang that keep updates from reaching every process of a server; what to do instead."""


def _unreached(settings: Mapping[str, Any]) -> str | None:
    above_one = (name for name in _UNREACHED if int(settings.get(name) or 1) > 1)
    return next((f"{name}={settings[name]}: {_UNREACHED[name]}" for name in above_one), None)


def _device(settings: Mapping[str, Any]) -> str:
    device = str(settings.get("device") or "")
    if not device.startswith("cuda"):
        return device
    first = int(settings.get("base_gpu_id") or device.partition(":")[2] or 0)
    last = first + int(settings.get("tp_size") or 1) - 1
    return f"GPU {first}" if first == last else f"GPUs {first}-{last}"


def _sampling_params(sampling: SamplingParams, max_new_tokens: int, most_kept: int | None) -> dict[str, Any]:
    params: dict[str, Any] = {
        "max_new_tokens": max_new_tokens,
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "top_k": sampling.top_k,
        "min_p": sampling.min_p,
        "ignore_eos": sampling.ignore_eos,
    }
    if sampling.stop:
        # The text is only ever searched for stop strings, so it has to hold everything they may match.
        params |= {"stop": list(sampling.stop), "skip_special_tokens": False, "no_stop_trim": True}
    if sampling.stop_token_ids:
        params["stop_token_ids"] = list(sampling.stop_token_ids)
    if sampling.seed is not None:
        params["sampling_seed"] = sampling.seed
    if (grammar := sampling.grammar) is not None:
        params[grammar.kind] = grammar.text
    if most_kept is not None and sampling.top_k == -1:
        # SGLang lists kept ids only under a finite top_k, and needs room for logits that are equal to the last.
        params["top_k"] = max(2, min(MOST_KEPT, most_kept // 2))
    return params

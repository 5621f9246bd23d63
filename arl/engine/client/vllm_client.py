"""vLLM's HTTP protocol, spoken to one server. docs/vllm_protocol.md records what vLLM answers."""

from __future__ import annotations

import hashlib
import io
import re
from base64 import b64decode
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, cast

import numpy as np

from arl.api.engine import TensorSpec, WeightGroup
from arl.api.errors import ArlError, NoSuchPathError, PromptTooLongError, RefusedRequestError, ServerError
from arl.api.sampling_mask import KeptIds
from arl.api.settings.engines import RELEASED, PauseMode
from arl.api.types import SamplingParams, new_id
from arl.engine.client.server_client import (
    MIXTURE,
    MOST_KEPT,
    NONSENSE,
    Answer,
    GenerateCall,
    Greeting,
    ServerClient,
    UnfitServerError,
    count_of,
    described,
    is_here,
    scored,
    spans_of,
)
from arl.runtime.http.client import Reply
from arl.runtime.threads import offload

_GENERATE = "/inference/v1/generate"
_PROMPT_TOO_LONG = re.compile(r"maximum model length|context length", re.IGNORECASE)
_ID_PREFIX = "generate-tokens-"
"""vLLM puts this before a request's name, and expects it in calls that abort the request."""
_LEAST_TEMPERATURE = 0.01
"""vLLM lifts temperatures between 0 and this one to it, for the samples and for their logprobs."""
_FLAGS = {
    **dict.fromkeys((_GENERATE, "/inference/v1/abort_requests"), "--enable-scale-out"),
    **dict.fromkeys(
        (
            *("/pause", "/resume", "/collective_rpc", "/reset_prefix_cache", "/reset_encoder_cache"),
            *("/weight_info", "/update_weight_version", "/server_info"),
        ),
        "VLLM_SERVER_DEV_MODE=1",
    ),
}
"""The paths that arl asks, and what makes a server of _TESTED offer them."""
_TESTED = "0.32"
TENSORS_FLAG = """--weight-transfer-config '{"backend": "nccl"}'"""


class VLLMClient(ServerClient):
    """The calls to one vLLM server, of one engine process group behind one API process."""

    program = "vLLM"
    memory_flag = "--enable-sleep-mode"
    meets_by_id = True
    path_hint = "is it a vLLM server? engine.kind=sglang is for SGLang"
    greeting_timeout_s = 120.0  # its first request compiles kernels, which took 17 s on two busy cores

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.lists_kept_ids = False
        """It says for every request among which ids it sampled, until `describe` has asked: it does not."""
        self.takes_tensors = False
        """It was started to receive weights over NCCL; until `describe` has asked, it was not."""
        self._lacks_cache = False
        """Its caches may have no memory. vLLM takes no harm from a call that gives them what they have."""
        self._update_version: int | None = None

    # Tokens

    async def generate(self, call: GenerateCall) -> Answer:
        reply = await self.call("POST", _GENERATE, self._payload(call))
        try:
            body = reply.json_object()
            if call.images:
                call.check_prompt(self.address, body)
            return _parse_answer(body, call.routes_from)
        except NONSENSE as error:
            what = f"{self.address} answered {_GENERATE} with what cannot be trained on"
            message = f"{what} ({type(error).__name__}: {error}); it must be vLLM {_TESTED} or newer"
            raise UnfitServerError(message) from error

    def _payload(self, call: GenerateCall) -> dict[str, Any]:
        sampling = call.sampling
        if 0 < sampling.temperature < _LEAST_TEMPERATURE:
            raise RefusedRequestError(
                f"temperature is {sampling.temperature:g}, and vLLM samples at {_LEAST_TEMPERATURE} instead of a lower "
                f"one; use 0, or {_LEAST_TEMPERATURE} and more"
            )
        images = dict[str, Any]()
        if call.images:
            urls = ((placed.image.data_url, placed.image.digest) for placed in call.images)
            images = {
                "token_ids": call.contracted("vLLM"),
                "content_parts": [{"type": "image_url", "url": url, "uuid": digest} for url, digest in urls],
                "return_token_ids": True,
            }
        return {
            "request_id": call.rid,
            "token_ids": call.input_ids,
            "sampling_params": self._sampling_params(call),
            "cache_salt": call.cache_key,
            "output_mode": "text" if sampling.stop else "tokens",
            **({} if call.adapter is None else {"model": call.adapter}),
            **images,
        }

    def _sampling_params(self, call: GenerateCall) -> dict[str, Any]:
        sampling = call.sampling
        temperature, top_k = sampling.temperature, max(sampling.top_k, 0)
        if self.lists_kept_ids:  # then it takes no greedy request, and none without top_k
            temperature, top_k = (temperature, top_k or MOST_KEPT) if temperature > 0 else (1.0, 1)
        params: dict[str, Any] = {
            "max_tokens": call.max_new_tokens,
            "temperature": temperature,
            "top_p": sampling.top_p,
            "top_k": top_k,
            "min_p": sampling.min_p,
            "ignore_eos": sampling.ignore_eos,
            "logprobs": 0,  # of the sampled token alone
            "detokenize": bool(sampling.stop),
        }
        if sampling.stop:
            # The text is only ever searched for stop strings, so it has to hold everything they may match.
            params |= {"stop": list(sampling.stop), "skip_special_tokens": False, "include_stop_str_in_output": True}
        if sampling.stop_token_ids and not sampling.ignore_eos:  # as SGLang does
            params["stop_token_ids"] = list(sampling.stop_token_ids)
        if sampling.seed is not None:
            params["seed"] = _seed(sampling.seed, call.num_continued)
        if (grammar := sampling.grammar) is not None:
            kind = "json" if grammar.kind == "json_schema" else grammar.kind
            params["structured_outputs"] = {kind: grammar.text}
        return params

    async def score(self, token_ids: Sequence[int], adapter: str | None = None) -> list[float]:
        sampling = {"max_tokens": 1, "prompt_logprobs": 0, "detokenize": False, "top_k": 1}
        payload = {"token_ids": [*token_ids], "sampling_params": sampling, "cache_salt": f"arl-score-{new_id()}"}
        answer = await self.call("POST", _GENERATE, payload if adapter is None else {**payload, "model": adapter})
        entries = (answer.json_object().get("prompt_logprobs") or [])[1:]
        told = [entry[str(i)]["logprob"] for entry, i in zip(entries, token_ids[1:], strict=False)]
        return scored(self.address, told, len(token_ids))

    async def abort(self, rid: str) -> None:
        await self._post("inference/v1/abort_requests", {"request_ids": [_ID_PREFIX + rid]})

    def check_kept_ids(self, sampling: SamplingParams) -> None:
        if not self.lists_kept_ids:
            what = "top_p, top_k and min_p" if sampling.grammar is None else "a grammar"
            raise ServerError(
                f"{self.address} does not say among which tokens it samples under {what}, and training needs to know: "
                "start vLLM with --return-sampling-mask, which needs its model runner V2 (GPUs), or sample without"
            )

    # Weights

    async def pause(self, mode: PauseMode) -> None:
        kept = "abort" if mode == "abort" else "keep"
        await self._post(f"pause?mode={kept}&clear_cache=false")
        if mode == "retract":
            await self._flush()

    async def resume(self) -> None:
        if self._lacks_cache:
            await self._post("wake_up?tags=kv_cache")
            self._lacks_cache = False
        await self._post("resume")

    async def release_memory(self) -> None:
        """Requests that were retracted stay in its queue. Level 2 keeps no copy of the weights."""
        await self._label(RELEASED)
        await self._post("sleep?level=2&mode=keep")

    async def resume_memory(self) -> None:
        """It generates as soon as all its memory is there, so that of its caches comes after the weights."""
        await self._post("wake_up?tags=weights")
        await self._label(MIXTURE)
        self._lacks_cache = True

    async def load_directory(self, directory: Path, *, version: int, flush_cache: bool) -> None:
        # vLLM would take a directory that is not there for a model of the hub, and end.
        if is_here(self.address) and not await offload(directory.is_dir):
            raise ServerError(f"{self.address} was not told to load {directory}, because that is no directory")
        await self._label(MIXTURE)
        await self._post("collective_rpc", {"method": "reload_weights", "kwargs": {"weights_path": str(directory)}})
        await self._forget_images()
        if flush_cache:
            await self._flush()
        await self._label(str(version))

    async def join_group(self, group: WeightGroup) -> None:
        if not self.takes_tensors:
            raise ServerError(f"{self.address} takes no tensors: start vLLM with {TENSORS_FLAG}")
        facts = {  # each call of /update_weights is one broadcast of all its bytes
            "nccl_unique_id_b64": group.unique_id,
            "rank_offset": 1,
            "world_size": group.world_size,
            "packed": True,
            "packed_buffer_size_bytes": 1 << 62,
            "packed_num_buffers": 1,
        }
        await self._post("init_weight_transfer_engine", {"init_info": facts})

    async def leave_group(self, name: str) -> None:
        """vLLM has one group at a time."""
        await self._post("shutdown_weight_transfer_engine")

    async def begin_update(self) -> None:
        await self._label(MIXTURE)
        await self._post("start_weight_update")

    async def receive(
        self, specs: Sequence[TensorSpec], group: WeightGroup, *, version: int | None, flush_cache: bool
    ) -> None:
        info = {
            "names": [spec.name for spec in specs],
            "dtype_names": [spec.dtype for spec in specs],
            "shapes": [list(spec.shape) for spec in specs],
        }
        await self._post("update_weights", {"update_info": info})
        if flush_cache:
            await self._flush()
        self._update_version = version

    async def end_update(self) -> None:
        version, self._update_version = self._update_version, None
        await self._forget_images()
        await self._post("finish_weight_update", {"weight_version": MIXTURE if version is None else str(version)})

    async def _add_adapter(self, name: str, directory: Path) -> None:
        await self._post("v1/load_lora_adapter", {"lora_name": name, "lora_path": str(directory)})

    async def _remove_adapter(self, name: str) -> None:
        await self._post("v1/unload_lora_adapter", {"lora_name": name})

    async def _flush(self) -> None:
        """Forget all cached prefixes; requests that run are computed again from their tokens."""
        await self._post("reset_prefix_cache?reset_running_requests=true")

    async def _forget_images(self) -> None:
        """Forget what the tower made of images under other weights. Its caches know images by their digests alone."""
        await self._post("reset_encoder_cache")

    async def _label(self, label: str) -> None:
        await self._post("update_weight_version", {"new_version": label})

    # What it says of itself

    async def describe(self, *, sets_going: bool) -> Greeting:
        version = str((await self.call("GET", "/version")).json_object()["version"])
        known = (await self.look_up("openapi.json")).get("paths")  # a server can be told to hide it
        if missing := [path for path in _FLAGS if path not in known] if known else []:
            flags = " and ".join(sorted({_FLAGS[path] for path in missing}))
            lacks = f"is vLLM {version} without {', '.join(missing)}"
            raise ServerError(f"{self.address} {lacks}; vLLM {_TESTED} has it, started with {flags}")
        if sets_going:
            if await self.weight_label() == RELEASED:
                await self.resume_memory()
            # A run may have ended after a load and before the caches had memory again.
            self._lacks_cache |= (await self.look_up("is_sleeping")).get("is_sleeping") is True
            await self.resume()
            await self.check_health()
        settings = (await self.call("GET", "/server_info?config_format=json")).json_object()["vllm_config"]
        model = settings["model_config"]
        num_processes = int(settings["parallel_config"].get("_api_process_count") or 1)
        several = f"--api-server-count={num_processes}" if num_processes > 1 else ""
        cards = (await self.look_up("v1/models")).get("data") or [{}]
        if (mode := model["logprobs_mode"]) != "processed_logprobs":
            raise ServerError(
                f"{self.address} returns {mode}, which are not those of the distribution that it samples from; start "
                "vLLM with --logprobs-mode processed_logprobs"
            )
        self.num_ranks = int((await self.look_up("get_world_size")).get("world_size") or 1)
        self.lists_kept_ids = model.get("return_sampling_mask") is True
        self.takes_tensors = (settings.get("weight_transfer_config") or {}).get("backend") == "nccl"
        return Greeting(
            address=self.address,
            label=await self.weight_label(),
            num_late=0,  # a pause ends after the step that runs, and the label changes while it is paused
            unreached=f"{several}: an abort reaches only one of them; leave the option out" if several else None,
            device=str(settings.get("device_config", {}).get("device_type", "")),
            returns_routes=(settings.get("aux_output_config") or {}).get("enable_return_routed_experts") is True,
            is_exact=model.get("dtype") == "torch.float32",
            releases_memory=model.get("enable_sleep_mode") is True,
            traits=await described(self, str(model["model"]), cards[0].get("max_model_len")),
        )

    async def check_alive(self) -> None:
        """vLLM answers /health while it is paused, and not after its engine has died."""
        await self.call("GET", "/health")

    async def check_health(self) -> None:
        sampling = {"max_tokens": 1, "detokenize": False, "top_k": 1}
        await self.call("POST", _GENERATE, {"token_ids": [0], "sampling_params": sampling, "cache_salt": "health"})

    async def weight_label(self) -> str:
        return str((await self.call("GET", "/weight_info")).json_object()["weight_version"])

    async def _post(self, path: str, payload: dict[str, Any] | None = None) -> None:
        await self.call("POST", f"/{path}", payload or {})

    def error_of(self, reply: Reply) -> ArlError:
        if reply.path != _GENERATE or reply.status not in (400, 404):
            return super().error_of(reply)
        if _PROMPT_TOO_LONG.search(reply.reason):
            return PromptTooLongError(f"{self.address}: {reply.reason}")
        if reply.status == 404 and reply.json_object().get("error"):  # it has the path, and not the adapter
            return UnfitServerError(f"{self.address} lost an adapter: {reply.reason}")
        if reply.status == 404:
            return NoSuchPathError(f"{self.address} has no {_GENERATE}: start vLLM {_TESTED} with {_FLAGS[_GENERATE]}")
        return RefusedRequestError(f"{self.address} refused the request: {reply.reason}")


def _seed(seed: int, num_continued: int) -> int:
    """vLLM draws a request's noise from its seed in order. A continuation needs noise that was not drawn before."""
    if num_continued == 0:
        return seed
    digest = hashlib.blake2b(f"{seed} {num_continued}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") >> 1


def _parse_answer(body: Mapping[str, Any], routes_from: int | None) -> Answer:
    choice = body["choices"][0]
    ids = choice.get("token_ids") or []
    logprobs = [entry["logprob"] for entry in (choice.get("logprobs") or {}).get("content") or []]
    spans = choice.get("weight_versions") or []
    masks = choice.get("sampling_mask")
    return Answer(
        output_ids=ids,
        output_logprobs=logprobs,
        finish=choice["finish_reason"],
        text=choice.get("text") or "",
        label=str(spans[-1]["version"]) if spans else "",
        spans=spans_of(spans),
        cached_tokens=count_of(((body.get("usage") or {}).get("prompt_tokens_details") or {}).get("cached_tokens")),
        kept_ids=KeptIds.of(masks) if masks is not None else None,
        experts=_experts(choice.get("routed_experts"), routes_from),
    )


def _experts(encoded: str | None, routes_from: int | None) -> np.ndarray | None:
    """[tokens from routes_from on, layers, experts per token]: vLLM returns those of all tokens but the last."""
    if encoded is None or routes_from is None:
        return None
    array = cast("np.ndarray", np.load(io.BytesIO(b64decode(encoded, validate=True)), allow_pickle=False))
    return array[routes_from:].astype(np.int32)

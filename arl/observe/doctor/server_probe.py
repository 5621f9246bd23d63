"""Asks one server about itself, scores given tokens and samples. Over HTTP, in SGLang's protocol."""

from __future__ import annotations

import itertools
import math
from base64 import b64decode
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from arl.api.errors import NoSuchPathError, ServerError
from arl.api.routed_experts import Routes, Routing
from arl.api.sampling_mask import KeptIds
from arl.api.types import SamplingParams
from arl.runtime.http.client import JsonClient

MOST_KEPT = 1024
"""The top_k of a truncated request to SGLang that names none, as arl's client asks."""

Floats = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerFacts:
    """A server's description of itself; None where it does not say."""

    label: str
    """The version label of its weights."""
    model_path: str
    context_length: int | None
    dtype: str | None
    kv_dtype: str | None
    """The dtype of keys and values, if it is not the model's."""
    chunk_size: int | None
    """The most prompt tokens that it computes in one step."""
    num_ranks: int
    num_late: int
    """How many tokens of a response may have too new a label after an update in place (SGLang's overlap scheduler)."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Sampled:
    """One sampled response."""

    prompt_ids: Sequence[int]
    output_ids: Sequence[int]
    logprobs: Floats
    """The behavior logprobs."""
    labels: Sequence[str]
    """The version label of each token."""
    temperature: float
    finish: Mapping[str, Any]
    prompt_tokens: int
    cached_tokens: int
    kept_ids: KeptIds | None = None
    routes: Routes | None = None
    """Of prompt and response, if they were asked for."""

    @property
    def token_ids(self) -> list[int]:
        return [*self.prompt_ids, *self.output_ids]


class ServerProbe:
    """The requests of the doctor to one server. Methods raise ServerError, as its client does."""

    def __init__(self, address: str, client: JsonClient) -> None:
        self.address = address
        self._client = client
        self._numbers = itertools.count()
        self._most_kept = 0
        """SGLang's limit on the kept ids of a token; 0 if it has none, and until `facts` was called."""

    async def facts(self) -> ServerFacts:
        info = await self._object("GET", "/model_info")
        settings = await self._look_up("GET", "/server_info")
        cards = (await self._look_up("GET", "/v1/models")).get("data") or [{}]
        runs_ahead = settings.get("disable_overlap_schedule") is False
        chunk = settings.get("chunked_prefill_size")
        dtype, kv_dtype = settings.get("dtype"), settings.get("kv_cache_dtype")
        kv_dtype = "bfloat16" if kv_dtype == "bf16" else kv_dtype
        self._most_kept = int(settings.get("sampling_mask_max_tokens") or 0)
        return ServerFacts(
            label=str(info.get("weight_version", "default")),
            model_path=str(info.get("model_path", "")),
            context_length=cards[0].get("max_model_len"),
            dtype=dtype,
            kv_dtype=None if kv_dtype in ("auto", dtype) else kv_dtype,
            chunk_size=chunk if isinstance(chunk, int) and chunk > 0 else None,
            num_ranks=int(settings.get("tp_size") or 1),
            num_late=int(settings.get("speculative_num_draft_tokens") or 1) if runs_ahead else 0,
        )

    async def num_running(self) -> int:
        loads = (await self._object("GET", "/v1/loads")).get("loads") or [{}]
        return sum(int(load.get("num_running_reqs") or 0) for load in loads)

    async def tokens_of(self, text: str) -> list[int] | None:
        """None if the server has no tokenizer."""
        return await self._tokens({"prompt": text, "add_special_tokens": False})

    async def rendered(
        self, messages: Sequence[Mapping[str, Any]], options: Mapping[str, Any] | None
    ) -> list[int] | None:
        """Messages as the server's chat template renders them. None if it cannot say."""
        body = {"messages": list(messages), "add_generation_prompt": True, "add_special_tokens": False}
        return await self._tokens({**body, **({"chat_template_kwargs": dict(options)} if options else {})})

    async def score(self, token_ids: Sequence[int], *, adapter: str | None = None) -> Floats:
        """[T - 1] The logprob of each token except the first, at temperature 1, computed without a cached prefix."""
        payload = self._payload(token_ids, SamplingParams(max_new_tokens=1), key="", adapter=adapter)
        payload["sampling_params"]["max_new_tokens"] = 0
        meta = (await self._object("POST", "/generate", payload | {"logprob_start_len": 0}))["meta_info"]
        entries = (meta.get("input_token_logprobs") or [])[1:]
        if len(entries) != len(token_ids) - 1:
            said = f"{len(entries)} logprobs for a prompt of {len(token_ids)} tokens"
            raise ServerError(f"{self.address} gave {said}; it must give one for each token but the first")
        return np.array([entry[0] for entry in entries], np.float64)

    async def sample(
        self,
        prompt_ids: Sequence[int],
        sampling: SamplingParams,
        *,
        key: str = "",
        adapter: str | None = None,
        wants_kept_ids: bool = False,
        routing: Routing | None = None,
    ) -> Sampled:
        """key: requests with the same key share cached prefixes; unset, it shares none. routing: ask for routes."""
        payload = self._payload(prompt_ids, sampling, key=key, adapter=adapter)
        if wants_kept_ids and sampling.is_filtered:
            payload["return_sampling_mask"] = True
            if self._most_kept and sampling.top_k == -1:  # SGLang lists ids only under a finite top_k
                payload["sampling_params"]["top_k"] = max(2, min(MOST_KEPT, self._most_kept // 2))
        if routing is not None:
            payload |= {"return_routed_experts": True, "routed_experts_start_len": 0}
        body = await self._object("POST", "/generate", payload)
        meta = body["meta_info"]
        entries = meta.get("output_token_logprobs") or []
        logprobs, kept_ids = [entry[0] for entry in entries], None
        if (masks := meta.get("output_token_sampling_mask")) is not None:
            logprobs, kept_ids = meta["output_token_sampling_logprobs"], KeptIds.of(masks)
        labels, num_tokens = [str(meta.get("weight_version", ""))] * len(entries), len(prompt_ids) + len(entries)
        for span in meta.get("weight_versions") or ():
            end = min(span["end"], len(labels))
            labels[span["start"] : end] = [str(span["version"])] * (end - span["start"])
        return Sampled(
            prompt_ids=prompt_ids,
            output_ids=[entry[1] for entry in entries],
            logprobs=np.array(logprobs, np.float64),
            labels=labels,
            temperature=sampling.logprob_temperature,
            finish=meta.get("finish_reason") or {},
            prompt_tokens=int(meta.get("prompt_tokens") or 0),
            cached_tokens=int(meta.get("cached_tokens") or 0),
            kept_ids=kept_ids,
            routes=None if routing is None else self._routes(meta.get("routed_experts"), routing, num_tokens),
        )

    def _routes(self, told: str | None, routing: Routing, num_tokens: int) -> Routes | None:
        """The routes of all tokens except the last, which was not computed. Raises ServerError for a wrong number."""
        if told is None:
            return None
        experts = np.frombuffer(b64decode(told), "<i4")
        shape = num_tokens - 1, routing.num_layers, routing.experts_per_token
        if experts.size != math.prod(shape):
            raise ServerError(f"{self.address} returned routes of {experts.size} numbers; they must be {shape}")
        return Routes.joined([Routes.of(experts.reshape(shape).astype(routing.dtype)), 1])

    async def load_directory(self, directory: str, label: str) -> None:
        await self._object(
            "POST", "/update_weights_from_disk", {"model_path": directory, "weight_version": label, "flush_cache": True}
        )

    def _payload(
        self, token_ids: Sequence[int], sampling: SamplingParams, *, key: str, adapter: str | None
    ) -> dict[str, Any]:
        number = next(self._numbers)
        params: dict[str, Any] = {
            name: getattr(sampling, name)
            for name in ("max_new_tokens", "temperature", "top_p", "top_k", "min_p", "ignore_eos")
        }
        if sampling.stop:
            params |= {"stop": list(sampling.stop), "skip_special_tokens": False, "no_stop_trim": True}
        if sampling.seed is not None:
            params["sampling_seed"] = sampling.seed
        if sampling.grammar is not None:
            params[sampling.grammar.kind] = sampling.grammar.text
        return {
            "rid": f"arl-doctor.{id(self):x}.{number:09}",
            "input_ids": list(token_ids),
            "sampling_params": params,
            "return_logprob": True,
            "stream": False,
            "extra_key": key or f"arl-doctor-{id(self):x}-{number}",
            **({"lora_path": adapter} if adapter is not None else {}),
        }

    async def _tokens(self, payload: dict[str, Any]) -> list[int] | None:
        try:
            return (await self._object("POST", "/tokenize", payload)).get("tokens")
        except ServerError:
            return None

    async def _look_up(self, method: str, path: str) -> dict[str, Any]:
        try:
            return await self._object(method, path)
        except NoSuchPathError:
            return {}

    async def _object(self, method: str, path: str, payload: dict[str, Any] | None = None) -> dict[str, Any]:
        return (await self._client.call(method, path, payload)).json_object()

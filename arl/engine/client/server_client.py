"""One inference server that speaks SGLang's HTTP protocol: its calls, its answers, and what it says of itself.

A call raises ServerFailedError if the server could not answer; another, or the same one later, may (UnfitServerError:
it must not go on as it is). It raises ServerError if the server refused, and would refuse again (NoSuchPathError: it
has no such path), and PromptTooLongError if the prompt does not fit.
Timeouts are the caller's, by asyncio.timeout.
"""

from __future__ import annotations

import asyncio
import json
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from yarl import URL

from arl.api.engine import MODEL_SIZES, ServedModel, TensorSpec, WeightGroup
from arl.api.engine_config import PauseMode
from arl.api.errors import ArlError, NoSuchPathError, PromptTooLongError, ServerError, ServerFailedError
from arl.web.client import JsonClient, Reply
from arl.web.connections import Connections

_PROMPT_TOO_LONG = re.compile(r"context length|maximum allowed length|longer than the model", re.IGNORECASE)
_NO_ADAPTER = re.compile(r"lora adapter", re.IGNORECASE)
"""A server that refuses a request for its adapter was started again: this engine names only what it has loaded."""
_MIXTURE = "mixture"
"""The label of weights that are of no version: a server that is left with it is given all of them again."""
_CONNECT_TIMEOUT_S = 30.0
_GREETING_TIMEOUT_S = 10.0
_PROBE_TEXT = "Agent 12345 said:\n\t'déjà vu' <|im_start|>def f(x): return x**2  # 你好"


_MAX_LOGPROB = 1e-4
"""Rounding may lift a logprob a little above 0; trajectories refuse more."""


_NONSENSE = (LookupError, TypeError, ValueError, AttributeError, OverflowError)
"""The errors of reading an answer that does not have the expected form."""


class UnfitServerError(ServerFailedError):
    """An answer of /generate shows that its server must not go on as it is: it is impossible, or an adapter is gone."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """The result of one call of /generate."""

    output_ids: list[int]
    output_logprobs: list[float]
    finish: Literal["stop", "length", "abort"]
    text: str
    label: str
    """Of the newest weights that it was sampled under."""
    spans: Sequence[tuple[str, int, int]]
    """Labels, and the output tokens start..end (end excluded) of each. Empty for servers too old to send them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Holding:
    """A server's report of the weights that it holds."""

    label: str
    adapters: frozenset[str] = frozenset()
    """The adapters beside them, if it was asked."""


class ServerClient(JsonClient):
    """The HTTP calls to one server. Borrows the connections."""

    key_hint = "set engine.api_key to the key that the server was started with"
    path_hint = "is it an SGLang server?"

    def __init__(self, connections: Connections, address: str, api_key: str | None = None) -> None:
        super().__init__(
            address,
            api_key=api_key,
            max_concurrent=None,
            timeout_s=None,
            connect_timeout_s=_CONNECT_TIMEOUT_S,
            connections=connections,
        )
        self.address = address
        self.num_ranks = 1
        """Until `greet` has asked."""

    async def generate(self, payload: dict[str, Any]) -> Answer:
        reply = await self.call("POST", "/generate", payload)
        try:
            return _parse_answer(reply.json_object())
        except _NONSENSE as error:
            what = f"{self.address} answered /generate with what cannot be trained on ({type(error).__name__}: {error})"
            raise UnfitServerError(f"{what}; it must be SGLang and return output_token_logprobs") from error

    async def abort(self, rid: str) -> None:
        await self._post("abort_request", {"rid": rid})

    async def pause(self, mode: PauseMode) -> None:
        await self._post("pause_generation", {"mode": mode})

    async def resume(self) -> None:
        await self._post("continue_generation", {})

    async def load_directory(self, directory: Path, *, version: int, flush_cache: bool) -> None:
        """Load a model directory (an absolute path), and label it with the version."""
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
        """Returns when the sender and all receivers have met."""
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
        """Receive tensors in one broadcast; see WeightServer.receive."""
        body = {
            "names": [spec.name for spec in specs],
            "dtypes": [spec.dtype for spec in specs],
            "shapes": [list(spec.shape) for spec in specs],
            "group_name": group.name,
            "load_format": "flattened_bucket",
            "weight_version": _MIXTURE if version is None else str(version),
            "flush_cache": flush_cache,
            "abort_all_requests": False,
        }
        await self._do("update_weights_from_distributed", body)

    async def end_update(self) -> None:
        await self._do("end_weight_update", {})

    async def load_adapter(self, name: str, directory: Path) -> None:
        """Load an adapter beside the model, unless it is there already; see WeightServer.load_adapter."""
        if (label := await self.weight_label()).isdecimal() or label == _MIXTURE:
            what = f"{self.address} serves weights {label!r}, which another run loaded"
            raise ServerError(f"{what}; adapters need the model that the server was started with: start it again")
        if name not in await self.adapters():
            body = {"lora_name": name, "lora_path": str(directory), "pinned": False}
            await self._do("load_lora_adapter", body)

    async def unload_adapter(self, name: str) -> None:
        """Returns when the requests that name it have ended. Until then SGLang loads no other adapter."""
        if name in await self.adapters():
            await self._do("unload_lora_adapter", {"lora_name": name})

    async def holding(self, *, with_adapters: bool) -> Holding:
        adapters = await self.adapters() if with_adapters else frozenset[str]()
        return Holding(label=await self.weight_label(), adapters=adapters)

    async def adapters(self) -> frozenset[str]:
        cards = (await self.look_up("v1/models")).get("data") or []
        try:
            return frozenset(card["id"] for card in cards if card.get("parent"))
        except _NONSENSE as error:
            raise ServerFailedError(f"{self.address}/v1/models makes no sense ({error}): {str(cards)[:200]}") from error

    async def model_info(self) -> dict[str, Any]:
        """The description of its model, also while it is paused. Raises ServerError if it is not an SGLang server."""
        info = (await self.call("GET", "/model_info")).json_object()
        if "model_path" not in info:
            raise ServerError(f"{self.address} is no SGLang server: GET /model_info gave no model_path")
        return info

    async def weight_label(self) -> str:
        return str((await self.model_info()).get("weight_version", "default"))

    async def check_health(self) -> None:
        """Returns if the server generates: SGLang samples a token first, so a paused server does not answer."""
        await self.call("GET", "/health")

    async def look_up(self, path: str, payload: dict[str, Any] | None = None) -> dict[str, Any]:
        """GET a path that not every server has, or POST the payload to it; {} from a server without it."""
        try:
            return (await self.call("GET" if payload is None else "POST", f"/{path}", payload)).json_object()
        except NoSuchPathError:
            return {}

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
        return super().error_of(reply)


def _parse_answer(body: dict[str, Any]) -> Answer:
    """Raises LookupError, TypeError or ValueError for an impossible answer."""
    meta = body["meta_info"]
    finish = meta["finish_reason"]["type"]
    if finish not in ("stop", "length", "abort"):
        raise ValueError(f"finish_reason is {finish!r}")
    # An abort before the first token has no logprobs at all.
    entries = meta["output_token_logprobs"] if finish != "abort" else meta.get("output_token_logprobs") or []
    ids, logprobs = [entry[1] for entry in entries], [entry[0] for entry in entries]
    if (entries or finish != "abort") and len(body.get("output_ids", ids)) != len(ids):
        raise ValueError(f"{len(ids)} logprobs for {len(body['output_ids'])} output_ids")
    if set(map(type, ids)) - {int} or min(ids, default=0) < 0:
        raise ValueError(f"token id {next(i for i in ids if type(i) is not int or i < 0)!r}")
    types = set(map(type, logprobs))
    if not (types <= {float, int} and all(map(math.isfinite, logprobs)) and max(logprobs, default=0) <= _MAX_LOGPROB):
        raise ValueError(f"logprob {next(value for value in logprobs if not _is_logprob(value))!r}")
    spans = [(str(span["version"]), span["start"], span["end"]) for span in meta.get("weight_versions") or ()]
    if wrong := [s for s in spans if not (0 <= s[1] <= s[2] and type(s[1]) is type(s[2]) is int)]:
        raise ValueError(f"the span {wrong[0]} of weight_versions")
    return Answer(
        output_ids=ids,
        output_logprobs=logprobs,
        finish=finish,
        text=body.get("text") or "",
        label=str(meta.get("weight_version", "")),
        spans=spans,
    )


def _is_logprob(value: Any) -> bool:
    return type(value) in (float, int) and math.isfinite(value) and value <= _MAX_LOGPROB


@dataclass(frozen=True, slots=True, kw_only=True)
class Greeting:
    """A server's description of itself."""

    address: str
    label: str
    """Of the weights that it holds."""
    num_late: int
    """Most tokens of a request that may still be on their way out of the model when a pause in place takes effect."""
    unreached: str | None = None
    """The setting that keeps updates from reaching all of the server, and what to do instead."""
    traits: Mapping[str, Any]
    """Traits that servers of the same model share; absent or None if this server does not report it."""


async def greet(client: ServerClient, *, sets_going: bool = True) -> Greeting:
    """Ask a server what it serves, and note its ranks in `client`. Raises ServerError with its address.

    sets_going: resume a server that a killed run left paused, and have it generate.
    """
    try:
        async with asyncio.timeout(_GREETING_TIMEOUT_S):
            info = await client.model_info()
            if sets_going:
                await client.resume()
                await client.check_health()
            settings = await client.look_up("server_info") or await client.look_up("get_server_info")
            models = (await client.look_up("v1/models")).get("data") or [{}]
            tokens = await _probe_tokens(client)
    except TimeoutError:
        raise ServerError(f"{client.address} gave no answer within {_GREETING_TIMEOUT_S:g} s") from None
    try:
        client.num_ranks = int(settings.get("tp_size") or 1)
        return _greeting(client.address, info, settings, models[0], tokens)
    except _NONSENSE as error:
        what = f"{client.address} describes itself in a way that makes no sense ({type(error).__name__}: {error})"
        raise ServerFailedError(what) from error


def _greeting(
    address: str, info: Mapping[str, Any], settings: Mapping[str, Any], card: Mapping[str, Any], tokens: Any
) -> Greeting:
    return Greeting(
        address=address,
        label=str(info.get("weight_version", "default")),
        num_late=_num_late(settings),
        unreached=_unreached(settings),
        traits={
            "model type": info.get("model_type"),
            "vocabulary's size": info.get("vocab_size"),
            **_shape(address, str(info["model_path"])),
            "architecture": info.get("architectures"),
            "context length": card.get("max_model_len"),
            f"tokenization of {_PROBE_TEXT!r}": tokens,
        },
    )


_UNREACHED = {
    "dp_size": "start one server for each replica, and name them all",
    "pp_size": "split the model by tensor parallelism (--tp-size) instead",
    "tokenizer_worker_num": "a pause reaches one of them alone: leave the option out",
}
"""Settings of SGLang that keep updates from reaching every process of a server; what to do instead."""


def _unreached(settings: Mapping[str, Any]) -> str | None:
    wrong = (f"{name}={settings[name]}: {advice}" for name, advice in _UNREACHED.items() if _above_one(settings, name))
    return next(wrong, None)


def _above_one(settings: Mapping[str, Any], name: str) -> bool:
    return int(settings.get(name) or 1) > 1


def _shape(address: str, model_path: str) -> dict[str, Any]:
    """The shape of a server's model, if server and model are on this machine; else empty."""
    if URL(address).host not in ("127.0.0.1", "localhost", "::1"):
        return {}
    try:
        config = json.loads((Path(model_path) / "config.json").read_bytes())
        text = config.get("text_config") or config
        return {name: text.get(name) for name in MODEL_SIZES}
    except (OSError, ValueError, AttributeError):
        return {}


def expected_of(model: ServedModel) -> Greeting:
    """The greeting that a server of this model would give, as far as the model is known."""
    traits = {"model type": model.model_type, "vocabulary's size": model.vocab_size, **model.shape}
    return Greeting(address=f"{model.name} (the model to serve)", label="", num_late=0, traits=traits)


def _num_late(settings: Mapping[str, Any]) -> int:
    """The tokens of one step, for a server that launches the next step before it has read the last one."""
    runs_ahead = settings.get("disable_overlap_schedule") is False
    return int(settings.get("speculative_num_draft_tokens") or 1) if runs_ahead else 0


async def _probe_tokens(client: ServerClient) -> list[int] | None:
    try:
        return (await client.look_up("tokenize", {"prompt": _PROBE_TEXT})).get("tokens")
    except ServerError:
        return None  # started without a tokenizer, as some are


def difference(greetings: Sequence[Greeting]) -> str | None:
    """A sentence about the first trait in which two servers differ; None if all serve the same model."""
    for name in dict.fromkeys(name for greeting in greetings for name in greeting.traits):
        told = [(trait, one.address) for one in greetings if (trait := one.traits.get(name)) is not None]
        for trait, address in told[1:]:
            first, first_address = told[0]
            if trait != first:
                return f"the {name} is {first} at {first_address}, but {trait} at {address}"
    return None

"""One inference server that speaks SGLang's HTTP protocol: its calls, its answers, and what it says of itself.

A call raises ServerFailedError if the server could not answer; another, or the same one later, may (UnfitServerError:
it must not go on as it is). It raises ServerError if the server refused, and would refuse again (NoSuchPathError: it
has no such path), and PromptTooLongError if the prompt does not fit.
Timeouts are the caller's, by asyncio.timeout.
"""

from __future__ import annotations

import asyncio
import logging
import math
import re
from base64 import b64decode
from collections.abc import Callable, Coroutine, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, Literal

import msgspec
import numpy as np
import orjson

from arl.api.engine import TensorSpec, WeightGroup
from arl.api.engine_config import PauseMode
from arl.api.errors import (
    ArlError,
    NoSuchPathError,
    PromptTooLongError,
    RefusedRequestError,
    ServerError,
    ServerFailedError,
)
from arl.api.events import ServerWorked
from arl.api.kept_ids import KeptIds
from arl.api.routes import Routes
from arl.engine.client.frame_client import FrameClient, Left
from arl.engine.frames import MAX_NAME_BYTES, PATH, Result
from arl.web.client import JsonClient, Reply, encoded
from arl.web.connections import Connections, NotConnectedError

_PROMPT_TOO_LONG = re.compile(r"context length|maximum allowed length|longer than the model", re.IGNORECASE)
_NO_ADAPTER = re.compile(r"lora adapter", re.IGNORECASE)
"""A server that refuses a request for its adapter was started again: this engine names only what it has loaded."""
_MIXTURE = "mixture"
"""The label of weights that are of no version: a server that is left with it is given all of them again."""
_CONNECT_TIMEOUT_S = 30.0


_MAX_LOGPROB = 1e-4
"""Rounding may lift a logprob a little above 0; trajectories refuse more."""


_SETTINGS = (
    "sampling_params",
    "extra_key",
    "lora_path",
    "continued_tokens",
    "return_sampling_mask",
    "return_routed_experts",
    "routed_experts_start_len",
)
"""The part of a request that frames carry besides its tokens and its name."""

_MAX_CACHED_BYTES = 1024

Spawn = Callable[[Coroutine[Any, Any, Any]], asyncio.Task[Any]]

_ENDING_S = 5.0
"""How long a server may take to answer a request that was cancelled, before the connection is cut."""

NONSENSE = (LookupError, TypeError, ValueError, AttributeError, OverflowError)
"""The errors of reading an answer that does not have the expected form."""


logger = logging.getLogger(__name__)


class UnfitServerError(ServerFailedError):
    """An answer of /generate shows that its server must not go on as it is: it is impossible, or an adapter is gone."""


class SharedFaultError(ServerFailedError):
    """A connection ended that carried several calls, and another of them has raised ServerFailedError for it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """The result of one call of /generate."""

    output_ids: list[int]
    output_logprobs: list[float]
    finish: Literal["stop", "length", "abort"]
    text: str
    label: str
    """The label of the newest weights that sampled it."""
    spans: Sequence[tuple[str, int, int]]
    """Labels, and the output tokens start..end (end excluded) of each. Empty for servers too old to send them."""
    cached_tokens: int = 0
    """Prompt tokens that the server found in its cache; 0 if it does not say."""
    server_s: float = 0.0
    """How long the server had it; 0 if it does not say."""
    kept_ids: KeptIds | None = None
    """The ids from which each token was sampled, if the request asked for them: logprobs are over these."""
    experts: np.ndarray | None = None
    """The experts of each token except the last, from the first that was asked for: [tokens, layers, experts per
    token], or these numbers flat."""


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

    def __init__(
        self, connections: Connections, address: str, api_key: str | None = None, spawn: Spawn | None = None
    ) -> None:
        """spawn: starts a task that lasts as long as the client; without it, calls of /generate are HTTP requests."""
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
        self.takes_frames = False
        """It speaks arl.engine.frames; until `greet` has asked, it does not."""
        self.is_embedded = False
        """It is arl's own; until `greet` has asked, it is not."""
        self.most_kept: int | None = None
        """How many kept ids of a token it can list; None if it is SGLang and too old to, or until `greet` has asked."""
        self._spawn = spawn
        self._frames: FrameClient | None = None
        self._opening = asyncio.Lock()

    async def aclose(self) -> None:
        self._spawn = None  # from now on no connection for frames is opened: nobody would close it
        if self._frames is not None:
            await self._frames.aclose()
        await super().aclose()

    async def generate(
        self, payload: dict[str, Any], session_id: str | None = None, left: Left = lambda _: None
    ) -> Answer:
        """session_id: of the requests whose prompts continue one another.

        A caller that is cancelled aborts the request, by `abort`; `left` is called in that case.
        """
        try:
            frames = await self._frame_client() if self.takes_frames else None
        except asyncio.CancelledError:
            left(0)
            raise
        if frames is not None and frames.fits(payload["rid"], len(payload["input_ids"])):
            answer = await self._ask_in_frames(frames, payload, session_id, left)
        else:
            answer = await self._ask_over_http(payload, left)
        try:
            return _answer_of(answer) if isinstance(answer, Result) else _parse_answer(answer.json_object())
        except NONSENSE as error:
            what = f"{self.address} answered /generate with what cannot be trained on ({type(error).__name__}: {error})"
            message = f"{what}; it must be SGLang and return output_token_logprobs"
            raise UnfitServerError(message, num_tokens=_num_tokens(answer)) from error

    async def _ask_over_http(self, payload: dict[str, Any], left: Left) -> Reply:
        """In a task of its own, which outlives a cancelled caller: the server's answer is to be counted."""
        asking, call = self._outcome(payload), None
        with suppress(RuntimeError):  # a TaskGroup that ends takes no more tasks
            call = self._spawn(asking) if self._spawn is not None else None
        try:
            if call is None:
                asking.close()
                return await self.call("POST", "/generate", payload)
            outcome = await asyncio.shield(call)
        except asyncio.CancelledError:
            if call is None:
                left(None)
            else:
                asyncio.get_running_loop().call_later(_ENDING_S, call.cancel)
                call.add_done_callback(lambda call: left(_tokens_left(call)))
            raise
        if isinstance(outcome, ArlError):
            raise outcome
        return outcome

    async def _outcome(self, payload: dict[str, Any]) -> Reply | ArlError:
        try:
            return await self.call("POST", "/generate", payload)
        except ArlError as error:  # in a TaskGroup, a task that raises would end all
            return error
        except asyncio.CancelledError:  # nobody waits any more, or the engine ends
            return ServerFailedError("the call was cut off")

    async def _ask_in_frames(
        self, frames: FrameClient, payload: Mapping[str, Any], session_id: str | None, left: Left
    ) -> Result:
        settings = encoded({name: payload[name] for name in _SETTINGS if name in payload})
        session = (session_id or "").encode(errors="surrogatepass")
        if len(session) > MAX_NAME_BYTES:
            session = b""
        try:
            result = await frames.generate(payload["rid"], payload["input_ids"], settings, session, left)
        except ConnectionError as error:
            failure = self._unreached("/generate", error)
            shared = SharedFaultError(str(failure), num_tokens=failure.num_tokens)
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
                    self._frames = await FrameClient.opened(self._base, self._api_key, _CONNECT_TIMEOUT_S)
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

    async def abort(self, rid: str) -> None:
        await self._post("abort_request", {"rid": rid})

    async def pause(self, mode: PauseMode) -> ServerWorked | None:
        """Returns what it has done so far, if it says: an embedded server does."""
        told = (await self._post("pause_generation", {"mode": mode})).get("work")
        try:
            return msgspec.convert({"server": self.address, **told}, ServerWorked) if told else None
        except (msgspec.ValidationError, TypeError) as error:  # another version of arl; it is for statistics alone
            logger.debug("%s says what it has done in a way that makes no sense: %s", self.address, error)
            return None

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
            "rank_offset": group.rank_offset,
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
        except NONSENSE as error:
            raise ServerFailedError(f"{self.address}/v1/models makes no sense ({error}): {str(cards)[:200]}") from error

    async def model_info(self) -> dict[str, Any]:
        """The description of its model, also while it is paused. Raises ServerError if it is not an SGLang server."""
        info = (await self.call("GET", "/model_info")).json_object()
        if "model_path" not in info:
            raise ServerError(f"{self.address} is not an SGLang server: GET /model_info gave no model_path")
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
            return UnfitServerError(f"{self.address} lost an adapter: {reply.reason}", num_tokens=0)
        if reply.status == 400 and reply.path == "/generate":
            return RefusedRequestError(f"{self.address} refused the request: {reply.reason}")
        return super().error_of(reply)


def _tokens_left(call: asyncio.Task[Reply | ArlError]) -> int | None:
    """How many tokens a call had got whose caller has gone; None if nobody knows."""
    match None if call.cancelled() else call.result():
        case Reply() as reply:
            return _num_tokens(reply)
        case ServerFailedError() as failure:
            return failure.num_tokens
        case refusal:
            return None if refusal is None else 0


def _num_tokens(answer: Reply | Result) -> int | None:
    """How many tokens an answer has, be it of use or not; None if it does not say."""
    if isinstance(answer, Result):
        return len(answer.ids)
    try:
        return int(answer.json_object()["meta_info"]["completion_tokens"])
    except NONSENSE:
        return None


def _parse_answer(body: dict[str, Any]) -> Answer:
    """Raises LookupError, TypeError or ValueError for an impossible answer."""
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
    return _answer(meta, body.get("text") or "", ids, logprobs, meta.get("e2e_latency"), kept_ids, experts)


@lru_cache(maxsize=256)
def _cached_meta(head: bytes) -> dict[str, Any]:
    """The JSON of a result's head: the same for many results. To be read alone."""
    return orjson.loads(head)


def _answer_of(result: Result) -> Answer:
    """Raises as `_answer` does."""
    is_short = len(result.head) <= _MAX_CACHED_BYTES
    meta = _cached_meta(result.head) if is_short else orjson.loads(result.head)
    kept_ids = KeptIds.decode(result.kept_ids) if result.kept_ids else None
    experts = Routes.decode(result.routes).experts if result.routes else None
    text, server_s = meta.get("text") or "", result.microseconds / 1e6
    return _answer(meta, text, result.ids.tolist(), result.logprobs.tolist(), server_s, kept_ids, experts)


def _answer(
    meta: Mapping[str, Any],
    text: str,
    ids: list[int],
    logprobs: list[float],
    server_s: float | None,
    kept_ids: KeptIds | None,
    experts: np.ndarray | None,
) -> Answer:
    """Raises LookupError, TypeError or ValueError for an impossible answer."""
    finish = meta["finish_reason"]["type"]
    if finish not in ("stop", "length", "abort"):
        raise ValueError(f"finish_reason is {finish!r}")
    if set(map(type, ids)) - {int} or min(ids, default=0) < 0:
        raise ValueError(f"token id {next(i for i in ids if type(i) is not int or i < 0)!r}")
    types = set(map(type, logprobs))
    if not (types <= {float, int} and all(map(math.isfinite, logprobs)) and max(logprobs, default=0) <= _MAX_LOGPROB):
        raise ValueError(f"logprob {next(value for value in logprobs if not _is_logprob(value))!r}")
    spans = [(str(span["version"]), span["start"], span["end"]) for span in meta.get("weight_versions") or ()]
    if wrong := [s for s in spans if not (0 <= s[1] <= s[2] and type(s[1]) is type(s[2]) is int)]:
        raise ValueError(f"the span {wrong[0]} of weight_versions")
    if len(logprobs) != len(ids):
        raise ValueError(f"{len(logprobs)} logprobs for {len(ids)} output_ids")
    if kept_ids is not None and not (len(kept_ids) == len(ids) and kept_ids.allows(np.array(ids, np.int32)).all()):
        raise ValueError("the ids that its tokens were sampled among (output_token_sampling_mask) lack a token")
    cached = meta.get("cached_tokens")
    return Answer(
        output_ids=ids,
        output_logprobs=logprobs,
        finish=finish,
        text=text,
        label=str(meta.get("weight_version", "")),
        spans=spans,
        cached_tokens=cached if type(cached) is int and cached > 0 else 0,
        kept_ids=kept_ids,
        experts=experts,
        server_s=server_s if type(server_s) is float and 0 < server_s < math.inf else 0.0,
    )


def _is_logprob(value: Any) -> bool:
    return type(value) in (float, int) and math.isfinite(value) and value <= _MAX_LOGPROB

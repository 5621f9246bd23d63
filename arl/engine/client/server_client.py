"""The calls to one inference server, whatever its kind: the contract of a client, its records, and what clients share.

`SGLangClient` speaks to stock SGLang and to embedded servers, `VLLMClient` to vLLM. The rest of this package knows
servers by this class alone.

A call raises ServerFailedError if the server could not answer; another, or the same one later, may (UnfitServerError:
it must not go on as it is). It raises ServerError if the server refused, and would refuse again (NoSuchPathError: it
has no such path), and PromptTooLongError if the prompt does not fit. Timeouts are the caller's, by asyncio.timeout.

**Images.** Prompts hold a placeholder for each vector of an image. The embedded server takes them so. SGLang and vLLM
take one placeholder for each image, which they expand, and say on request what the prompt has become
(docs/sglang_protocol.md, docs/vllm_protocol.md). They get images as PNG, without loss, of the size to which the model's
image processor scales them. Left to themselves, these servers scale with torchvision, and SGLang decodes JPEG on a GPU.
Both round otherwise than Pillow, so that the model would see another image than in training.
"""

from __future__ import annotations

import asyncio
import json
import math
from abc import abstractmethod
from collections import OrderedDict
from collections.abc import Callable, Coroutine, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar, Literal

import numpy as np
from yarl import URL

from arl.api.engine import MODEL_SIZES, ServedModel, TensorSpec, WeightGroup
from arl.api.errors import NoSuchPathError, RefusedRequestError, ServerError, ServerFailedError
from arl.api.events import ServerWorked
from arl.api.images import Image, PlacedImage
from arl.api.sampling_mask import KeptIds
from arl.api.settings.engines import PauseMode
from arl.api.types import SamplingParams
from arl.data.image_processor import ImageProcessor
from arl.runtime.http.client import Connections, JsonClient
from arl.runtime.http.server import is_loopback

MIXTURE = "mixture"
"""The label of weights that are of no version: a server that is left with it is given all of them again."""

MOST_KEPT = 1024
"""The top_k of a request that needs kept ids and names none, to a server that lists them under a top_k alone."""

NONSENSE = (LookupError, TypeError, ValueError, AttributeError, OverflowError)
"""The errors of reading an answer that does not have the expected form."""

CONNECT_TIMEOUT_S = 30.0
_PROBE_TEXT = "Agent 12345 said:\n\t'déjà vu' <|im_start|>def f(x): return x**2  # 你好"
_MAX_LOGPROB = 1e-4
"""Rounding may lift a logprob a little above 0; trajectories refuse more."""

Spawn = Callable[[Coroutine[Any, Any, Any]], asyncio.Task[Any]]


class UnfitServerError(ServerFailedError):
    """An answer shows that its server must not go on as it is: it is impossible, or an adapter is gone."""


class SharedFaultError(ServerFailedError):
    """A connection ended that carried several calls, and another of them has raised ServerFailedError for it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerateCall:
    """A request for tokens: a prompt, the tokens of its response so far, and how to go on."""

    rid: str
    input_ids: np.ndarray
    """int32: the prompt, and the response so far."""
    num_continued: int
    sampling: SamplingParams
    max_new_tokens: int
    cache_key: str
    adapter: str | None = None
    wants_kept_ids: bool = False
    """The answer must say among which ids each token was sampled."""
    routes_from: int | None = None
    """The first of input_ids whose routes are wanted; None: none are."""
    images: tuple[PlacedImage, ...] = ()
    """What lies at the placeholders among input_ids."""

    def contracted(self, program: str) -> np.ndarray:
        """input_ids with one placeholder for each image. Raises RefusedRequestError for placeholders without one.

        program: the server's, for the message.
        """
        is_left_out = np.zeros(len(self.input_ids), bool)
        for placed in self.images:
            is_left_out[placed.start + 1 : placed.stop] = True
        ids = self.input_ids[~is_left_out]
        placeholder = self.input_ids[self.images[0].start]
        if (num_others := int((ids == placeholder).sum()) - len(self.images)) > 0:
            raise RefusedRequestError(
                f"the prompt has the placeholder of images, {placeholder}, {num_others} times where no image lies, as "
                f"a model can sample it; {program} would take it for an image"
            )
        return ids

    def check_prompt(self, address: str, body: Mapping[str, Any]) -> None:
        """Raise RefusedRequestError unless a server computed the tokens of this call with images, by its answer.

        An embedded server says how many the prompt had, and has checked them.
        """
        told = body.get("prompt_token_ids")
        count = (body.get("meta_info") or {}).get("prompt_tokens") if told is None else len(told)
        wanted = len(self.input_ids)
        if count == wanted and (told is None or np.array_equal(told, self.input_ids)):
            return
        if count is None:
            raise RefusedRequestError(f"{address} does not say which tokens it computed for a prompt with images")
        what = (
            f"{count} tokens where the prompt has {wanted}" if count != wanted else "other tokens than the prompt has"
        )
        raise RefusedRequestError(
            f"{address} computed {what}, with its {len(self.images)} images: its image processor or the settings of "
            "that (min_pixels, max_pixels) are not those in the model's directory here"
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
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

    def __post_init__(self) -> None:
        """Raises ValueError, or another of NONSENSE, for what no server can mean."""
        ids, logprobs = self.output_ids, self.output_logprobs
        if self.finish not in ("stop", "length", "abort"):
            raise ValueError(f"finish_reason is {self.finish!r}")
        if set(map(type, ids)) - {int} or min(ids, default=0) < 0:
            raise ValueError(f"token id {next(i for i in ids if type(i) is not int or i < 0)!r}")
        are_numbers = set(map(type, logprobs)) <= {float, int} and all(map(math.isfinite, logprobs))
        if not are_numbers or max(logprobs, default=0) > _MAX_LOGPROB:
            wrong = [x for x in logprobs if type(x) not in (float, int) or not -math.inf < x <= _MAX_LOGPROB]
            raise ValueError(f"logprob {wrong[0]!r}")
        if wrong := [s for s in self.spans if not (0 <= s[1] <= s[2] and type(s[1]) is type(s[2]) is int)]:
            raise ValueError(f"the span {wrong[0]} of weight_versions")
        if len(logprobs) != len(ids):
            raise ValueError(f"{len(logprobs)} logprobs for {len(ids)} output_ids")
        kept = self.kept_ids
        if kept is not None and not (len(kept) == len(ids) and kept.allows(np.array(ids, np.int32)).all()):
            raise ValueError("the ids that its tokens were sampled among (output_token_sampling_mask) lack a token")


@dataclass(frozen=True, slots=True, kw_only=True)
class Holding:
    """A server's report of the weights that it holds."""

    label: str
    adapters: frozenset[str] = frozenset()


@dataclass(frozen=True, slots=True, kw_only=True)
class Greeting:
    address: str
    label: str
    """The version label of its weights."""
    num_late: int
    """Most tokens of a request that may still be on their way out of the model when a pause in place takes effect."""
    unreached: str | None = None
    """The setting that keeps updates from reaching all of the server, and what to do instead."""
    device: str = ""
    """The device on which it computes: cpu, GPU 0, GPUs 0-3; empty if it does not say."""
    returns_routes: bool = False
    """It can say which experts computed a token."""
    is_exact: bool = False
    """It says that it computes in float32."""
    releases_memory: bool = False
    """It was started so that it can let go of its memory."""
    traits: Mapping[str, Any]
    """Traits that servers of the same model share; absent or None if this server does not report it."""


class ServerClient(JsonClient):
    """The HTTP calls to one server. Borrows the connections."""

    key_hint = "set ARL_SERVER_API_KEY to the key that the server was started with"
    program: ClassVar[str]
    greeting_timeout_s: ClassVar[float] = 10.0
    """The longest that a healthy server takes to describe itself and to sample a first token."""
    meets_by_id = False
    is_embedded = False
    """It is arl's own."""
    routes_flag: ClassVar[str] = "--enable-return-routed-experts"
    memory_flag: ClassVar[str]

    def __init__(
        self, connections: Connections, address: str, api_key: str | None = None, spawn: Spawn | None = None
    ) -> None:
        """spawn: starts a task that lasts as long as the client."""
        super().__init__(
            address,
            api_key=api_key,
            max_concurrent=None,
            timeout_s=None,
            connect_timeout_s=CONNECT_TIMEOUT_S,
            connections=connections,
        )
        self.address = address
        self.num_ranks = 1
        """Until `describe` has asked."""
        self.continues_grammars = False
        """It goes on in the middle of a constrained response; otherwise such a response begins again."""
        self._spawn = spawn

    async def aclose(self) -> None:
        self._spawn = None
        await super().aclose()

    # Tokens

    @abstractmethod
    async def generate(self, call: GenerateCall) -> Answer:
        """A caller that is cancelled aborts the request, by `abort`."""

    @abstractmethod
    async def score(self, token_ids: Sequence[int], adapter: str | None = None) -> list[float]:
        """[T - 1] The logprob of each token except the first, at temperature 1, computed without a cached prefix."""

    @abstractmethod
    async def abort(self, rid: str) -> None: ...

    @abstractmethod
    def check_kept_ids(self, sampling: SamplingParams) -> None:
        """Raise ServerError if the server cannot say among which ids it samples with these settings."""

    # Weights

    @abstractmethod
    async def pause(self, mode: PauseMode) -> ServerWorked | None:
        """Returns what it has done so far, if it says: an embedded server does."""

    @abstractmethod
    async def resume(self) -> None: ...

    @abstractmethod
    async def release_memory(self) -> None:
        """Let a server that was paused in mode retract or abort let go of its weights and caches.

        Until the next load its label is RELEASED, or MIXTURE; so another run, too, knows what to do.
        """

    @abstractmethod
    async def resume_memory(self) -> None:
        """Have it take memory for its weights, which must be loaded next. `resume` brings the rest."""

    # As in WeightServer

    @abstractmethod
    async def load_directory(self, directory: Path, *, version: int, flush_cache: bool) -> None: ...

    @abstractmethod
    async def join_group(self, group: WeightGroup) -> None: ...

    @abstractmethod
    async def leave_group(self, name: str) -> None: ...

    @abstractmethod
    async def begin_update(self) -> None: ...

    @abstractmethod
    async def receive(
        self, specs: Sequence[TensorSpec], group: WeightGroup, *, version: int | None, flush_cache: bool
    ) -> None: ...

    @abstractmethod
    async def end_update(self) -> None: ...

    async def load_adapter(self, name: str, directory: Path) -> None:
        """Load an adapter beside the model, unless it is there already; see WeightServer.load_adapter."""
        if (label := await self.weight_label()).isdecimal() or label == MIXTURE:
            what = f"{self.address} serves weights {label!r}, which another run loaded"
            raise ServerError(f"{what}; adapters need the model that the server was started with: start it again")
        if name not in await self.adapters():
            await self._add_adapter(name, directory)

    async def unload_adapter(self, name: str) -> None:
        """Returns when the requests that name it have ended."""
        if name in await self.adapters():
            await self._remove_adapter(name)

    @abstractmethod
    async def _add_adapter(self, name: str, directory: Path) -> None: ...

    @abstractmethod
    async def _remove_adapter(self, name: str) -> None: ...

    # What it says of itself

    @abstractmethod
    async def describe(self, *, sets_going: bool) -> Greeting:
        """Ask a server what it serves, and note what this client needs to know.

        sets_going: resume a server that a killed run left paused, or without memory, and have it generate. An answer
        that makes no sense raises one of NONSENSE.
        """

    @abstractmethod
    async def check_alive(self) -> None:
        """Returns if it answers, also while it is paused. Raises ServerError if it is a server of another kind."""

    @abstractmethod
    async def check_health(self) -> None:
        """Returns if the server generates: it samples a token, so a paused server does not answer."""

    @abstractmethod
    async def weight_label(self) -> str: ...

    async def adapters(self) -> frozenset[str]:
        cards = (await self.look_up("v1/models")).get("data") or []
        try:
            return frozenset(card["id"] for card in cards if card.get("parent"))
        except NONSENSE as error:
            raise ServerFailedError(f"{self.address}/v1/models makes no sense ({error}): {str(cards)[:200]}") from error

    async def look_up(self, path: str, payload: dict[str, Any] | None = None) -> dict[str, Any]:
        """GET a path that not every server has, or POST the payload to it; {} from a server without it."""
        try:
            return (await self.call("GET" if payload is None else "POST", f"/{path}", payload)).json_object()
        except NoSuchPathError:
            return {}


def spans_of(told: Any) -> list[tuple[str, int, int]]:
    """Answer's spans, as SGLang and vLLM send them."""
    return [(str(span["version"]), span["start"], span["end"]) for span in told or ()]


def scored(address: str, logprobs: list[float], num_tokens: int) -> list[float]:
    """Raises ServerError unless there is one for each token but the first."""
    if len(logprobs) != num_tokens - 1:
        said = f"{len(logprobs)} logprobs for a prompt of {num_tokens} tokens"
        raise ServerError(f"{address} gave {said}; it must give one for each token but the first")
    return logprobs


def count_of(told: Any) -> int:
    return told if type(told) is int and told > 0 else 0


def is_here(address: str) -> bool:
    """Whether a server's address says that it is on this machine."""
    return is_loopback(URL(address).host or "")


async def described(client: ServerClient, model_path: str, context_length: Any) -> dict[str, Any]:
    """Traits that a server of any kind may tell: its tokenizer's work, and its model's shape if both are on this
    machine."""
    shape = dict[str, Any]()
    if is_here(client.address):
        try:
            config = json.loads((Path(model_path) / "config.json").read_bytes())
            text = config.get("text_config") or config
            shape = {name: text.get(name) for name in MODEL_SIZES}
        except (OSError, ValueError, AttributeError):
            pass
    asked = {"prompt": _PROBE_TEXT, "add_special_tokens": False}
    try:
        tokens = (await client.look_up("tokenize", asked)).get("tokens")
    except ServerError:  # it has no tokenizer
        tokens = None
    return {**shape, "context length": context_length, f"tokenization of {_PROBE_TEXT!r}": tokens}


async def greet(client: ServerClient, *, sets_going: bool = True) -> Greeting:
    """Ask a server what it serves; see ServerClient.describe. Raises ServerError with its address."""
    limit_s = client.greeting_timeout_s
    try:
        async with asyncio.timeout(limit_s):
            return await client.describe(sets_going=sets_going)
    except TimeoutError:
        raise ServerFailedError(f"{client.address} gave no answer within {limit_s:g} s") from None
    except NONSENSE as error:
        what = f"{client.address} describes itself in a way that makes no sense ({type(error).__name__}: {error})"
        raise ServerFailedError(what) from error


def expected_of(model: ServedModel) -> Greeting:
    """The greeting that a server of this model would give, as far as the model is known."""
    traits = {"model type": model.model_type, "vocabulary's size": model.vocab_size, **model.shape}
    return Greeting(address=f"{model.name} (the model to serve)", label="", num_late=0, traits=traits)


def difference(greetings: Sequence[Greeting]) -> str | None:
    """A sentence about the first trait in which two servers differ; None if all serve the same model."""
    for name in dict.fromkeys(name for greeting in greetings for name in greeting.traits):
        told = [(trait, one.address) for one in greetings if (trait := one.traits.get(name)) is not None]
        for trait, address in told[1:]:
            first, first_address = told[0]
            if trait != first:
                return f"the {name} is {first} at {first_address}, but {trait} at {address}"
    return None


_MOST_SCALED = 128
"""The episodes of a group show the same images, and each turn those of the turns before it."""
_SCALING = ThreadPoolExecutor(2, "arl-scaling")


class ScaledImages:
    """Belongs to the event loop. model: the directory or name of a model that sees."""

    def __init__(self, model: str) -> None:
        self._model = model
        self._kept: OrderedDict[str, Future[Image]] = OrderedDict()
        """By the digests of the images that were scaled."""

    async def of(self, images: Sequence[PlacedImage]) -> tuple[PlacedImage, ...]:
        """The same images, scaled, on the same placeholders. Raises ImageError, ModelError."""
        scaled = [self._begun(placed.image) for placed in images]
        # Others may wait for the same image, so a caller that is cancelled cancels none.
        files = [await asyncio.shield(asyncio.wrap_future(one)) for one in scaled]
        return tuple(replace(placed, image=file) for placed, file in zip(images, files, strict=True))

    def _begun(self, image: Image) -> Future[Image]:
        scaled = self._kept.pop(image.digest, None)
        if scaled is None or (scaled.done() and scaled.exception() is not None):
            scaled = _SCALING.submit(lambda: self._processor.scaled(image))
        self._kept[image.digest] = scaled
        while len(self._kept) > _MOST_SCALED:
            self._kept.popitem(last=False)
        return scaled

    @cached_property
    def _processor(self) -> ImageProcessor:
        return ImageProcessor(self._model)

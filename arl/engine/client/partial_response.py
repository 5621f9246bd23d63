"""A response in the making: the answers of all its attempts together."""

from __future__ import annotations

import math
from array import array
from collections.abc import Collection, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from arl.api.errors import TrajectoryError
from arl.api.routed_experts import Routes, Routing
from arl.api.sampling_mask import KeptIds
from arl.api.types import ModelRequest, ModelResponse, StopReason
from arl.engine.client.server_client import Answer, GenerateCall


class PartialResponse:
    """Collects one request's answers until `stop_reason` is set, so that they read like one answer.

    After an early end (a pause in abort mode, an abort) the next attempt sends prompt + tokens with the rest of
    max_new_tokens. A stop string may begin before this seam and end after it, but servers search only what they
    generate themselves: while the kept text ends with the beginning of one, the next attempt asks for one token, and
    the text is searched here. (Text that ends inside a character of several tokens matches nothing.) An abort just
    after an end token or a stop string ends the response all the same. In SGLang the noise is a function of seed and
    position, so the same seed continues the same stream.

    Under a grammar a server must know which tokens are the response's own, to go on behind them. An embedded server is
    told; others take all of them for the prompt, so there the response begins again.
    """

    def __init__(self, request: ModelRequest, *, replays_truncation: bool, routing: Routing | None) -> None:
        """replays_truncation: under top_p, top_k or min_p, ask for what each token was sampled among. routing: of a
        mixture of experts, whose routes to ask for."""
        self.sampling = request.sampling
        self.needs_kept_ids = self.is_constrained or (replays_truncation and request.sampling.is_filtered)
        self._routing = routing
        self._routes_from = request.routes_from
        self._images = request.images
        self._experts: list[np.ndarray] = []
        self.prompt_ids = _token_array(request)
        """int32."""
        self._output_ids: list[int] = []
        self._logprobs: list[float] = []
        self._versions: list[int] = []
        self._kept_ids: list[KeptIds | int] = []
        self._asked = request.sampling.max_new_tokens
        self.may_cut = request.sampling.seed is None
        """It was not cut before, and another server may continue it."""
        self._tail = ""  # the end of the text so far, long enough to hold a stop string
        self.stop_reason: StopReason | None = None
        self.server = ""
        self.queued_s = 0.0
        self.sends = 0
        self.cached_tokens: int | None = None
        self.server_s = 0.0

    @property
    def num_tokens(self) -> int:
        return len(self._output_ids)

    @property
    def is_constrained(self) -> bool:
        return self.sampling.grammar is not None

    def call(self, rid: str, cache_key: str, adapter: str | None = None, *, continues_grammars: bool) -> GenerateCall:
        """The next call. Prefixes are shared among calls of one `cache_key` alone.

        continues_grammars: whether the server goes on in the middle of a constrained response.
        """
        if self.is_constrained and not continues_grammars:
            self._output_ids, self._logprobs, self._versions, self._kept_ids, self._tail = [], [], [], [], ""
            self._experts = []
        budget = self.sampling.max_new_tokens - self.num_tokens
        if any(self._tail.endswith(stop[:n]) for stop in self.sampling.stop for n in range(1, len(stop))):
            budget = 1
        self._asked = budget
        said = np.array(self._output_ids, dtype=np.int32)
        return GenerateCall(
            rid=rid,
            input_ids=np.concatenate([self.prompt_ids, said]) if self._output_ids else self.prompt_ids,
            num_continued=self.num_tokens,
            sampling=self.sampling,
            max_new_tokens=budget,
            cache_key=cache_key,
            adapter=adapter,
            wants_kept_ids=self.needs_kept_ids,
            routes_from=None if self._routing is None else self._num_routed,
            images=self._images,
        )

    @property
    def _num_routed(self) -> int:
        """How many first tokens of prompt and output have routes that need not be asked for."""
        return self._routes_from + sum(map(len, self._experts))

    def flaw(self, answer: Answer, vocab_size: int | None) -> str | None:
        """Describes what is impossible in this answer to the last call; None if nothing is. vocab_size: the
        model's."""
        if len(answer.output_ids) > self._asked:
            return f"answered with {len(answer.output_ids)} tokens, but was asked for at most {self._asked}"
        if vocab_size is not None and max(answer.output_ids, default=0) >= vocab_size:
            return f"sampled token id {max(answer.output_ids)}, but the model has {vocab_size} tokens"
        if self.needs_kept_ids and answer.output_ids and answer.kept_ids is None:
            under = "a grammar" if self.is_constrained else "top_p, top_k or min_p"
            without = "" if self.is_constrained else "; engine.replay_truncation=false does without"
            return f"sampled under {under}, and does not say among which ids (output_token_sampling_mask){without}"
        return None if self._routing is None else self._route_flaw(self._routing, answer)

    def _route_flaw(self, routing: Routing, answer: Answer) -> str | None:
        if not answer.output_ids:  # aborted within the prompt, of which it may have computed a part
            return None
        if answer.experts is None:
            is_cut = answer.finish == "abort"  # while it waited, without the routes of what it had computed before
            return None if is_cut else "does not say which experts it used; engine.replay_routing=false does without"
        shape = self._shape_of_routes(routing, answer)
        flat = answer.experts.ndim == 1
        if answer.experts.size != math.prod(shape) if flat else answer.experts.shape != shape:
            return f"returned routes of shape {answer.experts.shape}, which are not those of {list(shape)}"
        if answer.experts.size and not 0 <= answer.experts.min() <= answer.experts.max() < routing.num_experts:
            return f"routed a token to expert {answer.experts.max()}, but a layer has {routing.num_experts}"
        return None

    def _shape_of_routes(self, routing: Routing, answer: Answer) -> tuple[int, int, int]:
        computed = len(self.prompt_ids) + self.num_tokens + len(answer.output_ids) - 1
        return max(computed - self._num_routed, 0), routing.num_layers, routing.experts_per_token

    def extend(self, answer: Answer, versions: Sequence[int], eos_token_ids: Collection[int]) -> None:
        """Add an answer's tokens and versions; decide whether it was the last. eos_token_ids: the model's own."""
        if self._routing is not None and answer.output_ids:
            if answer.experts is None:  # an abort lost them: its tokens are sampled again
                answer, versions = replace(answer, output_ids=[], output_logprobs=[], text="", kept_ids=None), []
            else:
                experts = answer.experts.reshape(self._shape_of_routes(self._routing, answer))
                self._experts.append(experts.astype(self._routing.dtype, copy=False))
        if self.cached_tokens is None:
            self.cached_tokens = answer.cached_tokens
        self.server_s += answer.server_s
        self._output_ids += answer.output_ids
        self._logprobs += answer.output_logprobs
        self._versions += versions
        self._kept_ids.append(len(answer.output_ids) if answer.kept_ids is None else answer.kept_ids)
        self.stop_reason = self._judge(answer, eos_token_ids)

    def response(self) -> ModelResponse:
        """The finished response. Only valid once stop_reason is set."""
        if self.stop_reason is None:
            raise RuntimeError("the response is not finished")
        routes = [Routes.of(experts) for experts in self._experts]
        return ModelResponse(
            output_ids=tuple(self._output_ids),
            output_logprobs=tuple(self._logprobs),
            output_versions=tuple(self._versions),
            stop_reason=self.stop_reason,
            temperature=self.sampling.logprob_temperature,
            kept_ids=KeptIds.joined(self._kept_ids),
            routes=Routes.joined([self._routes_from, *routes, 1]) if routes else None,
            server=self.server,
            queued_s=self.queued_s,
            sends=self.sends,
            cached_tokens=self.cached_tokens or 0,
            server_s=self.server_s,
        )

    def _judge(self, answer: Answer, eos_token_ids: Collection[int]) -> StopReason | None:
        sampling = self.sampling
        if sampling.stop:
            text = self._tail + answer.text
            self._tail = text[-max(map(len, sampling.stop)) :]
            if any(stop in text for stop in sampling.stop):
                return "stop"
        # Also of an answer cut for length: SGLang looks at the budget first, and a seam may have asked for one token.
        ends = () if sampling.ignore_eos else (*sampling.stop_token_ids, *eos_token_ids)
        if answer.finish == "stop" or (answer.output_ids and answer.output_ids[-1] in ends):
            return "stop"
        # A server that stops for length before the budget it was given has reached the end of its context.
        is_full = answer.finish == "length" and len(answer.output_ids) < self._asked
        return "length" if is_full or self.num_tokens >= sampling.max_new_tokens else None


def _token_array(request: ModelRequest) -> np.ndarray:
    """The prompt as int32: a copy, unless it is a read-only int32 array. Raises TrajectoryError for other numbers."""
    ids: Any = request.input_ids
    try:
        if not isinstance(ids, np.ndarray):
            return np.frombuffer(array("i", ids), dtype=np.int32)
        if ids.ndim == 1 and ids.dtype == np.int32:
            return ids.copy() if ids.flags.writeable else np.ascontiguousarray(ids)
        return np.frombuffer(array("i", ids.tolist()), dtype=np.int32)
    except (TypeError, OverflowError):
        places = ((t, i) for t, i in enumerate(ids) if not hasattr(i, "__index__") or not 0 <= i < 1 << 31)
        position, value = next(places, (0, ids))
        what = f"request {request.rid} has {value!r:.40} at position {position} of input_ids"
        raise TrajectoryError(f"{what}; a token id is an integer from 0 to {(1 << 31) - 1}") from None

"""One simulated server: continuous batching, without a step for each token.

All running requests get one token in each iteration, so the server counts iterations, and a heap holds the iteration in
which each request ends. As long as no request joins or leaves, an iteration takes longer than the one before it by a
constant (the context grows by n tokens), so the time of k iterations is a formula, and so is its inverse. What arrives
in the middle of an iteration joins at its end. Work for a request: the logarithm of their number.

The server knows no event loop: its caller calls `advance` at `next_change`. Times are seconds of any clock.
`tests/plan/test_batching.py` compares it with a server that computes every token.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import deque
from heapq import heappop, heappush
from math import inf, sqrt
from typing import Any

from arl.plan.costs import DecodeCosts, PrefillCosts

Spans = list[tuple[int, int]]
"""(version, tokens) of an answer, in order."""


class ServerRequest:
    """A request on its way through one server. owner: whatever its caller wants to find there."""

    __slots__ = (
        "end",
        "first_version",
        "has_left",
        "new_tokens",
        "number",
        "owner",
        "prompt_tokens",
        "size",
        "spans",
        "unread",
    )

    def __init__(self, prompt_tokens: int, cached_tokens: int, new_tokens: int, owner: Any = None) -> None:
        self.prompt_tokens = prompt_tokens
        self.new_tokens = new_tokens
        """Tokens that it is to get after this prompt."""
        self.size = prompt_tokens + new_tokens
        """Tokens whose keys and values it will need at its end."""
        self.owner = owner
        self.spans: Spans = []
        """What it has got: complete once it has ended, or was sent back."""
        self.number = 0
        self.end: int | None = None
        """The iteration that samples its last token; None before its first token."""
        self.first_version = 0
        self.has_left = False
        self.find(cached_tokens)

    def find(self, cached_tokens: int) -> None:
        """So many tokens of the prompt are computed where it is sent to."""
        self.unread = max(self.prompt_tokens - cached_tokens, 1)
        """Prompt tokens that are yet to be read; at least the last one has to be."""

    def num_got(self, iteration: int) -> int:
        """Tokens since its prompt, when the server has ended this iteration."""
        return 0 if self.end is None else self.new_tokens - (self.end - iteration)


class SimulatedServer:
    """See the module. `next_change`: when `advance` is due; infinite while it is idle or paused."""

    def __init__(self, decode: DecodeCosts, prefill: PrefillCosts, version: int = 0) -> None:
        self._base_s = [0.0, *(decode.base_s(n) for n in range(1, decode.max_running_requests + 1))]
        self._per_context_token_s = decode.per_context_token_s
        self._max_running = decode.max_running_requests
        self._kv_tokens = inf if decode.kv_tokens is None else decode.kv_tokens
        self._prefill = prefill
        self._version = version
        self._changes: list[tuple[int, int]] = [(-1, version)]
        """(iteration, version): tokens of later iterations are of this version."""
        self._waiting: deque[ServerRequest] = deque()
        self._reading: deque[ServerRequest] = deque()
        """Admitted requests whose prompts are being read."""
        self._ends: list[tuple[int, int, ServerRequest]] = []
        """A heap of the decoding requests: (end, number, request). Those that have left stay until they come up."""
        self._leaving: list[ServerRequest] = []
        self._numbers = 0
        self._iteration = 0
        """Decoding iterations that have ended before this stretch."""
        self._num_decoding = 0
        self._context = 0
        """Tokens of the decoding requests, before this stretch."""
        self._reserved = 0
        """Tokens that the admitted requests will have at their ends."""
        self._is_pausing = False
        self.is_paused = False
        # The stretch: `_length` iterations since `_began`; the first takes `_first_s`, each further one `_more_s` more.
        self._began = 0.0
        self._length = 0
        self._first_s = self._more_s = 0.0
        self._decodes = False
        self._read_tokens = 0
        """Prompt tokens that each iteration of the stretch reads."""
        self.next_change = inf
        # What it has done, for statistics.
        self.num_iterations = 0
        self.tokens_decoded = 0
        self.tokens_read = 0
        self.most_running = 0
        self.most_context = 0

    @property
    def num_requests(self) -> int:
        return len(self._waiting) + len(self._reading) + self._num_decoding

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    # What the client does

    def arrive(self, request: ServerRequest, now: float) -> None:
        self._numbers += 1
        request.number = self._numbers
        self._waiting.append(request)
        if self.is_paused:
            return
        if not self._length:
            self._plan(now)
        elif len(self._waiting) == 1 and self._has_room(request):
            self._cut(now)

    def leave(self, request: ServerRequest, now: float) -> None:
        """Abort a request that has not ended. It takes up its place until the iteration has ended."""
        request.has_left = True
        self._leaving.append(request)
        if self._length:
            self._cut(now)
        else:
            self._let_go()

    def pause(self, now: float) -> None:
        """Stop at the end of the iteration: `is_paused` from then on."""
        self._is_pausing = True
        if self._length:
            self._cut(now)
        else:
            self._plan(now)

    def resume(self, now: float, version: int) -> None:
        """Go on, with the weights of this version."""
        if version != self._version:
            self._version = version
            self._changes.append((self._iteration, version))
        self._is_pausing = self.is_paused = False
        self._plan(now)

    def retract(self) -> None:
        """While paused: all requests lose their keys and values, and queue again with what they have got."""
        self._let_go()
        for request in self._admitted()[::-1]:
            self._to_prompt(request)
            self._waiting.appendleft(request)
        for request in self._waiting:
            request.unread = request.prompt_tokens
        self._forget_admitted()

    def evict(self) -> list[ServerRequest]:
        """While paused: send all requests back, with what they have got, in the order of their arrival."""
        self._let_go()
        sent_back = self._admitted()
        for request in sent_back:
            self._to_prompt(request)
        sent_back += self._waiting
        self._waiting.clear()
        self._forget_admitted()
        return sent_back

    # Time

    def advance(self) -> list[ServerRequest]:
        """Bring the server to `next_change`; returns the requests that end there."""
        length, now = self._length, self.next_change
        self._length = 0
        self.num_iterations += length
        if self._decodes:
            self._iteration += length
            self._context += self._num_decoding * length
            self.tokens_decoded += self._num_decoding * length
        if self._read_tokens:
            self._read(self._read_tokens * length)
        if self._context > self.most_context:
            self.most_context = self._context
        ended = self._pop_ended()
        self._plan(now)
        return ended

    def _read(self, num_tokens: int) -> None:
        """Read so many prompt tokens. Requests whose prompts end with them get their first tokens."""
        reading = self._reading
        self.tokens_read += num_tokens
        while num_tokens:
            request = reading[0]
            if request.unread > num_tokens:
                request.unread -= num_tokens
                break
            num_tokens -= request.unread
            request.unread = 0
            reading.popleft()
            self.tokens_decoded += 1
            request.end, request.first_version = self._iteration + request.new_tokens - 1, self._version
            self._num_decoding += 1
            self._context += request.prompt_tokens + 1
            heappush(self._ends, (request.end, request.number, request))

    def _pop_ended(self) -> list[ServerRequest]:
        ended: list[ServerRequest] = []
        ends = self._ends
        while ends and (ends[0][0] <= self._iteration or ends[0][2].has_left):
            request = heappop(ends)[2]
            if request.has_left:
                continue  # it is counted until the iteration's end, in `_let_go`
            self._num_decoding -= 1
            self._context -= request.size
            self._reserved -= request.size
            self._note_spans(request)
            ended.append(request)
        return ended

    def _plan(self, now: float) -> None:
        """Begin the next stretch, at the end of an iteration."""
        if self._leaving:
            self._let_go()
        self._began, self._length, self.next_change = now, 0, inf
        if self._is_pausing:
            self.is_paused = True
            return
        while self._waiting and self._has_room(self._waiting[0]):
            request = self._waiting.popleft()
            self._reserved += request.size
            self._reading.append(request)
        n = self._num_decoding
        if n + len(self._reading) > self.most_running:
            self.most_running = n + len(self._reading)
        if self._reading:
            self._plan_reading()
        elif n:
            self._decodes, self._read_tokens = True, 0
            self._length = self._ends[0][0] - self._iteration
            self._first_s = self._base_s[n] + self._per_context_token_s * self._context
            self._more_s = self._per_context_token_s * n
        if self._length:
            self.next_change = now + self._seconds(self._length)

    def _plan_reading(self) -> None:
        """A stretch of full chunks of a long prompt, or one iteration that reads one or more prompts to their ends."""
        prefill, n = self._prefill, self._num_decoding
        chunk, head, num_read = prefill.chunk_tokens, self._reading[0].unread, 0
        self._decodes = n > 0 and not prefill.stops_decoding
        if head > chunk:
            self._length, self._read_tokens = -(-head // chunk) - 1, chunk
            if self._decodes:
                self._length = min(self._length, self._ends[0][0] - self._iteration)
        else:
            self._length, self._read_tokens = 1, 0
            for request in self._reading:
                if self._read_tokens + request.unread > chunk:
                    self._read_tokens = chunk
                    break
                self._read_tokens += request.unread
                num_read += 1
        self._first_s = prefill.base_s + prefill.per_token_s * self._read_tokens + prefill.per_request_s * num_read
        self._more_s = 0.0
        if self._decodes:
            self._first_s += self._base_s[n] + self._per_context_token_s * self._context
            self._more_s = self._per_context_token_s * n

    def _seconds(self, num_iterations: int) -> float:
        """The seconds of the first iterations of the stretch."""
        return num_iterations * (self._first_s + self._more_s * (num_iterations - 1) / 2)

    def _cut(self, now: float) -> None:
        """Let the stretch end with the iteration that runs now."""
        if self._length == 1 or self._first_s <= 0:
            return
        elapsed, more = max(now - self._began, 0.0), self._more_s
        h = self._first_s - more / 2
        ended = int(2 * elapsed / (h + sqrt(h * h + 2 * more * elapsed)))
        while ended and self._seconds(ended) > elapsed:
            ended -= 1
        while self._seconds(ended + 1) <= elapsed:
            ended += 1
        if ended + 1 < self._length:
            self._length = ended + 1
            self.next_change = self._began + self._seconds(ended + 1)

    def _has_room(self, request: ServerRequest) -> bool:
        running = self._num_decoding + len(self._reading)
        return running < self._max_running and (
            self._reserved + request.size <= self._kv_tokens or not running  # what never fits runs alone
        )

    # Requests that leave before their ends

    def _let_go(self) -> None:
        for request in self._leaving:
            if request.end is not None:
                self._num_decoding -= 1
                self._context -= request.prompt_tokens + request.num_got(self._iteration)
            elif request in self._reading:
                self._reading.remove(request)
            else:
                self._waiting.remove(request)
                continue
            self._reserved -= request.size
        self._leaving.clear()
        while self._ends and self._ends[0][2].has_left:
            heappop(self._ends)

    def _admitted(self) -> list[ServerRequest]:
        decoding = [request for _, _, request in self._ends if not request.has_left]
        return sorted([*decoding, *self._reading], key=lambda request: request.number)

    def _forget_admitted(self) -> None:
        self._ends.clear()
        self._reading.clear()
        self._num_decoding = self._context = self._reserved = 0

    def _to_prompt(self, request: ServerRequest) -> None:
        """What it has got becomes prompt."""
        got = request.num_got(self._iteration)
        if got:
            self._note_spans(request)
        request.prompt_tokens += got
        request.new_tokens -= got
        request.end = None

    def _note_spans(self, request: ServerRequest) -> None:
        """Add the versions of the tokens since its prompt, up to this iteration."""
        assert request.end is not None
        place = request.end - request.new_tokens + 1  # the iteration after which it had its first token
        _add_span(request.spans, request.first_version, 1)
        i = bisect_right(self._changes, (place, inf)) - 1
        for j in range(i, len(self._changes)):
            last = self._changes[j + 1][0] if j + 1 < len(self._changes) else self._iteration
            last = min(last, self._iteration, request.end)
            if last > place:
                _add_span(request.spans, self._changes[j][1], last - place)
                place = last


def _add_span(spans: Spans, version: int, num_tokens: int) -> None:
    if spans and spans[-1][0] == version:
        num_tokens += spans.pop()[1]
    spans.append((version, num_tokens))

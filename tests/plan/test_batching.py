"""A simulated server gives the same times, tokens and versions as one that computes every token."""

import random
from itertools import pairwise
from math import inf
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from token_server import TokenServer

from arl.plan.batching import ServerRequest, SimulatedServer, Spans
from arl.plan.costs import DecodeCosts, PrefillCosts

DECODE = DecodeCosts(points=((1, 0.010), (4, 0.0113), (16, 0.0231)), per_context_token_s=1.7e-6, max_running_requests=6)
PREFILL = PrefillCosts(base_s=0.0031, per_token_s=1.3e-5, chunk_tokens=100)


def spans_of(versions: list[int]) -> Spans:
    spans: Spans = []
    for version in versions:
        before = spans.pop()[1] if spans and spans[-1][0] == version else 0
        spans.append((version, before + 1))
    return spans


Ended = dict[int, tuple[float, Spans]]


class Drive:
    """Random arrivals, departures and weight updates, played to a server. `ended`: by the request's name."""

    def __init__(self, server: Any, seed: int, mode: str) -> None:
        self.server, self.mode, self.draw = server, mode, random.Random(seed)
        self.ended: Ended = {}
        self.sent_back: dict[int, tuple[int, Spans]] = {}
        self.left: set[int] = set()
        self.version = 0

    def run(self, num_actions: int) -> None:
        draw, now = self.draw, 0.0
        for name in range(num_actions):
            now += draw.expovariate(1 / draw.choice([0.001, 0.05, 1.0]))
            self.pass_until(now)
            kind = draw.random()
            new, prompt = draw.randint(1, 80), draw.randint(1, 250)
            request = ServerRequest(prompt, draw.randint(0, prompt), new, owner=name)
            leaver, length = draw.random(), draw.choice([0.0, 0.004, 0.3])
            if kind < 0.8:
                self.server.arrive(request, now)
                self.requests[name] = request
            elif kind < 0.9:
                there = [r for n, r in self.requests.items() if n not in self.ended and n not in self.sent_back]
                there = [r for r in there if r.owner not in self.left]
                if there:
                    gone = there[int(leaver * len(there))]
                    self.left.add(gone.owner)
                    self.server.leave(gone, now)
            else:
                now = self.update(now, length)
        self.pass_until(inf)

    @property
    def requests(self) -> dict[int, ServerRequest]:
        return self.__dict__.setdefault("_requests", {})

    def update(self, now: float, length: float) -> float:
        self.server.pause(now)
        while not self.server.is_paused:
            now = self.server.next_change
            self.advance()
        if self.mode == "retract":
            self.server.retract()
        if self.mode == "abort":
            for sent in self.server.evict():
                request, versions = sent if isinstance(sent, tuple) else (sent, None)
                spans = request.spans if versions is None else spans_of(versions)
                self.sent_back[request.owner] = sum(n for _, n in spans), spans
        self.version += 1
        self.server.resume(now + length, self.version)
        return now + length

    def pass_until(self, now: float) -> None:
        while self.server.next_change <= now and self.server.next_change != inf:
            self.advance()

    def advance(self) -> None:
        at = self.server.next_change
        for one in self.server.advance():
            request, versions = one if isinstance(one, tuple) else (one, None)
            self.ended[request.owner] = at, request.spans if versions is None else spans_of(versions)


@settings(max_examples=80)
@given(
    seed=st.integers(0, 2**32),
    mode=st.sampled_from(["in_place", "retract", "abort"]),
    stops_decoding=st.booleans(),
    kv_tokens=st.sampled_from([None, 300, 1200]),
)
def test_it_gives_what_a_server_gives_that_computes_each_token(
    seed: int, mode: str, stops_decoding: bool, kv_tokens: int | None
) -> None:
    costs = {"points": DECODE.points, "per_context_token_s": 1.7e-6, "max_running_requests": 6}
    decode = DecodeCosts(**costs, kv_tokens=kv_tokens)
    prefill = PrefillCosts(
        base_s=0.0031, per_token_s=1.3e-5, per_request_s=7e-4, chunk_tokens=100, stops_decoding=stops_decoding
    )
    fast = Drive(SimulatedServer(decode, prefill), seed, mode)
    slow = Drive(TokenServer(decode, prefill), seed, mode)
    fast.run(60)
    slow.run(60)
    assert fast.ended.keys() == slow.ended.keys()
    assert len(fast.ended) + len(fast.sent_back) + len(fast.left) == len(fast.requests)
    for name, (at, spans) in slow.ended.items():
        assert fast.ended[name] == (pytest.approx(at, rel=1e-9), spans)
    assert fast.sent_back == slow.sent_back
    assert fast.server.num_requests == 0
    assert fast.server._context == fast.server._reserved == 0


def test_every_token_that_is_asked_for_comes_once() -> None:
    server = SimulatedServer(DECODE, PREFILL)
    drive = Drive(server, seed=7, mode="in_place")
    drive.run(200)
    for name, (_, spans) in drive.ended.items():
        assert sum(n for _, n in spans) == drive.requests[name].new_tokens
        assert all(a < b for (a, _), (b, _) in pairwise(spans))
    assert max(len(spans) for _, spans in drive.ended.values()) > 1


def test_an_idle_server_waits_for_nothing_and_computes_nothing() -> None:
    server = SimulatedServer(DECODE, PREFILL)
    assert server.next_change == inf
    server.pause(5.0)
    assert server.is_paused
    server.arrive(ServerRequest(10, 0, 1), 6.0)
    assert server.next_change == inf
    server.resume(8.0, 1)
    assert server.next_change == pytest.approx(8.0 + 0.0031 + 10 * 1.3e-5)
    (ended,) = server.advance()
    assert ended.spans == [(1, 1)]
    assert server.next_change == inf


def test_a_request_that_is_alone_takes_the_sum_of_its_iterations() -> None:
    server = SimulatedServer(DECODE, PREFILL)
    server.arrive(ServerRequest(250, 30, 10), 1.0)
    end, done = 0.0, list[ServerRequest]()
    while server.next_change != inf:
        end, done = server.next_change, server.advance()
    reading = 3 * 0.0031 + 220 * 1.3e-5
    decoding = sum(DECODE.iteration_s(1, 251 + i) for i in range(9))
    assert len(done) == 1
    assert end == pytest.approx(1.0 + reading + decoding)

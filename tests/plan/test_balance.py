"""Simulated requests go to the servers that the real client's line would choose."""

import asyncio
import random
from typing import Any, cast

import pytest
from hypothesis import given
from hypothesis import strategies as st

from arl.engine.client.line import Line
from arl.engine.client.server_pool import Server, ServerPool
from arl.engine.client.sglang_client import SGLangClient
from arl.plan.balance import Balance
from arl.plan.virtual_time import run_in_virtual_time


class Both:
    """A real line and a balance, which are told the same."""

    def __init__(self, num_servers: int) -> None:
        self.pool = ServerPool(version=0)
        clients = [SGLangClient(cast(Any, None), f"http://127.0.0.1:{i}") for i in range(num_servers)]
        self.servers = [self.pool.join(client) for client in clients]
        for server in self.servers:
            self.pool.admit(server)
        self.line = Line(self.pool)
        self.balance = Balance(num_servers)
        self.running: list[tuple[Server, Any]] = []
        self.choices: list[tuple[int | None, int | None]] = []

    def ask(self, session: str) -> None:
        real = self.line._choose(session, None)
        simulated = self.balance.choose(session)
        self.choices.append((None if real is None else self.servers.index(real), simulated and simulated[0]))
        if real is not None and simulated is not None:
            self.running.append((real, self.pool.begin(real, "r", asyncio.timeout_at(None))))
            self.balance.begin(simulated[0])

    def end(self, index: int) -> None:
        server, attempt = self.running.pop(index)
        self.pool.end(server, attempt)
        self.balance.end(self.servers.index(server))

    def pause(self, numbers: list[int], *, together: bool) -> None:
        if together:
            self.pool.expect(self.servers[i] for i in numbers)
        for i in numbers:
            self.pool.pause(self.servers[i])
            self.balance.pause(i, together=together)

    def load_and_resume(self, number: int, version: int) -> None:
        self.pool.begin_load(self.servers[number])
        self.pool.end_load(self.servers[number], version)
        self.pool.resume(self.servers[number])
        self.balance.resume(number, has_new_weights=True)


@given(seed=st.integers(0, 2**32), num_servers=st.integers(1, 5), order=st.sampled_from(["all", "rolling"]))
def test_each_request_goes_where_the_line_sends_it(seed: int, num_servers: int, order: str) -> None:
    async def main() -> list[tuple[int | None, int | None]]:
        both, draw = Both(num_servers), random.Random(seed)
        paused: list[int] = []
        for version in range(1, 150):
            kind = draw.random()
            if kind < 0.6:
                both.ask(f"session {draw.randrange(12)}")
            elif kind < 0.85 and both.running:
                both.end(draw.randrange(len(both.running)))
            elif paused:
                both.load_and_resume(paused.pop(0), version)
            elif order == "all":
                paused = list(range(num_servers))
                both.pause(paused, together=True)
            else:
                paused = [draw.randrange(num_servers)]
                both.pause(paused, together=False)
        return both.choices

    choices = run_in_virtual_time(main())
    assert len(choices) > 20
    assert [simulated for _, simulated in choices] == [real for real, _ in choices]


def test_a_session_finds_its_prefix_until_its_server_gets_new_weights() -> None:
    balance = Balance(2)
    assert balance.choose("a") == (0, False)
    assert balance.choose("a") == (0, True)
    balance.pause(0, together=False)
    assert balance.choose("a") == (1, False)
    balance.resume(0, has_new_weights=True)
    assert balance.choose("a") == (1, True)
    balance.pause(1, together=False)
    balance.resume(1, has_new_weights=True)
    assert balance.choose("a") == (0, False)


def test_no_server_is_chosen_while_none_serves() -> None:
    balance = Balance(1)
    balance.pause(0, together=True)
    assert balance.choose("a") is None
    with pytest.raises(IndexError):
        balance.begin(1)

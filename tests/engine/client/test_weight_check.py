"""Which servers are compared with the trainer, when, and how far they may be from it."""

from collections.abc import Sequence
from typing import Any, cast

import numpy as np
import pytest

from arl.api.engine import WeightProbe
from arl.api.errors import ServerError, ServerFailedError
from arl.engine.client.health import WeightCheck
from arl.engine.client.server_client import Greeting
from arl.engine.client.server_pool import ServerPool
from arl.engine.client.sglang_client import SGLangClient


class Scored(SGLangClient):
    """Its logprobs are off by `gap`."""

    def __init__(self, address: str) -> None:
        super().__init__(cast(Any, None), address)
        self.gap, self.num_asked, self.is_silent = 1e-6, 0, False

    async def score(self, token_ids: Sequence[int], adapter: str | None = None) -> list[float]:
        self.num_asked += 1
        if self.is_silent:
            raise ServerFailedError("it gave no answer")
        return [-1.0 - self.gap] * (len(token_ids) - 1)


class Checked:
    """Servers that take each version, and are checked as a run would check them."""

    def __init__(self, num_servers: int = 1, *, is_exact: bool = True) -> None:
        self.pool = ServerPool(0)
        self.clients = [Scored(f"http://127.0.0.1:{i}") for i in range(num_servers)]
        for client in self.clients:
            self.greet(self.pool.join(client), is_exact)
        self.check, self.is_exact, self.version = WeightCheck(self.pool), is_exact, 0

    def greet(self, server: Any, is_exact: bool = True) -> None:
        greeting = Greeting(address=server.address, label="", num_late=0, is_exact=is_exact, traits={})
        server.greeting = greeting
        self.pool.admit(server)

    async def step(self) -> bool:
        """Returns whether a probe was wanted."""
        self.version += 1
        for server in self.pool.servers:
            self.pool.pause(server)
            self.pool.begin_load(server)
            self.pool.end_load(server, self.version)
            self.pool.resume(server)
        if not self.check.is_due(self.version):
            return False
        logprobs = np.full(7, -1.0)
        probe = WeightProbe(version=self.version, token_ids=(1,) * 8, logprobs=logprobs, is_exact=self.is_exact)
        await self.check.run(probe)
        return True


async def test_a_server_is_compared_after_its_first_load_and_at_doubling_distances() -> None:
    run = Checked()
    assert [version for version in range(1, 40) if await run.step()] == [1, 2, 4, 8, 16, 32]
    assert run.clients[0].num_asked == 6


async def test_a_server_that_was_started_again_is_compared_again() -> None:
    run = Checked(2)
    for _ in range(5):
        await run.step()
    before = [client.num_asked for client in run.clients]
    run.greet(run.pool.servers[1])
    assert await run.step()
    assert [client.num_asked - n for client, n in zip(run.clients, before, strict=True)] == [0, 1]


@pytest.mark.parametrize(("is_exact", "gap", "passes"), [
    (True, 0.01, True), (True, 0.03, False), (False, 0.03, True), (False, 0.6, False), (False, float("nan"), False),
])  # fmt: skip
async def test_the_first_comparison_allows_for_rounding_alone(is_exact: bool, gap: float, passes: bool) -> None:
    run = Checked(is_exact=is_exact)
    run.clients[0].gap = gap
    if passes:
        assert await run.step()
    else:
        with pytest.raises(ServerError, match="does not compute with the weights of version 1"):
            await run.step()


async def test_a_difference_that_grows_with_training_is_found() -> None:
    """A mixture is no farther off than training has moved: hardly, at first."""
    run = Checked(is_exact=False)
    run.clients[0].gap = 0.001
    await run.step()
    await run.step()
    run.clients[0].gap = 0.0049
    await run.step()
    await run.step()
    run.clients[0].gap = 0.0051
    for _ in range(3):
        await run.step()
    with pytest.raises(ServerError, match="version 8"):
        await run.step()


async def test_a_server_that_does_not_answer_is_asked_at_the_next_version() -> None:
    run = Checked()
    run.clients[0].is_silent = True
    assert await run.step()
    run.clients[0].is_silent = False
    assert await run.step()
    assert run.clients[0].num_asked == 2

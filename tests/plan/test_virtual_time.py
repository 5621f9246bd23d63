"""The event loop whose clock jumps: when and in which context callbacks run, and what ends it."""

import asyncio
import math
import os
import random
import signal
from contextvars import Context, ContextVar

import pytest

from arl.plan.virtual_time import DeadlockError, run_in_virtual_time, virtual_loop

NAME: ContextVar[str] = ContextVar("NAME", default="nobody")


def test_callbacks_run_when_they_are_due_in_the_order_of_asking_and_those_cancelled_do_not() -> None:
    async def main() -> list[tuple[str, float]]:
        loop, said = virtual_loop(), list[tuple[str, float]]()
        loop.call_later(2.0, lambda: said.append(("later", loop.time())))
        loop.do_at(1.0, lambda: said.append(("first", loop.time())))
        loop.call_at(1.0, lambda: said.append(("second", loop.time())))
        loop.call_at(1.5, lambda: said.append(("never", loop.time()))).cancel()
        loop.call_soon(lambda: said.append(("never", loop.time()))).cancel()
        await loop.until(3.0)
        return said

    assert run_in_virtual_time(main()) == [("first", 1.0), ("second", 1.0), ("later", 2.0)]


@pytest.mark.parametrize("tick_s", [0.0, 0.3])
def test_timers_go_off_by_their_time_and_then_by_their_number_however_far_they_are(tick_s: float) -> None:
    draw = random.Random(0)
    asked = [draw.choice([0.0, 0.5, draw.random(), draw.expovariate(0.01)]) for _ in range(2000)]

    async def main() -> list[tuple[float, int]]:
        loop, went_off = virtual_loop(), list[tuple[float, int]]()

        def ask(i: int) -> None:
            loop.do_at(loop.time() + asked[i], go_off, loop.time() + asked[i], i)

        def go_off(when: float, i: int) -> None:
            assert when <= loop.time() <= when + 2 * tick_s
            went_off.append((when, i))
            if i < 1000:
                ask(1000 + i)

        for i in range(1000):
            ask(i)
        await loop.until(1e6)
        await loop.until(math.inf)
        return went_off

    went_off = run_in_virtual_time(main(), tick_s)
    assert len(went_off) == 2000
    assert went_off == sorted(went_off, key=lambda timer: timer[0])


def test_a_callback_runs_in_the_context_that_it_was_given_even_an_empty_one_or_in_that_of_its_caller() -> None:
    async def main() -> list[str]:
        loop, said = virtual_loop(), list[str]()
        NAME.set("caller")
        for context in (None, Context()):
            loop.call_soon(lambda: said.append(NAME.get()), context=context)
            loop.call_later(1.0, lambda: said.append(NAME.get()), context=context)
        await asyncio.sleep(2.0)
        return said

    assert run_in_virtual_time(main()) == ["caller", "nobody"] * 2


def test_many_cancelled_timers_leave_the_others_as_they_were() -> None:
    async def main() -> list[float]:
        loop, ends = virtual_loop(), list[float]()
        timers = [loop.call_at(1.0 + i, lambda: ends.append(loop.time())) for i in range(5000)]
        for i, timer in enumerate(timers):
            if i % 100:
                timer.cancel()
        await loop.until(9999.0)
        return ends

    assert run_in_virtual_time(main()) == [1.0 + i for i in range(0, 5000, 100)]


def test_a_wait_that_nothing_can_end_is_an_error() -> None:
    async def main() -> None:
        await asyncio.Event().wait()

    with pytest.raises(DeadlockError, match="every task waits for another"):
        run_in_virtual_time(main())


def test_an_interrupt_of_the_user_ends_it() -> None:
    async def main() -> None:
        os.kill(os.getpid(), signal.SIGINT)
        await asyncio.sleep(1.0)

    with pytest.raises(KeyboardInterrupt):
        run_in_virtual_time(main())

"""Cores in virtual time: who computes for how long when several processes share a machine."""

import asyncio
from collections.abc import Coroutine
from typing import Any

import pytest

from arl.plan.machines import MachineWithCores, Processor, SharingProcessor
from arl.plan.virtual_time import run_in_virtual_time


async def ends_of(*works: Coroutine[Any, Any, None]) -> list[float]:
    """When each of them ends, begun at once."""
    clock = asyncio.get_running_loop().time
    began = clock()

    async def timed(work: Coroutine[Any, Any, None]) -> float:
        await work
        return clock() - began

    async with asyncio.TaskGroup() as tasks:
        running = [tasks.create_task(timed(work)) for work in works]
    return [task.result() for task in running]


def test_a_process_does_one_thing_at_a_time() -> None:
    async def main() -> list[float]:
        process = Processor()
        return await ends_of(process.work(1.0), process.work(2.0), process.work(0.0))

    assert run_in_virtual_time(main()) == [1.0, 3.0, 0.0]


@pytest.mark.parametrize("shares", [False, True])
def test_a_callback_may_come_later_than_the_work_ends_and_the_process_is_free_meanwhile(shares: bool) -> None:
    async def main() -> tuple[list[float], float]:
        loop = asyncio.get_running_loop()
        process = SharingProcessor(MachineWithCores(1)) if shares else Processor()
        ends = list[float]()
        process.do(1.0, lambda: ends.append(loop.time()), 5.0)
        await process.work(2.0)
        busy_s = process.busy_s()
        await asyncio.sleep(4.0)
        return [*ends, loop.time()], busy_s

    assert run_in_virtual_time(main()) == ([6.0, 7.0], 3.0)


def test_processes_with_cores_of_their_own_do_not_wait_for_each_other() -> None:
    async def main() -> list[float]:
        return await ends_of(*(Processor().work(seconds) for seconds in (1.0, 2.0, 3.0)))

    assert run_in_virtual_time(main()) == [1.0, 2.0, 3.0]


def test_three_processes_on_two_cores_take_half_as_long_again() -> None:
    async def main() -> list[float]:
        machine = MachineWithCores(2)
        return await ends_of(*(SharingProcessor(machine).work(seconds) for seconds in (2.0, 2.0, 4.0)))

    assert run_in_virtual_time(main()) == pytest.approx([3.0, 3.0, 5.0])


def test_work_begun_later_slows_down_what_runs() -> None:
    async def later(process: Processor) -> None:
        await asyncio.sleep(1.0)
        await process.work(1.0)

    async def main() -> list[float]:
        machine = MachineWithCores(1)
        return await ends_of(SharingProcessor(machine).work(2.0), later(SharingProcessor(machine)))

    assert run_in_virtual_time(main()) == pytest.approx([3.0, 3.0])


def test_a_process_of_four_threads_on_two_cores_takes_twice_as_long() -> None:
    async def main() -> list[float]:
        return await ends_of(SharingProcessor(MachineWithCores(2), cores=4).work(1.0))

    assert run_in_virtual_time(main()) == pytest.approx([2.0])


def test_work_is_conserved() -> None:
    """The cores of a machine that is never idle do all the work that was asked for, and no more."""

    async def main() -> list[float]:
        machine = MachineWithCores(2)
        processes = [SharingProcessor(machine) for _ in range(5)]
        return await ends_of(*(process.work(1.0 + i / 7) for i, process in enumerate(processes) for _ in range(3)))

    ends = run_in_virtual_time(main())
    work = sum(3 * (1.0 + i / 7) for i in range(5))
    assert work / 2 <= max(ends) < work / 2 + 3 * (1.0 + 4 / 7) / 2
    assert max(ends) >= 3 * (1.0 + 4 / 7)

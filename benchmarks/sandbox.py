"""What a run in a sandbox costs: short programs a second, unit tests a second, and what hundreds of waiting calls do.

    python benchmarks/sandbox.py --programs 200

Prints programs a second and the median time of one, for `--concurrency` programs at once; the same for answers that are
tested as MBPP's are; and the event loop's lag while `--waiting` calls wait for their turn.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import time
from collections.abc import Awaitable, Callable, Sequence

from rich.console import Console
from rich.table import Table

from arl.rewards import CallTests, run_unit_tests
from arl.rollout.monitors import LagMonitor
from arl.sandbox import Sandbox, find_sandbox

PROGRAM = "print(sum(range(1000)))"
CODE = "def double(x):\n    return x + x"
TESTS = CallTests(tests=["assert double(1) == 2", "assert double('a') == 'aa'", "assert double([1]) == [1, 1]"])


async def timed(call: Callable[[], Awaitable[object]]) -> float:
    started = time.perf_counter()
    await call()
    return time.perf_counter() - started


async def together(calls: int, call: Callable[[], Awaitable[object]]) -> tuple[float, Sequence[float]]:
    """Calls a second, and the time of each, its wait for a place included."""
    started = time.perf_counter()
    times = await asyncio.gather(*(timed(call) for _ in range(calls)))
    return calls / (time.perf_counter() - started), times


async def in_turn(calls: int, call: Callable[[], Awaitable[object]]) -> tuple[float, Sequence[float]]:
    started = time.perf_counter()
    times = [await timed(call) for _ in range(calls)]
    return calls / (time.perf_counter() - started), times


async def measure(sandbox: Sandbox, programs: int, waiting: int) -> Table:
    async def run() -> None:
        outcome = await sandbox.run(PROGRAM)
        assert outcome.stdout == "499500\n", outcome

    async def check() -> None:
        report = await run_unit_tests(sandbox, CODE, TESTS)
        assert report.share_passed == 1.0, report

    table = Table("", "calls", "a second", "median, ms")
    for name, call in (("programs", run), ("answers with 3 tests", check)):
        for way, spread in (("one after another", in_turn), ("all at once", together)):
            rate, times = await spread(programs, call)
            shown = f"{1000 * statistics.median(times):.0f}" if spread is in_turn else ""
            table.add_row(f"{name}, {way}", str(programs), f"{rate:.1f}", shown)
    lag = LagMonitor("a program's start")
    async with asyncio.TaskGroup() as group:
        watching = group.create_task(lag.run())
        rate, _ = await together(waiting, run)
        watching.cancel()
    table.add_row("programs, all at once", str(waiting), f"{rate:.1f}", f"lag at most {1000 * lag.worst_s:.0f} ms")
    return table


async def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kind", choices=("auto", "bubblewrap", "docker", "unsafe"), default="auto")
    parser.add_argument("--programs", type=int, default=200)
    parser.add_argument("--waiting", type=int, default=1000)
    parser.add_argument("--concurrency", type=int, help="programs at once; one per processor unless given")
    arguments = parser.parse_args()
    started = time.perf_counter()
    async with find_sandbox(arguments.kind, concurrency=arguments.concurrency) as sandbox:
        print(f"opened in {time.perf_counter() - started:.2f} s")
        Console().print(await measure(sandbox, arguments.programs, arguments.waiting))


if __name__ == "__main__":
    asyncio.run(main())

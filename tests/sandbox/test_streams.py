"""Programs and their pipes: nothing is left open, whenever a call is cancelled."""

import asyncio
import contextlib
import os
import selectors
import signal
from typing import Any

import pytest

from arl.sandbox import streams
from arl.sandbox.streams import finish

PROGRAMS = {
    "ends without reading": "true",
    "reads": "cat > /dev/null",
    "runs until its limit": "sleep 600",
    "leaves a process that holds its pipes": "setsid sleep 1 & true",
}


class Canceller(selectors.DefaultSelector):
    """Cancels `task` at the event loop's turn `at`, if it still runs."""

    def __init__(self, at: int) -> None:
        super().__init__()
        self._turns_left = at
        self.task: asyncio.Task[Any] | None = None

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        self._turns_left -= self.task is not None
        if self.task is not None and self._turns_left == 0:
            self.task.cancel()
            timeout = 0
        return super().select(timeout)


async def run(command: str, canceller: Canceller) -> None:
    pipe = asyncio.subprocess.PIPE
    process = await asyncio.create_subprocess_exec(
        "sh", "-c", command, stdin=pipe, stdout=pipe, stderr=pipe, start_new_session=True
    )

    async def kill(_: bool) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)

    canceller.task = asyncio.current_task()
    await finish(process, b"x" * 1_000_000, output_bytes=9, wall_s=0.2, kill=kill)


async def is_cancelled(command: str, canceller: Canceller) -> bool:
    """Run a command. Whether it was cancelled before it ended."""
    errors: list[dict[str, Any]] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: errors.append(context))
    try:
        async with asyncio.TaskGroup() as group:
            running = group.create_task(run(command, canceller))
    finally:
        canceller.task = None
    assert errors == []
    return running.cancelled()


@pytest.mark.parametrize("command", PROGRAMS.values(), ids=PROGRAMS)
def test_a_call_that_is_cancelled_at_any_turn_of_the_loop_leaves_no_pipe_open(command: str) -> None:
    before, at, was_cancelled = set(os.listdir("/proc/self/fd")), 0, True
    while was_cancelled:
        at += 1
        canceller = Canceller(at)
        with asyncio.Runner(loop_factory=lambda selector=canceller: asyncio.SelectorEventLoop(selector)) as runner:
            was_cancelled = runner.run(is_cancelled(command, canceller))
        assert set(os.listdir("/proc/self/fd")) <= before, f"cancelled at turn {at}"
    assert at > 3


async def test_a_program_that_has_ended_is_not_waited_for_because_of_what_it_left_behind(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(streams, "_DRAIN_S", 0.05)
    pipe, before = asyncio.subprocess.PIPE, set(os.listdir("/proc/self/fd"))
    process = await asyncio.create_subprocess_exec(
        *("sh", "-c", "setsid sleep 600 & echo $!"), stdin=pipe, stdout=pipe, stderr=pipe, start_new_session=True
    )

    async def nothing(_: bool) -> None: ...

    ended_by, stdout, _ = await finish(process, b"x" * 1_000_000, output_bytes=99, wall_s=60, kill=nothing)
    os.kill(int(stdout), signal.SIGKILL)
    assert (ended_by, process.returncode) == ("exit", 0)
    await asyncio.sleep(0)  # asyncio closes pipes at its next turn
    assert set(os.listdir("/proc/self/fd")) <= before

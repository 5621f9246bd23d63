"""Threads for blocking calls: as many as needed, and a hung one holds up no other."""

import asyncio
import subprocess
import sys
import threading
from collections.abc import Iterator

import pytest
from still_clock import still_clock

from arl.api.errors import ToolsHungError
from arl.rewards.threads import CallThreads, CallTimeoutError


@pytest.fixture
def release() -> Iterator[threading.Event]:
    """Lets all go that hang."""
    event = threading.Event()
    yield event
    event.set()


async def hang(threads: CallThreads, release: threading.Event) -> None:
    with pytest.raises(CallTimeoutError, match=r"no answer within 0\.01 s"):
        await threads.acall(lambda: release.wait(60), timeout_s=0.01)


async def test_time_in_the_queue_does_not_count(release: threading.Event) -> None:
    threads = CallThreads(max_threads=1)
    with still_clock() as passes:
        async with asyncio.TaskGroup() as group:
            first = group.create_task(threads.acall(lambda: release.wait(60)))
            second = group.create_task(threads.acall(lambda: 2, timeout_s=0.2))
            await asyncio.sleep(0)
            await passes(0.3)
            assert not second.done()
            release.set()
    assert (first.result(), second.result()) == (True, 2)


async def test_no_more_calls_run_at_once_than_there_are_threads() -> None:
    threads = CallThreads(max_threads=2)
    running, most = 0, 0
    lock, both = threading.Lock(), threading.Barrier(2)

    def work() -> None:
        nonlocal running, most
        with lock:
            running, most = running + 1, max(most, running + 1)
        both.wait(60)
        threading.Event().wait(0.005)
        with lock:
            running -= 1

    async with asyncio.TaskGroup() as group:
        for _ in range(20):
            group.create_task(threads.acall(work))
    assert most == 2


async def test_a_thread_that_hangs_gives_its_place_to_others(release: threading.Event) -> None:
    threads = CallThreads(max_threads=1, max_hung=2)
    async with asyncio.TaskGroup() as group:
        group.create_task(hang(threads, release))
        waiting = group.create_task(threads.acall(lambda: "next", timeout_s=60))
    assert waiting.result() == "next"
    assert threads.num_hung == 1


async def test_when_too_many_hang_no_other_is_begun_until_one_returns(release: threading.Event) -> None:
    threads = CallThreads(max_hung=2)
    await hang(threads, release)
    await hang(threads, release)
    with pytest.raises(ToolsHungError, match="2 earlier calls hang"):
        await threads.acall(lambda: 1)
    release.set()
    async with asyncio.timeout(60):
        while threads.num_hung:  # noqa: ASYNC110 - a thread changes it
            await asyncio.sleep(0)
    assert await threads.acall(lambda: 1) == 1


async def test_a_call_is_an_error_if_no_thread_can_be_started(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(_: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    threads = CallThreads()
    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", refuse)
        with pytest.raises(ToolsHungError, match="no thread could be started"):
            await threads.acall(lambda: 1)
    assert await threads.acall(lambda: 1) == 1


async def test_a_keyboard_interrupt_in_a_call_is_only_its_error() -> None:
    def interrupted() -> None:
        raise KeyboardInterrupt

    threads = CallThreads()
    with pytest.raises(RuntimeError, match="KeyboardInterrupt"):
        await threads.acall(interrupted)
    assert await threads.acall(lambda: 1) == 1


async def test_a_call_that_is_cancelled_counts_as_hung_only_after_its_time(release: threading.Event) -> None:
    threads = CallThreads(max_hung=1)
    began = threading.Event()

    def run_on() -> None:
        began.set()
        release.wait(60)

    async def cancelled(timeout_s: float) -> None:
        began.clear()
        call = asyncio.create_task(threads.acall(run_on, timeout_s))
        await asyncio.to_thread(began.wait)
        call.cancel()
        with pytest.raises(asyncio.CancelledError):
            await call

    with still_clock() as passes:
        await cancelled(timeout_s=60)
        await cancelled(timeout_s=60)
        await cancelled(timeout_s=0.5)
        await passes(0.4)
        assert threads.num_hung == 0
        await passes(0.2)
        assert threads.num_hung == 1


async def test_a_call_that_is_cancelled_in_the_queue_is_not_begun(release: threading.Event) -> None:
    threads = CallThreads(max_threads=1)
    began: list[int] = []
    first = asyncio.create_task(threads.acall(lambda: release.wait(60)))
    second = asyncio.create_task(threads.acall(lambda: began.append(1)))
    await asyncio.sleep(0)
    second.cancel()
    with pytest.raises(asyncio.CancelledError):
        await second
    release.set()
    assert await first
    assert await threads.acall(lambda: list(began)) == []


def test_a_call_that_hangs_does_not_keep_the_process_from_ending() -> None:
    script = """
import asyncio, threading
from arl.rewards.threads import THREADS
async def main():
    try:
        await THREADS.acall(threading.Event().wait, 0.01)
    except Exception as error:
        print(error)
asyncio.run(main())
"""
    run = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=False)
    assert (run.returncode, run.stdout) == (0, "there was no answer within 0.01 s\n")

"""Reward functions: their time limits, their deaths, and their malformed results."""

import asyncio
import functools
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator
from concurrent.futures import Future
from pathlib import Path

import pytest
import pytest_asyncio
from pebble import ProcessPool
from scoring import behaves, dies_once, holds, worker_id

from arl.api.errors import RewardError, RewardTimeoutError
from arl.rewards import RewardPool

on_one_loop = pytest.mark.asyncio(loop_scope="module")


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def pool() -> AsyncIterator[RewardPool]:
    """One worker for all tests that leave the pool as it was."""
    async with RewardPool(behaves, timeout_s=1.0, workers=1) as reward:
        yield reward


@on_one_loop
@pytest.mark.parametrize(
    ("how", "error", "what"),
    [
        ("hangs", RewardTimeoutError, "reward function behaves ran longer than 1 s"),
        ("dies", RewardError, "the worker that ran reward function behaves died with exit code 7"),
        ("raises", RewardError, "(?s)reward function behaves failed in its worker.*ValueError: no such answer"),
        ("is not a number", RewardError, "reward function behaves returned 'text'; a reward must be a finite number"),
        (lambda: 1, RewardError, "an argument of reward function behaves cannot be pickled"),
    ],
)
async def test_a_failed_call_is_an_error_naming_the_function_and_the_next_one_works(
    pool: RewardPool, how: object, error: type[Exception], what: str
) -> None:
    with pytest.raises(error, match=what):
        await pool(how)
    assert await pool("works") == 1.0


@on_one_loop
async def test_a_cancelled_call_gives_its_worker_back(pool: RewardPool) -> None:
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.3):
            await pool("hangs")
    assert await pool("works") == 1.0


@on_one_loop
async def test_queued_calls_have_their_whole_time_limit_once_they_run(pool: RewardPool) -> None:
    assert await asyncio.gather(*(pool("takes a while") for _ in range(5))) == [1.0] * 5


async def test_a_function_and_a_class_of_the_script_reach_its_workers(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text("""
import asyncio
from arl.rewards import RewardPool

class Mine:
    value = 4

def mine(answer: str, data: Mine) -> float:
    return data.value

async def main() -> None:
    async with RewardPool(mine, workers=1) as reward:
        print(await reward("", Mine()))

if __name__ == "__main__":
    asyncio.run(main())
""")
    run = await asyncio.to_thread(
        subprocess.run, [sys.executable, script], capture_output=True, text=True, timeout=60, check=True
    )
    assert run.stdout == "4.0\n"


async def test_a_function_of_the_script_scores_in_an_episode_worker_too(tmp_path: Path) -> None:
    """There the script's module has another name."""
    script = tmp_path / "script.py"
    script.write_text("""
import pickle, subprocess, sys
from arl.runtime.processes.rpc import SentObject

def mine(answer: str, data: object) -> float:
    return len(answer)

WORKER = '''
import asyncio, pickle, sys
from arl.rewards import RewardPool

async def main() -> None:
    async with RewardPool(pickle.load(sys.stdin.buffer).received(), workers=1) as reward:
        print(await reward("four", None))

asyncio.run(main())
'''

if __name__ == "__main__":
    sent = pickle.dumps(SentObject.of(mine, "mine", "a worker", ""))
    subprocess.run([sys.executable, "-c", WORKER], input=sent, check=True)
""")
    run = await asyncio.to_thread(
        subprocess.run, [sys.executable, script], capture_output=True, text=True, timeout=60, check=True
    )
    assert run.stdout == "4.0\n"


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere a worker ends when its call does")
async def test_a_worker_in_a_long_call_ends_with_a_process_that_is_killed(tmp_path: Path) -> None:
    script = f"""
import asyncio, sys
sys.path.insert(0, {str(Path(__file__).parent)!r})
from scoring import holds
from arl.rewards import RewardPool

async def main() -> None:
    async with RewardPool(holds, workers=1) as reward:
        await reward(sys.argv[1], {{}})

asyncio.run(main())
"""
    os.mkfifo(tmp_path / "held")
    process = await asyncio.create_subprocess_exec(sys.executable, "-c", script, str(tmp_path / "held"))
    with os.fdopen(os.open(tmp_path / "held", os.O_RDONLY | os.O_NONBLOCK), "rb", 0) as held:
        while (begun := held.read(1)) != b"x":  # None, and b"" while nobody has opened it
            assert process.returncode is None, f"the script ended: {begun}"
            await asyncio.sleep(0.01)
        os.set_blocking(held.fileno(), True)
        process.kill()
        assert await asyncio.to_thread(held.read, 1) == b""  # nobody holds it any more
    await process.wait()


async def test_a_worker_is_another_process_and_is_replaced_if_it_dies_while_idle() -> None:
    async with RewardPool(worker_id, workers=1) as reward:
        worker = int(await reward(None))
        assert worker != os.getpid()
        os.kill(worker, signal.SIGKILL)
        async with asyncio.timeout(60):
            while reward._pool is not None and reward._pool.active:  # noqa: ASYNC110 - a thread notices it
                await asyncio.sleep(0.01)
        assert len(set(await asyncio.gather(*(reward(None) for _ in range(3))))) == 1


async def test_workers_that_are_killed_while_they_start_are_started_again(tmp_path: Path) -> None:
    async with RewardPool(worker_id, workers=1, prepare=functools.partial(dies_once, str(tmp_path / "died"))) as reward:
        assert await reward(None) > 0
    assert (tmp_path / "died").exists()


async def test_a_call_that_was_in_the_queue_when_all_workers_died_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("arl.rewards.pool._LOOK_S", 0.01)
    async with RewardPool(worker_id, workers=1) as reward:
        pool = reward._pool
        assert pool
        call = Future[float]()
        monkeypatch.setattr(pool, "schedule", lambda *_, **__: call)
        pool.stop()
        with monkeypatch.context() as patch:
            patch.setattr(type(pool), "active", True)  # until the call is in the queue
            calling = asyncio.create_task(reward(None))
            await asyncio.sleep(0)
        async with asyncio.timeout(60):
            with pytest.raises(RewardError, match="died; the next call starts others"):
                await calling
        assert call.cancelled()
        assert await reward(None) > 0


async def test_a_cancelled_start_leaves_no_worker_and_a_cancelled_restart_leaves_its_workers_to_other_calls(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def start(pool: RewardPool) -> ProcessPool:
        loop.call_soon_threadsafe(is_starting.set)
        started.append(whole(pool))
        return started[-1]

    async def cancelled(task: asyncio.Task[object]) -> None:
        await is_starting.wait()
        is_starting.clear()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    loop, is_starting, started, whole = (
        asyncio.get_running_loop(),
        asyncio.Event(),
        list[ProcessPool](),
        RewardPool._start,
    )
    monkeypatch.setattr(RewardPool, "_start", start)
    reward = RewardPool(worker_id, workers=1)
    await cancelled(asyncio.create_task(reward.__aenter__()))
    assert not started[0].active
    is_starting.clear()
    async with reward:
        is_starting.clear()
        started[1].stop()
        await cancelled(asyncio.create_task(reward(None)))
        assert await reward(None) > 0
    assert [pool.active for pool in started] == [False] * 3


async def test_leaving_the_pool_ends_running_calls(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "held")
    async with RewardPool(holds, workers=1) as reward:
        call = asyncio.create_task(reward(str(tmp_path / "held"), None))
        with await asyncio.to_thread((tmp_path / "held").open, "rb", 0) as held:
            assert await asyncio.to_thread(held.read, 1) == b"x"
    with pytest.raises(RewardError, match="closed during a call"):
        await call
    with pytest.raises(RewardError, match="not open"):
        await reward("", None)

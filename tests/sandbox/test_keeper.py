"""The keeper of a sandbox's programs: what it leaves if it is held up, and what it says at its end."""

import asyncio
import os
import signal
import time
from pathlib import Path

import pytest
from sandbox.test_bubblewrap import descendants, stat_of, with_keeper

from arl.sandbox import BubblewrapSandbox
from arl.sandbox.bubblewrap import START

pytestmark = pytest.mark.asyncio(loop_scope="session")


def hold_up(keeper: int, pipe: Path) -> None:
    """Stop a keeper from when it starts a program, which waits for the pipe's end, until the program has ended."""
    while not descendants(keeper):
        pass
    os.kill(keeper, signal.SIGSTOP)
    try:
        pipe.open("w").close()
        while any(stat_of(pid)[0] != "Z" for pid in descendants(keeper)):
            time.sleep(0.01)
    finally:
        os.kill(keeper, signal.SIGCONT)


async def test_a_program_that_ends_while_the_keeper_is_held_up_leaves_no_process(
    bubblewrap: BubblewrapSandbox, pipe: Path
) -> None:
    async with with_keeper(pipe) as (sandbox, pid):
        for _ in range(5):
            program = f"open({str(pipe)!r}).read()\nprint(1)"
            outcome, _ = await asyncio.gather(sandbox.run(program), asyncio.to_thread(hold_up, pid, pipe))
            assert outcome.stdout == "1\n"
            assert descendants(pid) == set()


TOLD_LATE = """
import asyncio, os
close = asyncio.BaseEventLoop.close
asyncio.BaseEventLoop.close = lambda self: [close(self), os.kill(os.getpid(), 15)]
"""
"""Sends a keeper SIGTERM when its event loop has closed what asyncio's handlers write to, and not yet the handlers."""


async def test_a_keeper_whose_parent_dies_as_it_ends_leaves_no_traceback(
    bubblewrap: BubblewrapSandbox, pipe: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("arl.sandbox.bubblewrap.START", START.removesuffix("main()\n") + TOLD_LATE + "main()\n")
    async with with_keeper(pipe) as (sandbox, _):
        assert (await sandbox.run("print(1)")).stdout == "1\n"
    assert capfd.readouterr().err == ""

"""How the code around a run is asked to end: a script by signals, a notebook's cell by interrupts.

A cell that does not await its run runs it to its end on a thread with an event loop of its own:

    the cell's thread --main--> arl-cell, which runs main in its event loop
                      <--its result or error--

| wait              | woken by                                                                                 |
|-------------------|------------------------------------------------------------------------------------------|
| the cell's thread | the end of `main` or a signal, a byte in `woken`; then the thread's end, for _PATIENCE_S |
| `main`            | its own tasks; an interrupt, which cancels it                                            |

The kernel's event loop runs on the cell's thread already. It stands still meanwhile, as in any cell that computes.
"""

from __future__ import annotations

import asyncio
import contextvars
import logging
import re
import shlex
import signal
import socket
import sys
import threading
from collections.abc import Callable, Coroutine, Iterator
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any, TypeVar

from arl.api.errors import ErrorT

T = TypeVar("T")

_PATIENCE_S = 10.0
"""How long a cell whose run has ended waits for threads that users' code started."""

log = logging.getLogger(__name__)


@dataclass(slots=True, kw_only=True, eq=False)
class ScriptEnd:
    """What a run knows of the script around it. `run_until_stopped` makes one, and its tasks find it in SCRIPT_END."""

    again: str
    """The subject of a sentence that says how the run continues, such as `the same command`."""
    is_told: bool = False
    """Whether the console said how the run ended, and what continues it."""
    signal: int | None = None
    """The first signal that asked the script to end."""
    last_words: list[Callable[[str], object]] = field(default_factory=list[Callable[[str], object]])
    """Each is called with the reason before the process ends without leaving its blocks."""

    def speak(self, reason: str) -> None:
        """Call the last words; they return soon, whatever hangs."""
        for say in tuple(self.last_words):
            say(reason)


SCRIPT_END: ContextVar[ScriptEnd | None] = ContextVar("SCRIPT_END", default=None)
"""Of the script that runs here; None where nothing handles signals, as in a notebook."""

_SECRET = re.compile(r"(key|token|secret|password)$", re.IGNORECASE)


def command_line() -> str:
    """This process's command line. The values of keys and passwords are left out."""
    words, is_secret = list[str](), False
    for word in sys.orig_argv:
        name, equals, _ = word.partition("=")
        is_flag = word.startswith("-")
        shown = "..." if is_secret and not is_flag else word
        is_secret = is_flag and bool(_SECRET.search(name))
        words.append(f"{name}=..." if is_secret and equals else shown)
        is_secret = is_secret and not equals
    return shlex.join(words)


# In a notebook


def kernel_shell() -> Any:
    """The shell of the notebook's kernel that runs this code; None elsewhere, in IPython's terminal too."""
    ipython = sys.modules.get("IPython")
    shell = ipython and ipython.get_ipython()
    return shell if hasattr(shell, "kernel") else None


def show_briefly(error: ErrorT, message: str) -> ErrorT:
    """Let IPython show the message alone, without a traceback."""
    setattr(error, "_render_traceback_", lambda: [message])  # noqa: B010 - no exception declares it
    return error


def is_in_cell() -> bool:
    """Whether a notebook's cell, or a coroutine of one, runs this code."""
    return kernel_shell() is not None and is_loop_running()


def is_loop_running() -> bool:
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return False
    return True


def run_in_cell(main: Coroutine[Any, Any, T], *, again: str) -> T:
    """Returns the result of `main`. An interrupt cancels it and then raises KeyboardInterrupt; later ones wait, too.

    again: what continues the run, as the subject of a sentence. Raises what `main` raises.
    """
    ending, ended = ScriptEnd(again=again), Future[T]()
    tasks = list[tuple[asyncio.AbstractEventLoop, asyncio.Task[Any]]]()

    async def cancellable() -> T:
        SCRIPT_END.set(ending)
        task = asyncio.current_task()
        assert task is not None
        tasks.append((asyncio.get_running_loop(), task))
        if ending.signal is not None:  # it came before there was a task
            task.cancel()
        return await main

    def work() -> None:
        with asyncio.Runner() as runner:
            try:
                ended.set_result(runner.run(cancellable()))
            except BaseException as error:  # noqa: BLE001 - raised in the cell
                ended.set_exception(error)
            waking.send(b"\0")

    def interrupt() -> None:
        if ending.signal is not None:
            sys.stderr.write("the run still saves; restart the kernel to end it at once\n")
            return
        ending.signal = signal.SIGINT
        for loop, task in tasks:
            with suppress(RuntimeError):  # the loop is closed
                loop.call_soon_threadsafe(task.cancel)

    # What the run prints belongs to this cell, which the context knows.
    thread = threading.Thread(target=contextvars.copy_context().run, args=[work], name="arl-cell", daemon=True)
    woken, waking = socket.socketpair()
    with woken, waking, _interrupts(interrupt, waking):
        thread.start()
        try:
            while not ended.done():
                woken.recv(1)
            return ended.result()
        except asyncio.CancelledError as error:
            if ending.signal is None:
                raise
            said = getattr(error, "_render_traceback_", lambda: ["the cell was interrupted"])
            raise show_briefly(KeyboardInterrupt(), "\n".join(said())) from None
        finally:
            thread.join(_PATIENCE_S)
            if thread.is_alive():
                log.warning("calls in threads (asyncio.to_thread) did not return; they go on beside the next cells")


@contextmanager
def _interrupts(act: Callable[[], object], waking: socket.socket) -> Iterator[None]:
    """Call `act` for each interrupt within the block. Other threads than the main one get none.

    The main thread alone acts on signals, but the system may hand one to any thread, and a wait for a lock sleeps on.
    waking: gets a byte for each signal, on whatever thread, so that a main thread that reads the other end wakes up.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    waking.setblocking(False)
    before = signal.signal(signal.SIGINT, lambda *_: act()), signal.set_wakeup_fd(waking.fileno())
    try:
        yield
    finally:
        signal.set_wakeup_fd(before[1])
        signal.signal(signal.SIGINT, before[0])

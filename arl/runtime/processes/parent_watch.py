"""Watches from within a process for what ends it: its parent's end, and signals."""

from __future__ import annotations

import asyncio
import contextlib
import faulthandler
import os
import select
import signal
import socket
import threading
from collections.abc import Callable
from typing import Self

_PARENT_POLL_S = 1.0
_GRACE_S = 5.0
"""The time that a process has to end after it was told to. Then it is killed."""
_STDERR = 2
_SIGNALS = (signal.SIGTERM, signal.SIGINT)
_OVER = b"\0"
"""No signal has this number."""


class Watch:
    """Ends this process when its parent is gone or a signal says so, also while its event loop is blocked.

    A thread waits for both from the first line of `with`, before heavy imports. Until `stop_event` is called, the
    parent's end ends the process at once, and signals do what they always do. From then on both set the event. If the
    process still runs _GRACE_S later, faulthandler's timer writes the tracebacks of all threads to stderr and ends it
    with code 1. The timer needs no lock that a blocked thread could hold.
    """

    def __init__(self, parent_pid: int | None = None) -> None:
        self._parent_pid = parent_pid
        self._read, self._write = socket.socketpair()
        self._write.setblocking(False)
        self._stop: Callable[[], object] | None = None
        self._thread = threading.Thread(target=self._wait, name="arl-watch", daemon=True)

    def __enter__(self) -> Self:
        self._handlers = [(number, signal.getsignal(number)) for number in _SIGNALS]
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        if self._stop is not None:
            signal.set_wakeup_fd(-1)
            for number, handler in self._handlers:
                signal.signal(number, handler)
        with contextlib.suppress(BlockingIOError):  # full of signals: the thread has ended
            self._write.send(_OVER)
        self._thread.join()
        faulthandler.cancel_dump_traceback_later()
        self._read.close()
        self._write.close()

    def stop_event(self) -> asyncio.Event:
        """An event of the running loop that SIGTERM, SIGINT or the end of the parent sets. Call it once, on the main
        thread."""
        loop, stop = asyncio.get_running_loop(), asyncio.Event()
        self._stop = lambda: loop.call_soon_threadsafe(stop.set)
        # Before the handlers, or a signal that came between would be lost.
        signal.set_wakeup_fd(self._write.fileno(), warn_on_full_buffer=False)
        for number in _SIGNALS:
            signal.signal(number, lambda *_: None)  # the thread reads its number, even while this one is blocked
        return stop

    def _wait(self) -> None:
        with contextlib.ExitStack() as opened:
            if not self._is_told(opened):
                return
        if self._stop is None:
            os._exit(0)
        faulthandler.dump_traceback_later(_GRACE_S, exit=True, file=_STDERR)
        with contextlib.suppress(RuntimeError):  # the loop is closed: the process is about to end
            self._stop()

    def _is_told(self, opened: contextlib.ExitStack) -> bool:
        """Wait until the process has to end, or the watch is over. Returns whether the process has to end."""
        waiting = select.poll()
        waiting.register(self._read.fileno(), select.POLLIN)
        is_polled = self._parent_pid is not None
        if self._parent_pid is not None:
            with contextlib.suppress(AttributeError, OSError):  # this system has no such descriptors, or it is gone
                descriptor = os.pidfd_open(self._parent_pid)
                opened.callback(os.close, descriptor)
                waiting.register(descriptor, select.POLLIN)
                is_polled = False
        while not is_polled or _is_there(self._parent_pid):
            ready = [descriptor for descriptor, _ in waiting.poll(1000 * _PARENT_POLL_S if is_polled else None)]
            if self._read.fileno() in ready:
                return self._read.recv(1) != _OVER
            if ready:
                break
        return True


def _is_there(pid: int | None) -> bool:
    try:
        os.kill(pid or 0, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        pass
    return True

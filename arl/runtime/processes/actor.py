"""An object in a process of its own, whose methods this process calls over a socket.

    call    --(number, is_in_turn, method, arguments)--> the object's process --> one thread for calls in turn,
            <--(number, CallOutcome)-------------------                           and one for each call beside them

| wait | woken by |
|---|---|
| a caller's thread | the answer; the process's end |
| `arl-calls`, which sends calls | the process's reading, its end |
| the process | a call; the end of the caller's process, however it ended |

Arrays travel as they lie in memory, beside the pickled rest (pickle's protocol 5, PEP 574).
"""

from __future__ import annotations

import contextlib
import faulthandler
import gc
import itertools
import logging
import os
import pickle
import signal
import socket
import subprocess
import sys
import threading
from array import array
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from queue import SimpleQueue
from typing import Any

from arl.api.errors import EngineClosedError, ProcessLostError
from arl.runtime.processes.logs import ChildLog, how_it_ended
from arl.runtime.processes.parent_watch import Watch
from arl.runtime.processes.rpc import CallOutcome, Messages, OtherTracebackError, outcome_of, place_of

_CLOSING_S = 300.0
"""How long closing may take, to finish checkpoints."""
_ENDING_S = 5.0
_ANSWER_S = 1.0

logger = logging.getLogger(__name__)


class ObjectProcess:
    """Starts a process and builds the object there. Any thread may call it.

    The process ends with this one, however this one ends. Signals to this one do not reach it, and it ignores SIGTERM
    and SIGINT: this process decides when it ends.
    """

    def __init__(self, what: str, build: Callable[[], Any], log: Path, environment: Mapping[str, str]) -> None:
        """what: its name in errors, such as "the trainer's process". build: makes the object there, and pickles. log:
        gets what it writes to stdout and stderr. environment: variables beside this process's. Raises what `build`
        raises.
        """
        self._what = what
        self._log = ChildLog(log)
        self._numbers = itertools.count()
        # A finalizer's `tell` may interrupt the thread that is using them.
        self._outbox, self._state = SimpleQueue[list[memoryview]](), threading.RLock()
        self._pending: dict[int, Future[CallOutcome]] = {}
        self._ended: str | None = None
        ours, theirs = socket.socketpair()
        self._socket = ours
        # The log tells people who look at the machine's processes what this one is.
        arguments = map(str, (theirs.fileno(), os.getpid(), log))
        with theirs, self._log.opened() as stream:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "arl.runtime.processes.actor", *arguments],
                stdin=subprocess.DEVNULL,
                stdout=stream,
                stderr=stream,
                env={**os.environ, **environment, "PYTHONUNBUFFERED": "1"},
                pass_fds=[theirs.fileno()],
                start_new_session=True,  # Ctrl-C reaches us alone
            )
        self._sender = threading.Thread(target=self._send, name="arl-calls", daemon=True)
        self._reader = threading.Thread(target=self._read, name="arl-answers", daemon=True)
        self._sender.start()
        self._reader.start()
        try:
            self.call("build", build)
        except BaseException:
            self.kill()
            raise

    @property
    def pid(self) -> int:
        return self._process.pid

    def call(self, method: str, *args: Any) -> Any:
        """Call a method after the calls before it; returns or raises what it does. Raises ProcessLostError if the
        process ended, and EngineClosedError after `close`.
        """
        return self._value(self._begin(True, method, args))

    def beside(self, method: str, *args: Any) -> Any:
        """`call` at once, on a thread of its own there."""
        return self._value(self._begin(False, method, args))

    def tell(self, method: str, *args: Any) -> None:
        """`beside` without waiting. It does nothing once the process has ended."""
        with contextlib.suppress(EngineClosedError, ProcessLostError):
            self._begin(False, method, args)

    def whereabouts(self) -> str:
        """Where its thread for calls in turn is. Waits _ANSWER_S at most."""
        try:
            return f"{self._what} is at {self._begin(False, 'whereabouts', ()).result(_ANSWER_S).value}"
        except TimeoutError:
            return f"{self._what} does not answer, as if it were stopped"
        except (ProcessLostError, EngineClosedError) as error:
            return str(error)

    def close(self, reason: str = "", timeout_s: float | None = None) -> None:
        """Close the object after the calls before, then `kill` the process. Logs what that raises. Idempotent."""
        if self._ended is None:
            limit_s = _CLOSING_S if timeout_s is None else timeout_s
            with contextlib.suppress(ProcessLostError, EngineClosedError):
                try:
                    outcome = self._begin(True, "close", ()).result(limit_s)
                    if outcome.error is not None:
                        logger.error("closing %s failed, in\n%s", self._what, outcome.traceback)
                except TimeoutError:
                    logger.error("%s was not closed within %g s, and is killed", self._what, limit_s)
        self.kill(reason)

    def kill(self, reason: str = "") -> None:
        """End the process at once. Idempotent. reason: calls raise ProcessLostError with it; "": EngineClosedError."""
        with self._state:
            self._ended = self._ended or reason
        self._process.kill()
        self._process.wait()
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)  # should a process that it started hold the other end
        self._outbox.put([])
        self._sender.join()
        self._reader.join()
        self._socket.close()

    def _begin(self, is_in_turn: bool, method: str, args: tuple[Any, ...]) -> Future[CallOutcome]:
        number, answer = next(self._numbers), Future[CallOutcome]()
        message = pickled((number, is_in_turn, method, args))
        with self._state:
            if self._ended is not None:
                raise self._error()
            self._pending[number] = answer
        self._outbox.put(message)
        return answer

    def _error(self) -> Exception:
        return ProcessLostError(self._ended) if self._ended else EngineClosedError(f"{self._what} was closed")

    def _value(self, answer: Future[CallOutcome]) -> Any:
        outcome = answer.result()
        if outcome.error is not None:
            raise outcome.error from OtherTracebackError(f"in {self._what}:\n{outcome.traceback}")
        return outcome.value

    def _send(self) -> None:
        """On a thread of its own: a stopped process takes no calls, and nobody else may wait for that."""
        with contextlib.suppress(OSError):  # the process has ended: the reader says so
            while message := self._outbox.get():
                send_parts(self._socket, message)

    def _read(self) -> None:
        """Hand answers to their callers until the process has ended."""
        reason = ""
        try:
            while True:
                number, outcome = receive_message(self._socket)
                for message in outcome.messages:
                    logging.getLogger(message.logger).log(message.level, "%s", message.text)
                if answer := self._pending.pop(number, None):
                    answer.set_result(outcome)
        except (OSError, EOFError):
            pass
        except Exception as error:  # noqa: BLE001 (an answer that does not unpickle, a user's log handler)
            reason = f"gave an answer that could not be read ({type(error).__name__}: {error}), and "
            self._process.kill()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(_ENDING_S)
        code = self._process.returncode
        how = "closed its socket" if code is None else how_it_ended(code)
        ended = f"{self._what} {reason}{how}; {self._log.end()}"
        with self._state:
            self._ended = ended if self._ended is None else self._ended
            left, self._pending = list(self._pending.values()), {}
        for answer in left:
            answer.set_exception(self._error())


# Messages


def pickled(value: Any) -> list[memoryview]:
    """A message: its sizes, the pickle, and the arrays as they lie in memory."""
    buffers: list[pickle.PickleBuffer] = []
    body = pickle.dumps(value, protocol=5, buffer_callback=buffers.append)
    parts = [memoryview(body), *(buffer.raw() for buffer in buffers)]
    return [memoryview(array("Q", [len(parts), *(part.nbytes for part in parts)])), *parts]


def send_parts(sock: socket.socket, message: list[memoryview]) -> None:
    """Only one thread may send at a time."""
    for part in message:
        sock.sendall(part)


def receive_message(sock: socket.socket) -> Any:
    """Raises EOFError when the other side has closed the socket."""
    (count,) = array("Q", _received(sock, 8))
    sizes = array("Q", _received(sock, 8 * count))
    body, *buffers = [_received(sock, size) for size in sizes]
    return pickle.loads(body, buffers=buffers)


def _received(sock: socket.socket, size: int) -> bytearray:
    data = bytearray(size)
    view = memoryview(data)
    while view:
        if not (count := sock.recv_into(view)):
            raise EOFError
        view = view[count:]
    return data


# In the process


class _Calls:
    def __init__(self, sock: socket.socket) -> None:
        self._socket = sock
        self._sending = threading.Lock()
        self._messages = Messages()
        self._in_turn = ThreadPoolExecutor(1, "training")
        self._object: Any = None

    def serve(self) -> None:
        with contextlib.suppress(EOFError, OSError):
            while True:
                number, is_in_turn, method, args = receive_message(self._socket)
                if is_in_turn:
                    self._in_turn.submit(self._answer, number, method, args)
                else:  # not in a pool: calls that end others must not wait behind them
                    call = (number, method, args)
                    threading.Thread(target=self._answer, args=call, name="beside", daemon=True).start()

    def _answer(self, number: int, method: str, args: tuple[Any, ...]) -> None:
        outcome = outcome_of(self._messages, self._call, method, args)
        try:
            message = pickled((number, outcome))
        except Exception as error:  # noqa: BLE001 (an object's own pickling may raise anything)
            failure = RuntimeError(f"the result of {method} cannot be pickled: {error}")
            message = pickled((number, CallOutcome(error=failure, messages=outcome.messages)))
        with self._sending, contextlib.suppress(OSError):  # the caller has ended, and so will this process
            send_parts(self._socket, message)

    def _call(self, method: str, args: tuple[Any, ...]) -> Any:
        if method == "whereabouts":
            return place_of(self._thread)
        if method != "build":
            return getattr(self._object, method)(*args)
        self._thread = threading.get_ident()
        (build,) = args
        self._object = build()
        gc.freeze()  # what was imported and built stays: no collection need look at it again
        gc.enable()
        return None


def main() -> None:
    descriptor, parent_pid = map(int, sys.argv[1:3])
    faulthandler.enable()
    gc.disable()  # until the object is built: a quarter of the time to import torch and transformers
    with Watch(parent_pid):
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, lambda *_: None)  # processes that it starts inherit no handler, as they would SIG_IGN
        with socket.socket(fileno=descriptor) as sock:
            sock.set_inheritable(False)
            _Calls(sock).serve()
        os._exit(0)  # threads may hang in calls that nobody waits for


if __name__ == "__main__":
    main()

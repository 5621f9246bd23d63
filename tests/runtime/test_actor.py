"""An object in another process: what its calls return and raise, and when it ends. Most objects are modules."""

import logging
import os
import signal
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from functools import partial
from importlib import import_module
from pathlib import Path
from queue import Queue
from typing import Any

import numpy as np
import pytest

from arl.api.errors import EngineClosedError, TrainingError
from arl.runtime.processes.actor import ObjectProcess
from arl.runtime.processes.rpc import Message, Messages, OtherTracebackError, outcome_of


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Any]:
    started: list[ObjectProcess] = []

    def start(*build: Any) -> ObjectProcess:
        started.append(ObjectProcess("the other process", partial(*build), tmp_path / "its.log", {}))
        return started[-1]

    yield start
    for process in started:
        process.kill()


def is_running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def until(holds: Callable[[], object]) -> None:
    """Wait until this holds, of what wakes nobody."""
    end = time.monotonic() + 20
    while not holds():
        assert time.monotonic() < end
        time.sleep(0.002)


def test_arrays_come_back_to_the_bit_and_can_be_written_to(start: Any) -> None:
    process, rng = start(import_module, "numpy"), np.random.default_rng(0)
    assert process.pid != os.getpid()
    for dtype, shape in ((np.int32, (3, 1 << 18)), (np.float32, (0,)), (np.int8, (7,)), (np.float64, ())):
        sent = rng.integers(0, 99, shape).astype(dtype)
        back = process.call("asarray", sent)
        assert back.dtype == dtype
        assert np.array_equal(back, sent)
        assert back.flags.writeable
    assert process.call("concatenate", [np.arange(2), np.arange(3)]).tolist() == [0, 1, 0, 1, 2]


def test_an_error_is_raised_here_with_its_traceback_there_and_the_process_goes_on(start: Any) -> None:
    process = start(import_module, "json")
    with pytest.raises(ValueError, match="Expecting property name") as raised:
        process.call("loads", "{")
    assert isinstance(raised.value.__cause__, OtherTracebackError)
    assert "in the other process" in str(raised.value.__cause__)
    assert "decoder.py" in str(raised.value.__cause__)
    with pytest.raises(AttributeError, match="no_such"):
        process.call("no_such")
    with pytest.raises(Exception, match="pickle"):
        process.call("dumps", lambda: None)
    with pytest.raises(RuntimeError, match="the result of JSONDecoder cannot be pickled"):
        process.call("JSONDecoder")
    assert process.call("loads", "[1]") == [1]


def test_an_object_that_cannot_be_built_raises_here_and_leaves_no_process(start: Any) -> None:
    with pytest.raises(ModuleNotFoundError, match="no_such_module"):
        start(import_module, "no_such_module")


def test_calls_in_turn_keep_their_order_and_calls_beside_them_do_not_wait(start: Any) -> None:
    process, order = start(threading.Event), list[str]()
    slow = threading.Thread(target=lambda: (process.call("wait", 20), order.append("first")))
    slow.start()
    until(lambda: process._pending)
    process.tell("wait", 60)
    process.beside("is_set")
    order.append("beside")
    process.beside("set")
    process.call("is_set")
    slow.join()
    assert order == ["beside", "first"]


def test_a_call_that_ends_others_gets_through_however_many_there_are(start: Any) -> None:
    process, waiting = start(Queue), 100
    for _ in range(waiting):
        process.tell("get")
    ending = threading.Thread(target=lambda: [process.beside("put", None) for _ in range(waiting)], daemon=True)
    ending.start()
    ending.join(20)
    assert not ending.is_alive()


def test_what_arl_logs_there_is_logged_here(start: Any, caplog: pytest.LogCaptureFixture) -> None:
    process = start(logging.getLogger, "arl.there")
    process.call("warning", "of %s", "arl")
    process.tell("error", "of nobody who waits")
    until(lambda: len(caplog.messages) == 2)
    assert caplog.messages == ["of arl", "of nobody who waits"]


def test_an_error_that_is_logged_there_is_told_with_its_traceback() -> None:
    messages = Messages()
    try:
        logging.getLogger("arl.there").error("cannot send", exc_info=OSError("no route"))
    finally:
        logging.getLogger("arl").removeHandler(messages)
    (message,) = messages.take()
    assert message.text == "cannot send\nOSError: no route"


class TakenMeanwhile(deque[Message]):
    """Another call takes the last message between a look at the number of messages and the taking of one."""

    def __len__(self) -> int:
        return super().__len__() + 1


def test_calls_that_end_at_once_share_the_messages_and_none_fails_for_the_lack_of_one() -> None:
    messages = Messages()
    logging.getLogger("arl").removeHandler(messages)
    messages._messages = TakenMeanwhile([Message(logger="arl", level=30, text="one")])
    first, second = (outcome_of(messages, int) for _ in range(2))
    assert [message.text for message in first.messages] == ["one"]
    assert (first.error, second.error, second.messages) == (None, None, ())


def test_a_process_that_ends_by_itself_is_named_with_the_end_of_its_log(start: Any) -> None:
    process = start(import_module, "os")
    process.call("write", 2, b"last words\n")
    with pytest.raises(TrainingError, match=r"(?s)the other process ended with exit code 3; the end of.*last words"):
        process.call("_exit", 3)
    with pytest.raises(TrainingError, match="exit code 3"):
        process.beside("getpid")
    process.tell("getpid")
    process.close()


def test_a_killed_process_ends_all_calls(start: Any) -> None:
    process, errors = start(import_module, "time"), list[BaseException]()

    def call(method: Any) -> None:
        with pytest.raises(TrainingError, match="SIGKILL") as raised:
            method("sleep", 60)
        errors.append(raised.value)

    threads = [threading.Thread(target=call, args=(method,)) for method in (process.call, process.call, process.beside)]
    for thread in threads:
        thread.start()
    until(lambda: len(process._pending) == 3)
    os.kill(process.pid, signal.SIGKILL)
    for thread in threads:
        thread.join(20)
    assert len(errors) == 3


def test_a_process_that_takes_no_calls_holds_up_nobody_but_the_caller(
    start: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    process, errors = start(import_module, "numpy"), list[BaseException]()
    monkeypatch.setattr("arl.runtime.processes.actor._ANSWER_S", 0.02)
    monkeypatch.setattr("arl.runtime.processes.actor._CLOSING_S", 0.02)
    os.kill(process.pid, signal.SIGSTOP)

    def call() -> None:
        with pytest.raises(EngineClosedError) as raised:
            process.call("asarray", np.zeros(1 << 20))  # more than a socket's buffers hold
        errors.append(raised.value)

    thread = threading.Thread(target=call, daemon=True)
    thread.start()
    until(lambda: process._pending and process._outbox.empty())
    places = list[str]()
    closing = threading.Thread(target=lambda: (places.append(process.whereabouts()), process.close()), daemon=True)
    closing.start()
    closing.join(20)
    assert places == ["the other process does not answer, as if it were stopped"]
    assert "the other process was not closed within 0.02 s, and is killed" in caplog.messages
    thread.join(20)
    assert len(errors) == 1
    assert not is_running(process.pid)


def test_an_answer_that_cannot_be_taken_ends_the_process_and_all_calls(start: Any) -> None:
    process = start(import_module, "urllib.error")
    with pytest.raises(TrainingError, match=r"gave an answer that could not be read.*missing 1 required positional"):
        process.call("ContentTooShortError", "cut", b"")  # an exception that pickles, and does not unpickle
    until(lambda: not is_running(process.pid))


def test_a_call_that_would_exit_raises_and_the_process_goes_on(start: Any) -> None:
    process = start(import_module, "sys")
    with pytest.raises(RuntimeError, match="SystemExit: 3"):
        process.call("exit", 3)
    assert process.call("getrecursionlimit") > 0


def test_signals_do_not_end_it_and_closing_does(start: Any) -> None:
    process = start(import_module, "os")
    for number in (signal.SIGTERM, signal.SIGINT):
        os.kill(process.pid, number)
    assert process.call("getpid") == process.pid
    process.close()
    process.close()
    assert not is_running(process.pid)
    with pytest.raises(EngineClosedError, match="the other process was closed"):
        process.call("getpid")


def test_an_error_in_closing_is_logged_and_the_process_ends(start: Any, caplog: pytest.LogCaptureFixture) -> None:
    process = start(import_module, "os")  # its close() needs an argument
    process.close()
    assert not is_running(process.pid)
    (message,) = caplog.messages
    assert message.startswith("closing the other process failed, in\nTraceback")
    assert "TypeError" in message


SCRIPT = """
import sys, time
from functools import partial
from importlib import import_module
from pathlib import Path
from arl.runtime.processes.actor import ObjectProcess

process = ObjectProcess("the other process", partial(import_module, "time"), Path(sys.argv[1]), {})
print(process.pid, flush=True)
process.call("sleep", 60)
"""


def test_it_ends_with_the_process_that_started_it_even_in_a_call(tmp_path: Path) -> None:
    with subprocess.Popen(
        [sys.executable, "-c", SCRIPT, str(tmp_path / "its.log")], stdout=subprocess.PIPE, text=True
    ) as parent:
        assert parent.stdout
        pid = int(parent.stdout.readline())
        command = Path(f"/proc/{pid}/cmdline").read_text()
        assert "arl.runtime.processes.actor" in command
        assert str(tmp_path) in command
        parent.kill()
    until(lambda: not is_running(pid))

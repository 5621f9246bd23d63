"""An object in another process: its way there, how calls of it ended, and stand-ins for what it keeps there.

A transport carries the calls: Ray to the ranks of a train engine, a socket to an ObjectProcess.
"""

from __future__ import annotations

import functools
import logging
import multiprocessing.process
import multiprocessing.spawn
import pickle
import sys
import traceback
import weakref
from collections import deque
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Concatenate, NamedTuple, ParamSpec, Protocol

from arl.api.engine import TensorSpec, WeightGroup
from arl.api.errors import ConfigError, EngineClosedError, TrainingError, TransportError, UnseenDirectoryError

_MAX_FRAMES = 6

P = ParamSpec("P")


def check_is_no_import(process: str = "the trainer's process or a worker") -> None:
    """Raise ConfigError where a run would start in a process that imports the run's script. process: which may be."""
    if getattr(multiprocessing.process.current_process(), "_inheriting", False):
        raise ConfigError(
            f"a process that imports this script, such as {process}, would start a run of its own; put the code that "
            'starts the run under `if __name__ == "__main__":`'
        )


class SentObject(NamedTuple):
    """It pickles by itself, whatever module the object is from."""

    main: Mapping[str, Any]
    """How a fresh process makes the script's own module __main__, for what the object uses of it."""
    pickled: bytes

    @classmethod
    def of(cls, thing: object, called: str, where: str, advice: str, instead: str = "") -> SentObject:
        """called: the object, in errors. where: the processes that get it. advice: what makes an object travel.
        instead: what to do otherwise.

        Raises ConfigError if it cannot travel.
        """
        check_is_no_import(where)
        data = multiprocessing.spawn.get_preparation_data(where)
        main = {name: value for name, value in data.items() if name != "authkey"}
        try:
            sent = cls(main, pickle.dumps(thing, protocol=5))
        except Exception as error:
            raise ConfigError(
                f"{called} cannot be sent to {where} ({type(error).__name__}: {error}). {advice}{instead}"
            ) from error
        path = main.get("init_main_from_path")
        is_script = "init_main_from_name" in main or (path is not None and Path(path).is_file())
        if b"__main__" in sent.pickled and not is_script:
            raise ConfigError(
                f"{called} uses what a notebook or an interactive session defines, and {where} cannot import that; "
                f"define it in a module{instead}"
            )
        return sent

    def received(self) -> Any:
        """In the other process. Raises what importing the script, or unpickling, raises."""
        process: Any = multiprocessing.process.current_process()
        process._inheriting = (
            True  # a script without `if __name__ == "__main__"` would start a run here: arl refuses it
        )
        try:
            multiprocessing.spawn.prepare(dict(self.main))
            return pickle.loads(self.pickled)
        finally:
            del process._inheriting


@dataclass(frozen=True, slots=True, kw_only=True)
class Message:
    logger: str
    level: int
    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class CallOutcome:
    """How a call ended: with a value or an error."""

    value: Any = None
    error: Exception | None = None
    traceback: str = ""
    messages: tuple[Message, ...] = ()
    """The messages that the process logged since its last answer."""
    is_dead: bool = False


class OtherTracebackError(Exception):
    """The cause of an error from another process: its text is the traceback there."""


class Messages(logging.Handler):
    """Keeps what arl logs in this process, for the process that calls it."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self._messages: deque[Message] = deque(maxlen=100)
        logging.getLogger("arl").addHandler(self)

    def emit(self, record: logging.LogRecord) -> None:
        self._messages.append(Message(logger=record.name, level=record.levelno, text=self.format(record)))

    def take(self) -> tuple[Message, ...]:
        taken: list[Message] = []
        with suppress(IndexError):  # calls that end at the same time share them
            while self._messages:
                taken.append(self._messages.popleft())
        return tuple(taken)


def outcome_of(messages: Messages, call: Callable[P, Any], *args: P.args, **kwargs: P.kwargs) -> CallOutcome:
    """Make the call; returns how it ended instead of raising."""
    try:
        return CallOutcome(value=call(*args, **kwargs), messages=messages.take())
    except BaseException as error:  # noqa: BLE001 (the caller raises it, or would wait for ever, as after sys.exit)
        text = "".join(traceback.format_exception(error))
        return CallOutcome(error=portable(error), traceback=text, messages=messages.take())


def reported(method: Callable[Concatenate[Any, P], Any]) -> Callable[Concatenate[Any, P], CallOutcome]:
    """Make a method of an object with `messages` return a CallOutcome instead of raising."""

    @functools.wraps(method)
    def call(self: Any, *args: P.args, **kwargs: P.kwargs) -> CallOutcome:
        return outcome_of(self.messages, method, self, *args, **kwargs)

    return call


def portable(error: BaseException) -> Exception:
    """The error if it pickles and ends no process, else a RuntimeError with its text."""
    with suppress(Exception):  # an exception's own pickling may raise anything
        pickle.loads(pickle.dumps(error))
        if isinstance(error, Exception):
            return error
    return RuntimeError(f"{type(error).__name__}: {error}")


def place_of(thread: int) -> str:
    """Where a thread of this process is: its innermost frames, up to the train engine's own."""
    stack = traceback.extract_stack(sys._current_frames().get(thread))
    frames = [f"{Path(frame.filename).name}:{frame.lineno} {frame.name}" for frame in reversed(stack)]
    ours = next((i for i, frame in enumerate(frames) if frame.startswith("train_engine.py")), 0)
    return " < ".join(frames[: ours + 1][-_MAX_FRAMES:])


# What an object keeps for its caller, under keys that the caller chooses, and what stands for it here.


class Kept:
    """Snapshots and savings that an object keeps for its caller."""

    def __init__(self) -> None:
        self._kept: dict[str, Any] = {}

    def put(self, key: str, value: Any) -> None:
        self._kept[key] = value

    def ask(self, key: str, name: str, args: tuple[Any, ...]) -> Any:
        """The attribute `name` of what is kept; a method is called with `args`."""
        answer = getattr(self._kept[key], name)
        return answer(*args) if callable(answer) else answer

    def forget(self, key: str) -> None:
        """Release a snapshot, or forget a saving. Idempotent."""
        kept = self._kept.pop(key, None)
        if hasattr(kept, "release"):
            kept.release()


class Holder(Protocol):
    """Reaches the process that keeps snapshots, from any thread."""

    def ask(self, key: str, name: str, *args: Any, is_leaving: bool = False) -> Any:
        """Kept.ask there. is_leaving: the call ends others, and so must not wait behind them."""
        ...

    def tell(self, method: str, *args: Any) -> None:
        """Call a method there, without waiting."""
        ...

    def unseen(self, directory: Path) -> str | None:
        """A sentence if that process does not see this process's directory; None if it does."""
        ...


class KeptSnapshot:
    """A SendableSnapshot (arl.engine.weights.distributed) whose methods run where it is kept, beside training."""

    def __init__(self, holder: Holder, key: str, version: int) -> None:
        self.version = version
        self.sender = self._holder = holder
        self._key = key
        self._is_released = False
        # One that is dropped without a release frees its memory, too.
        weakref.finalize(self, holder.tell, "forget", key).atexit = False

    @cached_property
    def specs(self) -> tuple[TensorSpec, ...]:
        return self._ask("specs")

    @cached_property
    def num_bytes(self) -> int:
        return self._ask("num_bytes")

    @cached_property
    def backend(self) -> str:
        return self._ask("backend")

    def write(self, directory: Path) -> int:
        """Raises TransportError, too, if the directory would lie where this process does not see it."""
        self._check()
        directory = Path(directory).absolute()
        if sentence := self._holder.unseen(directory.parent):
            raise UnseenDirectoryError(f"{sentence}; choose a directory that both see, such as one below run_dir")
        return self._ask("write", directory)

    def open_group(self, server: str, num_ranks: int, backend: str, address: str | None = None) -> WeightGroup:
        return self._ask("open_group", server, num_ranks, backend, address)

    def join(self, group: WeightGroup) -> None:
        self._ask("join", group)

    def wait(self) -> None:
        self._ask("wait")

    def send(self, group: str, start: int, stop: int) -> None:
        self._ask("send", group, start, stop)

    def leave(self, group: str) -> None:
        with suppress(EngineClosedError, TrainingError):  # the group ended with the process
            self._holder.ask(self._key, "leave", group, is_leaving=True)

    def release(self) -> None:
        """Does not wait for the process."""
        self._is_released = True
        self._holder.tell("ask", self._key, "release", ())

    def _check(self) -> None:
        if self._is_released:
            raise TransportError(f"the snapshot of version {self.version} was released")

    def _ask(self, name: str, *args: Any) -> Any:
        self._check()
        return self._holder.ask(self._key, name, *args)


class KeptSaving:
    """The Saving (arl.api.engine) of a checkpoint that another process is writing."""

    def __init__(self, holder: Holder, key: str) -> None:
        self._holder = holder
        self._key = key
        weakref.finalize(self, holder.tell, "forget", key).atexit = False

    def wait(self) -> None:
        """Raises CheckpointError, and ProcessLostError if the process died meanwhile."""
        self._holder.ask(self._key, "wait")

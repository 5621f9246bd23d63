"""A process that has imported what its children need, and forks them: each begins within milliseconds.

The client is `Nursery`. This file, run as a script, is the process: each line on its stdin names a function to call in
a new process, in a session of its own. It prints the process id, and later the exit code.
"""

import gc
import importlib
import json
import os
import selectors
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from pathlib import Path
from queue import Queue
from typing import Any, Self

TESTS = Path(__file__).parent


@dataclass(frozen=True, slots=True)
class Forked:
    """A child of the nursery."""

    pid: int
    code: Future[int] = field(default_factory=Future)
    """Its exit code; minus the signal that ended it."""

    @property
    def is_running(self) -> bool:
        return not self.code.done()


class Nursery:
    """Forks processes that have imported `modules`. Closing it kills those that still run."""

    def __init__(self, modules: Sequence[str], paths: Sequence[Path] = (), **environment: str) -> None:
        """paths: where the modules are, beside tests/."""
        where = ":".join(map(str, (TESTS.parent, TESTS, *paths)))
        settings = {"PYTHONPATH": where, "OMP_NUM_THREADS": "1", **environment}
        settings["HF_HUB_DISABLE_PROGRESS_BARS"] = "1"  # they share a lock, which a killed process may hold for ever
        command = [sys.executable, __file__, *modules]
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env={**os.environ, **settings}
        )
        self._began: Queue[Forked | None] = Queue()
        self._running: dict[int, Forked] = {}
        self._reader = threading.Thread(target=self._read)
        self._reader.start()

    @property
    def pid(self) -> int:
        return self._process.pid

    def fork(self, call: str, arguments: Mapping[str, Any], log: Path | None = None) -> Forked:
        """Call `module:function` with JSON values in a new process. log: where its output is appended."""
        assert self._process.stdin is not None
        if log is not None:
            log.touch()
        order = {"call": call, "log": None if log is None else str(log), "arguments": dict(arguments)}
        self._process.stdin.write(json.dumps(order, default=str) + "\n")
        self._process.stdin.flush()
        forked = self._began.get(timeout=120)
        assert forked is not None, "the nursery ended"
        return forked

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._reader.join()
        with self._process:
            pass

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            event = json.loads(line)
            if event["code"] is None:
                self._running[event["pid"]] = Forked(event["pid"])
                self._began.put(self._running[event["pid"]])
            else:
                self._running.pop(event["pid"]).code.set_result(event["code"])
        self._began.put(None)


def main() -> None:
    for module in sys.argv[1:]:
        importlib.import_module(module)
    gc.freeze()  # or each collection of a child goes through all that is imported, and copies its memory
    children: dict[int, int] = {}  # a descriptor of each process, which is readable when it has ended -> its id
    with selectors.DefaultSelector() as ready:
        ready.register(sys.stdin, selectors.EVENT_READ)
        while True:
            for key, _ in ready.select():
                if key.fileobj is not sys.stdin:
                    ready.unregister(key.fd)
                    os.close(key.fd)
                    pid = children.pop(key.fd)
                    say(pid, os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
                elif line := sys.stdin.readline():
                    if not (pid := os.fork()):
                        for descriptor in children:
                            os.close(descriptor)
                        return live(json.loads(line))
                    descriptor = os.pidfd_open(pid)
                    children[descriptor] = pid
                    ready.register(descriptor, selectors.EVENT_READ)
                    say(pid, None)
                else:
                    for pid in children.values():
                        os.kill(pid, 9)
                    return None


def live(order: dict[str, Any]) -> None:
    """In the child: ends as a script does that calls the function last."""
    os.setsid()
    output = os.open(order["log"] or os.devnull, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    nothing = os.open(os.devnull, os.O_RDONLY)
    for given, wanted in ((nothing, 0), (output, 1), (output, 2)):
        os.dup2(given, wanted)
    os.close(output)
    os.close(nothing)
    module, name = order["call"].split(":")
    sys.exit(getattr(importlib.import_module(module), name)(**order["arguments"]))


def say(pid: int, code: int | None) -> None:
    sys.stdout.write(json.dumps({"pid": pid, "code": code}) + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main()

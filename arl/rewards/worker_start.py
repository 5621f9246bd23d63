"""How worker processes start: forked from a clean server process, and without the user's script where it is not needed.

multiprocessing has each new process import the script that runs, with all that it imports itself: for one that imports
torch and transformers that takes many seconds, each time that a worker is killed and another takes its place.
"""

from __future__ import annotations

import functools
import multiprocessing
import os
import sys
from collections.abc import Callable
from multiprocessing import spawn
from multiprocessing.context import ForkServerContext, ForkServerProcess
from typing import Any


class _WithoutScript(str):
    """The name of a process that does not import the script. A name, since that is all that multiprocessing passes on
    to where it is decided; equal to the plain one."""

    __slots__ = ()


def context_for(*functions: Callable[..., Any] | None) -> Any:
    """The multiprocessing context for workers that call these functions."""
    if any(_module_of(function) == "__main__" for function in functions):
        return multiprocessing.get_context("forkserver")
    _install()
    return _Context()


def begin(prepare: Callable[[], object] | None) -> None:
    """In a new worker, before anything else."""
    if sys.platform == "linux":
        _end_with_parent()
    if prepare is not None:
        prepare()


def _end_with_parent() -> None:
    """Have the kernel end this process when arl's ends, however it does: a worker in a long call would not see to it.

    multiprocessing's sentinel is a pipe that only the parent can write to, and never does. SIGIO, which the kernel
    sends when it is closed, ends a process that does not handle it."""
    import fcntl

    parent = multiprocessing.parent_process()
    assert parent is not None
    pipe = int(parent.sentinel)
    fcntl.fcntl(pipe, fcntl.F_SETOWN, os.getpid())
    fcntl.fcntl(pipe, fcntl.F_SETFL, fcntl.fcntl(pipe, fcntl.F_GETFL) | os.O_ASYNC)
    if not parent.is_alive():
        os._exit(1)


class _Process(ForkServerProcess):
    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._name = _WithoutScript(self._name)


class _Context(ForkServerContext):
    Process = _Process  # pyright: ignore[reportAssignmentType]


@functools.cache
def _install() -> None:
    """Have multiprocessing ask the name whether the script is to be imported; all other processes start as ever."""
    prepare = spawn.get_preparation_data

    def preparation_data(name: str) -> dict[str, Any]:
        data = prepare(name)
        if isinstance(name, _WithoutScript):
            data.pop("init_main_from_path", None)
            data.pop("init_main_from_name", None)
        return data

    spawn.get_preparation_data = preparation_data


def _module_of(function: Any) -> str | None:
    while isinstance(function, functools.partial):
        function = function.func
    owner = getattr(function, "__self__", function)  # of a bound method
    return getattr(owner, "__module__", None)

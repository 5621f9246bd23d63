"""Makes multiprocessing's fork server remove its socket, and the socket's directory `pymp-*`, when it ends.

Python leaves that to the process that started the fork server, which may be killed. The fork server loads this module,
and ends after that process.
"""

import atexit
import contextlib
import multiprocessing
import os
import socket
from multiprocessing import forkserver
from typing import Any

_server: Any = forkserver._forkserver  # nothing public names the socket, or the modules to load


def load_into_fork_server() -> None:
    """Have fork servers that start from now on load this module."""
    if __name__ not in _server._preload_modules:
        multiprocessing.set_forkserver_preload([*_server._preload_modules, __name__])


def _remove_directory(of: int) -> None:
    """Only in the fork server: not in the processes that it forks, nor in one that started a fork server."""
    if os.getpid() != of or _server._forkserver_pid is not None or _server._forkserver_address is None:
        return
    directory = os.path.dirname(_server._forkserver_address)
    with contextlib.suppress(OSError):  # it is gone, or somebody listens there
        for name in os.listdir(directory):
            _remove_unless_heard(os.path.join(directory, name))
        os.rmdir(directory)


def _remove_unless_heard(address: str) -> None:
    """Remove a socket on which nobody listens: a fork server that was killed left it."""
    with socket.socket(socket.AF_UNIX) as probe:
        try:
            probe.connect(address)
        except ConnectionRefusedError:
            os.unlink(address)


atexit.register(_remove_directory, os.getpid())

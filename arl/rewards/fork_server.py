"""Loaded into multiprocessing's fork server: as that ends, it removes its socket, and the directory of it, `pymp-*`.

Python leaves that to the process that started the fork server, which may be killed. The fork server ends after it.
"""

import atexit
import contextlib
import multiprocessing
import os
import socket
from multiprocessing import forkserver
from typing import Any

_server: Any = forkserver._forkserver  # nothing public knows the socket, or what is to be loaded


def load_into_fork_server() -> None:
    """Have fork servers that start from now on load this module."""
    if __name__ not in _server._preload_modules:
        multiprocessing.set_forkserver_preload([*_server._preload_modules, __name__])


def _remove_directory(of: int) -> None:
    """In the fork server alone: not in what it forks, nor where a fork server was started."""
    if os.getpid() != of or _server._forkserver_pid is not None or _server._forkserver_address is None:
        return
    directory = os.path.dirname(_server._forkserver_address)
    with contextlib.suppress(OSError):  # removed already, or somebody listens there
        for name in os.listdir(directory):
            _remove_unless_heard(os.path.join(directory, name))
        os.rmdir(directory)


def _remove_unless_heard(address: str) -> None:
    """A fork server that was killed left its socket, too."""
    with socket.socket(socket.AF_UNIX) as probe:
        try:
            probe.connect(address)
        except ConnectionRefusedError:
            os.unlink(address)


atexit.register(_remove_directory, os.getpid())

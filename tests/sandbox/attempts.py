"""The beginning of each program of hostile/: what they all import, and `attempt`, which prints whether one was refused.

`given` is what the test tells all of them by stdin: addresses where someone listens, and paths that exist on the host.
"""

# ruff: noqa: F401 - for the programs

import atexit
import ctypes
import fcntl
import glob
import json
import mmap
import os
import resource
import shutil
import signal
import socket
import stat
import subprocess
import sys
import threading
import time

given = json.loads(sys.stdin.readline())
libc = ctypes.CDLL(None, use_errno=True)


def attempt(what, function, *arguments):
    try:
        result = function(*arguments)
    except BaseException as error:  # noqa: BLE001
        print(f"refused: {what}: {error!r}"[:200], flush=True)  # noqa: T201
        return None
    print(f"REACHED: {what}: {result!r}"[:200], flush=True)  # noqa: T201
    return result


def checked(result):
    """The result of a call into C, or its error."""
    if result == -1:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    return result

"""The beginning of each program of hostile/: it prints whether each attempt was refused.

`given` is what the test tells all of them by stdin: addresses where someone listens, and paths that exist on the host.
"""

import json
import sys

given = json.loads(sys.stdin.readline())


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
    import ctypes
    import os

    if result == -1:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    return result

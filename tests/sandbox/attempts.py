"""Put before each program of hostile/: says of each attempt whether it was refused, and takes the place of a traceback.

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

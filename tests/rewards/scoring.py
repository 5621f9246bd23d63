"""Reward functions that worker processes import."""

import os
import signal
import time

from arl.rewards import Score


def behaves(how: str) -> object:
    """One function that does whatever its argument says."""
    if how == "hangs":
        time.sleep(1000)
    if how == "dies":
        os._exit(7)
    if how == "raises":
        raise ValueError("no such answer")
    if how == "takes a while":
        time.sleep(0.3)
    return "text" if how == "is not a number" else 1


def worker_id(_: object) -> float:
    return float(os.getpid())


def reads_to_the_end(pipe: str, _: object) -> float:
    """Blocks its thread or process until somebody else has closed the other end."""
    with open(pipe, "rb") as reader:
        reader.read()
    return 1.0


def holds(path: str, _: object) -> float:
    """Tells that it has begun, and then lets no other thread of Python's run."""
    with open(path, "wb", 0) as held:
        held.write(b"x")
        return float(9**9**9 > 0)


def two_parts(answer: str, _: object) -> Score:
    return Score(1.5, {"a": 1.0, "b": 0.5})


def length(answer: str, _: object) -> float:
    return len(answer)


def dies_once(mark: str) -> None:
    """The first worker that prepares itself so kills itself."""
    if not os.path.exists(mark):
        open(mark, "w").close()
        os.kill(os.getpid(), signal.SIGKILL)

"""Process 1 of a container: lays out the program's files, runs it, and reports how it ended.

docker.py sends this file's text as the program of `python -c`. Over stdin it then sends a line of JSON, the contents of
the files, and the program's stdin. The report goes to the end of stderr, after a token that the program cannot know,
because this process's memory is closed to it.
"""

import ctypes
import json
import os
import signal
import sys
import time


def main() -> None:
    ctypes.CDLL(None).prctl(4, 0, 0, 0, 0)  # PR_SET_DUMPABLE
    line = b""
    while not line.endswith(b"\n"):
        line += received(1)
    header = json.loads(line)
    for path, length in header["files"].items():
        if directory := os.path.dirname(path):
            os.makedirs(directory, exist_ok=True)
        with open(path, "wb") as file:
            while length:
                length -= file.write(received(min(length, 1 << 16)))
    started = time.monotonic()
    program = os.posix_spawn(sys.executable, [sys.executable, "-I", "-u", header["main"]], {})
    ended_by, code = wait(program, started + header["wall_s"])
    if os.getpid() == 1:
        os.kill(-1, signal.SIGKILL)
    report = {"ended_by": ended_by, "code": code, "wall_s": time.monotonic() - started}
    os.write(2, f"{header['token']} {json.dumps(report)}".encode())


def received(most: int) -> bytes:
    """Ends this process, and so the container, if arl was killed before it had sent everything."""
    return os.read(0, most) or sys.exit("the program was not sent completely")


def wait(program: int, deadline: float) -> tuple[str, int]:
    """Wait for the program and reap other processes. Returns how it ended, and its exit code or minus its signal."""
    signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGCHLD])
    while True:
        ended, status = os.waitpid(-1, os.WNOHANG)
        if ended == program:
            code = os.waitstatus_to_exitcode(status)
            return how(code), code
        if ended == 0 and signal.sigtimedwait([signal.SIGCHLD], max(0.0, deadline - time.monotonic())) is None:
            return "timeout", 0


def how(code: int) -> str:
    if code == -signal.SIGKILL:  # from the program itself, or from the kernel for lack of memory
        return "memory" if out_of_memory() else "signal"
    if code == -signal.SIGXCPU:
        return "cpu"
    return "signal" if code < 0 else "exit"


def out_of_memory() -> bool:
    for place in ("memory.events", "memory/memory.oom_control"):
        try:
            with open(f"/sys/fs/cgroup/{place}") as events:
                counts = dict(line.split() for line in events)
        except OSError:
            continue
        return counts.get("oom_kill", "0") != "0"
    return False


if __name__ == "__main__":
    main()

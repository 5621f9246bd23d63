"""The program that runs one command of a BubblewrapTerminal: unpacks the files, runs it, packs the files.

bubblewrap_terminal.py sends this file's text to the sandbox. A request of JSON comes over stdin, with paths relative to
the working directory. The answer is a line of JSON, the bytes whose lengths it names, and the files as a tar. Imports
nothing of arl.
"""

import contextlib
import ctypes
import json
import os
import shutil
import signal
import stat
import subprocess
import sys
import tarfile
import threading
import time

OWN = ("main.py", "kept.tar", "added.tar")
"""The files beside the program that are not the terminal's."""
_CHUNK = 1 << 16
_AFTERWARDS_S = 1.0
"""How long the output may stay open after every process is killed."""


def main():
    ctypes.CDLL(None).prctl(4, 0, 0, 0, 0)  # PR_SET_DUMPABLE: the command cannot write to this process's stdout
    request = json.loads(sys.stdin.read())
    _unpack("kept.tar")
    for path in request["fresh"]:
        if os.path.isdir(path) and not os.path.islink(path):
            shutil.rmtree(path)
        elif os.path.lexists(path):
            os.unlink(path)
    for path in request["directories"]:
        os.makedirs(path, exist_ok=True)
    _unpack("added.tar")
    answer, output = _run(request)
    contents = _read(request["read"], request["most_bytes"])
    answer["files"] = [*contents]
    answer["lengths"] = [*map(len, (output, *contents.values()))]
    out = sys.stdout.buffer
    out.write(b"".join([json.dumps(answer).encode(), b"\n", output, *contents.values()]))
    _pack(out)
    out.flush()


def _unpack(name):
    if os.path.exists(name):
        with tarfile.open(name) as archive:
            archive.extraction_filter = lambda member, _: member  # it is this terminal's own
            archive.extractall()
        os.unlink(name)


def _run(request):
    """Run the command and end every process that it started. Returns how it ended, and its first output."""
    process = subprocess.Popen(
        ["bash", "-c", request["command"]],
        cwd=request["directory"],
        env={
            **os.environ,
            "PATH": os.path.dirname(sys.executable) + ":" + os.environ["PATH"],
            "PWD": request["workdir"],
            **request["env"],
        },
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        start_new_session=True,
    )
    kept, num_read = bytearray(), 0

    def read():
        nonlocal num_read
        assert process.stdout is not None
        while chunk := os.read(process.stdout.fileno(), _CHUNK):
            num_read += len(chunk)
            kept.extend(chunk[: request["most_bytes"] - len(kept)])

    reading = threading.Thread(target=read, daemon=True)
    reading.start()
    started = time.monotonic()
    deadline = started + request["timeout_s"]
    while process.poll() is None and time.monotonic() < deadline:
        reading.join(0.05)  # as a rule the output ends with the command
        if not reading.is_alive():
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(max(0.0, deadline - time.monotonic()))
    wall_s, code = time.monotonic() - started, process.returncode
    with contextlib.suppress(ProcessLookupError):
        os.kill(-1, signal.SIGKILL)  # all of this namespace but bubblewrap's process 1 and this one
    process.wait()
    reading.join(_AFTERWARDS_S)
    return {"code": code, "wall_s": wall_s, "num_dropped": num_read - len(kept)}, bytes(kept)


def _read(paths, most):
    """The beginning of each of these files that can be read."""
    contents = {}
    for path in paths:
        with contextlib.suppress(OSError), open(os.open(path, os.O_RDONLY | os.O_NONBLOCK), "rb") as file:
            contents[path] = file.read(most)
    return contents


def _pack(out):
    """Write everything in the working directory but the program. The command may have closed files to its own user."""
    for directory, names, files in os.walk("."):
        for path in (os.path.join(directory, name) for name in (*names, *files)):
            mode = os.lstat(path).st_mode
            if stat.S_ISDIR(mode):
                os.chmod(path, stat.S_IMODE(mode) | stat.S_IRWXU)
            elif stat.S_ISREG(mode) and not mode & stat.S_IRUSR:
                os.chmod(path, stat.S_IMODE(mode) | stat.S_IRUSR)
    with tarfile.open(mode="w|", fileobj=out) as archive:
        for name in sorted(set(os.listdir()) - set(OWN)):
            archive.add(name)


if __name__ == "__main__":
    main()

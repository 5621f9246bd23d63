"""The program that runs one command of a BubblewrapTerminal: unpacks the files, runs it, packs the files.

bubblewrap_terminal.py sends this file's text to the sandbox. A request of JSON comes over stdin, with paths relative to
the working directory. The answer is a line of JSON and, after it, the files as a tar in base64. Imports nothing of arl.
"""

import base64
import contextlib
import ctypes
import json
import os
import selectors
import shutil
import signal
import stat
import subprocess
import sys
import tarfile
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
        _remove(path)
    for path in request["directories"]:
        os.makedirs(path, exist_ok=True)
    _unpack("added.tar")
    answer = _run(request)
    answer["files"] = _read(request["read"], request["most_bytes"])
    out = sys.stdout.buffer
    out.write(json.dumps(answer).encode() + b"\n")
    _pack(out)
    out.flush()


def _unpack(name):
    if os.path.exists(name):
        with tarfile.open(name) as archive:
            archive.extraction_filter = lambda member, _: member  # it is this terminal's own
            archive.extractall()
        os.unlink(name)


def _remove(path):
    if os.path.isdir(path) and not os.path.islink(path):
        shutil.rmtree(path)
    elif os.path.lexists(path):
        os.unlink(path)


def _run(request):
    """Run the command and end every process that it started. At most `most_bytes` of its output are kept."""
    path = os.path.dirname(sys.executable) + ":" + os.environ["PATH"]
    process = subprocess.Popen(
        ["bash", "-c", request["command"]],
        cwd=request["directory"],
        env={**os.environ, "PATH": path, "PWD": request["workdir"], **request["env"]},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        start_new_session=True,
    )
    output = Printed(process.stdout, request["most_bytes"])
    started = time.monotonic()
    while process.poll() is None and time.monotonic() < started + request["timeout_s"]:
        output.wait(0.01 if output.is_closed else 0.05)
    wall_s, code = time.monotonic() - started, process.poll()
    with contextlib.suppress(ProcessLookupError):
        os.kill(-1, signal.SIGKILL)  # all of this namespace but bubblewrap's process 1 and this one
    process.wait()
    deadline = time.monotonic() + _AFTERWARDS_S
    while not output.is_closed and time.monotonic() < deadline:
        output.wait(0.05)
    text = base64.b64encode(output.kept).decode()
    return {"code": code, "wall_s": wall_s, "output": text, "num_dropped": output.num_dropped}


class Printed:
    def __init__(self, pipe, most):
        self.kept, self.num_dropped, self.is_closed = bytearray(), 0, False
        self._pipe, self._most = pipe.fileno(), most
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._pipe, selectors.EVENT_READ)

    def wait(self, seconds):
        if self.is_closed:
            time.sleep(seconds)
        elif self._selector.select(seconds):
            chunk = os.read(self._pipe, _CHUNK)
            self.is_closed = not chunk
            kept = chunk[: self._most - len(self.kept)]
            self.kept += kept
            self.num_dropped += len(chunk) - len(kept)


def _read(paths, most):
    """The beginning of each of these files that can be read."""
    contents = {}
    for path in paths:
        try:
            with open(os.open(path, os.O_RDONLY | os.O_NONBLOCK), "rb") as file:
                contents[path] = base64.b64encode(file.read(most)).decode()
        except OSError:
            continue
    return contents


def _pack(out):
    """Write everything in the working directory but the program."""
    encoded = Base64(out)
    with tarfile.open(mode="w|", fileobj=encoded) as archive:  # pyright: ignore[reportCallIssue, reportArgumentType]
        for name in sorted(set(os.listdir()) - set(OWN)):
            _open_to_owner(name)
            archive.add(name)
    encoded.close()


def _open_to_owner(top):
    """The command may have closed files to its own user; they could not be packed."""
    for path in [top, *(os.path.join(top, name) for name in _names(top))]:
        mode = os.lstat(path).st_mode
        if stat.S_ISREG(mode) and not mode & stat.S_IRUSR:
            os.chmod(path, stat.S_IMODE(mode) | stat.S_IRUSR)


def _names(top):
    """Everything below a directory, relative to it; opens closed directories on the way."""
    if os.path.isdir(top) and not os.path.islink(top):
        os.chmod(top, stat.S_IMODE(os.stat(top).st_mode) | stat.S_IRWXU)
        for name in os.listdir(top):
            yield name
            yield from (os.path.join(name, below) for below in _names(os.path.join(top, name)))


class Base64:
    """A file that encodes what is written to it."""

    def __init__(self, out):
        self._out, self._rest = out, b""

    def write(self, data):
        data = self._rest + data
        end = len(data) // 3 * 3
        self._out.write(base64.b64encode(data[:end]))
        self._rest = data[end:]

    def close(self):
        self._out.write(base64.b64encode(self._rest))


if __name__ == "__main__":
    main()

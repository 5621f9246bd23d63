"""A `docker` that runs a container's command as a plain process, and writes down what it was asked.

Environment: FAKE_DOCKER is a directory. calls.jsonl gets each call's arguments. A file named no_engine, no_image,
killed or stuck makes it behave as docker does then. A running container's process group is in a file of its name.

A container that runs detached is a directory of its name with `.root`: commands in it are plain processes, whose
arguments have that directory before /app, /tests and /logs.
"""

import contextlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tarfile
import tempfile
import time
from pathlib import Path

HOME = Path(os.environ["FAKE_DOCKER"])


def run(arguments: list[str]) -> int:
    if (HOME / "killed").exists():
        return 137
    if (HOME / "broken").exists():
        sys.stderr.write("docker: Error response from daemon: no space left on device.\n")
        return 125
    name = arguments[arguments.index("--name") + 1]
    command = arguments[arguments.index("python") + 1 :]
    with tempfile.TemporaryDirectory() as directory:
        process = subprocess.Popen([sys.executable, *command], cwd=directory, start_new_session=True)
        (HOME / name).write_text(str(process.pid))
        code = process.wait()
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)  # as the end of a container's first process does
        (HOME / name).unlink(missing_ok=True)
    return code if code >= 0 else 128 - code


def start(arguments: list[str]) -> int:
    root = HOME / (arguments[arguments.index("--name") + 1] + ".root")
    (root / "app").mkdir(parents=True)
    return 0


def execute(arguments: list[str]) -> int:
    """Only what a terminal runs: `kill -9 -1` would end every process of this user."""
    at = next(i for i, argument in enumerate(arguments) if argument.startswith("arl-"))
    root, command = HOME / f"{arguments[at]}.root", arguments[at + 1 :]
    if command[0] not in ("timeout", "rm", "head"):
        return 0
    inside = [re.sub(r"(?<![\w.])/(app|tests|logs|solution)\b", rf"{root}/\1", argument) for argument in command]
    given = [arguments[i + 1].split("=", 1) for i in range(at) if arguments[i] == "--env"]
    code = subprocess.run(inside, cwd=root / "app", env={**os.environ, **dict(given)}, check=False).returncode
    return code if code >= 0 else 128 - code


def copy(target: str) -> int:
    with tarfile.open(fileobj=sys.stdin.buffer, mode="r|") as archive:
        archive.extractall(HOME / f"{target.partition(':')[0]}.root", filter="fully_trusted")
    return 0


def main() -> int:
    with (HOME / "calls.jsonl").open("a") as calls:
        calls.write(json.dumps(sys.argv[1:]) + "\n")
    match sys.argv[1:]:
        case ["version", *_] if (HOME / "no_engine").exists():
            sys.stderr.write("Cannot connect to the Docker daemon at unix:///var/run/docker.sock.\n")
            return 1
        case ["image", "inspect", _] if (HOME / "no_image").exists():
            return 1
        case ["pull", *_] if (HOME / "no_pull").exists():
            sys.stderr.write("pull access denied\n")
            return 1
        case ["build", *_] if (HOME / "no_build").exists():
            sys.stderr.write("ERROR: failed to solve: debian: not found\n")
            return 1
        case ["run", "--detach", *arguments]:
            return start(arguments)
        case ["exec", *arguments]:
            return execute(arguments)
        case ["cp", "-", target]:
            return copy(target)
        case ["rm", "--force", name] if (HOME / f"{name}.root").exists():
            shutil.rmtree(HOME / f"{name}.root")
        case ["run", *arguments]:
            return run(arguments)
        case ["rm", *_] if (HOME / "stuck").exists():
            time.sleep(600)
        case ["rm", "--force", name] if (HOME / name).exists():
            os.killpg(int((HOME / name).read_text()), signal.SIGKILL)
            (HOME / name).unlink()
    return 0


if __name__ == "__main__":
    sys.exit(main())

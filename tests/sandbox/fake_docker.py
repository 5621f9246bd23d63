"""A `docker` that runs a container's command as a plain process, and writes down what it was asked.

Environment: FAKE_DOCKER is a directory. calls.jsonl gets each call's arguments. A file named no_engine, no_image,
killed or stuck makes it behave as docker does then. A running container's process group is in a file of its name.
"""

import contextlib
import json
import os
import signal
import subprocess
import sys
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

"""What the scripts of `arl launch` ask of a machine: `python -m arl.cluster.on_node COMMAND`.

- `check --towards HOST [--interface NAME] [--sglang PYTHON]` prints one line: `ready ADDRESS VERSIONS`. ADDRESS is this
  machine's, at the interface or at the one that leads to HOST. VERSIONS has no spaces, so lines can be compared.
- `ports COUNT` prints COUNT free ports in one line, and then lives on to keep them: no program gets one of them that
  does not ask for it by number.
- `wait SECONDS URL...` returns when every server answers GET URL/health. It says whom it waits for, and ends with code
  1 after SECONDS.
- `blocking-sigterm COMMAND...` becomes the command. SIGTERM does not reach it, nor what it starts: only SIGKILL ends
  them.
- `scale NAME COUNT`, in a pod: from now on COUNT pods of the StatefulSet NAME run.

Only the standard library is used, so that a start costs little on each of many machines.
"""

from __future__ import annotations

import argparse
import fcntl
import importlib.metadata
import json
import os
import platform
import signal
import socket
import ssl
import struct
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from http.client import HTTPException
from pathlib import Path
from typing import NoReturn

from arl.api.installing import __version__

_PACKAGES = ("torch", "transformers", "ray")
_GET_ADDRESS = 0x8915  # SIOCGIFADDR of Linux
_SAY_EVERY_S = 30.0
_TRY_EVERY_S = 1.0
_ANSWER_S = 60.0
_AT_ONCE = 32
_OPENER = urllib.request.build_opener(urllib.request.ProxyHandler({}))
"""No proxy leads to the machines of a cluster."""


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m arl.cluster.on_node", allow_abbrev=False)
    commands = parser.add_subparsers(required=True)
    check = commands.add_parser("check")
    check.add_argument("--towards", metavar="HOST", required=True)
    check.add_argument("--interface")
    check.add_argument("--sglang", metavar="PYTHON")
    check.set_defaults(run=lambda options: _check(options.towards, options.interface, options.sglang))
    ports = commands.add_parser("ports")
    ports.add_argument("count", type=int)
    ports.set_defaults(run=lambda options: _keep_ports(options.count))
    wait = commands.add_parser("wait")
    wait.add_argument("seconds", type=float)
    wait.add_argument("urls", nargs="+")
    wait.set_defaults(run=lambda options: _wait(options.seconds, options.urls))
    blocking = commands.add_parser("blocking-sigterm")
    blocking.add_argument("command", nargs=argparse.REMAINDER)
    blocking.set_defaults(run=lambda options: _block_sigterm(options.command))
    scale = commands.add_parser("scale")
    scale.add_argument("name")
    scale.add_argument("count", type=int)
    scale.add_argument("--account", type=Path, default=Path("/var/run/secrets/kubernetes.io/serviceaccount"))
    scale.set_defaults(run=lambda options: _scale(options.name, options.count, options.account))
    options = parser.parse_args(argv)
    run: Callable[[argparse.Namespace], int] = options.run
    return run(options)


def _check(towards: str, interface: str | None, sglang: str | None) -> int:
    versions = [
        f"python={platform.python_version()}",
        f"arl={__version__}",
        *(f"{name}={_version(name)}" for name in _PACKAGES),
    ]
    if sglang is not None:
        ask = "import importlib.metadata as m; print(m.version('sglang'))"
        answer = subprocess.run([sglang, "-c", ask], capture_output=True, text=True, check=False)
        if answer.returncode:
            sys.stderr.write(f"{sglang} has no sglang: {(answer.stderr.strip() or 'it fails').splitlines()[-1]}\n")
            return 1
        versions.append(f"sglang={answer.stdout.strip()}")
    try:
        address = _address_of(interface) if interface else _address_towards(towards)
    except OSError as error:
        known = ", ".join(name for _, name in socket.if_nameindex())
        what = f"interface {interface} has no address here" if interface else f"no way leads to {towards}"
        sys.stderr.write(f"{what}: {error.strerror}; the interfaces are {known}\n")
        return 1
    _say("ready", address, ",".join(versions))
    return 0


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "none"


def _address_of(interface: str) -> str:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asking:
        answer = fcntl.ioctl(asking, _GET_ADDRESS, struct.pack("256s", interface.encode()[:15]))
    return socket.inet_ntoa(answer[20:24])


def _address_towards(host: str) -> str:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asking:
        asking.connect((host, 9))  # sends nothing
        return asking.getsockname()[0]


def _keep_ports(count: int) -> int:
    kept = [socket.socket() for _ in range(count)]
    for port in kept:
        # Bound but never listening: a server that sets this option too, as all do, may bind and listen beside it.
        port.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        port.bind(("", 0))
    _say(*(str(port.getsockname()[1]) for port in kept))
    signal.pause()
    return 0


def _block_sigterm(command: Sequence[str]) -> NoReturn:
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})  # which programs inherit, whatever handlers they set
    os.execvp(command[0], list(command))


def _wait(seconds: float, urls: Sequence[str]) -> int:
    end, said, waiting = time.monotonic() + seconds, time.monotonic(), list(urls)
    with ThreadPoolExecutor(_AT_ONCE) as pool:
        while waiting := [
            url for url, answers in zip(waiting, pool.map(_answers, waiting), strict=True) if not answers
        ]:
            if time.monotonic() > end:
                sys.stderr.write(f"after {seconds:g} s there is no answer from {_named(waiting)}\n")
                return 1
            if time.monotonic() > said + _SAY_EVERY_S:
                said = time.monotonic()
                sys.stderr.write(f"waiting for {_named(waiting)}\n")
            time.sleep(_TRY_EVERY_S)
    return 0


def _named(urls: Sequence[str]) -> str:
    shown = ", ".join(urls[:5])
    return shown if len(urls) <= 5 else f"{shown} and {len(urls) - 5} more"


def _answers(url: str) -> bool:
    try:
        with _OPENER.open(f"{url}/health", timeout=_ANSWER_S):
            return True
    except (OSError, HTTPException):
        return False


def _scale(name: str, count: int, account: Path) -> int:
    """account: the directory of what Kubernetes gives a pod to ask it things."""
    try:
        host, port = os.environ["KUBERNETES_SERVICE_HOST"], os.environ["KUBERNETES_SERVICE_PORT"]
        place = f"namespaces/{(account / 'namespace').read_text()}/statefulsets/{name}/scale"
        headers = {
            "Authorization": f"Bearer {(account / 'token').read_text().strip()}",
            "Content-Type": "application/merge-patch+json",
        }
        url, body = f"https://{host}:{port}/apis/apps/v1/{place}", json.dumps({"spec": {"replicas": count}})
        patch = urllib.request.Request(url, body.encode(), headers, method="PATCH")
        trusted = ssl.create_default_context(cafile=str(account / "ca.crt"))
        with urllib.request.build_opener(
            urllib.request.ProxyHandler({}), urllib.request.HTTPSHandler(context=trusted)
        ).open(patch, timeout=_ANSWER_S):
            return 0
    except (KeyError, OSError, HTTPException) as error:
        sys.stderr.write(f"{name} could not be scaled to {count}: {type(error).__name__}: {error}\n")
        return 1


def _say(*words: str) -> None:
    sys.stdout.write(" ".join(words) + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(main())

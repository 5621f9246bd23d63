"""What is asked of each node of a cluster. It travels there as code, because the node may not have arl: it uses the
standard library alone, and answers in plain values.
"""

from __future__ import annotations

import contextlib
import glob
import hashlib
import importlib.metadata
import importlib.util
import os
import platform
import secrets
import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

_CONNECT_TIMEOUT_S = 5.0
_SIGHT_S = 2.0
"""How long a node may take to see a new file: network file systems keep listings for a while."""
_PACKAGES = {"torch": "torch", "transformers": "transformers", "ray": "ray", "arl": "arl-train"}
"""Each package, and the distribution that it comes with."""


class NodeProbe:
    """One node, as a process there sees it."""

    def __init__(self) -> None:
        self._listeners: list[socket.socket] = []

    def facts(self) -> dict[str, Any]:
        """machine, python, versions (package -> version, or None), sources (a digest of arl's), num_gpus."""
        boot = "/proc/sys/kernel/random/boot_id"
        with contextlib.suppress(OSError), open(boot) as file:
            boot = file.read().strip()
        return {
            "machine": f"{socket.gethostname()} {boot}",
            "python": platform.python_version(),
            "versions": {name: _version(distribution) for name, distribution in _PACKAGES.items()},
            "sources": _sources("arl"),
            "num_gpus": len(glob.glob("/dev/nvidia[0-9]*")),
        }

    def clock(self) -> float:
        """Seconds since 1970."""
        return time.time()

    def looks_for(self, token: str, mark: str, kind: str) -> str:
        """Whether this node sees the file `token` and may make the file `mark`: yes, no, read only."""
        until = time.monotonic() + _SIGHT_S
        while not os.path.exists(token):
            if time.monotonic() > until:
                return "no"
            time.sleep(0.1)
        if kind == "read":
            return "yes"
        try:
            with open(mark, "x"):
                return "yes"
        except OSError:
            return "read only"

    def files(self, directory: str) -> dict[str, Any] | None:
        """Names and sizes of a directory's files, and a digest of its config.json; None if it is not there."""
        try:
            sizes = {entry.name: entry.stat().st_size for entry in os.scandir(directory) if entry.is_file()}
        except OSError:
            return None
        digest = ""
        with contextlib.suppress(OSError), open(os.path.join(directory, "config.json"), "rb") as file:
            digest = hashlib.sha256(file.read()).hexdigest()
        return {"sizes": sizes, "config": digest}

    def listens(self, address: str) -> tuple[int, str]:
        """Listen on all interfaces until this process ends; returns the port, and the word that it says."""
        family = socket.AF_INET6 if ":" in address else socket.AF_INET
        listener, word = socket.create_server(("", 0), family=family), secrets.token_hex(8)
        self._listeners.append(listener)
        threading.Thread(target=_answer, args=(listener, word.encode()), daemon=True).start()
        return listener.getsockname()[1], word

    def address_towards(self, address: str) -> str:
        """The address from which this node reaches another one, found without sending anything."""
        with socket.socket(socket.AF_INET6 if ":" in address else socket.AF_INET, socket.SOCK_DGRAM) as probe:
            probe.connect((address, 9))
            return str(probe.getsockname()[0])

    def reaches(self, address: str, port: int, word: str) -> str:
        """Empty if this node reaches a listener at this address; else the reason why it does not.

        word: what the listener says; empty if anything may listen there.
        """
        try:
            with socket.create_connection((address, port), timeout=_CONNECT_TIMEOUT_S) as connection:
                if word and connection.recv(100).decode(errors="replace") != word:
                    return "something else answered"
            return ""
        except TimeoutError:
            return f"no answer within {_CONNECT_TIMEOUT_S:g} s"
        except OSError as error:
            return error.strerror or str(error)

    def reaches_all(self, places: list[tuple[str, int, str]]) -> list[str]:
        """`reaches` for each address, port and word, at once."""
        with ThreadPoolExecutor(len(places) or 1) as pool:
            return list(pool.map(lambda place: self.reaches(*place), places))


def _answer(listener: socket.socket, word: bytes) -> None:
    while True:
        try:
            connection, _ = listener.accept()
            with connection:
                connection.sendall(word)
        except OSError:
            if listener.fileno() < 0:
                return


def _version(distribution: str) -> str | None:
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None


def _sources(package: str) -> str | None:
    """A digest of the package's Python files; None if it cannot be imported."""
    try:
        found = importlib.util.find_spec(package)
    except (ImportError, ValueError):
        found = None
    if found is None or not found.submodule_search_locations:
        return None
    (root, *_), digest = found.submodule_search_locations, hashlib.sha256()
    for directory, names, files in os.walk(root):
        names.sort()
        for name in sorted(files):
            if name.endswith(".py"):
                path = os.path.join(directory, name)
                with open(path, "rb") as file:
                    digest.update(os.path.relpath(path, root).encode() + file.read())
    return digest.hexdigest()

"""Processes, HTTP, threads, clocks, the console and signals, as all wings use them.

    http/        a client, a server, request bodies
    processes/   an object in a process of its own, its calls, its logs, the watch over a parent
    threads, clocks, stopping, console

It imports arl.api alone, and knows none of arl's protocols. Import its modules; the package itself loads nothing.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from importlib import import_module
from typing import Any


def lazy_names(package: str, homes: Mapping[str, str]) -> tuple[Callable[[str], Any], Callable[[], list[str]]]:
    """The `__getattr__` and `__dir__` of `package`, whose names load their module when they are first used (PEP 562).

    homes: module -> the names that the package takes from it, separated by spaces. A module without names is itself
    what is taken, under the last part of its name.
    """
    found = {name: (module, name) for module, names in homes.items() for name in names.split()}
    found |= {module.rpartition(".")[2]: (module, "") for module, names in homes.items() if not names}

    def get(name: str) -> Any:
        if name not in found:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        home, attribute = found[name]
        module = import_module(home)
        value = getattr(module, attribute) if attribute else module
        setattr(sys.modules[package], name, value)
        return value

    def names() -> list[str]:
        return sorted({*found, *(name for name in vars(sys.modules[package]) if name.startswith("__"))})

    return get, names

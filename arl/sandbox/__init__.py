"""Where programs that a model wrote run, apart from everything else. docs/sandbox.md is the guide.

Users import from here; the modules behind are loaded when a name of theirs is used. `keeper` and `streams` are run by a
bare Python, so they import nothing else of arl, and `container` is sent to a container as text. The package imports
arl.api and arl.web alone.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from arl.sandbox.bubblewrap import BubblewrapSandbox
    from arl.sandbox.contract import EndedBy, Files, Limits, ProgramOutcome, Sandbox
    from arl.sandbox.docker import DockerSandbox
    from arl.sandbox.find import Kind, find_sandbox
    from arl.sandbox.remote import RemoteSandbox
    from arl.sandbox.unsafe import UnsafeSandbox

_MODULES = {
    "BubblewrapSandbox": "bubblewrap",
    "DockerSandbox": "docker",
    "EndedBy": "contract",
    "Files": "contract",
    "Kind": "find",
    "Limits": "contract",
    "ProgramOutcome": "contract",
    "RemoteSandbox": "remote",
    "Sandbox": "contract",
    "UnsafeSandbox": "unsafe",
    "find_sandbox": "find",
}

__all__ = [
    "BubblewrapSandbox",
    "DockerSandbox",
    "EndedBy",
    "Files",
    "Kind",
    "Limits",
    "ProgramOutcome",
    "RemoteSandbox",
    "Sandbox",
    "UnsafeSandbox",
    "find_sandbox",
]


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_MODULES[name]}"), name)

"""Sandboxes: they run a model's programs apart from everything else. docs/sandbox.md is the guide.

| module | holds |
|---|---|
| contract | the interface of a sandbox, its limits, and how a program ended |
| find | finds the first sandbox that runs programs on this machine |
| bubblewrap, docker, unsafe, remote | the kinds of sandboxes |
| serve | the command that serves this machine's sandbox to others |
| keeper, streams | the process beside arl that runs programs, in a bare Python: it imports nothing else of arl |
| keeping, seccomp | arl's side of the keeper; the filter of system calls |
| container | process 1 of a container; arl sends it there as text |

May import arl.api and arl.web. Loads each module only when it is needed.
"""

from typing import TYPE_CHECKING

from arl.lazy import lazy_names

if TYPE_CHECKING:
    from arl.sandbox.bubblewrap import BubblewrapSandbox
    from arl.sandbox.contract import EndedBy, Files, Limits, ProgramOutcome, Sandbox
    from arl.sandbox.docker import DockerSandbox
    from arl.sandbox.find import Kind, find_sandbox
    from arl.sandbox.remote import RemoteSandbox
    from arl.sandbox.unsafe import UnsafeSandbox

_HOMES = {
    "arl.sandbox.bubblewrap": "BubblewrapSandbox",
    "arl.sandbox.contract": "EndedBy Files Limits ProgramOutcome Sandbox",
    "arl.sandbox.docker": "DockerSandbox",
    "arl.sandbox.find": "Kind find_sandbox",
    "arl.sandbox.remote": "RemoteSandbox",
    "arl.sandbox.unsafe": "UnsafeSandbox",
}

__getattr__, __dir__ = lazy_names(__name__, _HOMES)
__all__ = sorted(" ".join(_HOMES.values()).split())  # pyright: ignore[reportUnsupportedDunderAll]

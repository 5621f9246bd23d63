"""Sandboxes: they run a model's programs apart from everything else. docs/sandbox.md is the guide.

| module | holds |
|---|---|
| contract | the interface of a sandbox, its limits, and how a program ended |
| find | the first sandbox that runs programs on this machine; the one that isolates nothing |
| bubblewrap, seccomp | namespaces, and a filter of system calls |
| keeper | the process beside arl that runs programs and watches each |
| cgroup | cgroups of v2, one for each program |
| docker, container | containers, and terminals in them; container is their process 1, and arl sends it there as text |
| bubblewrap_terminal | files that stay from one command to the next; one_command runs each, sent as text |
| streams | bytes in and out. keeper, cgroup and streams import nothing else of arl |

May import arl.api. Loads each module only when it is needed.
"""

from typing import TYPE_CHECKING

from arl.runtime import lazy_names

if TYPE_CHECKING:
    from arl.sandbox.bubblewrap import BubblewrapSandbox
    from arl.sandbox.bubblewrap_terminal import BubblewrapTerminal, CommandOutcome, Terminal
    from arl.sandbox.contract import EndedBy, Files, Limits, ProgramOutcome, Sandbox
    from arl.sandbox.docker import DockerImages, DockerSandbox, DockerTerminal
    from arl.sandbox.find import Kind, UnsafeSandbox, find_sandbox

_HOMES = {
    "arl.sandbox.bubblewrap": "BubblewrapSandbox",
    "arl.sandbox.contract": "EndedBy Files Limits ProgramOutcome Sandbox",
    "arl.sandbox.docker": "DockerImages DockerSandbox DockerTerminal",
    "arl.sandbox.find": "Kind UnsafeSandbox find_sandbox",
    "arl.sandbox.bubblewrap_terminal": "BubblewrapTerminal CommandOutcome Terminal",
}

__getattr__, __dir__ = lazy_names(__name__, _HOMES)
__all__ = sorted(" ".join(_HOMES.values()).split())  # pyright: ignore[reportUnsupportedDunderAll]

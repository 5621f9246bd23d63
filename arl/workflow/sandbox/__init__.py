"""Where programs that a model wrote run, apart from everything else. docs/sandbox.md is the guide."""

from arl.workflow.sandbox.bubblewrap import BubblewrapSandbox
from arl.workflow.sandbox.contract import EndedBy, Files, Limits, Outcome, Sandbox
from arl.workflow.sandbox.docker import DockerSandbox
from arl.workflow.sandbox.find import find_sandbox
from arl.workflow.sandbox.unsafe import UnsafeSandbox

__all__ = [
    "BubblewrapSandbox",
    "DockerSandbox",
    "EndedBy",
    "Files",
    "Limits",
    "Outcome",
    "Sandbox",
    "UnsafeSandbox",
    "find_sandbox",
]

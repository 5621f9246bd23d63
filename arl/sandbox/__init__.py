"""Where programs that a model wrote run, apart from everything else. docs/sandbox.md is the guide."""

from arl.sandbox.bubblewrap import BubblewrapSandbox
from arl.sandbox.contract import EndedBy, Files, Limits, Outcome, Sandbox
from arl.sandbox.docker import DockerSandbox
from arl.sandbox.find import Kind, find_sandbox
from arl.sandbox.remote import RemoteSandbox
from arl.sandbox.unsafe import UnsafeSandbox

__all__ = [
    "BubblewrapSandbox",
    "DockerSandbox",
    "EndedBy",
    "Files",
    "Kind",
    "Limits",
    "Outcome",
    "RemoteSandbox",
    "Sandbox",
    "UnsafeSandbox",
    "find_sandbox",
]

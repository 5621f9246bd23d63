"""Finds a sandbox that runs programs on this machine."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AsyncExitStack
from typing import Literal

from arl.api.errors import SandboxError
from arl.api.workflow import Shared
from arl.sandbox.bubblewrap import INSTALL, BubblewrapSandbox
from arl.sandbox.contract import NO_FILES, Files, Limits, ProgramOutcome, Sandbox, not_open
from arl.sandbox.docker import DockerSandbox
from arl.sandbox.unsafe import UnsafeSandbox

Kind = Literal["auto", "bubblewrap", "docker", "unsafe"]


def find_sandbox(kind: Kind = "auto", *, limits: Limits | None = None, concurrency: int | None = None) -> Sandbox:
    """A sandbox, to enter by `async with`.

    kind: "auto" is bubblewrap if it can run a program, else Docker if an engine can. It is never "unsafe", because
        "unsafe" isolates nothing.
    limits: for runs that name none.
    concurrency: programs at once; one per processor by default.

    If neither works, entering raises SandboxError, which says what to install or allow.
    """
    match kind:
        case "auto":
            return FirstSandbox([find_sandbox("bubblewrap", limits=limits, concurrency=concurrency),
                                 find_sandbox("docker", limits=limits, concurrency=concurrency)])  # fmt: skip
        case "bubblewrap":
            return BubblewrapSandbox(limits=limits, concurrency=concurrency)
        case "docker":
            return DockerSandbox(limits=limits, concurrency=concurrency)
        case "unsafe":
            return UnsafeSandbox(limits=limits, concurrency=concurrency)
        case _:
            raise SandboxError(f"there is no sandbox of kind {kind!r}; it is auto, bubblewrap, docker or unsafe")


class FirstSandbox(Shared):
    """The first of several sandboxes that can be entered."""

    def __init__(self, candidates: Sequence[Sandbox]) -> None:
        super().__init__()
        self._candidates = candidates
        self._opened = AsyncExitStack()
        self._found: Sandbox | None = None

    async def _open(self) -> None:
        reasons: list[str] = []
        for candidate in self._candidates:
            try:
                self._found = await self._opened.enter_async_context(candidate)
            except SandboxError as reason:
                reasons.append(f"\n- {reason}")
            else:
                return
        raise SandboxError(
            f"no sandbox was found:{''.join(reasons)}\nThe least to do is: {INSTALL}. To run programs without any "
            "isolation, on a machine that you could lose, ask for kind='unsafe'."
        )

    async def _close(self) -> None:
        self._found = None
        await self._opened.aclose()

    async def run(
        self, program: str, *, stdin: str = "", files: Files = NO_FILES, limits: Limits | None = None
    ) -> ProgramOutcome:
        """As Sandbox.run."""
        if self._found is None:
            raise not_open()
        return await self._found.run(program, stdin=stdin, files=files, limits=limits)

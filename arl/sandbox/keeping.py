"""arl's side of the keeper: starts it, sends it programs, and hands each answer to the call that waits for it."""

from __future__ import annotations

import asyncio
import itertools
import logging
import os
import socket
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Self

from arl.api.errors import SandboxError
from arl.sandbox.contract import EndedBy, Limits, not_open
from arl.sandbox.streams import Frames, Header, frame

log = logging.getLogger(__name__)

START = """
import sys, types
*packages, directory = sys.argv.pop(1).split("|")
for depth in range(len(packages)):
    package = types.ModuleType(".".join(packages[: depth + 1]))
    package.__path__ = ["/".join([directory, *packages[: depth + 1]])]
    sys.modules[package.__name__] = package
from arl.sandbox.keeper import main
main()
"""
"""Imports the keeper from packages without running their `__init__`, whose imports take a second."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Ended:
    """How a program ended. code: as in shells, 128 and more if a signal ended it."""

    ended_by: EndedBy
    code: int
    wall_s: float
    stdout: bytes
    stderr: bytes


class Keeping:
    """One keeper.

    places: programs that run at once.
    staged: directories that a keeper started by root cannot reach as nobody; they appear at keeper.STAGE/0 and so on.
    """

    def __init__(self, *, places: int, staged: Sequence[str]) -> None:
        self._places = places
        self._staged = staged
        self._numbers = itertools.count()
        self._answers: dict[int, asyncio.Future[tuple[Header, list[bytes]]]] = {}
        self._process: asyncio.subprocess.Process | None = None
        self._transport: asyncio.WriteTransport | None = None
        self._starting = asyncio.Lock()

    async def __aenter__(self) -> Self:
        await self._start()
        return self

    async def _start(self) -> None:
        ours, keepers = socket.socketpair()
        names = __name__.split(".")[:-1]
        packages = "|".join([*names, str(Path(__file__).parents[len(names)])])
        with keepers:
            self._process = await asyncio.create_subprocess_exec(
                *(sys.executable, "-I", "-S", "-c", START, packages),
                *(str(keepers.fileno()), str(self._places), str(os.getpid()), *self._staged),
                stdin=asyncio.subprocess.DEVNULL,
                stdout=asyncio.subprocess.DEVNULL,
                pass_fds=[keepers.fileno()],
                start_new_session=True,  # Ctrl-C is for arl, which then ends the keeper
                env={"PATH": os.environ.get("PATH", os.defpath)},
            )
        loop = asyncio.get_running_loop()
        self._transport, _ = await loop.create_connection(lambda: Frames(self._received, self._lost), sock=ours)

    async def __aexit__(self, *exc: object) -> None:
        """End every program. When this returns, they and the keeper are gone."""
        if self._transport is not None and self._process is not None:
            transport, self._transport = self._transport, None
            transport.close()
            await self._process.wait()

    async def run(
        self, command: Sequence[str], program: Sequence[str], confined: bytes, stdin: bytes,
        files: Mapping[str, bytes], limits: Limits,
    ) -> Ended:  # fmt: skip
        """Run `command`, then the keeper's options, then `program`, as one command line. Raises SandboxError."""
        async with self._starting:
            if self._transport is not None and self._transport.is_closing():
                log.warning("the keeper of the sandbox died, maybe for want of memory; another is started")
                await self._start()
            transport = self._transport
        if transport is None:
            raise not_open()
        number = next(self._numbers)
        request: Header = {"id": number, "command": [*command], "program": [*program], "files": [*files]}
        request["limits"] = asdict(limits)
        answer = self._answers[number] = asyncio.get_running_loop().create_future()
        transport.write(frame(request, [stdin, confined, *files.values()]))
        try:
            header, blobs = await answer
        except asyncio.CancelledError:
            if not transport.is_closing():
                transport.write(frame({"id": number, "stop": True}))
            raise
        finally:
            del self._answers[number]
        if "error" in header:
            raise SandboxError(f"a program could not be run: {header['error']}")
        stdout, stderr = blobs
        return Ended(
            ended_by=header["ended_by"], code=header["code"], wall_s=header["wall_s"], stdout=stdout, stderr=stderr
        )

    def _received(self, header: Header, blobs: list[bytes]) -> None:
        answer = self._answers.get(header["id"])  # nobody waits for a program that was stopped
        if answer is not None and not answer.done():
            answer.set_result((header, blobs))

    def _lost(self) -> None:
        for answer in self._answers.values():
            if not answer.done():
                answer.set_exception(SandboxError("the sandbox was closed, or its keeper died, during a call"))

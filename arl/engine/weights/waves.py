"""Mirrors that need a version at the same time get it in one wave, through trees.

    asked what they hold --+--> hold the version before: a tree that carries the delta
                           +--> hold anything else: then a tree that carries the whole model
                           +--> no answer for 2 s: on their own, once they answer

What a mirror fails to pass on goes out again in the same wave: mirrors to which nothing was sent get another tree, and
a mirror that failed below another one is sent to directly. For the next updates the trainer itself sends to mirrors
that failed, and puts nobody below them. It always does so with mirrors at loopback addresses, which mean another
machine to each mirror.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from yarl import URL

from arl.api.errors import ServerError, ServerFailedError
from arl.engine.weights.disk import look_at
from arl.engine.weights.mirror_client import Held, MirrorClient, Report, SlowMirrorError, pass_on, patience_s
from arl.engine.weights.mirror_tree import Branch, branches
from arl.engine.weights.package import Replica, WrongBaseError, whole_package
from arl.offload import offload
from arl.web.process import is_loopback

_GATHER_S = 0.01
"""Mirrors that ask within this time after the first share its wave."""
_ASK_S = 2.0
"""A wave begins without mirrors that do not answer for so long."""
_HEAD_START_S = 10.0
"""For how long whole models wait for deltas, which share the trainer's network with them."""
_SLOW_TIMES = 4.0
"""A mirror with others below it is given up if it takes so many times as long as the fastest branch."""
_UPDATES_APART = 8
"""For how many updates a mirror that failed is sent to directly."""
_PIECE_BYTES = 256 << 10
"""Small enough to tell slow mirrors from stuck ones."""

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Package:
    num_bytes: int
    pieces: Callable[[], Iterable[bytes]]
    """Its pieces, once more at each call."""
    is_delta: bool

    async def sent(self) -> AsyncIterator[bytes]:
        """Read the pieces from files while they are sent, on another thread."""
        pieces = iter(self.pieces())
        while piece := await offload(next, pieces, b""):
            for start in range(0, len(piece), _PIECE_BYTES):
                yield piece[start : start + _PIECE_BYTES]


@dataclass(kw_only=True)
class MirrorTrees:
    """How the mirrors of a run are arranged. It lasts for all updates."""

    fanout: int
    has_key: bool
    """Mirrors without a key pass nothing on."""
    apart: Counter[MirrorClient] = field(default_factory=Counter[MirrorClient])
    """For how many more updates a mirror is sent to directly."""

    def begin_update(self) -> None:
        self.apart = Counter({mirror: left - 1 for mirror, left in self.apart.items() if left > 1})

    def note_failure(self, mirror: MirrorClient, reason: Exception) -> None:
        if not self.apart[mirror]:
            logger.warning("the trainer itself sends to %s for %d updates: %s", mirror.url, _UPDATES_APART, reason)
        self.apart[mirror] = _UPDATES_APART

    def arrange(self, mirrors: Sequence[MirrorClient]) -> Iterator[Branch]:
        """The mirrors to which the trainer itself sends."""
        together = [mirror for mirror in mirrors if self.has_key and not self.apart[mirror] and not _is_local(mirror)]
        yield from branches([mirror.address for mirror in together], self.fanout)
        yield from (Branch(mirror.address) for mirror in mirrors if mirror not in together)


def _is_local(mirror: MirrorClient) -> bool:
    return is_loopback(URL(mirror.address).host or "")


class Waves:
    """Brings mirrors to one version."""

    def __init__(self, trees: MirrorTrees, new: Replica, version: int, delta: Package | None, base: str | None) -> None:
        """delta: from the version with the checksum `base`; None if all get the whole model."""
        self.num_sent = 0
        """Bytes that left this process."""
        self._trees = trees
        self._new = new
        self._version = version
        self._delta = delta
        self._base = base
        num_bytes, _ = whole_package(new, version)
        self._whole = Package(num_bytes=num_bytes, pieces=lambda: whole_package(new, version)[1], is_delta=False)
        self._coming: dict[MirrorClient, asyncio.Future[Path]] = {}
        self._locked: set[MirrorClient] = set()
        self._next: list[MirrorClient] = []
        """The mirrors of the wave that is about to begin."""
        self._tasks: set[asyncio.Task[None]] = set()
        self._num_waiting = 0
        self._is_over = False

    async def bring(self, mirror: MirrorClient, others: Iterable[MirrorClient] = ()) -> Path:
        """Returns the directory on the mirror's machine. Raises ServerError.

        others: those that will soon be asked for too, and may as well get it now.
        """
        loop = asyncio.get_running_loop()
        new = [one for one in dict.fromkeys((mirror, *others)) if one not in self._coming]
        for one in new:
            self._coming[one] = loop.create_future()
            self._coming[one].add_done_callback(look_at)
        if new and not self._next:
            self._tasks.add(task := loop.create_task(self._wave()))
            task.add_done_callback(self._tasks.discard)
        self._next += new
        self._num_waiting += 1
        coming = self._coming[mirror]
        try:
            return await asyncio.shield(coming)
        finally:
            self._num_waiting -= 1
            if self._is_over or not coming.done():
                self._stop_unless_awaited()

    def end(self) -> None:
        """The update is over: end what nobody waits for, now or later. Those that ask again begin another wave."""
        self._is_over = True
        self._stop_unless_awaited()

    def _stop_unless_awaited(self) -> None:
        if not self._num_waiting:
            for task in self._tasks:
                task.cancel()

    async def _wave(self) -> None:
        mine = dict[MirrorClient, asyncio.Future[Path]]()
        try:
            await asyncio.sleep(_GATHER_S)
            mine = self._taken()
            mirrors = [*mine]
            async with asyncio.TaskGroup() as group:
                asking = {mirror: group.create_task(self._ask(mirror)) for mirror in mirrors}
                await asyncio.wait(asking.values(), timeout=_ASK_S)
                late = {mirror: asking.pop(mirror) for mirror in mirrors if not asking[mirror].done()}
                for mirror, answering in late.items():
                    group.create_task(self._bring_late(mirror, answering))
                await self._bring_all({mirror: answering.result() for mirror, answering in asking.items()})
        except BaseExceptionGroup as errors:
            logger.error("mirrors could not be brought to version %s", self._version, exc_info=errors)
        finally:
            for mirror, coming in (mine or self._taken()).items():
                if self._coming.get(mirror) is coming:  # else it was settled, and another wave may have it
                    self._settle(mirror, ServerFailedError(f"{mirror.url} was not brought to version {self._version}"))

    def _taken(self) -> dict[MirrorClient, asyncio.Future[Path]]:
        """The mirrors of the wave that begins, or that ends before it has begun."""
        mirrors, self._next = self._next, []
        return {mirror: self._coming[mirror] for mirror in mirrors}

    async def _ask(self, mirror: MirrorClient) -> Held | ServerError:
        await mirror.busy.acquire()
        self._locked.add(mirror)
        try:
            return await mirror.held()
        except ServerError as error:
            return error

    async def _bring_late(self, mirror: MirrorClient, answering: asyncio.Task[Held | ServerError]) -> None:
        await self._bring_all({mirror: await answering})

    async def _bring_all(self, answers: Mapping[MirrorClient, Held | ServerError]) -> None:
        patched, whole = list[MirrorClient](), list[MirrorClient]()
        for mirror, held in answers.items():
            if isinstance(held, ServerError) or held.checksum == self._new.checksum:
                self._settle(mirror, held)
            elif held.checksum == self._base and self._delta is not None:
                patched.append(mirror)
            else:
                whole.append(mirror)
        async with asyncio.TaskGroup() as group:
            patching = group.create_task(self._spread(patched, self._delta or self._whole))
            await asyncio.wait({patching}, timeout=_HEAD_START_S if whole else None)
            group.create_task(self._spread(whole, self._whole))
        await self._spread(patching.result(), self._whole)

    async def _spread(
        self, mirrors: Sequence[MirrorClient], package: Package, directly: Sequence[MirrorClient] = ()
    ) -> list[MirrorClient]:
        """Returns those that do not hold the package's base, after all."""
        fastest = asyncio.get_running_loop().create_future()
        roots = [*self._trees.arrange(mirrors), *(Branch(mirror.address) for mirror in directly)]
        known = {mirror.address: mirror for mirror in (*mirrors, *directly)}
        async with asyncio.TaskGroup() as group:
            sending = [group.create_task(self._send(root, known, package, fastest)) for root in roots]
        return [mirror for sent in sending for mirror in sent.result()]

    async def _send(
        self, root: Branch, known: Mapping[str, MirrorClient], package: Package, fastest: asyncio.Future[float]
    ) -> list[MirrorClient]:
        report = await self._report(root, known[root.address], package, fastest)
        if any(isinstance(outcome, Held) for outcome in report.values()):
            self.num_sent += package.num_bytes
        wrong, unserved, directly = list[MirrorClient](), list[MirrorClient](), list[MirrorClient]()
        for address, outcome in report.items():
            mirror = known[address]
            match outcome:
                case None:
                    unserved.append(mirror)
                case WrongBaseError() if package.is_delta:
                    wrong.append(mirror)
                case Held():
                    self._settle(mirror, outcome)
                case SlowMirrorError():
                    self._trees.note_failure(mirror, outcome)
                    directly.append(mirror)
                case _:
                    if root.below:
                        self._trees.note_failure(mirror, outcome)
                    if address == root.address:
                        self._settle(mirror, outcome)
                    else:  # the way from the mirror above it may be at fault
                        directly.append(mirror)
        return wrong + (await self._spread(unserved, package, directly) if unserved or directly else [])

    async def _report(
        self, root: Branch, mirror: MirrorClient, package: Package, fastest: asyncio.Future[float]
    ) -> Report:
        """Send to a branch, unless others wait there and it is far slower than the fastest. Sets `fastest`, in s."""
        clock, others = asyncio.get_running_loop().time, bool(root.below)
        began = clock()
        sending = asyncio.ensure_future(
            pass_on(mirror, root, package.num_bytes, package.sent(), holds_up_others=others)
        )
        try:
            await asyncio.wait({sending, fastest} if others else {sending}, return_when=asyncio.FIRST_COMPLETED)
            if not sending.done():
                limit_s = max(patience_s(root), _SLOW_TIMES * fastest.result())
                await asyncio.wait({sending}, timeout=began + limit_s - clock())
            if not sending.done():
                slow = SlowMirrorError(f"{mirror.url} is far slower than the other mirrors")
                return dict.fromkeys(root.addresses) | {root.address: slow}
            report = sending.result()
            if isinstance(report[root.address], Held) and not fastest.done():
                fastest.set_result(clock() - began)
            return report
        finally:
            sending.cancel()
            sending.add_done_callback(look_at)
            await asyncio.wait({sending})  # it closes the mirror's connections, perhaps those of a send that follows

    def _settle(self, mirror: MirrorClient, outcome: Held | Exception) -> None:
        if mirror in self._locked:
            self._locked.remove(mirror)
            mirror.busy.release()
        if (coming := self._coming.pop(mirror, None)) is None:
            return
        match outcome:
            case Held(checksum=self._new.checksum, directory=Path() as directory):
                coming.set_result(directory)
            case Held():
                error = f"the mirror at {mirror.url} took an update but holds another; is it shared?"
                coming.set_exception(ServerError(error))
            case WrongBaseError():  # a package without a base came out wrong: files or bytes were damaged
                coming.set_exception(ServerFailedError(str(outcome)))
            case _:
                coming.set_exception(outcome)

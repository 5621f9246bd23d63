"""DistributedTransport: tensors go straight from the trainer's memory into the servers', and no file is written.

    prepare (the server generates):  a process group with this server, if there is none that works
    load (the server is paused):     begin, then for each bucket: receive over HTTP | broadcast in a thread, then end

Each server has a group of its own, so none can hold up another. A group in which anything failed is never used again.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import re
from collections import defaultdict
from collections.abc import Callable, Coroutine, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from functools import cache
from typing import TYPE_CHECKING, Any, Protocol, TypeVar, TypeVarTuple, runtime_checkable

from arl.api.engine import InferenceEngine, TensorSpec, UpdateStats, WeightGroup, WeightServer, WeightUpdate
from arl.api.errors import NoSuchPathError, ProcessLostError, ServerError, ServerFailedError, TransportError
from arl.api.settings.engines import DistributedWeightsConfig
from arl.api.train_engine import Snapshot, WeightSource
from arl.engine.weights.disk import look_at, submitted

if TYPE_CHECKING:
    import torch

_MAX_THREADS = 256
_LEAVING_S = 5.0
"""The longest that closing waits for groups to be left; it takes long only if a rank is stuck."""
_EXPLANATION_S = 1.0
"""The time that a server has to explain why its group broke."""

ResultT = TypeVar("ResultT")
ArgsT = TypeVarTuple("ArgsT")


@runtime_checkable
class SendableSnapshot(Snapshot, Protocol):
    """A snapshot whose tensors can also be sent, through process groups that are shared with inference servers.

    Every rank takes a snapshot, but only rank 0 writes and sends. Every call may come from any thread:
    several groups send at once, each of them one range at a time. Groups outlive the snapshot that opened them.
    """

    @property
    def specs(self) -> tuple[TensorSpec, ...]:
        """Every tensor, in the order in which it becomes ready."""
        ...

    @property
    def num_bytes(self) -> int:
        """The size of all tensors, as servers hold them."""
        ...

    @property
    def backend(self) -> str:
        """nccl or gloo, by the trainer's device."""
        ...

    @property
    def sender(self) -> object:
        """What groups belong to, and end with."""
        ...

    def open_group(self, server: str, num_ranks: int, backend: str, address: str | None = None) -> WeightGroup:
        """A group for num_ranks ranks, listening at a free port where the server at this base URL finds it.

        Its name is unique, also among runs.

        address: where servers reach this process; None: where this process reaches the server from. Raises
        TransportError.
        """
        ...

    def join(self, group: WeightGroup) -> None:
        """Wait until all of the servers' ranks have joined. Raises ServerFailedError if they do not in time."""
        ...

    def wait(self) -> None:
        """Wait until all tensors are there, as servers hold them. Raises TransportError."""
        ...

    def send(self, group: str, start: int, stop: int) -> None:
        """Broadcast specs[start:stop], all of one dtype, end to end as one tensor of bytes.

        Raises ServerFailedError if the group is broken and has to be left, TransportError if the weights could not be
        put together, or were released.
        """
        ...

    def leave(self, group: str) -> None:
        """Leave a group, which fails calls that send or join in it. Idempotent."""
        ...


class DistributedTransport:
    """Sends each snapshot to the servers, through a process group for each.

    A bucket has at most bucket_bytes, or one larger tensor. The newest delivered snapshot stays in memory, for servers
    that come back after a failure.
    """

    def __init__(self, config: DistributedWeightsConfig, bucket_bytes: int = 256 << 20) -> None:
        self.address = config.address
        self.bucket_bytes = bucket_bytes
        self.threads = ThreadPoolExecutor(_MAX_THREADS, "arl-send")
        self.groups: dict[str, WeightGroup] = {}
        """Server address -> the group that works."""
        self.broken: defaultdict[str, list[str]] = defaultdict(list)
        """Server address -> names of groups that the server must still be told to leave."""
        self._updates: list[DistributedWeights] = []
        self._sender: object = None

    def snapshot(self, engine: WeightSource) -> DistributedWeights:
        """Copy the weights aside. Raises TransportError if the engine cannot send them."""
        snapshot = engine.snapshot()
        if not isinstance(snapshot, SendableSnapshot):
            raise TransportError(f"{type(engine).__name__} cannot send tensors to servers; use weights.transport=disk")
        update = DistributedWeights(self, snapshot)
        self._updates.append(update)
        return update

    async def deliver(self, update: WeightUpdate, engine: InferenceEngine) -> UpdateStats:
        """Bring the servers to `update`, then release the snapshots before it.

        Raises TransportError if it cannot be gathered, before any server is touched; no snapshot is released then.
        """
        if isinstance(update, DistributedWeights):
            await update.gathered()
            if (sender := update.snapshot.sender) is not self._sender:
                # Groups of another sender ended with it. Else a server would be paused before that shows.
                self._sender = sender
                for address, group in self.groups.items():
                    self.broken[address].append(group.name)
                self.groups.clear()
        try:
            return await engine.update_weights(update)
        finally:
            for old in [old for old in self._updates if old.version < update.version]:
                self.discard(old)

    def discard(self, update: WeightUpdate) -> None:
        """Release a snapshot that will not be delivered. Idempotent."""
        if isinstance(update, DistributedWeights):
            update.snapshot.release()
            with contextlib.suppress(ValueError):  # it was released before
                self._updates.remove(update)

    def close(self) -> None:
        """Leave all groups. Idempotent. A call that hangs ends with the train engine."""
        # The sender is the engine's, so one snapshot can leave for all. In threads: a rank that is stuck never answers.
        leaving = [
            self.threads.submit(update.snapshot.leave, group.name)
            for update in self._updates[-1:]
            for group in self.groups.values()
        ]
        self.threads.shutdown(wait=False)
        wait(leaving, timeout=_LEAVING_S)
        for update in self._updates:
            update.snapshot.release()
        self._updates.clear()
        self.groups.clear()


class DistributedWeights:
    """A WeightUpdate that is sent to servers while they load it."""

    def __init__(self, transport: DistributedTransport, snapshot: SendableSnapshot) -> None:
        self.snapshot = snapshot
        self.version = snapshot.version
        self.adapter = None
        self.num_bytes = 0
        self._transport = transport
        self._specs = snapshot.specs
        self._buckets = ranges(self._specs, transport.bucket_bytes)
        self._backend = snapshot.backend
        self._met: set[str] = set()
        self.lost = asyncio.Event()
        """Set when a server could not get them, because the process that holds them is lost."""

    async def gathered(self) -> None:
        """Wait until all tensors are there, so that paused servers only wait for sending. Raises TransportError."""
        await self._in_thread(self.snapshot.wait)

    async def prepare(self, server: WeightServer) -> None:
        """Meet the server in a group, unless there is one already."""
        broken = self._transport.broken[server.address]
        for name in list(broken):
            try:
                await server.leave_group(name)
            except ServerFailedError:
                continue  # without an answer it is told again the next time
            except ServerError:
                pass  # it does not know of it
            broken.remove(name)
        if server.address not in self._transport.groups:
            try:
                self._transport.groups[server.address] = await self._meet(server)
            except ProcessLostError:
                self.lost.set()
                raise
            self._met.add(server.address)

    async def load(self, server: WeightServer, *, flush_cache: bool) -> None:
        """Send everything. If this raises, the group was left, and the server may hold a mixture, labelled so."""
        if (group := self._transport.groups.get(server.address)) is None:
            raise ServerFailedError(f"{server.address} no longer shares a group with the trainer")
        try:
            await _begin(server)
            for start, stop in self._buckets:
                specs, is_last = self._specs[start:stop], stop == len(self._specs)
                version = self.version if is_last else None
                receiving = server.receive(specs, group, version=version, flush_cache=flush_cache and is_last)
                await _both(self._in_thread(self.snapshot.send, group.name, start, stop), receiving)
                self.num_bytes += sum(map(byte_size, specs))
            await server.end_update()
        except BaseException as error:  # also if cancelled: the group may be in the middle of a broadcast
            self._break(server, group)
            if isinstance(error, ServerError) and server.address not in self._met:
                # A group of an earlier update: the server may have been restarted since, which a new group mends.
                raise ServerFailedError(str(error)) from error
            raise

    async def _meet(self, server: WeightServer) -> WeightGroup:
        backend = f"{self._backend}_by_id" if server.meets_by_id else self._backend
        where = (server.address, server.num_ranks, backend, self._transport.address)
        opening = submitted(self._transport.threads, self.snapshot.open_group, *where)
        try:
            group = await asyncio.wrap_future(opening)
        except asyncio.CancelledError:

            def leave(opening: Future[WeightGroup]) -> None:
                if not opening.cancelled() and opening.exception() is None:
                    self.snapshot.leave(opening.result().name)

            opening.add_done_callback(leave)  # the thread goes on
            raise
        try:
            await _both(self._in_thread(self.snapshot.join, group), server.join_group(group))
        except BaseException:  # also if cancelled: the server may wait in a group that is half formed
            self._break(server, group)
            raise
        return group

    def _break(self, server: WeightServer, group: WeightGroup) -> None:
        """Leave a group, which ends the server's waiting; the server is told at its next `prepare`."""
        self._transport.groups.pop(server.address, None)
        self._transport.broken[server.address].append(group.name)
        with contextlib.suppress(RuntimeError):  # the transport was closed, and has left all groups
            self._transport.threads.submit(self.snapshot.leave, group.name)

    def _in_thread(self, call: Callable[[*ArgsT], ResultT], *args: *ArgsT) -> asyncio.Future[ResultT]:
        return asyncio.wrap_future(submitted(self._transport.threads, call, *args))


async def _begin(server: WeightServer) -> None:
    try:
        await server.begin_update()
    except NoSuchPathError as error:
        raise ServerError(
            f"{server.address} must be SGLang 0.5.23 or newer for weights.transport=distributed ({error}); or use disk"
        ) from error
    except ServerFailedError:
        raise
    except ServerError:
        # An update that broke off was left open. Ending it puts into use what this one overwrites, all of it.
        await server.end_update()
        await server.begin_update()


async def _both(ours: asyncio.Future[Any], theirs: Coroutine[Any, Any, None]) -> None:
    """Wait for both sides of an exchange. Raises the first failure, or the server's explanation of it."""
    answering = asyncio.ensure_future(theirs)
    try:
        await asyncio.wait({ours, answering}, return_when=asyncio.FIRST_EXCEPTION)
        if ours.done() and isinstance(ours.exception(), ServerFailedError):
            await asyncio.wait({answering}, timeout=_EXPLANATION_S)
        for side in (answering, ours):
            if side.done():
                side.result()
    finally:
        for side in (answering, ours):
            side.cancel()  # a thread goes on until its group is left, or its time is over
            side.add_done_callback(look_at)


# How tensors are laid out: end to end, as bytes, in ranges of one dtype.


@cache
def byte_size(spec: TensorSpec) -> int:
    bits = re.search(r"\d+", spec.dtype)  # bool has none
    return math.prod(spec.shape) * max(int(bits[0]) // 8 if bits else 1, 1)


def ranges(specs: Sequence[TensorSpec], max_bytes: int) -> list[tuple[int, int]]:
    """Split `specs` into (start, stop) of one dtype and at most max_bytes; a larger tensor gets its own range."""
    found: list[tuple[int, int]] = []
    start, size = 0, 0
    for i, spec in enumerate(specs):
        grown = size + byte_size(spec)
        if i > start and (grown > max_bytes or spec.dtype != specs[start].dtype):
            found.append((start, i))
            start, grown = i, byte_size(spec)
        size = grown
    return [*found, (start, len(specs))] if specs else []


def torch_dtype(spec: TensorSpec) -> torch.dtype:
    import torch  # the script's process makes ranges without it

    return getattr(torch, spec.dtype)


def spec_of(name: str, tensor: torch.Tensor, dtype: torch.dtype) -> TensorSpec:
    return TensorSpec(name=name, dtype=str(dtype).removeprefix("torch."), shape=tuple(tensor.shape))


def views(specs: Sequence[TensorSpec], flat: torch.Tensor) -> list[torch.Tensor]:
    """The tensors that lie end to end in `flat` (uint8), without a copy."""
    parts = flat.split([byte_size(spec) for spec in specs])
    return [part.view(torch_dtype(spec)).view(spec.shape) for spec, part in zip(specs, parts, strict=True)]


def rows_of(num_rows: int, rank: int, num_ranks: int) -> range:
    """A rank's rows of a tensor sharded over its first dimension, by torch.chunk's rule."""
    each = -(-num_rows // num_ranks)
    return range(min(rank * each, num_rows), min((rank + 1) * each, num_rows))

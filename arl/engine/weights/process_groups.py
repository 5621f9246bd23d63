"""How a trainer sends weights over process groups that it shares with servers."""

from __future__ import annotations

import contextlib
import ipaddress
import socket
import threading
import time
from base64 import b64encode
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.cuda import nccl
from torch.distributed import TCPStore  # pyright: ignore[reportPrivateImportUsage]
from yarl import URL

from arl.api.engine import WeightGroup
from arl.api.errors import ServerFailedError, TransportError
from arl.api.types import new_id
from arl.engine.local.weight_receiver import first_line, form_group, run_into

_JOIN_TIMEOUT_S = 60.0
_SEND_TIMEOUT_S = 60.0
"""The longest broadcast. A stalled server delays only its own sending thread, for this long."""

_NEVER = timedelta(days=1)
"""NCCL's own timeout would end the process, so sends over NCCL are timed here."""

_POLL_S = 0.002
_BY_ID = "nccl_by_id"
"""The backend of a WeightGroup whose ranks meet by an id."""


@dataclass(slots=True, eq=False)
class _Link:
    """One group: first a store that waits for the servers' ranks, then also the group that they form."""

    store: TCPStore | None
    num_keys: int
    is_nccl: bool
    by_id: IdGroup | None = None
    """In the place of a store, and then of the group."""
    left: threading.Event = field(default_factory=threading.Event)
    sending: threading.Lock = field(default_factory=threading.Lock)
    """Held during a send over NCCL, which ends soon after `left` is set."""
    group: dist.ProcessGroup | None = None


class WeightSender:
    """Broadcasts to servers as rank 0, from any thread. No group delays another."""

    def __init__(self, device: torch.device) -> None:
        """device: computes the weights; NCCL sends from it."""
        self._device = device
        self.backend = "nccl" if device.type == "cuda" else "gloo"
        self._links: dict[str, _Link] = {}

    def open(self, server: str, num_ranks: int, backend: str, address: str | None = None) -> WeightGroup:
        """Listen for num_ranks ranks, where the server with this base URL sees it; see SendableSnapshot.open_group."""
        if not dist.is_backend_available(backend.partition("_")[0]):
            raise TransportError(f"this torch was built without {backend}, which weights.transport=distributed needs")
        name = f"arl-{new_id()}"
        if backend == _BY_ID:
            by_id = IdGroup(self._device, 1 + num_ranks)
            self._links[name] = _Link(None, num_keys=0, is_nccl=True, by_id=by_id)
            return WeightGroup(
                name=name, address="", port=0, world_size=1 + num_ranks, backend=backend, unique_id=by_id.unique_id
            )
        address = address or _own_address(server)
        store = _open_store(address, 1 + num_ranks)
        self._links[name] = _Link(store, num_keys=store.num_keys(), is_nccl=backend == "nccl")
        return WeightGroup(name=name, address=address, port=store.port, world_size=1 + num_ranks, backend=backend)

    def join(self, group: WeightGroup) -> None:
        """Wait until the servers' ranks have joined. Raises ServerFailedError if they do not in time."""
        link = self._link(group.name)
        if link.by_id is not None:
            met: Future[None] = Future()
            self._in_time(link, met, _JOIN_TIMEOUT_S, link.by_id.meet)
        if (store := link.store) is None:
            return
        deadline = time.monotonic() + _JOIN_TIMEOUT_S
        # Each rank of the servers writes to the store: gloo's own wait could not be ended. NCCL's meet when they send.
        while not link.is_nccl and store.num_keys() < link.num_keys + group.world_size - 1:
            if link.left.wait(_POLL_S):
                raise ServerFailedError(f"the group {group.name} was left before the server had joined it")
            if time.monotonic() > deadline:
                what = f"the server did not connect to {group.address}:{group.port} within {_JOIN_TIMEOUT_S:g} s"
                raise ServerFailedError(f"{what}; if it can't reach the trainer there, set weights.address")
        try:
            timeout = _NEVER if link.is_nccl else timedelta(seconds=_SEND_TIMEOUT_S)
            link.group = form_group(store, group, 0, timeout)
        except (RuntimeError, ValueError) as error:
            raise ServerFailedError(f"no group formed at {group.address}:{group.port}: {first_line(error)}") from error
        if link.left.is_set():
            _destroy(link)

    def send(self, name: str, data: torch.Tensor) -> None:
        """Broadcast `data` (uint8, on the CPU) and wait until it is sent. Raises ServerFailedError."""
        link = self._link(name)
        if (group := link.group or link.by_id) is None:
            raise ServerFailedError(f"the group {name} has not been joined")
        try:
            if link.is_nccl:
                with link.sending:
                    self._send_from_gpu(link, group, data)
            else:
                dist.broadcast(data, group_src=0, group=link.group)
        except RuntimeError as error:
            raise ServerFailedError(f"sending weights failed: {first_line(error)}") from error

    def leave(self, name: str) -> None:
        """Leave a group; a `join` that waits for its ranks fails. Idempotent."""
        if (link := self._links.pop(name, None)) is not None:
            link.left.set()
            with link.sending:  # the send notices `left` first: no group is destroyed during NCCL's first broadcast
                _destroy(link)

    def close(self) -> None:
        """Leave every group. Idempotent."""
        for name in list(self._links):
            self.leave(name)

    def _link(self, name: str) -> _Link:
        try:
            return self._links[name]
        except KeyError:
            raise ServerFailedError(f"the group {name} was left") from None

    def _send_from_gpu(self, link: _Link, group: dist.ProcessGroup | IdGroup, data: torch.Tensor) -> None:
        """Send on a separate stream, so that training and the sends to other servers go on.

        A group's first broadcast waits within NCCL for all ranks. If one has died it waits for ever, and nothing can
        end that. So each broadcast runs on a separate thread, which is abandoned in that case.
        """
        begun: Future[torch.Event] = Future()
        try:
            self._in_time(link, begun, _SEND_TIMEOUT_S, self._broadcast_from_gpu, group, data)
        except ServerFailedError:
            if begun.done() and link.group is not None:
                link.group.abort()
            else:
                link.group = link.by_id = None  # aborting or destroying it would wait as well
            raise

    def _in_time(self, link: _Link, begun: Future[Any], limit_s: float, call: Callable[..., Any], *args: Any) -> None:
        """Make a call on a thread of its own, until it has returned, and the event that it may return is recorded."""
        threading.Thread(target=run_into, args=(begun, call, *args), daemon=True).start()
        deadline = time.monotonic() + limit_s
        while not (begun.done() and ((event := begun.result()) is None or event.query())):
            if link.left.wait(_POLL_S) or time.monotonic() > deadline:
                raise ServerFailedError(f"the server did not take weights within {limit_s:g} s")

    def _broadcast_from_gpu(self, group: dist.ProcessGroup | IdGroup, data: torch.Tensor) -> torch.Event:
        """Returns an event that the GPU records once `data` is sent."""
        with torch.cuda.device(self._device), torch.cuda.stream(torch.cuda.Stream(self._device)):
            on_gpu = data.to(self._device, non_blocking=True)
            if isinstance(group, IdGroup):
                group.broadcast(on_gpu)
            else:
                dist.broadcast(on_gpu, group_src=0, group=group)
            return torch.cuda.current_stream().record_event()


def _destroy(link: _Link) -> None:
    link.by_id = None
    group, link.group = link.group, None
    if group is None:
        return
    if link.is_nccl:
        group.abort()  # ends a broadcast that the server has abandoned
    with contextlib.suppress(ValueError):  # it was destroyed together with the default group
        dist.destroy_process_group(group)


def _own_address(server: str) -> str:
    """The address from which this machine reaches the server, found without sending anything."""
    host, port = URL(server).host or "127.0.0.1", URL(server).port or 80
    try:
        family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.connect(address)
            return probe.getsockname()[0]
    except OSError as error:
        raise ServerFailedError(f"cannot find a route to {server}: {error}") from error


def _open_store(address: str, world_size: int) -> TCPStore:
    """A store at a free port, through which world_size ranks can meet. Raises TransportError.

    It listens on the loopback interface for a loopback address, else on all interfaces.
    """
    try:
        family, _, _, _, found = socket.getaddrinfo(address, 0, type=socket.SOCK_STREAM)[0]
    except OSError as error:
        raise TransportError(f"weights.address is {address!r}, which is not an address: {error}") from error
    is_local = ipaddress.ip_address(found[0]).is_loopback
    try:
        listening = socket.create_server((found[0] if is_local else "", 0), family=family)
        return TCPStore(
            address,
            listening.getsockname()[1],
            world_size=world_size,
            is_master=True,
            timeout=timedelta(seconds=_JOIN_TIMEOUT_S),
            wait_for_workers=False,
            master_listen_fd=listening.detach(),
        )
    except (OSError, RuntimeError) as error:  # torch's RuntimeError: the store cannot reach itself at this address
        what = f"servers cannot meet the trainer at {address}: {first_line(error)}"
        raise TransportError(f"{what}; set weights.address to an address of the trainer's machine") from error


class IdGroup:
    """The trainer's end, rank 0, of an NCCL group whose ranks meet by an id instead of at a store, as vLLM's do.

    The trainer makes the id, and a server gets it over HTTP (`/init_weight_transfer_engine`). Then all ranks enter
    ncclCommInitRank at the same time, and sum one number before anything else: vLLM does so, and a rank that does not
    would leave the others waiting. Nothing can end a call that waits for a rank which is gone: use a thread for each.
    """

    def __init__(self, device: torch.device, world_size: int) -> None:
        self._device = device
        self._world_size = world_size
        self._id: bytes = nccl.unique_id()
        self._communicator: Any = None

    @property
    def unique_id(self) -> str:
        """In base64."""
        return b64encode(self._id).decode()

    def meet(self) -> None:
        """Returns when all ranks have come."""
        with torch.cuda.device(self._device):
            self._communicator = nccl.init_rank(self._world_size, self._id, 0)
            number = torch.zeros(1, device=self._device)
            nccl.all_reduce([number], comms=[self._communicator])
            torch.cuda.synchronize(self._device)

    def broadcast(self, on_gpu: torch.Tensor) -> None:
        """Send bytes on the current stream."""
        nccl.broadcast([on_gpu], 0, comms=[self._communicator])
        on_gpu.record_stream(torch.cuda.current_stream())

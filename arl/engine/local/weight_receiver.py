"""New weights, from a model directory or from a trainer's broadcasts: received aside, checked, then loaded whole.

The model takes them when every tensor has arrived and fits, so a failed update leaves the old weights as they were.
The price is a second copy of the weights in memory during an update.
"""

from __future__ import annotations

import copy
import json
import math
import os
import threading
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from concurrent.futures import Future
from datetime import timedelta
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from safetensors import SafetensorError, safe_open
from torch.distributed import PrefixStore, Store, rendezvous  # pyright: ignore[reportPrivateImportUsage]
from torch.distributed import distributed_c10d as c10d

from arl.api.engine import WeightGroup
from arl.api.errors import ArlError
from arl.engine.model_files import as_stored

Shapes = Mapping[str, torch.Size]
ResultT = TypeVar("ResultT")

_INDEX = "model.safetensors.index.json"
_SINGLE = "model.safetensors"
_MAX_NAMED = 5
_MAX_GROUPS = 16
_MAX_ITEM_BYTES = 16
"""The size of an item of torch's widest dtype."""


class WeightsError(ArlError):
    """Weights are missing, unreadable, or do not fit the served model."""


class StoredForm:
    """How files and trainers name the tensors of a model, and how they become its parameters and buffers.

    transformers fuses some tensors when it loads them: the experts of a layer are stored one by one, and are one
    parameter. Others have another name in files, such as those of Qwen2.5-VL.

    shapes: by stored name; tied tensors once.
    own_names: of the parameters and buffers that these make.
    tied: names of tensors that files may hold besides, as they hold an output layer that is the embedding.
    """

    def __init__(self, model: Any, files: Collection[str]) -> None:
        """files: the names of the tensors in the files that it was loaded from."""
        ties = getattr(model, "all_tied_weights_keys", None) or {}
        state = {name: tensor.to("meta") for name, tensor in model.state_dict().items()}
        own = {name: tensor for name, tensor in state.items() if name not in ties}
        stored = as_stored(model, own, files)
        self.shapes: Shapes = {name: tensor.shape for name, tensor in stored.items()}
        self.own_names = frozenset(own)
        self.tied = frozenset(as_stored(model, {name: state[name] for name in ties}, files))
        names = {id(tensor): name for name, tensor in own.items()}
        self._names = {name: names[id(tensor)] for name, tensor in stored.items() if id(tensor) in names}
        """Of tensors that are one of the model's each: stored name -> the model's."""
        self._class, self._config = type(model), model.config

    def parameters(self, tensors: Mapping[str, torch.Tensor]) -> Mapping[str, torch.Tensor]:
        """The model's tensors that fitting ones make. Raises WeightsError if a part of a fused one is missing."""
        if self._names.keys() == self.shapes.keys():
            return {self._names[name]: tensor for name, tensor in tensors.items()}
        try:
            model, loading = self._class.from_pretrained(
                None, config=copy.deepcopy(self._config), state_dict=dict(tensors), output_loading_info=True
            )
        except RuntimeError as error:
            raise WeightsError(f"the tensors cannot be put together as the model has them: {error}") from error
        state = model.state_dict()
        return {name: state[name] for name in self.own_names - loading["missing_keys"]}


def read_directory(directory: str, shapes: Shapes, tied: Collection[str] = ()) -> dict[str, torch.Tensor]:
    """The weights of a model directory, sharded or not, but for those that are tied to others.

    Raises WeightsError unless their shapes are exactly these.
    """
    if not os.path.isabs(directory):
        raise WeightsError(f"model_path is {directory!r}; send the absolute path of a directory this server can read")
    if not os.path.isdir(directory):
        raise WeightsError(f"model_path is {directory!r}, which is not a directory this server can see")
    names, index = {_SINGLE}, Path(directory, _INDEX)
    if not Path(directory, _SINGLE).is_file():
        if not index.is_file():
            raise WeightsError(f"{directory} holds neither {_SINGLE} nor {_INDEX}")
        try:
            names = set(json.loads(index.read_text())["weight_map"].values())
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise WeightsError(f"{index} is not an index of weight files: {error!r}") from error
    tensors: dict[str, torch.Tensor] = {}
    for file in sorted(Path(directory, name) for name in names):
        try:
            with safe_open(str(file), framework="pt") as opened:
                # A clone reads the file now, on this thread; safetensors reads page by page when a tensor is used.
                tensors.update({name: opened.get_tensor(name).clone() for name in opened.keys()})  # noqa: SIM118
        except (OSError, SafetensorError) as error:
            raise WeightsError(f"cannot read {file}: {error}") from error
    for name in tied:
        tensors.pop(name, None)
    check_fit(tensors, shapes)
    if missing := sorted(shapes.keys() - tensors.keys()):
        raise WeightsError(f"{directory} lacks {named(missing)}, which the served model has")
    return tensors


def check_fit(tensors: Mapping[str, torch.Tensor], shapes: Shapes) -> None:
    """Raise WeightsError if a tensor is not one of the model's, or has another shape."""
    if unknown := sorted(tensors.keys() - shapes.keys()):
        raise WeightsError(f"the served model has no {named(unknown)}")
    for name, tensor in tensors.items():
        if tensor.shape != shapes[name]:
            raise WeightsError(f"{name} has shape {list(tensor.shape)}; the served model's has {list(shapes[name])}")


def named(names: Iterable[str]) -> str:
    """A few names, and the number of the others."""
    names = list(names)
    rest = len(names) - _MAX_NAMED
    return ", ".join(names[:_MAX_NAMED]) + (f" and {rest} more" if rest > 0 else "")


# Weights that a trainer broadcasts: process groups, and the begin .. end transaction that applies them at once.


def join_group(group: WeightGroup, rank: int, timeout: timedelta) -> dist.ProcessGroup:
    """Join a trainer's group, beside any others; returns when all ranks have. Raises RuntimeError if one is late."""
    gathering = rendezvous(f"tcp://{group.address}:{group.port}", rank, group.world_size, timeout=timeout)
    store, _, _ = next(gathering)
    return form_group(store, group, rank, timeout)


def form_group(store: Store, group: WeightGroup, rank: int, timeout: timedelta) -> dist.ProcessGroup:
    """The process group of the ranks that meet in `store`, the one at the group's address; returns when all have met.

    The prefix is part of the protocol: SGLang and its trainers find each other under these names. The function is
    private because torch has no public one for a group outside the default group.
    """
    store.set_timeout(timeout)
    formed, _ = c10d._new_process_group_helper(
        group.world_size,
        rank,
        [],
        dist.Backend(group.backend),
        PrefixStore(group.name, store),
        group_name=group.name,  # pyright: ignore[reportArgumentType]
        timeout=timeout,
    )
    if not isinstance(formed, dist.ProcessGroup):
        raise RuntimeError(f"rank {rank} is not in a group of {group.world_size}")
    c10d._world.pg_group_ranks[formed] = {i: i for i in range(group.world_size)}
    return formed


class WeightReceiver:
    """Joins trainers' groups and receives what they broadcast. Its calls block; make them all from one thread.

    If the trainer dies or stalls, or another server of the group, a call fails after `timeout_s`, or when `interrupt`
    ends it, and the server goes on. A failed receive leaves the group, because a later broadcast would look like the
    failed one; the open transaction then ends with that error.
    Joining or leaving a group discards a transaction that a former trainer left open.
    """

    def __init__(self, parameters: Shapes, device: str, timeout_s: float) -> None:
        self._parameters = parameters
        self._most_bytes = _MAX_ITEM_BYTES * sum(map(math.prod, parameters.values()))
        self._device = device
        self._timeout = timedelta(seconds=timeout_s)
        self._groups: dict[str, dist.ProcessGroup] = {}
        self._open: dict[str, torch.Tensor] | None = None
        """What the open transaction has received."""
        self._version, self._failure = "", ""
        """Of the open transaction: the last call's version, and why it failed."""
        self._left: set[str] = set()
        self._waiting: dict[str, threading.Event] = {}

    def interrupt(self, name: str) -> None:
        """End a call that waits in this group, which is about to be left. From any thread."""
        self._left.add(name)
        if (waiting := self._waiting.get(name)) is not None:
            waiting.set()

    def join(self, group: WeightGroup, rank: int) -> None:
        """Join the group of that name. Raises WeightsError if it does not gather in time."""
        if group.name in self._groups:
            raise WeightsError(f"the group {group.name!r} was joined already; destroy it first")
        if not dist.is_backend_available(group.backend.lower()):
            raise WeightsError(f"backend {group.backend!r} is not available here; gloo works between CPU processes")
        self._open = None
        while len(self._groups) >= _MAX_GROUPS:  # left by trainers that were killed
            self.leave(next(iter(self._groups)))
        try:
            self._groups[group.name] = self._wait(group.name, join_group, group, rank, self._timeout)
        except (RuntimeError, ValueError) as error:
            raise WeightsError(f"cannot join the group at {group.address}:{group.port}: {first_line(error)}") from error

    def leave(self, name: str) -> None:
        """Leave a group, and discard an open transaction. Raises WeightsError if the group was not joined."""
        self._open = None
        self._left.discard(name)
        if name not in self._groups:
            raise WeightsError("The group to be destroyed does not exist.")
        dist.destroy_process_group(self._groups.pop(name))

    def begin(self) -> None:
        if self._open is not None:
            raise WeightsError("a weight-update session is already open; call end_weight_update() first")
        self._open, self._version, self._failure = {}, "", ""

    def receive(self, name: str, expected: Sequence[tuple[str, str, Sequence[int]]], weight_version: str) -> None:
        """Receive the broadcast of a group's rank 0, in which the expected tensors lie end to end: (name, dtype, shape)
        of each."""
        if self._open is None:
            raise WeightsError(
                "update_weights_from_distributed must run between begin_weight_update() and end_weight_update()"
            )
        try:
            flat, tensors = _buffer(expected, self._device, self._most_bytes)
            if (group := self._groups.get(name)) is None:
                raise WeightsError(f"no group {name!r}; call init_weights_update_group() first")
            try:
                self._wait(name, dist.broadcast, flat, None, group, False, 0)
            except RuntimeError as error:
                dist.destroy_process_group(self._groups.pop(name))
                raise WeightsError(f"receiving from the group {name!r} failed: {first_line(error)}") from error
            check_fit(tensors, self._parameters)
        except WeightsError as error:
            self._failure = str(error)
            raise
        self._open.update(tensors)
        self._version = weight_version

    def end(self) -> tuple[dict[str, torch.Tensor], str]:
        """Close the transaction; returns its tensors and their version. Raises WeightsError if a part of it failed."""
        if self._open is None:
            raise WeightsError("no weight-update session is open; call begin_weight_update() first")
        tensors, self._open = self._open, None
        if self._failure:
            raise WeightsError(f"nothing was applied: {self._failure}")
        return tensors, self._version

    def _wait(self, name: str, call: Callable[..., ResultT], *args: Any) -> ResultT:
        """Make a call that waits for other ranks on a thread of its own, since only abandoning it can end gloo's wait.

        Raises RuntimeError.
        """
        left = self._waiting[name] = threading.Event()
        done: Future[ResultT] = Future()
        done.add_done_callback(lambda _: left.set())
        threading.Thread(target=run_into, args=(done, call, *args), daemon=True).start()
        if name not in self._left:
            left.wait()
        del self._waiting[name]
        if not done.done():
            raise RuntimeError("the group was left meanwhile")
        return done.result()


def _buffer(
    expected: Sequence[tuple[str, str, Sequence[int]]], device: str, most_bytes: int
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """A buffer of bytes to receive into, and the tensors that are its views, end to end."""
    kinds: list[torch.dtype] = []
    for name, dtype, _ in expected:
        kind = getattr(torch, dtype.removeprefix("torch."), None)
        if not isinstance(kind, torch.dtype):
            raise WeightsError(f"the dtype of {name} is {dtype!r}; torch has none of that name")
        kinds.append(kind)
    sizes = [math.prod(shape) * kind.itemsize for (_, _, shape), kind in zip(expected, kinds, strict=True)]
    if sum(sizes) > most_bytes:
        raise WeightsError(
            f"the tensors have {sum(sizes)} bytes; the served model takes at most {most_bytes} in a call"
        )
    flat = torch.empty(sum(sizes), dtype=torch.uint8, device=device)
    tensors: dict[str, torch.Tensor] = {}
    start = 0
    for (name, _, shape), kind, size in zip(expected, kinds, sizes, strict=True):
        if start % kind.itemsize:
            raise WeightsError(f"{name} would begin at byte {start}, where no {kind} can: send it apart")
        tensors[name] = flat[start : start + size].view(kind).view(tuple(shape))
        start += size
    return flat, tensors


def run_into(future: Future[ResultT], call: Callable[..., ResultT], *args: Any) -> None:
    """Make a call whose result `future` gets, whatever it is."""
    try:
        future.set_result(call(*args))
    except BaseException as error:  # noqa: BLE001 (result() raises it where it is awaited)
        future.set_exception(error)


def first_line(error: Exception) -> str:
    """An error's message without torch's stack of native frames."""
    return str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__

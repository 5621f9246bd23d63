"""Checkpoints of a sharded model and its optimizer: torch DCP, written during later steps, whole or absent.

    training's thread    copy this rank's shards aside --> train on
                                        |
    arl-checkpoint           write, fsync --> all ranks done --> rank 0: progress.json, fsync, rename

The thread has its own process group, so its collectives never mix with those of later steps.
"""

from __future__ import annotations

import json
import math
import os
import shutil
import uuid
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner
from torch.distributed.checkpoint.state_dict_loader import load as load_tensors
from torch.distributed.checkpoint.state_dict_saver import save as save_tensors
from torch.distributed.checkpoint.storage import WriteResult
from torch.distributed.tensor import DTensor

from arl.api.errors import CheckpointError, DamagedCheckpointError
from arl.api.train_engine import TensorPrint
from arl.engine.fsdp.lora import Adapters, LoRAOrigin
from arl.engine.fsdp.minibatch import reduce_over
from arl.engine.fsdp.model import replace_directory
from arl.engine.fsdp.policy import Reference, local_shard, trained_parameters
from arl.runtime.threads import force_to_disk

_PROGRESS_FILE = "progress.json"


@dataclass(frozen=True, slots=True, kw_only=True)
class Progress:
    """The contents of a checkpoint apart from its tensors."""

    version: int
    num_updates: int
    """Optimizer steps taken."""
    world_size: int
    """How many ranks wrote it, each with its random state."""
    device: str
    """The type of the device that they computed on: cpu or cuda."""
    parameters: Mapping[str, list[int]]
    """Name -> whole shape of each trained parameter."""
    lora: LoRAOrigin | None = None
    """The model that the adapters belong to; None without adapters. The checkpoint does not hold that model."""
    has_reference: bool = False
    frozen: Mapping[str, int] = field(default_factory=dict)
    """Name -> fingerprint of each frozen parameter, which the checkpoint does not hold either; with adapters `lora` has
    them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RankSaving:
    """One rank's Saving (arl.api.engine). Any thread may wait for it."""

    written: Future[None]

    def wait(self) -> None:
        self.written.result()


class EngineCheckpoints:
    """Writes a train engine's checkpoints, one after another, and reads them. All ranks make the same calls in the same
    order."""

    def __init__(
        self, module: nn.Module, optimizer: torch.optim.AdamW, reference: Reference, adapters: Adapters | None
    ) -> None:
        """A collective of the default process group."""
        self._module = module
        self._optimizer = optimizer
        self._reference = reference
        self._adapters = adapters
        self._group = cast("dist.ProcessGroup", dist.new_group(backend="gloo"))
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="arl-checkpoint")
        self._last: Future[None] | None = None

    def begin(self, directory: Path, version: int, num_updates: int) -> RankSaving:
        """Copy weights, optimizer state, reference and random state aside, and begin to write them to `directory`.

        Waits for the previous checkpoint, so that there is one copy at a time. The directory gets its name when it is
        complete and on the disk; a kill before that leaves a directory whose name begins with a dot. If any rank fails,
        the saving raises CheckpointError on every rank.
        """
        if self._last:
            wait([self._last])  # its error belongs to its own saving
        tensors, module = _copied(self._tensors(dist.get_rank())), self._module
        progress = Progress(
            version=version,
            num_updates=num_updates,
            world_size=dist.get_world_size(),
            device=_device_type(module),
            parameters={name: list(p.shape) for name, p in trained_parameters(module).items()},
            lora=self._adapters.origin if self._adapters else None,
            has_reference=bool(self._reference.values),
            frozen=_frozen(module, self._adapters),
        )
        self._last = self._thread.submit(self._write, Path(os.path.abspath(directory)), tensors, progress)
        return RankSaving(written=self._last)

    def load(self, directory: Path) -> Progress:
        """Read weights, optimizer state, reference and random state in place, on any number of ranks.

        A stored reference is held from then on. A rank without a stored random state keeps its own. Raises
        CheckpointError that names the mismatch. After a failed read the engine may be half loaded and must not be used.
        """
        progress = _checked_progress(directory, self._module, self._adapters)
        if self._reference.values and not progress.has_reference:
            raise CheckpointError(
                f"{directory} has no reference policy, and this run needs one: perhaps it was written with "
                "algorithm.kl.coefficient=0. Keep that setting, or begin another run from the model itself"
            )
        if progress.has_reference and not self._reference.values:
            self._reference.update(1.0)
        rank = dist.get_rank()
        tensors = self._tensors(rank if rank < progress.world_size else None)
        if progress.device != "cuda":
            tensors.pop("cuda_rng", None)
        _read_in_place(directory, tensors)
        if "rng" in tensors:
            torch.set_rng_state(tensors["rng"][str(rank)])
        if "cuda_rng" in tensors:
            torch.cuda.set_rng_state(tensors["cuda_rng"][str(rank)])
        return progress

    def close(self) -> None:
        """Wait for the checkpoint under way, and leave the process group."""
        self._thread.shutdown()
        dist.destroy_process_group(self._group)

    def _tensors(self, rank: int | None) -> dict[str, Any]:
        """The checkpoint's tensors, in the model's own memory. rank: whose random state to include."""
        named, states = trained_parameters(self._module), self._optimizer.state
        tensors: dict[str, Any] = {"model": {name: p.detach() for name, p in named.items()}}
        # The optimizer skips a parameter that the loss does not reach, so each has its own count of steps.
        for kind in ("exp_avg", "exp_avg_sq", "step"):
            tensors[kind] = {name: states[p][kind] for name, p in named.items()}
        if self._reference.values:
            tensors["reference"] = dict(self._reference.values)
        if rank is not None:
            tensors["rng"] = {str(rank): torch.get_rng_state()}
            if _device_type(self._module) == "cuda":
                tensors["cuda_rng"] = {str(rank): torch.cuda.get_rng_state()}
        return tensors

    def _write(self, directory: Path, tensors: dict[str, Any], progress: Progress) -> None:
        aside: Path | None = None
        try:
            aside = directory.parent / f".{directory.name}.{self._agree(uuid.uuid4().hex)}"
            # To copy ahead, DCP would open a CUDA context on GPU 0; the tensors are on the CPU anyway.
            files = _Files(aside, per_thread_copy_ahead=0)
            save_tensors(tensors, storage_writer=files, process_group=self._group)
            failure, cause = "", None
            if dist.get_rank() == 0:
                try:
                    _complete(aside, directory, progress)
                except Exception as error:  # noqa: BLE001 (raised on all ranks: none may wait for one that has given up)
                    failure, cause = _described(error), error
            if failure := self._agree(failure):
                raise CheckpointError(failure) from cause
        except (Exception, CheckpointException) as error:
            if aside is not None:
                shutil.rmtree(aside, ignore_errors=True)
            raise CheckpointError(f"cannot write the checkpoint {directory}: {_described(error)}") from error

    def _agree(self, value: str) -> str:
        values = [value]
        dist.broadcast_object_list(values, group=self._group)
        return values[0]


def load_weights(directory: Path, module: nn.Module, adapters: Adapters | None) -> Progress:
    """Read the trained weights alone, in place: an export needs no optimizer. Raises CheckpointError."""
    progress = _checked_progress(directory, module, adapters)
    _read_in_place(directory, {"model": {name: p.detach() for name, p in trained_parameters(module).items()}})
    return progress


class _Files(FileSystemWriter):
    """DCP's writer, but a failed write raises the system's own error."""

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> torch.futures.Future[list[WriteResult]]:
        try:
            return super().write_data(plan, planner)
        except RuntimeError as error:
            # torch.save hides a failed write behind an error about positions in the file.
            if isinstance(error.__context__, OSError):
                raise error.__context__ from None
            raise


def _frozen(module: nn.Module, adapters: Adapters | None) -> dict[str, int]:
    """A collective, if there are any."""
    frozen = {name: p for name, p in module.named_parameters() if not p.requires_grad}
    if adapters is not None or not frozen:
        return {}
    prints = fingerprints(frozen, torch.device(_device_type(module)))
    return {name: found.bits for name, found in prints.items()}


def _device_type(module: nn.Module) -> str:
    """The type of the device that computes. Offloaded parameters are on the CPU, but their mesh names the GPU."""
    parameter = next(module.parameters())
    mesh = getattr(parameter, "device_mesh", None)
    return mesh.device_type if mesh is not None else parameter.device.type


def _copied(tensors: Mapping[str, Mapping[str, torch.Tensor]]) -> dict[str, Any]:
    """Copy to the CPU; from a GPU into pinned memory, all at once."""
    copies = {
        kind: {name: tensor.to("cpu", non_blocking=True, copy=True) for name, tensor in named.items()}
        for kind, named in tensors.items()
    }
    if torch.cuda.is_initialized():
        torch.cuda.synchronize()
    return copies


def _complete(aside: Path, directory: Path, progress: Progress) -> None:
    """Rename the directory that all ranks have written, after forcing it to the disk."""
    # From DCP's file: the return value of its save does not name the files in every version of torch.
    written = FileSystemReader(aside).read_metadata().storage_data
    files = {info.relative_path for info in written.values()}
    if missing := sorted(name for name in files if not (aside / name).exists()):
        raise CheckpointError(f"rank 0 does not see {', '.join(missing)}; set run_dir to storage that all ranks share")
    (aside / _PROGRESS_FILE).write_text(json.dumps(asdict(progress)))
    force_to_disk(aside / _PROGRESS_FILE)
    force_to_disk(aside)
    replace_directory(aside, directory)
    force_to_disk(directory.parent)


def _checked_progress(directory: Path, module: nn.Module, adapters: Adapters | None) -> Progress:
    progress = read_progress(directory)
    _check_origin(directory, progress.lora, adapters.origin if adapters else None)
    frozen, expected = progress.frozen, _frozen(module, adapters)
    if frozen.keys() != expected.keys():
        there, here, what = ("with", "unset", "set it") if frozen else ("without", "set", "unset it")
        raise CheckpointError(
            f"{directory} was written {there} train.freeze_vision_tower, which is {here} here; {what} to load it"
        )
    if other := sorted(name for name, bits in frozen.items() if bits != expected[name]):
        raise CheckpointError(
            f"{directory} was trained beside another vision tower: its {other[0]} differs from this model's; load the "
            "model that the run began from"
        )
    stored, shapes = progress.parameters, {name: list(p.shape) for name, p in trained_parameters(module).items()}
    for name in sorted(stored.keys() | shapes.keys()):
        there, here = stored.get(name, "absent"), shapes.get(name, "absent")
        if there != here:
            raise CheckpointError(f"{directory} was written with another model: {name} is {there} there, {here} here")
    return progress


def _read_in_place(directory: Path, tensors: dict[str, Any]) -> None:
    try:
        load_tensors(tensors, checkpoint_id=directory)
    except (Exception, CheckpointException) as error:  # a damaged file makes torch and pickle raise almost anything
        if isinstance(_root(error), MemoryError | torch.OutOfMemoryError):
            raise CheckpointError(f"no memory to read the checkpoint {directory}: {_described(error)}") from error
        raise DamagedCheckpointError(f"the checkpoint {directory} is damaged: {_described(error)}") from error


def read_progress(directory: Path) -> Progress:
    """Raises CheckpointError if the directory is not a train engine's checkpoint."""
    file = Path(directory) / _PROGRESS_FILE
    if not file.is_file():
        raise DamagedCheckpointError(f"{directory} is not a train engine's checkpoint: it has no {_PROGRESS_FILE}")
    try:
        fields = json.loads(file.read_text())
        lora = LoRAOrigin(**fields["lora"]) if fields.get("lora") else None
        return Progress(**{**fields, "lora": lora})
    except (OSError, ValueError, TypeError, AttributeError) as error:
        raise DamagedCheckpointError(f"the checkpoint {directory} is damaged: {_PROGRESS_FILE}: {error}") from error


def _check_origin(directory: Path, stored: LoRAOrigin | None, expected: LoRAOrigin | None) -> None:
    if stored is None and expected is None:
        return
    if stored is None or expected is None:
        there, here, what = ("with", "unset", "set it alike") if stored else ("without", "set", "unset it")
        raise CheckpointError(f"{directory} was written {there} train.lora, which is {here} here; {what} to load it")
    for name in ("rank", "alpha", "target_modules"):
        if (there := getattr(stored, name)) != (here := getattr(expected, name)):
            raise CheckpointError(f"{directory} was written with train.lora.{name}={there}, and here it is {here}")
    for name in sorted(stored.frozen.keys() | expected.frozen.keys()):
        if stored.frozen.get(name) != expected.frozen.get(name):
            what = f"{directory} holds adapters of another model: its {name} differs from this one's"
            raise CheckpointError(f"{what}; load the model that they were trained on")


def _root(error: BaseException) -> BaseException:
    """The first rank's error, if DCP has collected the ranks' errors in its own, which is not an Exception."""
    if isinstance(error, CheckpointException) and error.failures:
        return next(iter(error.failures.values()))[0]
    return error


def _described(error: BaseException) -> str:
    error = _root(error)  # the text of DCP's own error is the tracebacks of all ranks
    return str(error) if isinstance(error, CheckpointError | OSError) else f"{type(error).__name__}: {error}"


# Fingerprints of sharded weights: each rank adds up its own elements, wherever they lie in the whole tensor
#
#     element i of a tensor = (row r, column c)      k_i = K(r) K(c)      s_i = S(r) S(c)


_GOLDEN = 0x9E3779B97F4A7C15 - (1 << 64)
_MIX = 0xBF58476D1CE4E5B9 - (1 << 64)
_HALF = 1 << 33
"""Columns have other numbers than rows."""
_CHUNK = 1 << 22
"""Elements that are looked at together."""
_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
"""The integers of as many bytes as an element has."""


@torch.no_grad()
def fingerprints(tensors: Mapping[str, torch.Tensor], device: torch.device) -> dict[str, TensorPrint]:
    """The print of each tensor, the same on every rank; a collective. device: where the ranks' group reduces."""
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    bits = torch.zeros(len(tensors), dtype=torch.int64, device=device)
    sums = torch.zeros(len(tensors), 2, dtype=torch.float64, device=device)
    for i, tensor in enumerate(tensors.values()):
        offsets, is_ours = [0] * tensor.ndim, dist.get_rank() == 0
        if isinstance(tensor, DTensor):
            mesh, placements = tensor.device_mesh, tensor.placements
            offsets = compute_local_shape_and_global_offset(tensor.shape, mesh, placements)[1]
            # Of ranks that hold the same part, the first one counts it.
            places = zip(mesh.get_coordinate() or (), placements, strict=True)
            is_ours = all(place == 0 for place, kind in places if kind.is_replicate())
        if is_ours and (shard := local_shard(tensor.detach())).numel():
            bits[i], sums[i, 0], sums[i, 1] = _of_shard(shard, offsets, tensor.shape)
    reduce_over(bits)
    reduce_over(sums)
    rows = zip(tensors, bits.tolist(), sums.tolist(), strict=True)
    return {
        name: TensorPrint(bits=own & (2**64 - 1), norm=math.sqrt(square), projection=projection)
        for name, own, (square, projection) in rows
    }


def _of_shard(
    shard: torch.Tensor, offsets: Sequence[int], shape: Sequence[int]
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The sums of bits (wrapping), squares and signed elements. offsets: of the shard's first element in `shape`."""
    rows = torch.arange(shard.shape[0] if shard.ndim else 1, device=shard.device) + (offsets[0] if offsets else 0)
    columns = torch.zeros(1, dtype=torch.int64, device=shard.device)  # the places of one row's elements in a whole row
    for size, offset, whole in zip(shard.shape[1:], offsets[1:], shape[1:], strict=True):
        columns = (columns[:, None] * whole + torch.arange(size, device=shard.device) + offset).flatten()
    flat = shard.reshape(len(rows), -1)
    of_rows, of_columns = _numbers(rows), _numbers(columns + _HALF)
    row_signs, column_signs = (1.0 - 2.0 * ((numbers >> 40) & 1).double() for numbers in (of_rows, of_columns))
    bits = torch.zeros((), dtype=torch.int64, device=shard.device)
    square, projection = (torch.zeros((), dtype=torch.float64, device=shard.device) for _ in range(2))
    step = max(_CHUNK // flat.shape[1], 1)
    for part in (slice(start, start + step) for start in range(0, len(rows), step)):
        own = flat[part].contiguous()
        words = own.view(_BITS[own.element_size()]).long()
        bits += ((words * of_columns).sum(1) * of_rows[part]).sum()
        wide = own.double()
        square += wide.square().sum()
        projection += row_signs[part] @ (wide @ column_signs)
    return bits, square, projection


def _numbers(places: torch.Tensor) -> torch.Tensor:
    """An odd pseudo-random int64 for each place, after SplitMix64 (Steele, Lea and Flood 2014)."""
    z = places * _GOLDEN + _GOLDEN
    z = (z ^ ((z >> 30) & 0x3FFFFFFFF)) * _MIX
    return (z ^ ((z >> 27) & 0x1FFFFFFFFF)) | 1

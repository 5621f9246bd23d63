"""Checkpoints of a sharded model and its optimizer: torch DCP, atomic, and refused when they do not fit."""

from __future__ import annotations

import json
import os
import shutil
import uuid
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict_loader import load as load_tensors
from torch.distributed.checkpoint.state_dict_saver import save as save_tensors

from arl.api.errors import CheckpointError
from arl.engine.export import replace_directory

_PROGRESS_FILE = "progress.json"


@dataclass(frozen=True, slots=True, kw_only=True)
class Progress:
    """What a checkpoint holds beside tensors. parameters: name -> shape of each whole parameter."""

    version: int
    num_updates: int
    world_size: int
    parameters: Mapping[str, list[int]]


@dataclass(frozen=True, slots=True, kw_only=True)
class RankSaving:
    """One rank's part of a checkpoint being written; see arl.api.engine.Saving."""

    directory: Path

    def wait(self) -> None: ...


def begin_checkpoint(
    directory: Path, module: nn.Module, optimizer: torch.optim.AdamW, *, version: int, num_updates: int
) -> RankSaving:
    """Write weights, optimizer state and each rank's random state. All ranks call, with the same directory.

    It is on the disk, complete, under its name when this returns; killed before, there is no directory of that name
    (or the older one), and what was written aside begins with a dot.
    """
    directory = Path(os.path.abspath(directory))
    aside = directory.parent / f".{directory.name}.{_agree(uuid.uuid4().hex)}"
    aside.mkdir(parents=True, exist_ok=True)
    try:
        save_tensors(_tensors(module, optimizer, dist.get_rank()), checkpoint_id=aside)
        if dist.get_rank() == 0:
            shapes = {name: list(p.shape) for name, p in module.named_parameters()}
            progress = Progress(
                version=version, num_updates=num_updates, world_size=dist.get_world_size(), parameters=shapes
            )
            _write_durably(aside / _PROGRESS_FILE, json.dumps(asdict(progress)))
            _sync(aside)
            replace_directory(aside, directory)
            _sync(directory.parent)
    except BaseException as error:
        shutil.rmtree(aside, ignore_errors=True)
        if isinstance(error, CheckpointException):
            raise CheckpointError(f"cannot write the checkpoint {directory}: {_cause(error)}") from error
        raise
    dist.barrier()
    return RankSaving(directory=directory)


def load_checkpoint(directory: Path, module: nn.Module, optimizer: torch.optim.AdamW) -> Progress:
    """Read weights, optimizer state and random state in place; also with another number of ranks than it was saved.

    Raises CheckpointError naming what is missing or does not fit. Where tensors turn out to be unreadable only while
    they are read, the engine is left half loaded and must not be used on.
    """
    progress = _read_progress(directory)
    _check_parameters(directory, progress, {name: list(p.shape) for name, p in module.named_parameters()})
    rank = dist.get_rank()
    tensors = _tensors(module, optimizer, rank if rank < progress.world_size else None)
    try:
        load_tensors(tensors, checkpoint_id=directory)
    except (Exception, CheckpointException) as error:
        raise CheckpointError(f"the checkpoint {directory} is damaged: {_cause(error)}") from error
    for state in optimizer.state.values():
        state["step"].fill_(progress.num_updates)
    if "rng" in tensors:
        torch.set_rng_state(tensors["rng"][str(rank)])
    return progress


def _tensors(module: nn.Module, optimizer: torch.optim.AdamW, rank: int | None) -> dict[str, Any]:
    """The checkpoint's tensors, sharing storage with the model's; with the random state of a rank that has one."""
    named = dict(module.named_parameters())
    tensors: dict[str, Any] = {
        "model": {name: p.detach() for name, p in named.items()},
        "exp_avg": {name: optimizer.state[p]["exp_avg"] for name, p in named.items()},
        "exp_avg_sq": {name: optimizer.state[p]["exp_avg_sq"] for name, p in named.items()},
    }
    if rank is not None:
        tensors["rng"] = {str(rank): torch.get_rng_state()}
    return tensors


def _read_progress(directory: Path) -> Progress:
    file = Path(directory) / _PROGRESS_FILE
    if not file.is_file():
        raise CheckpointError(f"{directory} is not a train engine's checkpoint: it has no {_PROGRESS_FILE}")
    try:
        return Progress(**json.loads(file.read_text()))
    except (ValueError, TypeError) as error:
        raise CheckpointError(f"the checkpoint {directory} is damaged: {_PROGRESS_FILE}: {error}") from error


def _check_parameters(directory: Path, progress: Progress, expected: Mapping[str, list[int]]) -> None:
    stored = progress.parameters
    for name in sorted(stored.keys() | expected.keys()):
        if name not in stored or name not in expected:
            where = "the checkpoint" if name in stored else "the model"
            raise CheckpointError(f"{directory} was written with another model: only {where} has the parameter {name}")
        if stored[name] != expected[name]:
            raise CheckpointError(
                f"{directory} was written with another model: {name} is {stored[name]} there, {expected[name]} here"
            )


def _cause(error: BaseException) -> str:
    """What happened, of an error that may be DCP's own (no Exception, and with every rank's traceback as its text)."""
    if isinstance(error, CheckpointException) and error.failures:
        error = next(iter(error.failures.values()))[0]
    return f"{type(error).__name__}: {error}"


def _agree(value: str) -> str:
    """Rank 0's value, on every rank."""
    values = [value]
    dist.broadcast_object_list(values)
    return values[0]


def _write_durably(file: Path, text: str) -> None:
    with file.open("w") as stream:
        stream.write(text)
        stream.flush()
        os.fsync(stream.fileno())


def _sync(directory: Path) -> None:
    descriptor = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)

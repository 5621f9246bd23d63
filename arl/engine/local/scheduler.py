"""Continuous batching: which sequences the model computes in each step, and what becomes of the sampled tokens."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

import torch

from arl.api.config import PauseMode
from arl.engine.local.job import Job

Deliver = Callable[[Sequence[Job]], None]
"""Called on the model thread once per step, with the jobs that finished and the streaming jobs that gained tokens."""

NamedTensors = Callable[[], Iterable[tuple[str, torch.Tensor]]]
"""Yields (parameter name, tensor); called on the model thread."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """How busy a scheduler is: sequences in the batch, and sequences waiting for a place in it."""

    running: int
    queued: int


class Scheduler:
    """Generates jobs on a thread of its own. Every method may be called from any thread and returns at once.

    What they ask for takes effect between two steps, in the order of the calls. Futures are resolved on the model
    thread.
    """

    def __init__(
        self,
        model_dir: str,
        deliver: Deliver,
        *,
        device: str = "cpu",
        dtype: str = "float32",
        num_threads: int = 1,
        max_running_requests: int = 128,
        context_length: int | None = None,
        weight_version: str = "default",
    ) -> None:
        raise NotImplementedError

    tokenizer: Any
    model_config: Any

    @property
    def weight_version(self) -> str: ...
    @property
    def is_paused(self) -> bool: ...
    @property
    def is_alive(self) -> bool: ...
    @property
    def context_length(self) -> int: ...
    @property
    def load_stats(self) -> Load: ...
    @property
    def parameter_shapes(self) -> dict[str, torch.Size]: ...

    def start(self) -> None: ...
    def close(self) -> None: ...

    def submit(self, job: Job) -> None: ...
    def abort(self, rid: str | None) -> None: ...
    def pause(self, mode: PauseMode) -> Future[None]: ...
    def resume(self) -> Future[None]: ...
    def flush_cache(self) -> Future[bool]: ...
    def load(self, tensors: NamedTensors, weight_version: str | None, flush_cache: bool) -> Future[None]: ...

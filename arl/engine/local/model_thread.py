"""The model thread: it steps the batch, and runs the other threads' commands between two steps.

    submit, abort, pause, resume, release_memory, load, ... --commands, in order--> model thread --deliver--> event loop

The thread sleeps on its command queue while it is paused, has nothing to generate, or no memory to do it in; each
command wakes it.
"""

from __future__ import annotations

import logging
import queue
import threading
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any, TypeVar

import torch

from arl.api.errors import EngineClosedError
from arl.api.settings.engines import PauseMode
from arl.engine.local.adapters import Adapter
from arl.engine.local.memory import MemoryPart
from arl.engine.local.runner import ModelRunner
from arl.engine.local.scheduler import IterationTimes, RunningBatch
from arl.engine.local.sequences import Job

Deliver = Callable[[Sequence[Job]], None]
"""Called on the model thread with jobs that have ended."""

_PREFILL_TOKENS = {"cpu": 512}
"""Most prompt tokens in a step, by device: enough to keep the device busy without stalling decoding."""

_SHUTTING_DOWN = "the server is shutting down"

_T = TypeVar("_T")

_logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerSettings:
    """How a model is served."""

    device: str = "cpu"
    dtype: str = "float32"
    num_threads: int = 1
    max_running_requests: int = 128
    """Sequences decoded at once."""
    context_length: int | None = None
    """Longest prompt plus response in tokens; by default the model's own."""
    weight_version: str = "default"
    """The label of the weights at the start."""
    prefill_tokens: int | None = None
    """Most prompt tokens computed in a step, so that others decode in between; by default the device decides."""
    prefix_cache_bytes: int = 1 << 30
    """Memory for the keys and values of finished requests."""


class Scheduler:
    """Generates jobs on the model thread. Every method may be called from any thread and returns at once.

    Calls take effect between two steps, in their order. Futures are resolved on the model thread; after `close` they
    fail with EngineClosedError. A job that names an unknown adapter finishes with reason abort and status_code 400; a
    job whose step failed, with 500.

    runner: the model. Read only its constant parts: tokenizer, configuration and limits.

    Raises ModelError if model_dir holds no model that it can serve, ConfigError for an unknown device or dtype.
    """

    def __init__(self, model_dir: str, deliver: Deliver, settings: SchedulerSettings) -> None:
        self._deliver = deliver
        self.runner = ModelRunner(
            model_dir,
            device=settings.device,
            dtype=settings.dtype,
            max_rows=settings.max_running_requests,
            context_length=settings.context_length,
            num_threads=settings.num_threads,
        )
        is_cpu = self.runner.device.type == "cpu"
        self.prefill_tokens = settings.prefill_tokens or _PREFILL_TOKENS.get(self.runner.device.type, 2048)
        """Most prompt tokens computed in a step."""
        self._times = IterationTimes(is_alone=is_cpu and settings.num_threads == 1)
        self._batch = RunningBatch(
            self.runner,
            max_rows=settings.max_running_requests,
            prefill_tokens=self.prefill_tokens,
            prefix_cache_bytes=settings.prefix_cache_bytes,
            weight_version=settings.weight_version,
            times=self._times,
        )
        self._commands: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._on_death: Callable[[], object] = lambda: None
        self._is_paused = False
        self._is_closing = False
        self._has_ended = False
        self._ending = threading.Lock()  # a command is either run by the model thread, or refused: never forgotten
        self._thread = threading.Thread(target=self._run, name="arl-model")

    @property
    def weight_version(self) -> str:
        return self._batch.weight_version

    @property
    def is_paused(self) -> bool:
        return self._is_paused

    @property
    def is_alive(self) -> bool:
        return self._thread.is_alive()

    @property
    def num_running(self) -> int:
        return self._batch.num_running

    @property
    def num_waiting(self) -> int:
        return self._batch.num_waiting

    def start(self, on_death: Callable[[], object] = lambda: None) -> None:
        """on_death: called on the model thread when an error has ended it; nothing is served from then on."""
        self._on_death = on_death
        self._thread.start()

    def close(self) -> None:
        """Abort unfinished jobs and end the model thread. Idempotent."""
        self._put(self._close)
        if self._thread.is_alive():
            self._thread.join()

    # ---- from any thread --------------------------------------------------------------------------------------

    def submit(self, job: Job) -> None:
        """Queue a job; it comes back through `deliver`."""
        self._put(lambda: self._add(job))

    def abort(self, rid: str | None) -> None:
        """Finish the job `rid`, or for None all that run or wait, with their tokens so far."""
        self._put(lambda: self._send(self._batch.abort(rid)))

    def pause(self, mode: PauseMode) -> Future[dict[str, Any]]:
        """Stop generating. in_place: requests keep their cache. retract: they recompute it. abort: they return.

        Gives IterationTimes.report.
        """
        return self._ask(lambda: self._pause(mode))

    def resume(self) -> Future[None]:
        return self._ask(self._resume)

    def flush_cache(self) -> Future[None]:
        """Forget the prefixes of finished requests; always possible."""
        return self._ask(self._batch.flush)

    def load(self, tensors: Mapping[str, torch.Tensor], weight_version: str) -> Future[None]:
        """Change parameters between two steps, paused or not. Fails with WeightsError, and changes none, on a misfit.

        Tokens sampled from then on carry weight_version. Later jobs find no prefix of old weights.
        """
        return self._ask(lambda: self._batch.load(tensors, weight_version))

    def release_memory(self, parts: Collection[MemoryPart]) -> Future[None]:
        """Let go of the weights' memory or that of keys and values. Jobs wait until both are there again.

        Fails with RequestError while sequences run.
        """
        return self._ask(lambda: self._batch.release(parts))

    def resume_memory(self, parts: Collection[MemoryPart]) -> Future[None]:
        """Take the memory again. After that of the weights, `load` has to bring all of them."""
        return self._ask(lambda: self._batch.resume(parts))

    def load_adapter(self, adapter: Adapter) -> Future[None]:
        """Let jobs name it; fails with WeightsError if another has its name."""
        return self._ask(lambda: self.runner.adapters.add(adapter))

    def unload_adapter(self, name: str) -> Future[None]:
        """Refuse later jobs that name it; earlier ones keep it. Fails with WeightsError if it is not loaded."""
        return self._ask(lambda: self.runner.adapters.remove(name))

    def _ask(self, work: Callable[[], _T]) -> Future[_T]:
        future: Future[_T] = Future()

        def run() -> None:
            if self._is_closing:
                future.set_exception(EngineClosedError("the scheduler was closed"))
            elif future.set_running_or_notify_cancel():
                try:
                    future.set_result(work())
                except Exception as error:  # noqa: BLE001 - the caller's to handle
                    future.set_exception(error)

        self._put(run)
        return future

    def _put(self, command: Callable[[], None]) -> None:
        with self._ending:
            if not self._has_ended:
                self._commands.put(command)
                return
        command()

    # ---- on the model thread ----------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            self._serve()
        except Exception:
            _logger.exception("the model thread died")
            self._on_death()

    def _serve(self) -> None:
        torch.set_num_threads(1)
        try:
            while not self._is_closing:
                if self._is_still:  # nothing to generate: wait for a command
                    self._commands.get()()
                self._drain()
                if not self._is_still:
                    self._step()
        finally:
            self._is_closing = True
            with self._ending:
                self._has_ended = True
            self._drain()
            self._send(self._batch.abort(None, _SHUTTING_DOWN))
            self.runner.close()

    @property
    def _is_still(self) -> bool:
        return self._is_paused or self._batch.is_idle or not self._batch.can_compute

    def _drain(self) -> None:
        while not self._commands.empty():
            self._commands.get()()

    def _step(self) -> None:
        try:
            delivered = self._batch.step()
        except Exception as error:
            _logger.exception("a step failed; its requests are aborted")
            delivered = self._batch.fail(error)
        self._send(delivered)

    def _send(self, jobs: Sequence[Job]) -> None:
        if jobs:
            self._deliver(jobs)

    def _add(self, job: Job) -> None:
        if self._is_closing:
            job.abort(_SHUTTING_DOWN)
        else:
            self._batch.add(job)
        if job.is_done:
            self._send([job])

    def _close(self) -> None:
        self._is_closing = True

    def _pause(self, mode: PauseMode) -> dict[str, Any]:
        if mode == "abort":
            self._send(self._batch.abort(None))
        elif mode == "retract":
            self._batch.retract()
        self._is_paused = True
        return self._times.report()

    def _resume(self) -> None:
        self._is_paused = False

"""The model thread: it steps the batch, and runs the other threads' commands between two steps.

    submit, abort, pause, resume, ask --commands, in order--> model thread --deliver--> event loop

The thread sleeps on its command queue while it is paused, has nothing to generate, or no memory to do it in; each
command wakes it.
"""

from __future__ import annotations

import logging
import queue
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Any, TypeVar

import torch

from arl.api.errors import EngineClosedError
from arl.api.settings.engines import PauseMode
from arl.engine.local.runner import ModelRunner
from arl.engine.local.scheduler import IterationTimes, RunningBatch
from arl.engine.local.sequences import Job

Deliver = Callable[[Sequence[Job]], None]
"""Called on the model thread with jobs that have ended."""

_SHUTTING_DOWN = "the server is shutting down"

_T = TypeVar("_T")

_logger = logging.getLogger(__name__)


class Scheduler:
    """Generates jobs on the model thread. Every method may be called from any thread and returns at once.

    Calls take effect between two steps, in their order. Futures are resolved on the model thread; after `close` they
    fail with EngineClosedError. A job that names an unknown adapter finishes with reason abort and status_code 400; a
    job whose step failed, with 500.
    """

    def __init__(
        self,
        model_dir: str,
        *,
        device: str = "cpu",
        dtype: str = "float32",
        num_threads: int = 1,
        max_running_requests: int = 128,
        context_length: int | None = None,
        weight_version: str = "default",
    ) -> None:
        """max_running_requests: sequences decoded at once. context_length: longest prompt plus response in tokens; by
        default the model's own. weight_version: the label of the weights at the start.

        Raises ModelError if model_dir holds no model that it can serve, ConfigError for an unknown device.
        """
        self.runner = ModelRunner(
            model_dir,
            device=device,
            dtype=dtype,
            max_rows=max_running_requests,
            context_length=context_length,
            num_threads=num_threads,
        )
        """The model. Other threads read only its constant parts: tokenizer, configuration and limits."""
        is_cpu = self.runner.device.type == "cpu"
        self.prefill_tokens = 512 if is_cpu else 2048
        """Most prompt tokens computed in a step: enough to keep the device busy without stalling decoding."""
        self._times = IterationTimes(is_alone=is_cpu and num_threads == 1)
        self.batch = RunningBatch(
            self.runner,
            max_rows=max_running_requests,
            prefill_tokens=self.prefill_tokens,
            weight_version=weight_version,
            times=self._times,
        )
        """Other threads read its version and its counts; they call its methods through `ask`."""
        self.is_paused = False
        self._commands: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._deliver: Deliver = lambda jobs: None
        self._on_death: Callable[[], object] = lambda: None
        self._is_closing = False
        self._has_ended = False
        self._ending = threading.Lock()  # a command is either run by the model thread, or refused: never forgotten
        self._thread = threading.Thread(target=self._run, name="arl-model")

    @property
    def is_alive(self) -> bool:
        return self._thread.is_alive()

    def start(self, deliver: Deliver, on_death: Callable[[], object] = lambda: None) -> None:
        """on_death: called on the model thread when an error has ended it; nothing is served from then on."""
        self._deliver, self._on_death = deliver, on_death
        self._thread.start()

    def close(self) -> None:
        """Abort unfinished jobs and end the model thread. Idempotent."""

        def work() -> None:
            self._is_closing = True

        self._put(work)
        if self._thread.is_alive():
            self._thread.join()

    # ---- from any thread --------------------------------------------------------------------------------------

    def submit(self, job: Job) -> None:
        """Queue a job; it comes back through `deliver`."""
        self._put(lambda: self._add(job))

    def abort(self, rid: str | None) -> None:
        """Finish the job `rid`, or for None all that run or wait, with their tokens so far."""
        self._put(lambda: self._send(self.batch.abort(rid)))

    def pause(self, mode: PauseMode) -> Future[dict[str, Any]]:
        """Stop generating. in_place: requests keep their cache. retract: they recompute it. abort: they return.

        Gives IterationTimes.report.
        """

        def work() -> dict[str, Any]:
            if mode == "abort":
                self._send(self.batch.abort(None))
            elif mode == "retract":
                self.batch.retract()
            self.is_paused = True
            return self._times.report()

        return self.ask(work)

    def resume(self) -> Future[None]:
        def work() -> None:
            self.is_paused = False

        return self.ask(work)

    def ask(self, work: Callable[[], _T]) -> Future[_T]:
        """Do work on the batch or the model between two steps, paused or not."""
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
                    try:
                        ended = self.batch.step()
                    except Exception as error:
                        _logger.exception("a step failed; its requests are aborted")
                        ended = self.batch.fail(error)
                    self._send(ended)
        finally:
            self._is_closing = True
            with self._ending:
                self._has_ended = True
            self._drain()
            self._send(self.batch.abort(None, _SHUTTING_DOWN))
            self.runner.close()

    @property
    def _is_still(self) -> bool:
        return self.is_paused or self.batch.is_idle or not self.runner.can_compute

    def _drain(self) -> None:
        while not self._commands.empty():
            self._commands.get()()

    def _send(self, jobs: Sequence[Job]) -> None:
        if jobs:
            self._deliver(jobs)

    def _add(self, job: Job) -> None:
        if self._is_closing:
            job.abort(_SHUTTING_DOWN)
        else:
            self.batch.add(job)
        if job.is_done:
            self._send([job])

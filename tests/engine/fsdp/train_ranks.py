"""Ranks of a process group as processes that run one function after another."""

import faulthandler
import multiprocessing
import os
import pickle
import traceback
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

Report = dict[str, Any]
TIMEOUT_S = 90


class Ranks:
    """`run(function, ...)` calls `function(rank, ...)` on each rank, and returns what each reports.

    After a call that failed, the next one starts other ranks: those that are left may wait for the one that is not.
    """

    def __init__(self, world_size: int, directory: Path, backend: str = "gloo") -> None:
        self._world_size, self._directory, self._backend = world_size, directory, backend
        self._num_starts = 0
        self._is_broken = False
        self._ranks: list[tuple[ThreadPoolExecutor, BaseProcess, Any]] = []
        self._begin()

    def start(self, function: Callable[..., Report], *arguments: object) -> list[Future[Report]]:
        if self._is_broken:
            self.close()
            self._begin()
        work = pickle.dumps((function, arguments))
        return [thread.submit(_call, process, connection, work) for thread, process, connection in self._ranks]

    def run(self, function: Callable[..., Report], *arguments: object) -> list[Report]:
        return self.reports(self.start(function, *arguments))

    def reports(self, calls: list[Future[Report]]) -> list[Report]:
        try:
            return [call.result() for call in calls]
        except BaseException:
            self._is_broken = True
            raise

    def close(self) -> None:
        for thread, process, connection in self._ranks:
            if self._is_broken:
                process.kill()
            thread.shutdown()
            connection.close()

    def _begin(self) -> None:
        # torch and transformers are imported once, in the server that the ranks are forked from.
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(["arl.engine.fsdp.train_engine", "transformers.models.auto.modeling_auto"])
        store = self._directory / f"store-{self._num_starts}"
        self._num_starts += 1
        self._is_broken, self._ranks = False, []
        for rank in range(self._world_size):
            ours, theirs = context.Pipe()
            arguments = (rank, self._world_size, self._backend, str(store), theirs)
            process = context.Process(target=_serve, args=arguments, daemon=True)
            process.start()
            self._ranks.append((ThreadPoolExecutor(1), process, ours))


def _call(process: BaseProcess, connection: Any, work: bytes) -> Report:
    try:
        connection.send_bytes(work)
        assert connection.poll(TIMEOUT_S), "a rank gave no answer"
        report = pickle.loads(connection.recv_bytes())
    except (EOFError, OSError) as error:
        process.join(TIMEOUT_S)
        raise AssertionError(f"a rank's process ended with exit code {process.exitcode}") from error
    assert not isinstance(report, str), report
    return report


def _serve(rank: int, world_size: int, backend: str, store: str, connection: Any) -> None:
    faulthandler.enable()
    torch.set_num_threads(1)
    os.environ["LOCAL_RANK"] = str(rank)
    dist.init_process_group(backend, store=dist.FileStore(store, world_size), rank=rank, world_size=world_size)
    while (work := _next(connection)) is not None:
        function, arguments = pickle.loads(work)
        try:
            report = function(rank, *arguments)
        except Exception:  # noqa: BLE001 (the test raises it)
            report = traceback.format_exc()
        connection.send_bytes(pickle.dumps(report))


def _next(connection: Any) -> bytes | None:
    try:
        return connection.recv_bytes()
    except EOFError:  # the tests have ended
        return None

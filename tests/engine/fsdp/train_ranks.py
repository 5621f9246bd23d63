"""Ranks of a process group as processes that run one function after another."""

import multiprocessing
import os
import pickle
import traceback
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

Report = dict[str, Any]
TIMEOUT_S = 90


class Ranks:
    """`run(function, ...)` calls `function(rank, ...)` on each rank, and returns what each reports."""

    def __init__(self, world_size: int, directory: Path, backend: str = "gloo") -> None:
        # torch and transformers are imported once, in the server that the ranks are forked from.
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(["arl.engine.fsdp.train_engine", "transformers.models.auto.modeling_auto"])
        self._is_broken = False
        self._calls: list[tuple[ThreadPoolExecutor, Any]] = []
        for rank in range(world_size):
            ours, theirs = context.Pipe()
            arguments = (rank, world_size, backend, str(directory / "store"), theirs)
            context.Process(target=_serve, args=arguments, daemon=True).start()
            self._calls.append((ThreadPoolExecutor(1), ours))

    def start(self, function: Callable[..., Report], *arguments: object) -> list[Future[Report]]:
        assert not self._is_broken, "an earlier function failed on these ranks"
        work = pickle.dumps((function, arguments))
        return [thread.submit(_call, connection, work) for thread, connection in self._calls]

    def run(self, function: Callable[..., Report], *arguments: object) -> list[Report]:
        return self.reports(self.start(function, *arguments))

    def reports(self, calls: list[Future[Report]]) -> list[Report]:
        try:
            return [call.result() for call in calls]
        except BaseException:
            self._is_broken = True
            raise

    def close(self) -> None:
        """End the ranks. Those of a call that failed may wait for each other, and end with the tests."""
        for thread, connection in self._calls:
            thread.shutdown()
            connection.close()


def _call(connection: Any, work: bytes) -> Report:
    connection.send_bytes(work)
    assert connection.poll(TIMEOUT_S), "a rank gave no answer"
    report = pickle.loads(connection.recv_bytes())
    assert not isinstance(report, str), report
    return report


def _serve(rank: int, world_size: int, backend: str, store: str, connection: Any) -> None:
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

"""Ranks of a process group as processes of their own, each running one function."""

import json
import multiprocessing
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

Report = dict[str, Any]


class Ranks:
    """`run(rank, directory, *args) -> report` on each of `world_size` ranks; starts at once."""

    def __init__(self, run: Callable[..., Report], world_size: int, directory: Path, *args: object) -> None:
        directory.mkdir()
        # torch and transformers are imported once, in the server that the ranks are forked from.
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(["arl.engine.fsdp.train_engine", "transformers.models.auto.modeling_auto"])
        self._directory = directory
        # Daemons, so that a rank that hangs ends with the tests.
        self._processes = [
            context.Process(target=_run_rank, args=(rank, world_size, directory, run, args), daemon=True)
            for rank in range(world_size)
        ]
        for process in self._processes:
            process.start()

    def reports(self) -> list[Report]:
        """What each rank reported; fails if one of them did."""
        for process in self._processes:
            process.join(timeout=90)
        assert [process.exitcode for process in self._processes] == [0] * len(self._processes)
        return [json.loads((self._directory / f"{rank}.json").read_text()) for rank in range(len(self._processes))]


def _run_rank(rank: int, world_size: int, directory: Path, run: Callable[..., Report], args: tuple[Any, ...]) -> None:
    torch.set_num_threads(1)
    store = dist.FileStore(str(directory / "store"), world_size)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world_size)
    report = run(rank, directory, *args)
    dist.destroy_process_group()
    (directory / f"{rank}.json").write_text(json.dumps(report))

"""Other programs read the log, as docs/events.md says."""

import ast
import importlib.util
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from guides import python_blocks
from records import trajectory

from arl.api.events import BatchTrained, EpisodeBegan, EpisodeEnded, KeptTokens, TrainedSummary, TurnEnded
from arl.api.settings.run import EventsConfig
from arl.observe.events.writer import EventLog

PAGE = Path(__file__).parents[3] / "docs" / "events.md"


def write_run(run_dir: Path) -> None:
    with EventLog(run_dir, EventsConfig()).open() as log:
        for number in range(3):
            name = f"0.{number}"
            log.emit(EpisodeBegan(episode=name))
            log.emit(TurnEnded(episode=name, rid=name, server="a", seconds=0.5, prompt=3, output=number))
            log.emit(EpisodeEnded(episode=name, how="finished", began=0.0, reward=float(number)))
            trained = {"weights": np.full(2, number, np.float32), "proximal_logprobs": np.zeros(2, np.float32)}
            log.keep(KeptTokens(rows=[(name, 0, trajectory(versions=(1, 1)))], trained=trained))
            log.emit(
                BatchTrained(version=1, groups=[], seconds=1.0, trajectories=[TrainedSummary(name, 0, 0, 1, 0, 0)])
            )
            log.flush()


def imported(block: str) -> set[str]:
    found = [node for node in ast.walk(ast.parse(block)) if isinstance(node, ast.Import)]
    return {name.name.partition(".")[0] for node in found for name in node.names}


def test_the_code_of_the_page_runs_with_what_is_installed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    write_run(Path("runs/quickstart"))
    namespace: dict[str, Any] = {}
    for block in python_blocks(PAGE):
        if all(importlib.util.find_spec(name) for name in imported(block)):
            exec(compile(block, PAGE, "exec"), namespace)
    assert namespace["best"].reward == 2.0
    assert namespace["events"].query("event == 'EpisodeEnded'").reward.tolist() == [0.0, 1.0, 2.0]
    assert namespace["calls"]["output"].to_pylist() == [0, 1, 2]
    (table,) = [pa.ipc.open_stream(file).read_all() for file in Path("runs/quickstart/events").glob("tokens-*")]
    assert table["weights"][2].as_py() == pytest.approx([np.nan, 2.0, 2.0], nan_ok=True)


def test_batches_before_one_that_is_cut_short_are_read(tmp_path: Path) -> None:
    write_run(tmp_path)
    (file,) = tmp_path.glob("events/calls-*")
    namespace: dict[str, Any] = {"pa": pa}
    (loop,) = [block for block in python_blocks(PAGE) if "def batches" in block]
    exec(loop.partition("calls =")[0], namespace)
    batches: Callable[[Path], Iterator[pa.RecordBatch]] = namespace["batches"]
    assert [batch["output"].to_pylist() for batch in batches(file)] == [[0], [1], [2]]
    file.write_bytes(file.read_bytes()[:-20])
    assert [batch["output"].to_pylist() for batch in batches(file)] == [[0], [1]]

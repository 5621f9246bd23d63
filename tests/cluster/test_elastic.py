"""A run that loses a node goes on with the ranks that there are, and with all of them when the node is back."""

import json
import re
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from nodes import REPOSITORY, Cluster
from recovery.invariants import check_ledger, newest_checkpoint, trained_batches

from arl.api.events import ProcessRestarted, ServerFenced, TrainerRecovered
from arl.engine.tiny import TinyShape, write_tiny_model
from arl.eventlog.run_record import RunRecord
from arl.training.run_files import read_jsonl

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(400)]
STEPS, NUM_EXAMPLES = 7, 200
PATIENCE_S = 120.0
NOTICES_SOON = {"RAY_health_check_period_ms": "500", "RAY_health_check_timeout_ms": "1000"}
"""Ray takes a node that is silent for 3 s in place of half a minute for dead."""


def until(holds: Callable[[], object], what: str, log: Path) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while not holds():
        assert time.monotonic() < deadline, f"{what}; the run says\n{log.read_text()}"
        time.sleep(0.1)


def test_a_run_goes_on_with_fewer_ranks_when_a_node_is_lost_and_with_all_when_it_is_back(tmp_path: Path) -> None:
    shape = TinyShape(hidden_size=32, intermediate_size=48, num_layers=2, num_heads=2, num_kv_heads=2, head_dim=16)
    pace, log, run_dir = tmp_path / "pace", tmp_path / "run.log", tmp_path / "run"
    pace.mkdir()
    settings = {
        "model": str(write_tiny_model(tmp_path / "model", shape=shape)),
        "run_dir": str(run_dir),
        "steps": STEPS,
        "rollout": {"batch_size": 2, "group_size": 2, "max_staleness": 1},
        "engine": {"kind": "local"},
        "train": {"num_ranks": 2, "min_ranks": 1, "replace_timeout_s": 3, "ray_address": "auto"},
        "checkpoint": {"every": 2},
    }
    config = tmp_path / "config.yaml"
    config.write_text(json.dumps(settings))

    def allow(step: int) -> None:
        (pace / str(step)).touch()

    def said() -> dict[int, int]:
        """How many ranks had trained each version."""
        lines = re.findall(r"trained (\d+) on (\d+) ranks", log.read_text())
        return {int(version): int(count) for version, count in lines}

    with Cluster(2, shared=tmp_path) as cluster:
        here, other = cluster.nodes
        here.start_ray(1, env=NOTICES_SOON)
        other.start_ray(1)
        tests = f"{REPOSITORY}:{REPOSITORY / 'tests'}"
        command = [sys.executable, REPOSITORY / "tests" / "cluster" / "elastic_run.py", config, pace]
        run = here.start(command, log=log, env={"PYTHONPATH": tests, "HF_HUB_OFFLINE": "1"})
        for step in (2, 3):
            allow(step)
        until(lambda: 3 in said(), "version 3 was not trained", log)
        other.kill()
        for step in (4, 5):
            allow(step)
        until(lambda: 5 in said(), "version 5 was not trained without a node", log)
        other.restart()
        other.start_ray(1)
        for step in (6, 7, 8):
            allow(step)
        until(lambda: run.poll() is not None, "the run did not end", log)
        assert run.returncode == 0, log.read_text()
    counts = said()
    assert list(counts) == list(range(1, STEPS + 1))
    assert [counts[version] for version in (1, 2, 3, 5, 7)] == [2, 2, 2, 1, 2], counts
    assert [row["version"] for row in read_jsonl(run_dir / "metrics.jsonl")] == list(range(1, STEPS + 1))
    record = RunRecord(run_dir)
    record.update()
    seen = [sorted(group.row for group in batch) for batch in trained_batches(record)]
    check_ledger(newest_checkpoint(run_dir)[1], seen, NUM_EXAMPLES)
    system = [event for _, event in record.system]
    assert [event.num_ranks for event in system if isinstance(event, TrainerRecovered)] == [1, 2]
    assert not any(isinstance(event, ServerFenced | ProcessRestarted) for event in system), "servers were disturbed"

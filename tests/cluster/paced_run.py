"""A training on a cluster's node whose steps a test allows one by one, and inference servers on others.

The script is elastic_run.py.
"""

import json
import re
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from nodes import REPOSITORY, Cluster, Node
from recovery.invariants import check_ledger, newest_checkpoint, trained_batches

from arl.api.settings.sections import laid_over
from arl.engine.tiny import TinyShape, write_tiny_model
from arl.observe.events.run_record import RunRecord
from arl.training.metrics_log import read_jsonl

PATIENCE_S = 150.0
PORT = 30000
NUM_EXAMPLES = 200
ENVIRONMENT = {
    "PYTHONPATH": f"{REPOSITORY}:{REPOSITORY / 'tests'}",
    "HF_HUB_OFFLINE": "1",
    "ARL_SERVER_API_KEY": "key-of-servers",
    "ARL_MIRROR_API_KEY": "key-of-mirrors",
}
SHAPE = TinyShape(hidden_size=32, intermediate_size=48, num_layers=2, num_heads=2, num_kv_heads=2, head_dim=16)


def until(holds: Callable[[], object], what: str, log: Path) -> None:
    """Wait until `holds()`; `what` and the log say why it never did."""
    deadline = time.monotonic() + PATIENCE_S
    while not holds():
        assert time.monotonic() < deadline, f"{what}; {log.name} says\n{log.read_text()}"
        time.sleep(0.1)


def model_of(cluster: Cluster) -> Path:
    """A tiny model that all nodes see."""
    directory = cluster.shared / "model"
    return directory if directory.exists() else write_tiny_model(directory, shape=SHAPE)


def start_ready(node: Node, module: str, *options: str | Path, log: Path) -> subprocess.Popen[bytes]:
    """Start a server of arl that listens at the node's address, and wait until it is ready."""
    log.unlink(missing_ok=True)
    command = [sys.executable, "-m", module, "--host", node.address, *options]
    process = node.start(command, log=log, env=ENVIRONMENT)
    until(lambda: '"ready"' in log.read_text() or process.poll() is not None, f"{module} is not ready", log)
    assert process.poll() is None, log.read_text()
    return process


def serve(cluster: Cluster, node: Node, port: int = PORT) -> None:
    """Start an embedded inference server."""
    log = cluster.shared / f"server-{node.name}-{port}.log"
    start_ready(node, "arl.engine.local", "--model", model_of(cluster), "--port", str(port), log=log)


class PacedRun:
    """A run in `node`, in a directory that all nodes see. It trains a step when that is allowed, and `steps` in all."""

    def __init__(
        self,
        cluster: Cluster,
        node: Node,
        name: str,
        *,
        steps: int,
        env: dict[str, str] | None = None,
        **settings: Any,
    ) -> None:
        """settings: laid over those of a small run. env: variables beside those that every run gets."""
        base = cluster.shared / name
        self.steps, self.directory, self.log = steps, base / "run", base / "log"
        self._pace, self._config, self._node = base / "pace", base / "config.yaml", node
        self._environment = ENVIRONMENT | (env or {})
        self._pace.mkdir(parents=True)
        small = {
            "model": str(model_of(cluster)),
            "run_dir": str(self.directory),
            "steps": steps,
            "rollout": {"batch_size": 2, "group_size": 2, "max_staleness": 1},
            "checkpoint": {"every": 1},
            "log": {"console": False},
        }
        self._config.write_text(json.dumps(laid_over(small, settings)))
        self.process = self.start()

    def start(self) -> subprocess.Popen[bytes]:
        """The same command again, which continues."""
        command = [sys.executable, REPOSITORY / "tests/cluster/elastic_run.py", self._config, self._pace]
        self.process = self._node.start(command, log=self.log, env=self._environment)
        return self.process

    def allow(self, *steps: int) -> None:
        for step in steps:
            (self._pace / str(step)).touch()

    def train(self, version: int) -> None:
        """Allow steps up to this version, and wait for it."""
        self.allow(*range(version + 1))
        self.until(lambda: f"trained {version} " in self.said, f"version {version} was not trained")

    @property
    def said(self) -> str:
        return self.log.read_text()

    def until(self, holds: Callable[[], object], what: str) -> None:
        until(lambda: holds() or self.process.poll() is not None, what, self.log)
        assert holds(), f"{what}; the run ended with {self.process.returncode}, and says\n{self.said}"

    def finish(self) -> RunRecord:
        """Let it train all that is left, and check that nothing was lost; returns its record."""
        self.allow(*range(self.steps + 2))
        until(lambda: self.process.poll() is not None, "the run did not end", self.log)
        assert self.process.returncode == 0, self.said
        return self.checked()

    def fail(self) -> str:
        """Wait until it ends with an error; returns what it says of it."""
        self.allow(*range(self.steps + 2))
        until(lambda: self.process.poll() is not None, "the run did not end", self.log)
        assert self.process.returncode == 1, self.said
        return re.findall(r"^error: .*", self.said, re.DOTALL | re.MULTILINE)[-1]

    def checked(self) -> RunRecord:
        """Each version has one line, and each example of the history of the newest weights was trained once."""
        assert [row["version"] for row in read_jsonl(self.directory / "metrics.jsonl")] == list(
            range(1, self.steps + 1)
        )
        record = RunRecord(self.directory)
        record.update()
        seen = [sorted(group.row for group in batch) for batch in trained_batches(record)]
        check_ledger(newest_checkpoint(self.directory)[1], seen, NUM_EXAMPLES)
        return record

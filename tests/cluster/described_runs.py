"""Descriptions of small runs on nodes of tests: `tests/agent_script.py` with a tiny model and embedded servers."""

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import yaml
from nodes import REPOSITORY

from arl.cluster.description import AnyDescription, read_description
from arl.engine.tiny import write_tiny_model

PYTHON = REPOSITORY / ".venv" / "bin" / "python"
SCRIPT = f"python {REPOSITORY}/tests/agent_script.py --rollout.batch_size 4 --rollout.group_size 2 --no-log.console"


def described(shared: Path, kind: str, *, steps: int = 1000, **changes: Any) -> AnyDescription:
    """The description of a run in `shared`, for which it writes a model there."""
    if not (shared / "model").exists():
        write_tiny_model(shared / "model")
    content: dict[str, Any] = {
        "kind": kind,
        "name": "sums",
        "command": f"{SCRIPT} --steps {steps}",
        "workdir": str(shared),
        "run_dir": str(shared / "run"),
        "model": str(shared / "model"),
        "trainer": {"cpus_per_node": 2},
        "servers": {"kind": "embedded", "restarts": 1, "startup_s": 60},
        "environment": {"PYTHONPATH": str(REPOSITORY), "OMP_NUM_THREADS": "1"},
        "notice_s": 25,
    }
    if kind != "kubernetes":
        content["python"] = str(PYTHON)
    file = shared / "description.yaml"
    file.write_text(yaml.safe_dump(content | changes))
    return read_description(file)


def said(log: Path) -> str:
    return log.read_text() if log.exists() else ""


def trained(log: Path) -> list[int]:
    """The versions that the script says it has trained, in the order of its log."""
    return [int(line.split()[1]) for line in said(log).splitlines() if line.startswith("trained ")]


def wait_until(happens: Callable[[], object], log: Path, timeout_s: float = 90.0) -> None:
    """log: what to show if it does not happen."""
    end = time.monotonic() + timeout_s
    while not happens():
        assert time.monotonic() < end, f"it did not happen within {timeout_s:g} s:\n{said(log)}"
        time.sleep(0.2)

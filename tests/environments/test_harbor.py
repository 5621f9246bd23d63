"""arl's reading of tasks beside Harbor's own, from Python 3.12 on: `make test-environments`."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from workflow.harbor_tasks import CONFIG, write_task

from arl.workflow.harbor_task import HarborTask

sys.path.insert(0, str(Path(__file__).parents[2] / "examples" / "agents"))
import terminal_tasks

pytestmark = [pytest.mark.environments, pytest.mark.timeout(240)]
HERE = Path(__file__).parent
OLD = """version = "1.0"
[agent]
timeout_sec = 9.5
[environment]
memory = "2G"
storage = "512M"
allow_internet = false
"""


@pytest.fixture(scope="module")
def harbor() -> Path:
    """The environment's directory of programs."""
    if (python := os.environ.get("ARL_ENVIRONMENTS_PYTHON")) is None:
        pytest.skip("needs Harbor: make test-environments")
    if not (programs := Path(python).parent).joinpath("harbor").exists():
        pytest.skip("needs Python 3.12: make test-environments ENVIRONMENTS_PYTHON=python3.12")
    return programs


def same(harbor: Path, *tasks: Path) -> None:
    """Assert that both read the same of each task."""
    read = subprocess.run(
        [harbor / "python", HERE / "read_by_harbor.py", *tasks], capture_output=True, text=True, check=True
    )
    for directory, line in zip(tasks, read.stdout.splitlines(), strict=True):
        task, by_harbor = HarborTask.read(directory), json.loads(line)
        by_harbor["instruction"] = by_harbor["instruction"].strip("\n")
        assert {name: getattr(task, name) for name in by_harbor} == by_harbor


def test_tasks_read_the_same_in_new_and_old_versions_of_the_format(harbor: Path, tmp_path: Path) -> None:
    configs = (CONFIG, OLD, "", '[environment]\ndocker_image = "a/b:1"\nworkdir = "/x"\nmemory_mb = 7\n')
    same(harbor, *(write_task(tmp_path / f"{i}", config=config) for i, config in enumerate(configs)))


def test_a_task_that_harbor_began_is_read(harbor: Path, tmp_path: Path) -> None:
    options = ("--verifier-mode", "shared", "--include-canary-strings", "-o", str(tmp_path))
    subprocess.run([harbor / "harbor", "init", "--task", "demo/begun", *options], check=True, capture_output=True)
    same(harbor, tmp_path / "begun")
    assert HarborTask.read(tmp_path / "begun").plain_image().workdir == "/app"


def test_the_examples_tasks_are_harbors(harbor: Path, tmp_path: Path) -> None:
    same(harbor, *sorted(terminal_tasks.write_tasks(tmp_path, "held_out", 3).iterdir()))

"""`arl doctor` as users start it."""

import json
import subprocess
import sys
from pathlib import Path
from unittest.mock import patch

import pytest
from observe.doctor.faulty_server import FaultyServer
from observe.doctor.planted import planted

from arl.__main__ import main

SCRIPT = """
from arl import Experiment, ExperimentConfig, SamplingParams, Setup, SingleTurnWorkflow, load_tokenizer


def reward(answer, data):
    return 0.0


def prepare(config):
    def agent(temperature):
        sampling = SamplingParams(temperature=temperature, max_new_tokens=64)
        return SingleTurnWorkflow(load_tokenizer(config.model), reward, sampling=sampling)

    return Setup(model=config.model, workflow=agent(0.8), dataset=[{"question": "hi"}])


experiment = Experiment(config=ExperimentConfig, prepare=prepare)
"""

ONE = 'Setup(model=config.model, workflow=agent(0.8), dataset=[{"question": "hi"}])'
TASKS = """Setup(model=config.model, tasks=[
        Task(name=name, workflow=agent(temperature), dataset=[{"question": "hi"}])
        for name, temperature in (("warm", 1.0), ("cool", 0.8))
    ])"""


def arguments(directory: Path, model: Path, *flags: str, script: str = SCRIPT) -> list[str]:
    path = directory / ("doctored_script.py" if script == SCRIPT else "doctored_tasks.py")
    path.write_text(script)
    return ["doctor", str(path), "--model", str(model), "--run_dir", str(directory / "run"), *flags]


@pytest.mark.runs
def test_a_healthy_experiment_ends_with_code_0_and_leaves_nothing(model: Path, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "arl", *arguments(tmp_path, model)]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=240, check=False)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert "sampler and trainer agree" in ended.stdout
    assert [path.name for path in (tmp_path / "run").iterdir()] == ["logs"]


def test_a_fault_ends_with_code_1_and_json_names_it(
    model: Path, server: FaultyServer, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    flags = ("--engine.kind", "sglang", "--engine.addresses", server.address, "--json")
    path = patch.object(sys, "path", [*sys.path])
    with planted(server, "logprobs_of_temperature_1", model), path, pytest.raises(SystemExit) as ended:
        main(arguments(tmp_path, model, *flags))
    assert ended.value.code == 1
    told = json.loads(capsys.readouterr().out)
    assert told["cause"] == "logprobs of another temperature"
    outcomes = {one["check"]: (one["outcome"], one["measured"]) for one in told["checks"]}
    assert outcomes["truncation"] == ("skipped", "it depends on: temperature")
    assert outcomes["weights after load 1"][0] == "skipped"  # arl did not start this server
    assert "--publish" in outcomes["weights after load 1"][1]


def test_a_task_is_examined_with_its_own_sampling(
    model: Path, server: FaultyServer, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """At temperature 1, that of the first task, this fault does not show."""
    script = SCRIPT.replace("from arl import ", "from arl import Task, ").replace(ONE, TASKS)
    flags = ("--engine.kind", "sglang", "--engine.addresses", server.address, "--json", "--task", "cool")
    path = patch.object(sys, "path", [*sys.path])
    with planted(server, "logprobs_of_temperature_1", model), path, pytest.raises(SystemExit) as ended:
        main(arguments(tmp_path, model, *flags, script=script))
    assert ended.value.code == 1
    assert json.loads(capsys.readouterr().out)["cause"] == "logprobs of another temperature"

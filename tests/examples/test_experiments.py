"""Every example is an experiment that `arl try` and `arl eval` can load, with settings of its own for a tiny model."""

from pathlib import Path

import pytest

from arl.cli import load_config
from arl.commands.command import load_experiment
from arl.experiment import ExperimentConfig

EXAMPLES = Path(__file__).parents[2] / "examples" / "agents"
SCRIPTS = sorted(path.name for path in EXAMPLES.glob("*.py") if "experiment.main()" in path.read_text())


def test_there_are_examples() -> None:
    assert "math_agent.py" in SCRIPTS


@pytest.mark.parametrize("name", SCRIPTS)
def test_an_example_has_an_experiment_with_tiny_settings(name: str) -> None:
    experiment = load_experiment(EXAMPLES / name)
    config = load_config(experiment.config, [])
    assert isinstance(config, ExperimentConfig)
    assert config.is_tiny
    assert config.run_dir != load_config(experiment.config, ["--model", "another"]).run_dir
    assert config.steps == experiment.config.tiny_settings["steps"]

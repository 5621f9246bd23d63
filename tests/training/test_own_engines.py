"""launch with engines of a user's own: what it refuses and closes, and what an episode must return to them."""

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from one_turn import OneTurn
from records import trajectory
from scripted_launch import small
from trainer_run import EXAMPLES, DirectTransport

import arl
from arl.api.errors import ConfigError, TrajectoryError
from arl.api.fakes import ScriptedEngine, ScriptedTrainEngine
from arl.api.settings.run import OwnEngines
from arl.api.train_engine import ModelLimits
from arl.api.types import Trajectory
from arl.api.workflow import RolloutWorkflow
from arl.rollout.episode import EpisodeRunner
from arl.run.learner import load_learner
from arl.training.metrics_log import read_jsonl


def load_scripted(model: str, settings: arl.TrainConfig, *, seed: int, head: str) -> ScriptedTrainEngine:
    assert (model, head, settings.optimizer.lr) == ("my model", "policy", 0.5), "in the trainer's process"
    return ScriptedTrainEngine()


class ClosingEngine(ScriptedEngine):
    def __init__(self) -> None:
        super().__init__(lambda request: (7, 8, 9))
        self.is_closed = False

    async def aclose(self) -> None:
        await super().aclose()
        self.is_closed = True


class ClosedTransport(DirectTransport):
    is_closed = False

    def close(self) -> None:
        self.is_closed = True


def own(train: Any = load_scripted) -> OwnEngines:
    return OwnEngines(inference=ClosingEngine(), train=train, transport=ClosedTransport())


def are_closed(engines: OwnEngines) -> bool:
    assert isinstance(engines.inference, ClosingEngine)
    assert isinstance(engines.transport, ClosedTransport)
    return engines.inference.is_closed and engines.transport.is_closed


async def test_a_run_is_made_of_them_and_closes_them(tmp_path: Path) -> None:
    engines = own()
    config = small(tmp_path, model="my model", train={"optimizer": {"lr": 0.5}})
    async with arl.launch(config, workflow=OneTurn(), dataset=EXAMPLES, engines=engines) as trainer:
        assert [step.version async for step in trainer] == [1, 2]
    assert are_closed(engines)
    assert len(read_jsonl(tmp_path / "metrics.jsonl")) == 2


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"engine": {"kind": "sglang", "addresses": ["http://127.0.0.1:1"]}}, "engine is set, but the engines are"),
        ({"weights": {"transport": "distributed"}}, "weights is set, but the engines are launch's `engines`"),
        ({"train": {"num_ranks": 2}}, "train.num_ranks is 2"),
        ({"record": True}, "record is set"),
    ],
)
async def test_a_setting_of_the_engines_that_they_replace_is_refused(
    tmp_path: Path, settings: dict[str, Any], said: str
) -> None:
    with pytest.raises(ConfigError, match=said):
        async with arl.launch(small(tmp_path, **settings), workflow=OneTurn(), dataset=EXAMPLES, engines=own()):
            pass
    assert not (tmp_path / "logs").exists()


async def test_a_loader_that_cannot_travel_is_refused_by_name(tmp_path: Path) -> None:
    engines = own(lambda model, settings, *, seed, head: ScriptedTrainEngine())
    with pytest.raises(ConfigError, match=r"engines.train cannot be sent to the trainer's process .* no lambda"):
        async with arl.launch(small(tmp_path), workflow=OneTurn(), dataset=EXAMPLES, engines=engines):
            pass
    assert are_closed(engines)


def test_models_beside_the_policy_are_for_the_loader_alone_to_read() -> None:
    """They may be no language models, and have no tokenizer."""
    loaded = list[tuple[str, str]]()

    def load(model: str, settings: arl.TrainConfig, *, seed: int, head: str) -> ScriptedTrainEngine:
        loaded.append((model, head))
        return ScriptedTrainEngine()

    algorithm = {"preset": "prime", "reward_model": {"model": "my judge"}}
    load_learner(arl.Config.model_validate({"model": "my model", "algorithm": algorithm}), load).close()
    assert loaded == [("my model", "policy"), ("my judge", "policy")]


UNGUARDED = """
import asyncio, sys
from pathlib import Path
import arl
from arl.api.fakes import ScriptedTrainEngine
from arl.extending import OwnEngines
from training.test_own_engines import EXAMPLES, OneTurn, own, small

class Load:
    def __call__(self, model, settings, *, seed, head):
        return ScriptedTrainEngine()

async def main():
    async with arl.launch(small(Path(sys.argv[1])), workflow=OneTurn(), dataset=EXAMPLES, engines=own(Load())):
        pass

asyncio.run(main())
"""


@pytest.mark.runs
def test_a_script_whose_run_starts_on_import_is_told_to_put_it_under_main(tmp_path: Path) -> None:
    """The trainer's process imports the script for its loader."""
    (tmp_path / "script.py").write_text(UNGUARDED)
    paths = {"PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, tmp_path / "script.py", tmp_path / "run"]
    ran = subprocess.run(command, env={**os.environ, **paths}, capture_output=True, text=True, timeout=60)
    assert ran.returncode == 1
    assert 'put the code that starts the run under `if __name__ == "__main__":`' in ran.stderr.splitlines()[-1]


class Returning(RolloutWorkflow):
    def __init__(self, made: Trajectory) -> None:
        self.made = made

    async def arun_episode(self, engine: Any, data: Any) -> Trajectory:
        return self.made


@pytest.mark.parametrize(("names", "said"), [((), "has the arrays: none"), (("t", "x"), "has the arrays: t, x")])
async def test_an_episode_must_return_the_arrays_that_the_model_needs(names: tuple[str, ...], said: str) -> None:
    said = said.replace("has", "with")
    limits = ModelLimits(vocab_size=100, arrays=frozenset({"x"}))
    made = trajectory((0, 0), arrays=dict.fromkeys(names, np.zeros(3)))
    runner = EpisodeRunner(workflow=Returning(made), timeout_s=5, limits=limits)
    failure = await runner.attempt(ScriptedEngine(lambda request: ()), {})
    with pytest.raises(TrajectoryError, match=f"a trajectory {said}; the trained model needs: x"):
        raise failure if isinstance(failure, Exception) else AssertionError
    runner = EpisodeRunner(workflow=Returning(trajectory(arrays={"x": np.zeros(3)})), timeout_s=5, limits=limits)
    assert isinstance(await runner.attempt(ScriptedEngine(lambda request: ()), {}), tuple)

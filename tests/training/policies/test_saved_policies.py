"""A checkpoint of several policies: each is exported as its own engine would write it, and none for another."""

import re
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from random_groups import random_groups
from training.policies.learners_here import settings, together

from arl.__main__ import main
from arl.api.errors import ConfigError
from arl.api.settings.run import Config
from arl.cli.episodes import _with_models
from arl.engine.tiny import TinyShape, write_tiny_model
from arl.run.dry_run import rehearse
from arl.run.engines import policies_identity
from arl.run.export import SavedWeights
from arl.training.checkpoints import Checkpoints, RunState


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Config:
    """The settings of a run with a checkpoint of version 1; beside it, what the engines wrote: written/NAME."""
    directory = tmp_path_factory.mktemp("saved")
    shape = TinyShape(hidden_size=32, num_layers=1, head_dim=8, context_length=128)
    config = settings(write_tiny_model(directory / "model", shape=shape), directory / "run")
    identity = {"model": config.model, "seed": 0, **policies_identity(config)}
    with closing(together(config)) as learners:
        learners.train(learners.prepare(random_groups(0)))
        checkpoints = Checkpoints(config.run_dir / "checkpoints", 2, identity)
        checkpoints.begin(1, learners.save, RunState(values={"version": 1}))()
        snapshot = learners.engine.snapshot()
        snapshot.write(directory / "written")
        snapshot.release()
    return config


def export(*argv: str | Path) -> int:
    try:
        main(["export", *map(str, argv)])
    except SystemExit as end:
        return int(end.code or 0)
    return 0


def test_each_policy_is_written_as_its_engine_would_write_it(saved: Config, capsys: Any) -> None:
    for name in saved.policies:
        assert export(saved.run_dir, "--policy", name) == 0
        (made,) = (saved.run_dir / "exported").glob(f"version-00000001-{name}")
        written = saved.run_dir.parent / "written" / name
        assert (made / "model.safetensors").read_bytes() == (written / "model.safetensors").read_bytes()
    capsys.readouterr()


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        ([], "has several policies; name one with --policy: writer, reader"),
        (["--policy", "critic"], "--policy is 'critic', and .* has the policies writer, reader"),
    ],
)
def test_a_policy_has_to_be_named_and_known(saved: Config, capsys: Any, flags: list[str], said: str) -> None:
    assert export(saved.run_dir, *flags) == 2
    assert re.search(said, capsys.readouterr().err)


def test_the_policies_of_settings_and_checkpoint_are_the_same(saved: Config) -> None:
    found = SavedWeights.of_policies(saved.run_dir, None, saved.policies)
    assert {name: (one.version, one.checkpoint.name) for name, one in found.items()} == {
        "writer": (1, "writer"),
        "reader": (1, "reader"),
    }
    with pytest.raises(ConfigError, match="trained with the policies writer, reader, and the settings name judge"):
        SavedWeights.of_policies(saved.run_dir, 1, ["judge"])


def test_a_command_serves_each_policys_trained_model(saved: Config) -> None:
    served = _with_models(saved, {"writer": "/a", "reader": "/b"})
    assert {name: policy.model for name, policy in served.policies.items()} == {"writer": "/a", "reader": "/b"}
    assert served.policies["reader"].lr == saved.policies["reader"].lr


async def test_a_dry_run_shows_the_trainer_and_the_servers_of_each_policy(saved: Config) -> None:
    table = await rehearse(saved)
    assert table.mistakes == []
    shown = [(part.part, part.name) for part in table.parts]
    assert shown == [
        ("controller", ""),
        ("trainer", "writer"),
        ("server", "writer"),
        ("trainer", "reader"),
        ("server", "reader"),
    ]

"""Several policies train as runs of each alone would, in step, and continue in step."""

import os
import re
import signal
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from dataclasses import replace
from functools import partial
from itertools import compress
from pathlib import Path
from typing import Any

import pytest
from random_groups import random_groups
from training.policies.learners_here import ROLES, alone, of_role, settings, together

from arl.__main__ import main
from arl.api.errors import CheckpointError, ConfigError, RoleError, TrainingError
from arl.api.settings.engines import PolicyRoles
from arl.api.settings.run import Config
from arl.api.types import Group
from arl.cli.episodes import _with_models
from arl.engine.tiny import TinyShape, write_tiny_model
from arl.run.dry_run import rehearse
from arl.run.engines import policies_identity
from arl.run.export import SavedWeights
from arl.run.learner import host_learner
from arl.run.servers import of_policy
from arl.training.batch_codec import FlatBatch
from arl.training.checkpoints import Checkpoints, RunState
from arl.training.learner_process import RemoteLearner
from arl.training.learner_recovery import RecoveringLearner
from arl.training.policies import PolicyLearners
from arl.training.token_log import named

REPLAYED = random_groups(10)[:1]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    shape = TinyShape(hidden_size=32, num_layers=1, head_dim=8, context_length=128)
    return write_tiny_model(tmp_path_factory.mktemp("policies") / "model", shape=shape)


@pytest.fixture
def config(model: Path, tmp_path: Path, request: pytest.FixtureRequest) -> Config:
    return settings(model, tmp_path, **getattr(request, "param", {}))


@pytest.fixture
def learners(config: Config) -> Iterator[PolicyLearners]:
    with closing(together(config)) as made:
        yield made


def batches(count: int, first: int = 0) -> list[list[Group]]:
    return [random_groups(seed) for seed in range(first, first + count)]


def trained(learners: PolicyLearners, groups: Sequence[Group], replayed: Sequence[Group] = ()) -> Any:
    return learners.train(learners.prepare(groups, replayed))


def weights(learners: PolicyLearners) -> dict[str, Any]:
    return {name: learner._learner.weights() for name, learner in learners._of.items()}


ADAPTERS = {
    "weights": {"transport": "adapter"},
    "train": {"optimizer": {"lr": 1e-3, "eps": 1e-3}, "max_tokens_per_microbatch": 60, "lora": {"rank": 4, "alpha": 8}},
}


@pytest.mark.parametrize("config", [{}, ADAPTERS], indirect=True, ids=["whole models", "adapters"])
def test_each_is_trained_as_a_run_of_its_roles_alone_to_the_bit(learners: PolicyLearners, config: Config) -> None:
    steps = [(learners.prepare(groups, REPLAYED), trained(learners, groups, REPLAYED)) for groups in batches(2)]
    for role, policy in ROLES.items():
        with closing(alone(config, policy)) as single:
            for groups, (prepared, done) in zip(batches(2), steps, strict=True):
                own = single.prepare_flat(FlatBatch.of(of_role(role, groups), of_role(role, REPLAYED)))
                expected = single.train(own)
                is_own = [t.role == role for group in [*groups, *REPLAYED] for t in group.trajectories]
                assert [*compress(prepared.advantages, is_own)] == own.advantages
                assert [*compress(done.numbers, is_own)] == expected.numbers
                for name, value in expected.metrics.items():
                    assert done.metrics[f"policies/{policy}/{name}"] == pytest.approx(value, nan_ok=True), name
            assert weights(learners)[policy] == single.weights()
    assert weights(learners)["reader"] != weights(learners)["writer"]
    assert learners.version == 2


def test_the_log_gets_tokens_under_the_names_of_the_whole_episode(learners: PolicyLearners) -> None:
    groups = random_groups(0)
    rows = [row for frame in trained(learners, groups).tokens for row in frame.rows]
    everything = [(episode, number) for group in groups for episode, number, _ in named(group)]
    assert sorted(map(tuple, rows)) == sorted(everything)


def test_a_policy_without_trained_tokens_stands_still_and_its_version_goes_on(learners: PolicyLearners) -> None:
    (first,) = batches(1)
    trained(learners, first)
    before = weights(learners)
    silent = of_role("solver", random_groups(1))
    metrics = trained(learners, silent).metrics
    after = weights(learners)
    assert after["reader"] == before["reader"]
    assert after["writer"] != before["writer"]
    assert {learner.version for learner in learners._of.values()} == {2}
    assert metrics["policies/reader/trained_tokens"] == 0 < metrics["policies/writer/trained_tokens"]
    assert metrics["loss"] == metrics["policies/writer/loss"]
    assert "policies/reader/reward" not in metrics


def test_what_was_saved_goes_on_to_the_bit_for_all_of_them(config: Config) -> None:
    with closing(together(config)) as learners, closing(together(config)) as again:
        for groups in batches(2):
            trained(learners, groups)
        learners.save(config.run_dir / "saved").wait()
        again.load(config.run_dir / "saved")
        assert again.version == 2
        for groups in batches(2, first=2):
            trained(learners, groups)
            trained(again, groups)
        assert weights(learners) == weights(again)


def test_policies_of_different_versions_are_refused(config: Config) -> None:
    with closing(together(config)) as learners:
        trained(learners, random_groups(0))
        learners.save(config.run_dir / "one").wait()
        trained(learners, random_groups(1))
        learners.save(config.run_dir / "two").wait()
        (config.run_dir / "one" / "reader").rename(config.run_dir / "reader")
        (config.run_dir / "two" / "reader").rename(config.run_dir / "one" / "reader")
        with pytest.raises(CheckpointError, match="policies of different versions: writer 1, reader 2"):
            learners.load(config.run_dir / "one")


def test_after_a_step_that_one_policy_could_not_make_nothing_is_trained_or_saved(
    learners: PolicyLearners, config: Config
) -> None:
    prepared = learners.prepare(random_groups(0))
    fails: Any = lambda batch: (_ for _ in ()).throw(TrainingError("weights are not finite"))  # noqa: E731
    learners._of["reader"].train = fails
    with pytest.raises(TrainingError, match="weights are not finite"):
        learners.train(prepared)
    assert learners.version == 0, "the step does not count"
    with pytest.raises(TrainingError, match="their versions differ: writer 1, reader 0; start the run again"):
        learners.prepare(random_groups(1))
    with pytest.raises(TrainingError, match="their versions differ"):
        learners.save(config.run_dir / "saved")


def test_a_trajectory_of_no_policy_is_refused_by_its_role(learners: PolicyLearners) -> None:
    (group, *_) = random_groups(0)
    strange = replace(group, trajectories=tuple(replace(t, role="judge") for t in group.trajectories))
    with pytest.raises(RoleError, match=r"no policy plays the role 'judge'; .* solver \(writer\), critic \(reader\)"):
        learners.prepare([strange])


def test_policies_that_nobody_asks_are_told_of_once(learners: PolicyLearners, caplog: Any) -> None:
    for seed in range(2):
        learners.prepare(of_role("solver", random_groups(seed)))
    (told,) = [record.getMessage() for record in caplog.records if "is never trained" in record.getMessage()]
    assert "no agent of the first 4 groups had a role of the policy reader; the roles were: solver" in told


def test_an_export_is_a_model_for_each_policy_and_replaces_the_last_one(
    learners: PolicyLearners, config: Config
) -> None:
    for _ in range(2):
        snapshot = learners.engine.snapshot()
        assert snapshot.write(config.run_dir / "trained") > 0
        snapshot.release()
    files = {str(path.parent.relative_to(config.run_dir)) for path in config.run_dir.rglob("model.safetensors")}
    assert files == {"trained/writer", "trained/reader"}


Start = Callable[[], RecoveringLearner]


@pytest.mark.runs
def test_a_lost_process_is_replaced_and_all_policies_have_one_version_and_the_weights_they_would_have(
    config: Config,
) -> None:
    def start(name: str) -> RecoveringLearner:
        own = of_policy(config, name)
        begin = partial(RemoteLearner, partial(host_learner, own), own.run_dir / "logs" / "trainer.log", 1)
        return RecoveringLearner(begin, config.run_dir / "checkpoints", own.train, within=f"engine/{name}")

    starts: dict[str, Start] = {name: partial(start, name) for name in config.policies}
    with closing(PolicyLearners(starts, PolicyRoles.of(config.policies))) as there, closing(together(config)) as here:
        for seed in range(4):
            trained(there, random_groups(seed))
            trained(here, random_groups(seed))
            if seed == 1:
                there.save(config.run_dir / "checkpoints" / "version-00000002" / "engine").wait()
        os.kill(there._of["reader"]._learner._process.pid, signal.SIGKILL)
        trained(there, random_groups(4))
        trained(here, random_groups(4))
        assert {name: learner.version for name, learner in there._of.items()} == {"writer": 5, "reader": 5}
        assert there.num_recoveries == 1
        for learners, directory in ((there, "there"), (here, "here")):
            snapshot = learners.engine.snapshot()
            snapshot.write(config.run_dir / directory)
            snapshot.release()
        for name in config.policies:
            written = [
                (config.run_dir / where / name / "model.safetensors").read_bytes() for where in ("there", "here")
            ]
            assert written[0] == written[1], name


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

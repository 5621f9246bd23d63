"""config.yaml can be given to --config again; environment.json has a record of each start."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any, ClassVar

import pytest
from training.trainer_run import run

from arl.api.errors import CheckpointError
from arl.api.settings.presets import PRESETS
from arl.api.settings.run import Config
from arl.api.settings.sections import settings_of
from arl.run.experiment import ExperimentConfig
from arl.run.script import load_config
from arl.training import run_dir as run_dir_module
from arl.training.run_dir import _HARMLESS, _MATTER, record_start, say_changes, starts_of


class OwnConfig(ExperimentConfig):
    tiny_settings: ClassVar[dict[str, Any]] = {"steps": 7, "train": {"optimizer": {"lr": 3e-4}}}
    note: str | None = "on: off, 1e-6 #"
    levels: tuple[int, ...] = (1, 2)


@pytest.mark.parametrize(
    ("config_class", "flags"),
    [
        (Config, ["--model", "m", *("--algorithm.preset", preset)])
        for preset in PRESETS
    ]
    + [
        (OwnConfig, []),
        (OwnConfig, ["--note", "null", "--levels", "3", "--train.lora.rank", "4", "--weights.transport", "adapter"]),
        (OwnConfig, ["--model", "m", "--rollout.group_size", "1", "--algorithm.preset", "ppo"]),
        (Config, ["--model", "m", "--engine.kind", "sglang", "--engine.addresses", "http://127.0.0.1:1"]),
        (Config, ["--model", "m", "--log.events", "null", "--log.trackers", '{"kind": "wandb", "tags": ["a"]}']),
        (Config, ["--model", "m", "--checkpoint.every_s", "null", "--run_dir", "runs/with space: é"]),
    ],
)  # fmt: skip
def test_the_file_makes_the_same_settings_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, config_class: type[Config], flags: list[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    config = load_config(config_class, flags)
    config.run_dir.mkdir(parents=True)
    record_start(config, 1)
    again = load_config(config_class, ["--config", str(config.run_dir / "config.yaml")])
    assert again == config
    assert again.model_dump() == config.model_dump()


def test_a_config_yaml_of_your_own_stays_as_it_is(tmp_path: Path) -> None:
    (tmp_path / "config.yaml").write_text("# mine\nsteps: 3\n")
    for _ in range(2):
        record_start(Config(model="m", run_dir=tmp_path), 1)
    assert (tmp_path / "config.yaml").read_text() == "# mine\nsteps: 3\n"
    assert load_config(Config, ["--config", str(tmp_path / "config.resolved.yaml")]).model == "m"


class Judged(Config):
    """A user's own settings."""

    api_token: str = "none"


def test_keys_are_left_out_of_the_files_of_a_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    words = ["python", "train.py", "--judge.key=hidden", "--api_token", "hidden", "--steps", "3"]
    monkeypatch.setattr(sys, "orig_argv", words)
    record_start(Judged(model="m", run_dir=tmp_path, api_token="hidden"), 1)
    for name in ("config.yaml", "environment.json"):
        assert "hidden" not in (tmp_path / name).read_text()
    (start,) = starts_of(tmp_path)
    assert start["command"] == "python train.py --judge.key=... --api_token ... --steps 3"
    assert load_config(Judged, ["--config", str(tmp_path / "config.yaml")]).api_token == "none"


async def test_each_start_of_a_run_adds_its_record(tmp_path: Path) -> None:
    await run(tmp_path, steps=1)
    await run(tmp_path, steps=2)
    first, second = starts_of(tmp_path)
    assert [start["steps"] for start in (first, second)] == [1, 2]
    assert second["model"] == "none"
    assert second["directory"] == str(Path.cwd())
    assert {"arl", "torch", "transformers"} <= second["versions"].keys()
    assert second["python"] == ".".join(map(str, sys.version_info[:3]))


def git(directory: Path, *words: str) -> str:
    own = {"GIT_CONFIG_GLOBAL": "/dev/null", "GIT_AUTHOR_NAME": "a", "GIT_AUTHOR_EMAIL": "a@b"}
    own |= {"GIT_COMMITTER_NAME": "a", "GIT_COMMITTER_EMAIL": "a@b"}
    environment = os.environ | own
    done = subprocess.run(["git", *words], cwd=directory, env=environment, capture_output=True, text=True, check=True)
    return done.stdout.strip()


def test_the_commit_is_that_of_the_scripts_repository_and_changes_are_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "code").mkdir()
    script = tmp_path / "code" / "train.py"
    script.write_text("pass\n")
    monkeypatch.setattr(sys.modules["__main__"], "__file__", str(script), raising=False)
    config = Config(model="m", run_dir=tmp_path)
    record_start(config, 1)
    git(tmp_path, "init")
    record_start(config, 1)
    git(tmp_path, "add", "code")
    git(tmp_path, "commit", "-m", "all of it")
    (tmp_path / "code" / "notes").touch()
    record_start(config, 1)
    script.write_text("pass  # changed\n")
    record_start(config, 1)
    known = [(start["script"], start["commit"], start["has_changes"]) for start in starts_of(tmp_path)]
    commit = git(tmp_path, "rev-parse", "HEAD")
    assert known == [(str(script), *found) for found in ((None, None), (None, None), (commit, False), (commit, True))]


def test_without_room_or_with_a_torn_record_the_run_goes_on_and_the_log_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    config = Config(model="m", run_dir=tmp_path)
    (tmp_path / "environment.json").write_text('[{"began"')
    record_start(config, 1)
    assert len(json.loads((tmp_path / "environment.json").read_text())) == 1
    assert "environment.json is unreadable, so earlier starts are forgotten" in caplog.text

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(run_dir_module, "write_atomically", full)
    record_start(config, 1)
    assert f"cannot be written to {tmp_path}: No space left on device" in caplog.text


BEFORE = {"steps": 1, "rollout": {"max_staleness": 1}, "log": {"console": True}}


async def test_it_warns_of_what_changes_the_training_and_mentions_the_rest(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, capsys: pytest.CaptureFixture[str]
) -> None:
    await run(tmp_path, **BEFORE)
    await run(tmp_path, **BEFORE)
    assert "other settings than before" not in caplog.text + capsys.readouterr().out
    changed: dict[str, Any] = {
        "steps": 2,
        "rollout": {"max_staleness": 0, "num_workers": 0, "max_concurrent_episodes": 7},
        "train": {"optimizer": {"lr": 0.5}},
        "log": {"console": True, "events": None},
    }
    await run(tmp_path, **changed)
    (warning,) = [message for message in caplog.messages if "other settings" in message]
    assert warning == (
        "from version 1 on, other settings than before change what is trained: rollout.max_staleness 1 -> 0; "
        "train.optimizer.lr 1e-05 -> 0.5"
    )
    said = "other settings than before, which do not change what is trained: "
    (line,) = [line for line in capsys.readouterr().out.splitlines() if line.startswith(said)]
    changes = 'rollout.max_concurrent_episodes 1024 -> 7; log.events {"tokens": null, "max_gb": 5.0} -> null'
    assert line == f"{said}steps 1 -> 2; {changes}"


async def test_another_seed_or_model_stays_an_error(tmp_path: Path) -> None:
    await run(tmp_path, **BEFORE)
    with pytest.raises(CheckpointError, match="was written with seed=0, this run has 1"):
        await run(tmp_path, **BEFORE, seed=1)


@pytest.mark.parametrize(
    ("name", "matters"),
    [
        ("engine.addresses", False),
        ("engine.dtype", True),
        ("train.dtype", True),
        ("train.num_ranks", False),
        ("rollout.num_workers", False),
        ("rollout.group_size", True),
        ("algorithm.loss.kind", True),
        ("num_turns", True),
        ("model", False),
        ("logs", True),
    ],
)
def test_what_is_unknown_to_arl_or_steers_learning_matters(
    name: str, matters: bool, caplog: pytest.LogCaptureFixture
) -> None:
    def nested(value: int) -> dict[str, Any]:
        found: Any = value
        for part in reversed(name.split(".")):
            found = {part: found}
        return found

    said = list[str]()
    say_changes(nested(1), nested(2), 3, said.append)
    assert (len(caplog.messages), len(said)) == ((1, 0) if matters else (0, 1))
    assert f"{name} 1 -> 2" in "".join((*caplog.messages, *said))


def test_what_the_lists_name_are_settings() -> None:
    known = {setting.name for setting in settings_of(Config)}
    assert known >= _HARMLESS | _MATTER


def test_a_weight_of_a_named_reward_that_comes_or_goes_is_told(caplog: pytest.LogCaptureFixture) -> None:
    before, after = ({"algorithm": {"advantage": {"reward_weights": w}}} for w in ({"right": 2.0}, {"brief": 3.0}))
    say_changes(before, after, 3, pytest.fail)
    assert 'algorithm.advantage.reward_weights {"right": 2.0} -> {"brief": 3.0}' in caplog.text

"""A run that continues with other settings says which differ, and which of them change what is trained."""

from pathlib import Path
from typing import Any

import pytest
from training.trainer_run import run

from arl.api.errors import CheckpointError
from arl.api.settings.run import Config
from arl.api.settings.sections import settings_of
from arl.training.run_dir import _HARMLESS, _MATTER, say_changes

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

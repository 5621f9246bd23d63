"""The commands of docs/cluster.md: each is run, or what of it one machine without GPUs can run."""

import re
import shlex
from itertools import pairwise
from pathlib import Path

import pytest
from cluster.plan.made_log import MadeRun, known_costs
from nodes import REPOSITORY

from arl.__main__ import main
from arl.run.dry_run import dry_run
from arl.run.script import load_config

PAGE = REPOSITORY / "docs" / "cluster.md"
EXAMPLES = REPOSITORY / "examples"
SCRIPT = "examples/agents/math_agent.py"
BLOCKS = re.findall(r"^```sh\n(.*?)^```", PAGE.read_text(), re.DOTALL | re.MULTILINE)
COMMANDS = [shlex.split(line) for block in BLOCKS for line in block.replace("\\\n", " ").splitlines() if line]


def begins(*words: str) -> list[list[str]]:
    return [command for command in COMMANDS if command[: len(words)] == list(words)]


TRAININGS = begins("python", SCRIPT)
KINDS = (
    ("python", SCRIPT),
    ("python", "-m", "sglang.launch_server"),
    ("ray", "start"),
    ("arl", "servers"),
    ("arl", "plan"),
)


def test_the_tests_below_know_every_command() -> None:
    known = [command for kind in KINDS for command in begins(*kind)]
    assert [command for command in COMMANDS if command not in known] == []
    assert all(begins(*kind) for kind in KINDS)


def without(command: list[str], *flags: str) -> list[str]:
    """The command without flags and their values."""
    kept = list(command)
    while places := [i for i, word in enumerate(kept) if word in flags]:
        del kept[places[0] : places[0] + 2]
    return kept


@pytest.mark.parametrize("command", TRAININGS, ids=range(len(TRAININGS)))
def test_the_flags_of_a_training_fit_together_and_a_dry_run_finds_what_this_machine_lacks(
    command: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(EXAMPLES / "agents"))
    from math_agent import MathAgentConfig

    here = [re.sub(r"\b10\.0\.0\.(\d):\d+", r"127.0.0.1:\1", word) for word in command[2:] if word != "--dry-run"]
    config = load_config(
        MathAgentConfig, [*without(here, "--run_dir", "--dataset"), "--run_dir", str(tmp_path / "run")]
    )
    wanted = [word for flag, word in pairwise(here) if flag == "--engine.addresses"]
    mistakes = "\n".join(dry_run(config).mistakes)
    assert "GPU" in mistakes or "Ray" in mistakes
    assert all(address in mistakes for address in wanted)
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("command", begins("arl", "plan"), ids=lambda command: command[2])
def test_a_plan_is_made(
    command: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """In a smaller range."""
    monkeypatch.chdir(tmp_path)
    small = without(command[1:], "--servers", "--ranks")
    if command[2] == "runs/gsm8k":
        MadeRun(known_costs()).write(tmp_path / "runs" / "gsm8k")
    main([*small, "--servers", "1:2", "--ranks", "4" if "--gpu" in command else "1"])
    assert "episodes/s" in capsys.readouterr().out
    if "--plot" in command:
        assert (tmp_path / command[command.index("--plot") + 1]).stat().st_size > 0

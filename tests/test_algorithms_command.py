"""`arl algorithms` lists the presets, and prints one as a section of a --config file."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

from arl.__main__ import as_yaml, main
from arl.api.algorithm import preset
from arl.api.config import Config
from arl.api.presets import PRESETS
from arl.cli import load_config


def test_the_list_names_every_preset_with_its_paper(capsys: pytest.CaptureFixture[str]) -> None:
    main(["algorithms"])
    lines = [re.split(r"\s{2,}", line.strip()) for line in capsys.readouterr().out.splitlines()]
    listed = {line[0]: line[1] for line in lines if len(line) > 2}
    assert {name: listed.get(name) for name in PRESETS} == {name: about.paper for name, about in PRESETS.items()}


@pytest.mark.parametrize("name", PRESETS)
def test_what_is_printed_is_a_config_file_with_the_presets_settings(name: str, tmp_path: Path) -> None:
    path = tmp_path / "run.yaml"
    path.write_text(as_yaml(name))
    loaded = load_config(Config, ["--model", "none", "--config", str(path)]).algorithm
    assert loaded.model_dump() == preset(name).model_dump()


@pytest.mark.parametrize("name", PRESETS)
def test_what_is_printed_goes_with_one_update_and_without_a_kl(name: str, tmp_path: Path) -> None:
    """Settings that the preset brings along may idle; those that need more updates are refused, as for the preset."""
    path = tmp_path / "run.yaml"
    path.write_text(as_yaml(name))
    flags = ["--model", "none", "--config", str(path), "--algorithm.kl.coefficient", "0"]
    if name not in ("a3po", "kl_cov"):
        flags += ["--algorithm.minibatches", "1"]
    assert load_config(Config, flags).algorithm.kl.coefficient == 0


@pytest.mark.parametrize("name", PRESETS)
def test_what_is_printed_depends_on_no_preset_for_its_values(name: str, tmp_path: Path) -> None:
    """Every value is there: under the name of another preset, the settings are still these."""
    path = tmp_path / "run.yaml"
    other = "decoupled_ppo" if name != "decoupled_ppo" else "ppo"
    path.write_text(as_yaml(name).replace(f"preset: {name}\n", f"preset: {other}\n"))
    loaded = load_config(Config, ["--model", "none", "--config", str(path)]).algorithm
    left_out = {"preset": True, "correction": {"upper", "lower"}}  # a correction of kind none has no bounds to give
    assert loaded.model_dump(exclude=left_out) == preset(name).model_dump(exclude=left_out)


def test_what_differs_from_the_default_is_noted_with_the_defaults_value() -> None:
    noted = [line.strip() for line in as_yaml("gspo").splitlines()[2:] if "#" in line]
    assert noted == [
        "kind: gspo  # ppo",
        "clip_low: 0.0003  # 0.2",
        "clip_high: 0.0004  # 0.2",
        "aggregation: sequence_mean  # token_mean",
        "minibatches: 4  # 1",
    ]


def test_the_default_has_nothing_to_note() -> None:
    assert "#" not in "".join(as_yaml("decoupled_ppo").splitlines()[2:])


def test_a_name_that_does_not_exist_ends_the_command_with_close_ones(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as exit_:
        main(["algorithms", "gropo"])
    assert exit_.value.code == 2
    assert "no preset is named 'gropo'; did you mean grpo" in capsys.readouterr().err


def test_the_command_runs_without_torch() -> None:
    code = "import sys; from arl.__main__ import main; main(['algorithms', 'dapo']); sys.exit('torch' in sys.modules)"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert (run.returncode, run.stderr) == (0, "")
    assert run.stdout == as_yaml("dapo")

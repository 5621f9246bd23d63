"""`arl plan` as a command: its options, what it prints and writes, and what it refuses."""

from pathlib import Path

import msgspec
import pytest
from made_costs import made_costs

from arl.__main__ import main
from arl.api.errors import ConfigError
from arl.cli import planning
from arl.cluster.plan.costs import Measured, read_costs, write_costs


@pytest.fixture
def costs(tmp_path: Path) -> Path:
    write_costs(tmp_path / "costs.json", made_costs(source="a test"))
    return tmp_path / "costs.json"


def test_it_prints_the_best_split_and_writes_what_it_is_asked_for(
    costs: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    plot, predictions, copy = tmp_path / "plan.png", tmp_path / "plan.json", tmp_path / "copy.json"
    options = ["--servers", "1:3", "--max-staleness", "1", "--tool-latency", "2", "--rank-hour", "7"]
    main(["plan", "--costs", str(costs), *options, "--plot", str(plot), "--json", str(predictions)])
    out = capsys.readouterr().out
    for words in ("episodes/s", "The limit is", "trainer", "staleness of trained tokens", "extrapolated", "a test"):
        assert words in out
    told = msgspec.json.decode(predictions.read_bytes())
    assert told["best"] in told["tried"]
    assert {one["deployment"]["num_servers"] for one in told["tried"]} <= {1, 2, 3}
    assert told["best"]["deployment"]["max_staleness"] == 1
    assert told["best"]["deployment"]["tool_factor"] == 2
    assert plot.stat().st_size > 10_000
    main(["plan", "--costs", str(costs), "--write-costs", str(copy), "--server-hour", "5"])
    assert read_costs(copy).prices.server_hour == 5


def test_it_guesses_for_a_gpu_and_says_so(capsys: pytest.CaptureFixture[str]) -> None:
    options = ["--batch-size", "4", "--group-size", "4", "--servers", "2", "--ranks", "4"]
    main(["plan", "--gpu", "H100", "--model-size", "8B", *options, "--turns", "2", "--tool-s", "1"])
    out = capsys.readouterr().out
    assert "every number is a guess" in out
    assert "extrapolated" in out
    assert "memory of a rank" in out


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        ([], "give one of RUN_DIR"),
        (["--gpu", "h100"], "--model-size"),
        (["--gpu", "abacus", "--model-size", "8B"], "abacus is not among the known GPUs"),
        (["--gpu", "l4", "--model-size", "32B"], "try --gpus-per-server 4"),
        (["--costs", "nowhere.json"], "nowhere.json cannot be read"),
        (["nowhere"], "nowhere"),
        (["--gpu", "h100", "--model-size", "8B", "--servers", "4:2"], "goes from 4 down to 2"),
        (["--gpu", "h100", "--model-size", "big"], "'big' is not the size of a model"),
        (["--gpu", "h100", "--model-size", "8B", "--budget", "1"], "raise --budget"),
        (["--gpu", "h100", "--model-size", "8B", "--max-staleness", "-1"], "max_staleness"),
    ],
)
def test_a_wrong_option_ends_with_code_2(argv: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as error:
        main(["plan", *argv])
    assert error.value.code == 2
    assert said in capsys.readouterr().err


def test_a_file_that_cannot_be_written_is_named_before_anything_is_computed(
    costs: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(planning, "search", lambda *_: pytest.fail("it computes"))
    with pytest.raises(SystemExit):
        main(["plan", "--costs", str(costs), "--json", "/nowhere/plan.json"])
    assert "/nowhere/plan.json cannot be written: there is no directory /nowhere" in capsys.readouterr().err


def test_each_number_is_followed_by_its_error_where_something_was_measured(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    measured = Measured(num_servers=(1, 1))
    write_costs(tmp_path / "costs.json", made_costs(measured=measured))
    main(["plan", "--costs", str(tmp_path / "costs.json"), "--servers", "1:2", "--json", str(tmp_path / "plan.json")])
    out = capsys.readouterr().out
    assert out.count("±") > 20
    assert "errors: nine of ten stored settings are within them" in out
    told = msgspec.json.decode((tmp_path / "plan.json").read_bytes())
    assert told["errors"]["throughput"] > 0


@pytest.mark.parametrize(
    ("right", "wrong", "said"),
    [
        ('"per_token_s"', '"per_token"', "per_token"),
        ('"cores": 2', '"cores": 0', r"int. >= 1 - at `\$\.shared\.cores"),
        ('"turns": [', '"turns": "three", "were": [', r"Expected `array`, got `str`.*turns"),
        ("{", "", "not a file of costs"),
    ],
)
def test_a_wrong_file_of_costs_is_refused_by_the_field_that_is_wrong(
    costs: Path, right: str, wrong: str, said: str
) -> None:
    assert read_costs(costs) == made_costs(source="a test")
    assert right in costs.read_text()
    costs.write_text(costs.read_text().replace(right, wrong, 1))
    with pytest.raises(ConfigError, match=said):
        read_costs(costs)

"""The runs of docs/healthy.md: each trains, and at its full length has the findings that the page shows."""

import json
from collections.abc import Mapping
from pathlib import Path

import digit_runs
import pytest
from scripted_launch import use_fakes

from arl import load_tokenizer, read_run
from arl.api.fakes import ScriptedEngine
from arl.engine.tiny import tiny_tokenizer, write_tiny_model
from arl.observe.view.health import findings

TOLD = {
    "healthy": [],
    "hacking": ["episode/exact fell from", "they have grown"],
    "collapse": ["The entropy fell from", "groups had equal rewards, and taught nothing"],
    "stale": ["away from the sampler of its tokens"],
    "starved": ["groups had equal rewards, and taught nothing"],
    "template": ["the trajectories in the last steps, and 100% in the first ones", "and taught nothing: all 0"],
}
"""Something of the errors and warnings about each run."""


def warnings(run_dir: Path) -> list[str]:
    found = findings(read_run(run_dir), [], {})
    return [f"{one['text']} {one['advice']}" for one in found if one["severity"] != "note"]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model of the runs' kind that has learned nothing."""
    return write_tiny_model(tmp_path_factory.mktemp("runs") / "model", digit_runs.PHRASES, digit_runs.SHAPE)


def test_no_question_is_asked_twice_or_although_held_out() -> None:
    training, held_out = digit_runs.questions()
    assert (len(training), len(held_out)) == (900, 100)
    assert len({example["question"] for example in [*training, *held_out]}) == 1000
    assert {"question": "Largest of 3 9 4?", "answer": "9"} in [*training, *held_out]


def test_a_warm_start_writes_a_model_once(tmp_path: Path) -> None:
    written = digit_runs.warm_start(tmp_path / "model", num_demonstrations=32)
    assert load_tokenizer(written).eos_token == "<|im_end|>"
    (written / "config.json").unlink()
    assert digit_runs.warm_start(tmp_path / "model") == written
    assert not (written / "config.json").exists()
    assert [path.name for path in tmp_path.iterdir()] == ["model"]


@pytest.mark.parametrize("name", digit_runs.RUNS)
def test_each_run_trains(name: str, model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tokens = tiny_tokenizer(digit_runs.PHRASES).encode("9<|im_end|>")
    use_fakes(monkeypatch, ScriptedEngine(lambda request: tokens))
    summary: Mapping[str, float] = digit_runs.train(name, model.parent, steps=2, batch_size=4, group_size=2)
    assert summary["steps"] == 2
    (*_, row) = map(json.loads, (model.parent / name / "metrics.jsonl").read_text().splitlines())
    assert ("episode/exact" in row) == (name == "hacking")


def test_the_other_template_ends_turns_with_another_token(model: Path) -> None:
    other = digit_runs.template(model)["model"]
    tokenizer = load_tokenizer(other)
    said = tokenizer.apply_chat_template([{"role": "assistant", "content": "9"}], tokenize=False)
    assert str(said).endswith("9<|endoftext|>\n")
    assert tokenizer.eos_token == "<|endoftext|>"
    config = json.loads((other / "config.json").read_text())
    assert config["eos_token_id"] == tokenizer.convert_tokens_to_ids("<|endoftext|>")


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("name", digit_runs.RUNS)
def test_each_run_is_found_healthy_or_sick(name: str, tmp_path_factory: pytest.TempPathFactory) -> None:
    place = tmp_path_factory.getbasetemp() / "health"
    digit_runs.train(name, place)
    told = "\n".join(warnings(place / name))
    assert all(sentence in told for sentence in TOLD[name]), told
    assert bool(told) == (name != "healthy"), told

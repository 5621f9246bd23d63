"""`arl finetune`: a run that is killed or interrupted goes on, and ends with the same weights."""

import asyncio
import json
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from nursery import TESTS, Nursery
from pydantic import ValidationError
from safetensors.torch import load_file

from arl.api.errors import ArlError, CheckpointError, ConfigError, DatasetError
from arl.api.settings.finetuning import FinetuneConfig
from arl.engine.tiny import TinyShape, write_tiny_model
from arl.run.finetuning import examples as examples_module
from arl.run.finetuning.examples import Examples, Kind
from arl.run.finetuning.job import fine_tune
from arl.run.script import load_config
from arl.training.metrics_log import read_jsonl
from arl.training.run_dir import starts_of
from arl.training.run_result import how_it_ended

SHAPE = TinyShape(hidden_size=32, intermediate_size=32, num_layers=1, head_dim=8)
NUM_ROWS, NUM_HELD_OUT, BATCH_SIZE, EPOCHS = 22, 4, 4, 2
NUM_STEPS = EPOCHS * 5  # batches of 4, 4, 4, 4 and 2
KINDS: tuple[Kind, ...] = ("sft", "dpo", "rm")


def rows(task: str) -> list[dict[str, Any]]:
    asked = [[{"role": "user", "content": f"{i} + 1 = ?"}] for i in range(NUM_ROWS)]
    if task == "sft":
        return [{"messages": [*asked[i], {"role": "assistant", "content": str(i + 1)}]} for i in range(NUM_ROWS)]
    return [{"prompt": asked[i], "chosen": str(i + 1), "rejected": str(i)} for i in range(NUM_ROWS)]


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where a model and the rows of each task are."""
    directory = tmp_path_factory.mktemp("tuned")
    write_tiny_model(directory / "model", shape=SHAPE)
    for task in KINDS:
        (directory / f"{task}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows(task)))
    return directory


@pytest.fixture(scope="module")
def nursery() -> Iterator[Nursery]:
    with Nursery(["tuned_life"], [TESTS / "run" / "finetuning"], HF_HUB_OFFLINE="1") as found:
        yield found


def flags(place: Path, task: str, run_dir: Path, *more: str) -> list[str]:
    named = {
        "kind": task,
        "model": place / "model",
        "dataset": place / f"{task}.jsonl",
        "num_held_out": NUM_HELD_OUT,
        "run_dir": run_dir,
        "epochs": EPOCHS,
        "batch_size": BATCH_SIZE,
        "evaluation.every": 5,
        "train.optimizer.lr": 1e-2,
        "checkpoint.every": 2,
    }
    return [*(str(part) for name, value in named.items() for part in (f"--{name}", value)), *more]


UNTOLD = ("time_s", "wall_s", "tokens_per_s")


def told(run_dir: Path, name: str) -> list[dict[str, Any]]:
    """The rows of a file, without times."""
    return [{k: v for k, v in row.items() if k not in UNTOLD} for row in read_jsonl(run_dir / f"{name}.jsonl")]


@pytest.mark.runs
@pytest.mark.timeout(180)
@pytest.mark.parametrize("task", [pytest.param("sft", marks=pytest.mark.slow), "dpo"])
def test_a_run_that_was_interrupted_and_killed_ends_with_the_weights_and_rows_of_one_that_was_not(
    task: str, place: Path, nursery: Nursery, tmp_path: Path
) -> None:
    """To the last bit; and DPO's reference is the start model in every life."""

    def life(run_dir: Path, number: int = 0, at: int = 0) -> int:
        argv = ["finetune", *flags(place, task, run_dir)]
        forked = nursery.fork("tuned_life:live", {"argv": argv, "number": number, "at": at}, tmp_path / "log")
        return forked.code.result(timeout=150)

    whole, cut = tmp_path / "whole", tmp_path / "cut"
    assert life(whole) == 0, (tmp_path / "log").read_text()
    assert life(cut, signal.SIGINT, at=3) == 128 + signal.SIGINT
    end = how_it_ended(cut)
    assert end is not None
    assert (end.how, end.signal, end.steps) == ("interrupted", "SIGINT", NUM_STEPS)
    assert end.version in (3, 4)  # the signal may come during the next step
    assert end.checkpoint == str(cut / "checkpoints" / f"version-{end.version:08d}")
    assert life(cut, signal.SIGKILL, at=7) == -signal.SIGKILL  # and the last checkpoint is of version 6
    killed = how_it_ended(cut)
    assert killed is not None
    assert killed.how == "killed"
    assert [start["steps"] for start in starts_of(cut)] == [NUM_STEPS] * 2
    assert life(cut) == 0, (tmp_path / "log").read_text()
    first, second = (load_file(run_dir / "trained" / "model.safetensors") for run_dir in (whole, cut))
    assert first.keys() == second.keys()
    assert all(torch.equal(first[name], second[name]) for name in first)
    for name in ("metrics", "evaluations"):
        assert told(cut, name) == told(whole, name)
    assert [row["version"] for row in told(whole, "evaluations")] == [0, 5, 10]
    trained = told(whole, "metrics")
    assert trained[-1]["loss"] < trained[0]["loss"]
    rates = [row["lr"] for row in trained]
    assert rates == pytest.approx([1e-2 * (1 - step / NUM_STEPS) for step in range(NUM_STEPS)])


@pytest.mark.parametrize("task", KINDS)
def test_an_evaluation_is_what_training_reports_of_the_same_examples(
    task: str, place: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of examples that are forwarded in several parts."""
    monkeypatch.setattr(examples_module, "_AT_ONCE", 3)
    of_training: list[dict[str, float]] = []
    init = Examples.__init__

    def compared(examples: Examples, *given: Any) -> None:
        init(examples, *given)
        evaluate = examples.evaluate

        def both(engine: Any, loss: Any) -> dict[str, float]:
            found = evaluate(engine, loss)
            of_training.append(engine.train_batch([examples.minibatch(range(len(examples)))], loss))
            assert {name: of_training[-1][name] for name in found} == pytest.approx(found, abs=1e-5)
            return found

        examples.evaluate = both  # type: ignore[method-assign]

    monkeypatch.setattr(Examples, "__init__", compared)
    config = load_config(FinetuneConfig, [*flags(place, task, tmp_path), "--no-log.console"])
    asyncio.run(fine_tune(config))
    assert len(of_training) > 2
    assert all("loss" in metrics for metrics in of_training)


def test_columns_are_renamed_and_long_rows_are_left_out(place: Path, tmp_path: Path) -> None:
    rows = [{"question": "a?", "answer": text} for text in ("b", "c", "d" * 300)]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    config = FinetuneConfig(
        kind="sft",
        model=str(place / "model"),
        dataset=str(tmp_path / "rows.jsonl"),
        columns={"prompt": "question", "completion": "answer"},
        run_dir=tmp_path / "run",
        max_tokens=100,
        too_long="drop",
        log={"console": False},  # type: ignore[arg-type]
    )
    assert asyncio.run(fine_tune(config))["num_examples"] == 2
    with pytest.raises(CheckpointError, match=r"was written with examples='2 with digest .*', this run has '3 with"):
        asyncio.run(fine_tune(config.model_copy(update={"max_tokens": None})))


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"max_tokens": 10}, DatasetError, r"sft\.jsonl: row 0 has \d+ tokens, more than max_tokens=10; shorten it"),
        ({"max_tokens": 10**6}, ConfigError, r"max_tokens is 1000000, but the context of .*model is \d+ tokens"),
        ({"num_held_out": 22}, DatasetError, "has 22 rows, of which num_held_out=22 are held out; lower it"),
        ({"columns": {"messages": "chat"}}, DatasetError, "has no 'chat'"),
    ],
)
def test_a_run_that_cannot_begin_says_why_and_leaves_its_end(
    changes: dict[str, Any], error: type[ArlError], message: str, place: Path, tmp_path: Path
) -> None:
    config = load_config(FinetuneConfig, [*flags(place, "sft", tmp_path), "--no-log.console"])
    with pytest.raises(error, match=message):
        asyncio.run(fine_tune(config.model_copy(update=changes)))
    end = how_it_ended(tmp_path)
    assert end is not None
    assert (end.how, end.error) == ("failed", error.__name__)


@pytest.mark.parametrize(
    ("kind", "changes", "message"),
    [
        ("sft", {"evaluation": {"every": 5}}, "there is nothing to evaluate on; set eval_dataset"),
        ("sft", {"eval_dataset": "x", "num_held_out": 5}, "leave one of them out"),
        ("sft", {"train": {"min_ranks": 1, "num_ranks": 2}}, "min_ranks is set, but fine-tuning replaces no lost"),
        (
            "sft",
            {"train": {"optimizer": {"schedule": "constant", "total_steps": 5}}},
            "total_steps is set, but schedule is constant",
        ),
        ("sft", {"dpo": {"beta": 1}}, "dpo is set, but kind is sft"),
        ("dpo", {"dpo": {"loss": "ipo", "label_smoothing": 0.1}}, "loss is ipo"),
        ("rm", {"rm": {"center": -1}}, "center"),
        ("ppo", {}, "kind"),
    ],
)
def test_settings_that_contradict_each_other_are_refused(kind: str, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        FinetuneConfig.model_validate({"kind": kind, "model": "m", "dataset": "d", **changes})


def test_run_dir_and_the_learning_rate_follow_the_kind_unless_they_are_set() -> None:
    given = {"model": "m", "dataset": "d", "train": {"num_threads": 2}}
    sft, dpo = (FinetuneConfig.model_validate({"kind": kind, **given}) for kind in ("sft", "dpo"))
    assert (str(sft.run_dir), sft.train.optimizer.lr) == ("runs/sft", 1e-5)
    assert (str(dpo.run_dir), dpo.train.optimizer.lr, dpo.train.num_threads) == ("runs/dpo", 1e-6, 2)
    set_one = {**given, "kind": "dpo", "run_dir": "here", "train": {"optimizer": {"lr": 1e-4}}}
    assert FinetuneConfig.model_validate(set_one).train.optimizer.lr == 1e-4

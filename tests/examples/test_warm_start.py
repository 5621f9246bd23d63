"""The warm start: a model directory that is complete or not there, and is made once."""

from __future__ import annotations

from pathlib import Path

import math_tasks
import pytest
import warm_start
from math_agent import CALCULATOR, prompt
from transformers import AutoModelForCausalLM, AutoTokenizer

from arl.engine.tiny import TinyShape
from arl.workflow.conversation import Conversation

HELD_OUT = math_tasks.held_out(20)


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(warm_start, "SHAPE", TinyShape(hidden_size=32, intermediate_size=32, num_layers=1, head_dim=8))
    monkeypatch.setattr(warm_start, "NUM_CAREFUL", 32)
    monkeypatch.setattr(warm_start, "NUM_MIXED", 32)


@pytest.mark.usefixtures("quick")
def test_the_model_is_made_once_and_a_prompts_boilerplate_is_few_tokens(tmp_path: Path) -> None:
    directory = warm_start.warm_start(tmp_path / "model", prompt, CALCULATOR, HELD_OUT, seed=0)
    assert [path.name for path in tmp_path.iterdir()] == ["model"]
    written = (directory / "model.safetensors").stat().st_mtime_ns
    assert warm_start.warm_start(directory, prompt, CALCULATOR, HELD_OUT, seed=0) == directory
    assert (directory / "model.safetensors").stat().st_mtime_ns == written

    tokenizer = AutoTokenizer.from_pretrained(directory)
    assert AutoModelForCausalLM.from_pretrained(directory).config.vocab_size >= len(tokenizer)
    for entry in HELD_OUT:
        assert len(Conversation(tokenizer, prompt(entry["question"]), tools=[CALCULATOR]).token_ids) < 40


@pytest.mark.usefixtures("quick")
def test_an_interrupted_warm_start_leaves_no_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*_args: object, **_options: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(warm_start, "finetune", interrupted)
    with pytest.raises(KeyboardInterrupt):
        warm_start.warm_start(tmp_path / "model", prompt, CALCULATOR, HELD_OUT, seed=0)
    assert list(tmp_path.iterdir()) == []

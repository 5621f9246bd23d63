"""The warm start: a model directory that is complete or not there, and is made once."""

from functools import partial
from pathlib import Path

import pytest
from transformers import AutoModelForCausalLM, AutoTokenizer

from arl.api.types import Example
from arl.engine.tiny import TinyShape
from arl.run.finetuning import warm_starts
from arl.run.finetuning.warm_starts import frequent_phrases, tool_call, warm_start
from arl.workflow.conversation import Conversation
from arl.workflow.tools import Tool

small_warm_start = partial(
    warm_start,
    shape=TinyShape(hidden_size=32, intermediate_size=32, num_layers=1, head_dim=8),
    seed=0,
    num_threads=1,
)


def increase(number: int) -> int:
    """Add one."""
    return number + 1


TOOL = Tool.from_function(increase)


def opened(question: str) -> list[dict[str, str]]:
    return [{"role": "system", "content": "You may count."}, {"role": "user", "content": question}]


def lesson(size: int = 32) -> list[Example]:
    return [
        {
            "messages": [
                *opened(f"After {number} comes ..."),
                {"role": "assistant", "content": tool_call("increase", number=number)},
                {"role": "tool", "content": str(number + 1)},
                {"role": "assistant", "content": f"It is {number + 1}."},
            ],
            "tools": [TOOL.spec],
        }
        for number in range(size)
    ]


def test_the_model_is_made_once_and_a_prompts_boilerplate_is_few_tokens(tmp_path: Path) -> None:
    directory = small_warm_start(tmp_path / "model", lambda: [lesson(), lesson()])
    assert [path.name for path in tmp_path.iterdir()] == ["model"]
    written = (directory / "model.safetensors").stat().st_mtime_ns

    def never() -> list[list[Example]]:
        raise AssertionError("a model that is there needs no demonstrations")

    assert small_warm_start(directory, never) == directory
    assert (directory / "model.safetensors").stat().st_mtime_ns == written

    tokenizer = AutoTokenizer.from_pretrained(directory)
    assert AutoModelForCausalLM.from_pretrained(directory).config.vocab_size >= len(tokenizer)
    assert len(Conversation(tokenizer, opened("After 7 comes ..."), tools=[TOOL]).token_ids) < 20


def test_an_interrupted_warm_start_leaves_no_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*_args: object, **_options: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(warm_starts, "finetune", interrupted)
    with pytest.raises(KeyboardInterrupt):
        small_warm_start(tmp_path / "model", lambda: [lesson()])
    assert list(tmp_path.iterdir()) == []


def test_frequent_phrases_are_what_many_texts_share_between_numbers_and_operators() -> None:
    texts = [f"What is {i} + {i}? <tool_call>" for i in range(100)] + ["Once only 3"]
    assert frequent_phrases(texts, min_share=0.05) == (" + ", "<tool_call>", "? ", "What is ")


def test_phrases_of_a_conversation_without_an_opening_and_those_of_the_caller_are_one_token_each(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(warm_starts, "finetune", lambda *_, **__: None)
    said = [{"role": "user", "content": "ready?"}, {"role": "assistant", "content": "steady"}]
    model = small_warm_start(tmp_path / "model", lambda: [[{"messages": said}] * 16], phrases=["seldom"])
    tokenizer = AutoTokenizer.from_pretrained(model)
    assert [len(tokenizer.encode(word)) for word in ("ready?", "steady", "seldom")] == [1, 1, 1]

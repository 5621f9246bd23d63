"""The math agent's episodes, its settings and where its questions come from, without a model."""

from __future__ import annotations

import json
from pathlib import Path

import math_agent
import math_tasks
import pytest
from math_agent import MathAgent, MathAgentConfig, answer_score, questions

from arl.api.errors import ConfigError, DatasetError, PromptTooLongError
from arl.api.scripted import ScriptedEngine
from arl.api.types import ModelRequest, SamplingParams, Trajectory
from arl.cli import load_config
from arl.engine.tiny import tiny_tokenizer
from arl.rewards import InlineReward

TOKENIZER = tiny_tokenizer()
ENTRY = next(e for e in math_tasks.held_out(50) if len(math_tasks.expressions(e)) == 2)


def call(expression: str) -> str:
    return (
        "<tool_call>\n" + json.dumps({"name": "calculator", "arguments": {"expression": expression}}) + "\n</tool_call>"
    )


async def episode(*answers: str | PromptTooLongError, max_turns: int = 4) -> tuple[Trajectory, str]:
    """Run the agent on ENTRY with a model that says `answers`; also the text of all that it saw and said."""
    remaining = iter(answers)

    def script(_: ModelRequest) -> list[int]:
        answer = next(remaining)
        if isinstance(answer, PromptTooLongError):
            raise answer
        return [*TOKENIZER.encode(answer), TOKENIZER.eos_token_id]

    engine = ScriptedEngine(script)
    score, sampling = InlineReward(math_tasks.score), SamplingParams(max_new_tokens=500)
    agent = MathAgent(tokenizer=TOKENIZER, score=score, sampling=sampling, max_turns=max_turns)
    (trajectory,) = await agent.arun_episode(engine, ENTRY)
    return trajectory, str(TOKENIZER.decode(trajectory.token_ids))


async def test_an_episode_of_several_calls_sees_each_result_and_is_scored_on_its_answer() -> None:
    first, second = math_tasks.expressions(ENTRY)
    result = math_agent.calculator(first)
    trajectory, text = await episode(call(first), call(second.format(result)), f"It is {ENTRY['answer']}.")
    assert ENTRY["question"] in text
    assert f"<tool_response>\n{result}\n</tool_response>" in text
    assert f"<tool_response>\n{ENTRY['answer']}\n</tool_response>" in text
    assert trajectory.reward == 1.0
    assert trajectory.metrics == {"tool_calls": 2, "turns": 3, "context_full": 0}


async def test_an_answer_at_once_is_an_episode_of_one_turn() -> None:
    trajectory, _ = await episode("-123456")
    assert trajectory.reward == 0.0
    assert trajectory.metrics == {"tool_calls": 0, "turns": 1, "context_full": 0}


async def test_what_is_wrong_with_a_call_comes_back_and_the_episode_goes_on() -> None:
    trajectory, text = await episode("<tool_call>12 +</tool_call>", call("1 / 0"), ENTRY["answer"])
    assert "error: a tool call must be one JSON object" in text
    assert "error: division by zero" in text
    assert trajectory.reward == 1.0


async def test_an_agent_that_never_answers_has_no_reward() -> None:
    trajectory, _ = await episode(call("1 + 1"), call("1 + 1"), max_turns=2)
    assert trajectory.reward == 0.0
    assert trajectory.metrics == {"tool_calls": 2, "turns": 2, "context_full": 0}


async def test_an_agent_whose_context_is_full_ends_with_what_it_has() -> None:
    trajectory, text = await episode(call("9 ** 9"), PromptTooLongError("no room"))
    assert trajectory.is_truncated
    assert text.endswith("</tool_call><|im_end|>")
    assert trajectory.metrics == {"tool_calls": 1, "turns": 1, "context_full": 1}


async def test_what_the_model_said_is_trained_and_nothing_else() -> None:
    trajectory, _ = await episode(call("1 + 1"), "2")
    said = [t for t, m in zip(trajectory.token_ids, trajectory.loss_mask, strict=True) if m]
    assert TOKENIZER.decode(said) == call("1 + 1") + "<|im_end|>2<|im_end|>"


@pytest.mark.parametrize(
    ("text", "reward"),
    [("42", 1.0), ("It is 42.", 1.0), ("<think>7</think> so 42", 1.0), ("42, no, 7", 0.0), ("none", 0.0), ("", 0.0)],
)
def test_the_answer_is_the_last_number(text: str, reward: float) -> None:
    entry = {"question": "?", "answer": "42", "metadata": {"source_dataset": "chain_sum"}}
    assert math_tasks.score(text, entry) == reward


@pytest.mark.parametrize(
    ("answer", "reference", "reward"),
    [
        ("42", "40 + 2 = <<40+2=42>>42\n#### 42", 1.0),
        ("1234.0", "#### 1,234", 1.0),
        ("41", "#### 42", 0.0),
        ("40", "40 + 2 = 42\n#### 42", 0.0),
        ("none", "#### 42", 0.0),
        ("5", "5", 1.0),
    ],
)
async def test_gsm8ks_answers_are_matched_as_numbers(answer: str, reference: str, reward: float) -> None:
    score = answer_score(MathAgentConfig(model="none", dataset="openai/gsm8k"))
    assert await score(answer, {"question": "?", "answer": reference}) == reward


def test_the_tiny_models_settings_yield_to_flags_one_by_one() -> None:
    config = load_config(MathAgentConfig, ["--rollout.max_staleness", "4", "--steps", "7"])
    assert (config.rollout.max_staleness, config.steps) == (4, 7)
    assert config.rollout.batch_size == MathAgentConfig.tiny_settings["rollout"]["batch_size"]
    assert config.train.optimizer.lr == MathAgentConfig.tiny_settings["train"]["optimizer"]["lr"]


def test_a_real_model_has_the_ordinary_settings() -> None:
    flags = "--model Qwen/Qwen3-0.6B --dataset openai/gsm8k --engine.kind sglang --engine.addresses http://127.0.0.1:1"
    config = load_config(MathAgentConfig, flags.split())
    assert config.train.optimizer.lr == 1e-5
    assert config.max_new_tokens == 1024


def test_an_unknown_flag_is_an_error_that_names_it() -> None:
    with pytest.raises(ConfigError, match="max_turn"):
        load_config(MathAgentConfig, ["--max_turn", "3"])


def write_rows(path: Path, count: int) -> str:
    rows = [{"question": f"{i} + 1?", "answer": f"#### {i + 1}"} for i in range(count)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def test_a_single_file_is_split_at_its_end(tmp_path: Path) -> None:
    path = write_rows(tmp_path / "rows.jsonl", 10)
    training, held_out = questions(MathAgentConfig(dataset=path, num_held_out=3))
    assert [len(training), len(held_out)] == [7, 3]
    assert held_out[-1]["question"] == "9 + 1?"


def test_a_directory_gives_its_train_and_test_splits(tmp_path: Path) -> None:
    write_rows(tmp_path / "train.jsonl", 5)
    write_rows(tmp_path / "test.jsonl", 4)
    training, held_out = questions(MathAgentConfig(dataset=str(tmp_path), num_held_out=3))
    assert [len(training), len(held_out)] == [5, 3]


def test_a_file_too_short_to_hold_out_from_is_an_error(tmp_path: Path) -> None:
    path = write_rows(tmp_path / "rows.jsonl", 3)
    with pytest.raises(DatasetError, match="num_held_out=192"):
        questions(MathAgentConfig(dataset=path))


def test_reasoning_gym_is_split_without_overlap() -> None:
    training, held_out = questions(MathAgentConfig(num_questions=300, num_held_out=100))
    assert not {entry["question"] for entry in training} & {entry["question"] for entry in held_out}

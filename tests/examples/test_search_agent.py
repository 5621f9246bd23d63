"""The search agent's episodes, scores and questions, over a real index and server, without a model."""

from __future__ import annotations

import json
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import search_agent
import search_tasks
from search_agent import (
    SearchAgent,
    SearchAgentConfig,
    SearchTool,
    answer_score,
    documents,
    f1,
    paragraphs,
    prepare,
    questions,
)
from search_server import Document, Index, SearchEngine, serve
from warm_start import tool_call, warm_start

from arl.api.errors import ArlError
from arl.api.scripted import ScriptedEngine
from arl.api.types import Example, SamplingParams, Trajectory
from arl.cli import load_config
from arl.engine.tiny import TinyShape, tiny_tokenizer, write_tiny_model
from arl.rewards import InlineReward

TOKENIZER = tiny_tokenizer()
CONTEXT = [
    ["Amber Harp", ["Amber Harp is a novel.", " It was written by Mira Tovel."]],
    ["Mira Tovel", ["Mira Tovel is a painter.", " She was born in Kelmora."]],
    ["Kelmora", ["Kelmora is a town."]],
]
ROW = {
    "_id": "5a8b",
    "question": "Where was the author of Amber Harp born?",
    "answer": "Kelmora",
    "type": "bridge",
    "supporting_facts": [["Amber Harp", 1], ["Mira Tovel", 1]],
    "context": CONTEXT,
}


def call(query: str) -> str:
    return tool_call("search", query=query)


async def episode(
    *answers: str, data: Example = ROW, max_turns: int = 4, url: str | None = None
) -> tuple[Trajectory, str]:
    """Run the agent with a model that says `answers`; also the text of all that it saw and said."""
    remaining = iter(answers)
    engine = ScriptedEngine(lambda _: [*TOKENIZER.encode(next(remaining)), TOKENIZER.eos_token_id])
    search = SearchTool(SearchEngine(url=url, index=None if url else Index(documents([ROW]))), topk=2)
    agent = SearchAgent(
        TOKENIZER,
        InlineReward(answer_score),
        tools=[search],
        sampling=SamplingParams(max_new_tokens=500),
        max_turns=max_turns,
    )
    async with agent:
        (trajectory,) = await agent.arun_episode(engine, data)
    return trajectory, str(TOKENIZER.decode(trajectory.token_ids))


async def test_two_searches_and_the_answer_have_full_reward() -> None:
    trajectory, text = await episode(call("Amber Harp"), call("Mira Tovel"), "Kelmora")
    assert "Mira Tovel: Mira Tovel is a painter. She was born in Kelmora." in text
    assert trajectory.reward == 1.0
    expected = {"tool_calls": 2, "turns": 3, "exact_match": 1.0, "supporting_found": 1.0}
    assert expected.items() <= trajectory.metrics.items()


async def test_an_answer_at_once_has_read_nothing() -> None:
    trajectory, _ = await episode("Belmora")
    assert trajectory.reward == 0.0
    expected = {"tool_calls": 0, "turns": 1, "exact_match": 0.0, "supporting_found": 0.0}
    assert expected.items() <= trajectory.metrics.items()


async def test_a_search_that_finds_nothing_says_so() -> None:
    trajectory, text = await episode(call("xylophone"), "Kelmora")
    assert "<tool_response>\nnothing was found\n</tool_response>" in text
    assert trajectory.metrics["supporting_found"] == 0.0


async def test_a_question_without_supporting_facts_has_no_share_of_them() -> None:
    trajectory, _ = await episode("Kelmora", data={"question": "Where?", "answer": "Kelmora"})
    assert "supporting_found" not in trajectory.metrics


async def test_an_answer_that_is_partly_right_is_worth_a_part() -> None:
    trajectory, _ = await episode("in Kelmora", data=ROW | {"supporting_facts": [["Amber Harp", 1]]})
    assert trajectory.reward == pytest.approx(2 / 3)
    assert trajectory.metrics["exact_match"] == 0.0


async def test_the_share_found_is_of_the_entries_that_are_named() -> None:
    trajectory, _ = await episode(call("Kelmora"), "Kelmora", data=ROW | {"supporting_facts": [["Kelmora", 0]]})
    assert trajectory.metrics["supporting_found"] == 1.0


async def test_supporting_facts_in_the_hubs_form_count_as_well() -> None:
    facts = {"title": ["Amber Harp", "Mira Tovel"], "sent_id": [1, 1]}
    trajectory, _ = await episode(call("painter"), "Kelmora", data=ROW | {"supporting_facts": facts})
    assert trajectory.metrics["supporting_found"] == 0.5


async def test_an_agent_that_never_answers_has_no_reward() -> None:
    trajectory, _ = await episode(call("Amber Harp"), call("Amber Harp"), max_turns=2)
    assert trajectory.reward == 0.0
    assert trajectory.metrics["tool_calls"] == 2


async def test_a_malformed_call_comes_back_and_the_episode_goes_on() -> None:
    trajectory, text = await episode("<tool_call>Amber Harp</tool_call>", tool_call("search", words="x"), "Kelmora")
    assert text.count("error: ") == 2
    assert trajectory.reward == 1.0


async def test_a_search_server_that_is_away_fails_the_episode() -> None:
    async with serve(Index([Document("a", "word")])) as url:
        pass
    with pytest.raises(ArlError, match="cannot be reached"):
        await episode(call("Amber Harp"), "Kelmora", url=url)


async def test_a_running_server_is_searched_instead() -> None:
    async with serve(Index([Document("Amber Harp", "a stone in the sea")])) as url:
        _, text = await episode(call("Amber Harp"), "Kelmora", url=url)
    assert "Amber Harp: a stone in the sea" in text


@pytest.mark.parametrize(
    ("answer", "reference", "score"),
    [
        ("Kelmora", "Kelmora", 1.0),
        ("the kelmora.", "Kelmora", 1.0),
        ("in Kelmora", "Kelmora", 2 / 3),
        ("Mira Tovel", "Jon Tovel", 0.5),
        ("no no", "no", 0.0),
        ("yes", "yes", 1.0),
        ("Yes, it is", "yes", 0.0),
        ("", "Kelmora", 0.0),
        ("", "", 1.0),
        ("Tovel Tovel", "Tovel", 2 / 3),
    ],
)
def test_answers_are_scored_as_hotpotqa_scores_them(answer: str, reference: str, score: float) -> None:
    assert f1(answer, reference) == pytest.approx(score)


async def test_thinking_is_no_part_of_the_answer() -> None:
    trajectory, _ = await episode("<think>Kelmora or Glalmalo?</think>\n\nKelmora\n")
    assert trajectory.reward == 1.0


def test_paragraphs_are_read_from_files_and_from_the_hubs_form() -> None:
    columns = {"title": [title for title, _ in CONTEXT], "sentences": [sentences for _, sentences in CONTEXT]}
    assert paragraphs(columns) == paragraphs(CONTEXT)
    assert paragraphs(CONTEXT)[1] == Document("Mira Tovel", "Mira Tovel is a painter. She was born in Kelmora.")
    assert len(documents([ROW, ROW])) == 3


@pytest.mark.parametrize("context", [7, ["Amber Harp"], [["a", ["b"], "c"]], {"title": ["a"]}, [["a", None]]])
def test_a_context_of_another_form_is_an_error(context: Any) -> None:
    with pytest.raises(ArlError, match=r"a context must be a list of \[title"):
        paragraphs(context)


def write_rows(path: Path, rows: Sequence[Example]) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


async def test_a_file_in_hotpotqas_format_gives_the_questions_and_the_corpus(tmp_path: Path) -> None:
    others = [ROW | {"question": f"{n}?", "context": [[f"Title {n}", [f"Word{n}."]]]} for n in range(3)]
    path = write_rows(tmp_path / "hotpot.jsonl", [*others, ROW])
    model = write_tiny_model(tmp_path / "model", shape=TinyShape(hidden_size=32, num_layers=1, head_dim=8))
    config = SearchAgentConfig(model=str(model), dataset=path, num_held_out=1)
    setup = prepare(config)
    assert [row["question"] for row in setup.dataset] == ["0?", "1?", "2?"]
    assert setup.eval_dataset == [ROW]
    assert isinstance(setup.workflow, SearchAgent)
    for _ in range(2):  # evaluated first, say, and then trained
        async with setup.workflow as agent, agent.episode_tools(ROW) as (tool,):
            assert await tool.acall({"query": "word2"}) == "Title 2: Word2."
            assert (await tool.acall({"query": "Kelmora"})).startswith("Kelmora: Kelmora is a town.")


def test_a_directory_gives_its_training_split_and_the_one_to_evaluate_on(tmp_path: Path) -> None:
    write_rows(tmp_path / "train.jsonl", [ROW] * 3)
    write_rows(tmp_path / "validation.jsonl", [ROW] * 2)
    training, held_out = questions(SearchAgentConfig(dataset=str(tmp_path), eval_split="validation"))
    assert [len(training), len(held_out)] == [3, 2]


def test_a_file_too_short_to_hold_out_from_is_an_error(tmp_path: Path) -> None:
    path = write_rows(tmp_path / "rows.jsonl", [ROW])
    with pytest.raises(ArlError, match="num_held_out=192"):
        questions(SearchAgentConfig(dataset=path))


def test_questions_need_their_paragraphs_only_where_no_server_is_named(tmp_path: Path) -> None:
    path = write_rows(tmp_path / "rows.jsonl", [{"question": "?", "answer": "!"}] * 3)
    with pytest.raises(ArlError, match="'context'"):
        questions(SearchAgentConfig(dataset=path, num_held_out=1))
    training, _ = questions(SearchAgentConfig(dataset=path, num_held_out=1, search_url="http://127.0.0.1:1"))
    assert len(training) == 2


def test_the_tiny_models_settings_yield_to_flags_and_a_real_model_has_the_ordinary_ones() -> None:
    assert load_config(SearchAgentConfig, ["--topk", "3"]).topk == 3
    assert load_config(SearchAgentConfig, []).topk == 2
    assert load_config(SearchAgentConfig, ["--model", "Qwen/Qwen3-0.6B"]).max_new_tokens == 1024


def test_the_tiny_model_is_shown_searches_and_its_boilerplate_is_few_tokens(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(search_tasks, "NUM_CAREFUL", 32)
    monkeypatch.setattr(search_tasks, "NUM_MIXED", 32)
    small = TinyShape(hidden_size=32, intermediate_size=32, num_layers=1, head_dim=8)
    monkeypatch.setattr(search_agent, "warm_start", partial(warm_start, shape=small, num_threads=1))
    setup = prepare(SearchAgentConfig(run_dir=tmp_path))
    assert setup.model == str(tmp_path / "model")
    tokenizer = search_agent.load_tokenizer(setup.model)
    assert len(tokenizer.encode(call("Amber Harp"))) == 4
    assert len(setup.dataset) > 50 * 32
    assert setup.eval_dataset is not None
    assert len(setup.eval_dataset) == 192

"""The search agent's episodes, scores and questions, over a real index and server, without a model."""

import json
from pathlib import Path
from typing import Any

import pytest
from played import TOKENIZER, played
from search_agent import (
    SearchAgent,
    SearchAgentConfig,
    SearchTool,
    answer_score,
    documents,
    f1,
    paragraphs,
    prepare,
)
from search_server import Index, SearchEngine

from arl.api.errors import ArlError
from arl.api.types import SamplingParams
from arl.engine.tiny import TinyShape, write_tiny_model
from arl.rewards import InlineReward
from arl.run.finetuning.warm_starts import tool_call

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


FACTS = ROW["supporting_facts"]
HUBS_FACTS = {"title": ["Amber Harp", "Mira Tovel"], "sent_id": [1, 1]}
TWICE = (call("Amber Harp"), call("Mira Tovel"), "<think>Kelmora or Glalmalo?</think>\n\nKelmora\n")
SECOND = "Mira Tovel: Mira Tovel is a painter. She was born in Kelmora."
NOTHING_FOUND = "<tool_response>\nnothing was found\n</tool_response>"


@pytest.mark.parametrize(
    ("answers", "facts", "reward", "metrics", "shown"),
    [
        (TWICE, FACTS, 1.0, {"tool_calls": 2, "turns": 3, "exact_match": 1.0, "supporting_found": 1.0}, SECOND),
        (("Belmora",), FACTS, 0.0, {"tool_calls": 0, "turns": 1, "exact_match": 0.0, "supporting_found": 0.0}, ""),
        ((call("xylophone"), "Kelmora"), FACTS, 1.0, {"supporting_found": 0.0}, NOTHING_FOUND),
        (("Kelmora",), [], 1.0, {}, ""),
        (("in Kelmora",), [["Amber Harp", 1]], 2 / 3, {"exact_match": 0.0}, ""),
        ((call("Kelmora"), "Kelmora"), [["Kelmora", 0]], 1.0, {"supporting_found": 1.0}, ""),
        ((call("painter"), "Kelmora"), HUBS_FACTS, 1.0, {"supporting_found": 0.5}, ""),
    ],
)
async def test_an_episode_is_worth_its_answer_and_logs_what_it_found(
    answers: tuple[str, ...], facts: Any, reward: float, metrics: dict[str, float], shown: str
) -> None:
    search = SearchTool(SearchEngine(index=Index(documents([ROW]))), topk=2)
    sampling = SamplingParams(max_new_tokens=500)
    agent = SearchAgent(TOKENIZER, InlineReward(answer_score), tools=[search], sampling=sampling)
    ((trajectory, text),) = await played(agent, ROW | {"supporting_facts": facts}, *answers)
    assert trajectory.reward == pytest.approx(reward)
    assert metrics.items() <= trajectory.metrics.items()
    assert ("supporting_found" in trajectory.metrics) == bool(facts)
    assert shown in text


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


@pytest.mark.parametrize("context", [7, ["Amber Harp"], [["a", ["b"], "c"]], {"title": ["a"]}, [["a", None]]])
def test_a_context_of_another_form_is_an_error(context: Any) -> None:
    with pytest.raises(ArlError, match=r"a context must be a list of \[title"):
        paragraphs(context)


async def test_a_file_in_hotpotqas_format_gives_the_questions_and_the_corpus(tmp_path: Path) -> None:
    path = tmp_path / "hotpot.jsonl"
    others = [ROW | {"question": f"{n}?", "context": [[f"Title {n}", [f"Word{n}."]]]} for n in range(3)]
    path.write_text("".join(json.dumps(row) + "\n" for row in (*others, ROW)))
    model = write_tiny_model(tmp_path / "model", shape=TinyShape(hidden_size=32, num_layers=1, head_dim=8))
    setup = prepare(SearchAgentConfig(model=str(model), dataset=str(path), num_held_out=1))
    assert [row["question"] for row in setup.dataset] == ["0?", "1?", "2?"]
    assert [*setup.eval_dataset] == [ROW]
    assert isinstance(setup.workflow, SearchAgent)
    for _ in range(2):  # evaluated first, say, and then trained
        async with setup.workflow as agent, agent.episode_tools(ROW) as (tool,):
            assert await tool.acall({"query": "word2"}) == "Title 2: Word2."
            assert (await tool.acall({"query": "Kelmora"})).startswith("Kelmora: Kelmora is a town.")

"""The search agent's world: always the same, its regions apart, and every question answered by two searches."""

from collections import Counter
from functools import cache
from itertools import combinations

import pytest
import search_tasks
from search_agent import SearchTool, prompt, shown
from search_server import Index, SearchEngine

from arl.workflow.call_formats import parse_tool_calls

REGIONS = ("demonstrations", "training", "held_out")


@pytest.fixture(scope="module")
def index() -> Index:
    return Index(search_tasks.documents())


def test_the_world_is_the_same_each_time_nothing_is_in_two_regions_and_no_fact_leads_out_of_one() -> None:
    regions = search_tasks.world()
    search_tasks.world.cache_clear()
    assert search_tasks.world() == regions
    names = Counter(name for entries in regions.values() for name in entries)
    assert max(names.values()) == 1
    for entries in regions.values():
        for entry in entries.values():
            linked = {relation: name for relation, name in entry.facts.items() if relation != "river"}
            assert set(linked.values()) <= set(entries)
            assert entry.name not in linked.values()


def test_no_question_is_asked_in_two_regions_or_about_what_another_asks_about() -> None:
    asked = {region: search_tasks.questions(region) for region in REGIONS}
    for one, other in combinations(REGIONS, 2):
        titles = [{title for row in asked[region] for title, _ in row["supporting_facts"]} for region in (one, other)]
        assert not titles[0] & titles[1]
    assert len(asked["training"]) > 50 * 32  # the steps of a run times its batch: none is asked twice
    assert len({row["question"] for row in asked["training"]}) == len(asked["training"])


def test_two_searches_lead_to_each_answer_beside_distractors_and_the_first_alone_does_not(index: Index) -> None:
    for row in search_tasks.questions("held_out")[:200]:
        (first, _), (second, _) = row["supporting_facts"]
        assert first in row["question"]
        assert second not in row["question"]
        results = [index.best(title, 2) for title in (first, second)]
        assert [(documents[0].title, len(documents)) for documents in results] == [(first, 2), (second, 2)]
        assert second in results[0][0].text
        assert row["answer"] in results[1][0].text


def test_lessons_show_the_habits_of_their_shares_and_nothing_that_is_asked(
    index: Index, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(search_tasks, "NUM_CAREFUL", 50)
    monkeypatch.setattr(search_tasks, "NUM_MIXED", 400)
    tool = SearchTool(SearchEngine(index=index), 2).tool
    search = cache(lambda query: shown(index.best(query, 2)))
    careful, mixed = search_tasks.lessons(prompt, tool, search, seed=0)

    assert {len(shown["messages"]) for shown in careful} == {7}
    for demonstration in careful:
        results = [message["content"] for message in demonstration["messages"] if message["role"] == "tool"]
        calls = [parse_tool_calls(m["content"]) for m in demonstration["messages"] if m["role"] == "assistant"]
        assert [len(call) for call in calls] == [1, 1, 0]
        assert demonstration["messages"][-1]["content"] in results[1].splitlines()[0]
    searches = Counter(sum(m["role"] == "tool" for m in demonstration["messages"]) for demonstration in mixed)
    shares = [searches[n] / 400 for n in (0, 1, 2)]
    assert shares == pytest.approx([search_tasks.MIX[habit] for habit in ("guess", "halfway", "careful")], abs=0.08)
    asked = {row["question"] for region in ("training", "held_out") for row in search_tasks.questions(region)}
    assert not asked & {shown["messages"][1]["content"] for shown in (*careful, *mixed)}

"""The search agent's world: always the same, its regions apart, and every question answered by two searches."""

from collections import Counter
from itertools import combinations

import pytest
import search_tasks
from search_server import Index

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

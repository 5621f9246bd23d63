"""The long agent: its books, what an answer is worth, and lessons that fit into the tiny model's context."""

import random

import long_agent
import long_tasks
import pytest
from long_agent import LongAgentConfig, agent, f1
from long_tasks import NO_MORE, Teacher, book, noted
from played import played

from arl.api.types import Example
from arl.engine.tiny import tiny_tokenizer
from arl.run.finetuning.examples import to_demonstrations
from arl.run.finetuning.warm_starts import _phrases, tool_call
from arl.run.script import load_config

CONFIG = load_config(LongAgentConfig, [])
SIZE = CONFIG.num_pages, CONFIG.words


@pytest.fixture
def lessons(monkeypatch: pytest.MonkeyPatch) -> list[list[Example]]:
    monkeypatch.setattr(long_tasks, "NUM_CAREFUL", 60)
    monkeypatch.setattr(long_tasks, "NUM_MIXED", 200)
    return Teacher(long_agent.SYSTEM, long_agent.compaction(CONFIG), *SIZE, seed=0).lessons()


def test_a_book_has_its_treasures_on_pages_of_their_own() -> None:
    row = book(random.Random(0), *SIZE)
    assert [len(page.split()) for page in row["pages"]] == [CONFIG.words] * CONFIG.num_pages
    on_pages = [treasure for page in row["pages"] for treasure in long_tasks.treasures_in([page])]
    assert sorted(on_pages) == row["answer"]
    assert len(on_pages) == 4


@pytest.mark.parametrize(
    ("answer", "worth"),
    [("gold ruby", 1.0), ("Ruby, then gold.", 1.0), ("gold", 2 / 3), ("gold ruby opal jade", 2 / 3), ("nothing", 0.0)],
)
def test_an_answer_is_worth_its_agreement_with_the_book(answer: str, worth: float) -> None:
    assert f1(answer, {"answer": ["gold", "ruby"]}) == pytest.approx(worth)


async def test_notes_carry_treasures_over_contexts_and_all_of_them_fit(lessons: list[list[Example]]) -> None:
    noted_before = long_agent.HANDOVER.removesuffix("{summary}")
    tokenizer = tiny_tokenizer([*long_tasks.phrases(), noted_before, *_phrases(lessons)])
    row, turn = book(random.Random(1), *SIZE), tool_call("next_page")
    pages = row["pages"]
    notes = [noted(pages[:n]) for n in (3, 6, 9)]
    said = [*[turn] * 3, notes[0], *[turn] * 3, notes[1], *[turn] * 3, notes[2], *[turn] * 2, noted(pages)]
    made = await played(agent(CONFIG, tokenizer), row, *said, tokenizer=tokenizer)
    trajectories = [trajectory for trajectory, _ in made]
    assert {trajectory.reward for trajectory in trajectories} == {1.0}
    assert trajectories[0].metrics["compactions"] == len(trajectories) - 1 == 3
    assert sum(len(trajectory.token_ids) for trajectory in trajectories) > 2 * CONFIG.context_length
    shown = [demonstration[0] for demonstration in to_demonstrations(lessons[0], tokenizer)]
    assert max(map(len, [*shown, *(trajectory.token_ids for trajectory in trajectories)])) <= CONFIG.context_length
    assert notes[2] in made[-1][1]


def test_careful_readers_note_every_treasure_and_read_to_the_end(lessons: list[list[Example]]) -> None:
    for demonstration in lessons[0]:
        *before, last = demonstration["messages"]
        assert last["content"] == noted([m["content"] for m in before if m["role"] != "system"])
        assert before[-1]["content"] in (NO_MORE, long_agent.INSTRUCTION)

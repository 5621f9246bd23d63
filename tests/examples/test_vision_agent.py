"""The seeing agent: its pictures, its zoom, and lessons whose players look first, and later mostly guess."""

from pathlib import Path
from random import Random
from statistics import fmean

import pytest
from played import played
from vision_agent import SYSTEM, VisionAgentConfig, agent, is_right
from vision_tasks import FACES, NUM_CAREFUL, NUM_MIXED, PARTS, SEEN, SHAPE, VISION, Table, lessons, table, tables

from arl.api.images import Image
from arl.api.types import Example
from arl.engine.model_files import load_tokenizer
from arl.engine.tiny import write_tiny_vision_model
from arl.run.finetuning.examples import to_demonstrations
from arl.run.finetuning.warm_starts import tool_call
from arl.run.script import load_config


def pictures_of(row: Example) -> list[Image]:
    """The table, and the die in question from near by."""
    return [Image.of(picture) for picture in (row["image"], Table(row["image"]).zoom(row["part"]))]


@pytest.mark.parametrize("part", PARTS)
def test_a_zoom_shows_the_number_of_one_die_alone(part: str) -> None:
    place = PARTS.index(part)

    def zoomed(face: int, other: int) -> Image:
        faces = (face, other) if place == 0 else (other, face)
        return Image.of(Table(table(faces, Random(0))).zoom(part))

    assert len({zoomed(face, 1) for face in FACES}) == len(FACES)
    assert len({zoomed(1, other) for other in FACES}) == 1


def test_careful_players_are_right_and_mixed_ones_mostly_guess_about_the_picture_that_they_see() -> None:
    rows, (careful, mixed) = tables(7, NUM_CAREFUL + NUM_MIXED), lessons(SYSTEM, 7)
    right = [
        is_right(lesson["messages"][-1]["content"], row) for lesson, row in zip([*careful, *mixed], rows, strict=True)
    ]
    assert all(right[:NUM_CAREFUL])
    assert fmean(right[NUM_CAREFUL:]) == pytest.approx(SEEN + (1 - SEEN) / len(FACES), abs=0.06)


def test_a_lesson_shows_the_pictures_that_the_agent_sees(tmp_path: Path) -> None:
    tokenizer = load_tokenizer(str(write_tiny_vision_model(tmp_path, shape=SHAPE, vision=VISION)))
    (row,) = tables(7, 1)
    ((*_, images),) = to_demonstrations([lessons(SYSTEM, 7)[0][0]], tokenizer)
    assert [placed.image for placed in images] == pictures_of(row)


async def test_the_agent_sees_the_table_and_the_part_that_it_zooms_in_on(tmp_path: Path) -> None:
    model = write_tiny_vision_model(tmp_path / "model", shape=SHAPE, vision=VISION)
    tokenizer = load_tokenizer(str(model))
    (row,) = tables(3, 1)
    said = tool_call("zoom", part=row["part"]), str(row["answer"])
    ((made, _),) = await played(
        agent(load_config(VisionAgentConfig, ["--max_new_tokens", "128"]), tokenizer), row, *said, tokenizer=tokenizer
    )
    assert [placed.image for placed in made.images] == pictures_of(row)
    assert made.reward == made.metrics["found"] == 1.0

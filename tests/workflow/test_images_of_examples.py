"""Images of examples: from their columns to their places in the messages, and into episodes."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from scripted_answers import TOKENIZER
from scripted_launch import small
from sighted_chats import SMALL, WIDE, seeing

from arl.api.errors import ArlError, DatasetError, ImageError
from arl.api.images import Image
from arl.engine.tiny import TinyVision, write_tiny_vision_model
from arl.rewards.adapt import InlineReward
from arl.run.launch import launch
from arl.workflow.agent import SingleTurnWorkflow
from arl.workflow.images import check_places_as
from arl.workflow.messages import image_part, images_in, text_part

SEEING = seeing("qwen2_5_vl")


def likes_all(answer: str, data: Any) -> float:
    return 1.0


def agent(tokenizer: Any = SEEING, **fields: Any) -> SingleTurnWorkflow:
    return SingleTurnWorkflow(tokenizer, InlineReward(likes_all), **fields)


def asked(*parts: Image | str | dict[str, Any]) -> list[Any]:
    return [{"role": "user", "content": [*map(part_of, parts)]}]


def part_of(given: Image | str | dict[str, Any]) -> dict[str, Any]:
    if isinstance(given, dict):
        return given
    return image_part(given) if isinstance(given, Image) else text_part(given)


FOUR_FORMS = [SMALL, SMALL.picture(), {"bytes": SMALL.data, "path": None}, SMALL.data_url]


@pytest.mark.parametrize("form", FOUR_FORMS, ids=lambda form: type(form).__name__)
def test_without_a_marker_images_come_before_the_text(form: Any) -> None:
    assert agent().messages({"question": "what?", "image": form}) == asked(SMALL, "what?")
    assert agent().messages({"question": "what?", "images": [form, WIDE]}) == asked(SMALL, WIDE, "what?")


PLACES: list[tuple[dict[str, Any], list[Any]]] = [
    ({"question": "<image>\nor <image>?"}, asked(SMALL, "\nor ", WIDE, "?")),
    ({"prompt": [{"role": "user", "content": "a <image><image>"}]}, asked("a ", SMALL, WIDE)),
    (
        {"messages": [{"role": "user", "content": [{"type": "image"}, text_part("or <image>?")]}]},
        asked(SMALL, "or ", WIDE, "?"),
    ),
    ({"messages": [{"role": "user", "content": [{"type": "image", "image": None}] * 2}]}, asked(SMALL, WIDE)),
    (
        {"messages": asked("<image>?", SMALL, "<image>")},
        asked(SMALL, "?", SMALL, WIDE),
    ),
]


@pytest.mark.parametrize(("row", "messages"), PLACES)
def test_each_marker_and_each_empty_part_is_a_place(row: dict[str, Any], messages: list[Any]) -> None:
    assert agent().messages({**row, "images": [SMALL, WIDE]}) == messages
    as_pandas_has_it = np.empty(2, object)
    as_pandas_has_it[:] = [SMALL, WIDE]
    assert agent().messages({**row, "images": as_pandas_has_it}) == messages


def test_what_an_assistant_said_has_no_places() -> None:
    chat = [{"role": "user", "content": "<image>"}, {"role": "assistant", "content": "<image>"}, *asked("?")]
    made = agent().messages({"messages": chat, "image": SMALL})
    assert images_in(made) == [SMALL]
    assert made[1:] == chat[1:]


def test_markers_without_images_are_text_and_messages_with_images_stay() -> None:
    for row in ({"question": "an <image> tag"}, {"question": "an <image> tag", "images": []}):
        assert agent().messages(row) == [{"role": "user", "content": "an <image> tag"}]
    own = asked(WIDE, "what?")
    assert agent().messages({"messages": own, "images": [SMALL]}) == own
    assert agent(prompt=lambda data: own).messages({"image": SMALL}) == own
    assert agent(image_columns=()).messages({"question": "?", "image": 3}) == [{"role": "user", "content": "?"}]
    assert images_in(agent(image_columns=("photo",)).messages({"question": "?", "photo": SMALL})) == [SMALL]


@pytest.mark.parametrize(
    ("row", "error", "reason"),
    [
        ({"question": "<image>?", "images": [SMALL, WIDE]}, DatasetError, "begins '<image>.' has 2 images .* 1 places"),
        ({"question": "<image><image>", "image": SMALL}, DatasetError, "has 1 images .*, and 2 places"),
        ({"messages": asked(WIDE, "<image><image>"), "image": SMALL}, DatasetError, "has 1 images .*, and 2 places"),
        (
            {"question": "how many?", "images": [SMALL, "/no/such.png"]},
            ImageError,
            "image 1 of the example that begins",
        ),
        ({"question": "?", "image": np.zeros((4, 4, 3), np.uint8)}, ImageError, "an image is of type ndarray"),
        (
            {"messages": asked("what?", {"type": "image"})},
            DatasetError,
            "begins 'what.' has a part of type image w",
        ),
        ({"messages": [{"role": "system", "content": "a"}], "image": SMALL}, DatasetError, "no message of a user"),
    ],
)
def test_an_example_that_does_not_fit_is_an_error_that_quotes_it(
    row: dict[str, Any], error: type[ArlError], reason: str
) -> None:
    with pytest.raises(error, match=reason):
        agent().check_example(row)


async def test_a_run_of_a_text_model_whose_first_example_has_an_image_does_not_start(tmp_path: Path) -> None:
    rows = [{"question": "what?", "image": SMALL}]
    with pytest.raises(ImageError, match="the first example: a message of role 'user' has an image, and the chat"):
        async with launch(small(tmp_path / "run"), workflow=agent(TOKENIZER), dataset=rows):
            pass
    assert not (tmp_path / "run").exists()


async def test_a_run_whose_model_places_images_otherwise_than_its_workflow_does_not_start(tmp_path: Path) -> None:
    rows = [{"question": "what?", "image": SMALL}]
    for name, vision in {"same": TinyVision(), "other": TinyVision(patch_size=14)}.items():
        write_tiny_vision_model(tmp_path / name, vision=vision)
    check_places_as(SEEING, str(tmp_path / "same"))
    settings = small(tmp_path / "run").model_copy(update={"model": str(tmp_path / "other")})
    with pytest.raises(
        ImageError, match=r"the first example: .* has patch_size=8; .*other, which is asked, has patch_size=14,"
    ):
        async with launch(settings, workflow=agent(), dataset=rows):
            pass
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("workflow", "data", "is_odd"),
    [
        (agent(), {"question": "<image> what?", "picture": SMALL}, True),
        (agent(image_columns=("picture",)), {"question": "<image> what?", "picture": SMALL}, False),
        (agent(), {"question": "what?"}, False),
        (agent(image_columns=()), {"question": "<image> what?", "image": SMALL}, False),
        (agent(TOKENIZER), {"question": "what is <image> in HTML?"}, False),
    ],
)
def test_a_place_without_an_image_is_remarked(workflow: SingleTurnWorkflow, data: dict[str, Any], is_odd: bool) -> None:
    remark = workflow.check_first(data, [])
    assert (remark is not None) == is_odd
    assert remark is None or "nothing in a column 'images' or 'image'" in remark

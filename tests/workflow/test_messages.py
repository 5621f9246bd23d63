"""Messages in the one form that templates take: texts and images, in the forms of OpenAI, transformers, Anthropic and
Python."""

import base64
import copy
import io
from pathlib import Path
from typing import Any

import pytest
from PIL import Image as Pictures
from sighted import noise

from arl.api.errors import ImageError, ModelError
from arl.api.images import Image
from arl.workflow.messages import (
    HistoryKeys,
    Message,
    content_of,
    history_key,
    image_part,
    images_in,
    normalised,
    text_part,
    tools_key,
    with_read_images,
)

CALL = {"id": "a", "type": "function", "function": {"name": "look", "arguments": '{"n": 1}'}}
CALLED = {"role": "assistant", "tool_calls": [CALL]}
OBJECT = {**CALL, "function": {"name": "look", "arguments": {"n": 1}}}
READ = {"role": "assistant", "content": "", "tool_calls": [OBJECT]}


@pytest.mark.parametrize(
    ("message", "form"),
    [
        ({"role": "assistant", "content": None}, {"role": "assistant", "content": ""}),
        ({"role": "assistant"}, {"role": "assistant", "content": ""}),
        ({"role": "user", "content": "a", "name": None}, {"role": "user", "content": "a"}),
        ({"role": "assistant", "content": "a", "tool_calls": []}, {"role": "assistant", "content": "a"}),
        ({"role": "user", "content": [{"type": "text", "text": "a"}, "b"]}, {"role": "user", "content": "a\nb"}),
        ({"role": "user", "content": []}, {"role": "user", "content": ""}),
        ({**CALLED, "content": ""}, READ),
        (CALLED, READ),
        ({**CALLED, "tool_calls": [{**CALL["function"], "id": "a"}]}, READ),
        ({**CALLED, "content": None}, {**READ, "content": None}),
        ({"role": "assistant", "thinking": "hm"}, {"role": "assistant", "content": "", "reasoning_content": "hm"}),
    ],
)
def test_contents_are_texts_arguments_are_objects_and_none_fields_are_left_out(message: Message, form: Message) -> None:
    before = copy.deepcopy(message)
    assert normalised(message) == normalised(form) == form
    assert message == before


@pytest.mark.parametrize(
    ("field", "value", "what"),
    [
        ("reasoning_content", ["hm"], "message 3 has reasoning_content that is a list; thinking must be text"),
        ("thinking", {"text": "hm"}, "message 3 has thinking that is a dict"),
        ("function_call", {"name": "look", "arguments": "{}"}, "message 3 has function_call, .* give tool_calls"),
        ("tool_calls", ["look"], "message 3 has a call 'look'; it must have a function with name and arguments"),
        ("tool_calls", [{"id": "a"}], "message 3 has a call .* it must have a function"),
    ],
)
def test_what_no_template_could_show_is_an_error_with_the_messages_number(field: str, value: Any, what: str) -> None:
    with pytest.raises(ModelError, match=what):
        normalised({"role": "assistant", "content": "a", field: value}, 3)


def key(*messages: Message) -> bytes:
    return history_key(tools_key([]), messages)


def test_equal_histories_have_equal_keys() -> None:
    other = {"id": "b", "function": {"arguments": {"n": 1}, "name": "look"}}
    assert key({"role": "assistant", "content": None, "tool_calls": [CALL]}) == key(
        {"role": "assistant", "content": " ", "tool_calls": [other], "reasoning_content": "hm"}
    )
    assert history_key(key({"role": "user", "content": "a"}), [{"role": "user", "content": "b"}]) == key(
        {"role": "user", "content": "a"}, {"role": "user", "content": "b"}
    )


@pytest.mark.parametrize(
    "other",
    [
        {"role": "user", "content": "a "},
        {"role": "tool", "content": "a"},
        {"role": "user", "content": "a", "name": "Ann"},
        {"role": "assistant", "content": "a", "tool_calls": [CALL]},
        {"role": "usera", "content": ""},
    ],
)
def test_other_histories_have_other_keys(other: Message) -> None:
    assert key(other) != key({"role": "user", "content": "a"})
    assert key({"role": "user", "content": "a"}, other) != key(other, {"role": "user", "content": "a"})
    changed = {**CALL, "function": {"name": "hear", "arguments": "{}"}}
    assert key({"role": "assistant", "tool_calls": [changed]}) != key({"role": "assistant", "tool_calls": [CALL]})


def test_keys_of_a_history_that_is_sent_again_are_those_of_its_messages_even_if_they_were_changed() -> None:
    keys, tools = HistoryKeys(), [{"function": {"name": "look"}}]
    call = {"function": {"name": "look", "arguments": {"n": 1}}}
    messages: list[dict[str, Any]] = [{"role": "user", "content": "?"}, {"role": "assistant", "tool_calls": [call]}]

    def expected() -> list[bytes]:
        return [history_key(tools_key(tools), messages[: i + 1]) for i in range(len(messages))]

    assert keys.of(messages, tools) == expected()
    messages.append({"role": "tool", "content": "42"})
    assert keys.of(messages, tools) == expected()
    call["function"]["arguments"]["n"] = True  # equals 1
    assert keys.of(messages, tools) == expected()
    messages[0]["content"] = "!"
    assert keys.of(messages, tools) == expected()
    tools[0]["function"]["name"] = "hear"
    assert keys.of(messages, tools) == expected()
    assert keys.of(messages[:1], tools) == expected()[:1]


PICTURE = noise(20, 16, 0)
IN_BASE64 = base64.b64encode(PICTURE.data).decode()
TEXT = {"type": "text", "text": "what?"}


def said(*parts: Any, role: str = "user") -> dict[str, Any]:
    return {"role": role, "content": list(parts)}


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("files") / "a.png"
    path.write_bytes(PICTURE.data)
    return path


def forms(file: Path) -> list[dict[str, Any]]:
    return [
        {"type": "image_url", "image_url": {"url": PICTURE.data_url, "detail": "auto"}},
        {"type": "image_url", "image_url": PICTURE.data_url},
        {"type": "image_url", "image_url": {"url": f"file://{file}"}},
        {"type": "image", "url": str(file)},
        {"type": "image", "path": str(file)},
        {"type": "image", "base64": IN_BASE64},
        {"type": "image", "image": str(file)},
        {"type": "image", "image": file},
        {"type": "image", "image": PICTURE.data},
        {"type": "image", "image": PICTURE},
        {"type": "image", "image": PICTURE.picture()},
        {"type": "image", "image": {"bytes": PICTURE.data, "path": None}},
        {"type": "image", "image": PICTURE, "text": None, "url": None},
        {"image": PICTURE},
        {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": IN_BASE64}},
    ]


def test_all_forms_of_an_image_are_one(file: Path) -> None:
    made = [normalised(said(form, TEXT))["content"] for form in forms(file)]
    assert made == [[image_part(PICTURE), text_part("what?")]] * len(made)
    assert len({history_key(b"", [said(form, TEXT)]) for form in forms(file)}) == 1


@pytest.mark.parametrize(
    "other",
    [
        said(TEXT, image_part(PICTURE)),
        said(image_part(PICTURE)),
        said(image_part(PICTURE), image_part(PICTURE), TEXT),
        said(image_part(noise(20, 16, 1)), TEXT),
        said(image_part(PICTURE), TEXT, role="tool"),
        said(TEXT),
        {"role": "user", "content": f"what?image{PICTURE.digest}"},
    ],
)
def test_histories_with_other_images_have_other_keys(other: Any) -> None:
    assert history_key(b"", [other]) != history_key(b"", [said(image_part(PICTURE), TEXT)])


def test_the_keys_of_a_history_that_is_sent_again_are_those_of_the_files_of_now(tmp_path: Path) -> None:
    file, keys = tmp_path / "screen.png", HistoryKeys()
    messages = [said({"type": "image", "path": str(file)})]
    for picture in (PICTURE, noise(20, 16, 1), PICTURE):
        file.write_bytes(picture.data)
        keys.of(messages, ())
        assert keys.of(messages, ()) == keys.of([said(image_part(picture))], ())


def test_a_message_without_images_stays_as_it_is() -> None:
    for message in ({"role": "user", "content": "a"}, said(TEXT, "b"), {"role": "assistant", "content": None}):
        assert with_read_images(message) is message
    assert images_in([with_read_images(said(TEXT, {"image": PICTURE.data_url}))]) == [PICTURE]


def damaged() -> bytes:
    file = io.BytesIO()
    Pictures.new("RGB", (64, 64)).save(file, "JPEG")
    return file.getvalue()[:-200]


@pytest.mark.parametrize(
    ("part", "error", "reason"),
    [
        ({"type": "image"}, ImageError, "has the fields type; give its image in one of image, image_url, "),
        ({"type": "image", "image": PICTURE, "url": "a.png"}, ImageError, "fields type, image, url; give its image"),
        ({"type": "image", "image": PICTURE, "max_pixels": 64}, ImageError, "nothing that changes its size"),
        ({"type": "image", "image": 7}, ImageError, "an image is of type int"),
        ({"type": "image_url", "image_url": {}}, ImageError, "an image is of type NoneType"),
        ({"type": "image", "path": "/no/such.png"}, ImageError, "cannot read the image /no/such.png: No such file"),
        ({"type": "image", "url": "https://a.test/b.png"}, ImageError, "fetches nothing from the web"),
        ({"type": "image", "base64": "%%"}, ImageError, "base64 cannot be read"),
        ({"type": "image", "image": damaged()}, ImageError, "cannot read the image"),
        ({"type": "image", "image": Pictures.new("I;16", (8, 8))}, ImageError, "more than 8 bits a channel"),
        ({"type": "image", "image": Pictures.new("L", (10_000, 5_001))}, ImageError, "at most 50,000,000 are read"),
        ({"type": "image", "source": {"type": "file", "file_id": "f"}}, ImageError, "source is of type 'file'"),
        ({"type": "video", "video": "a.mp4"}, ModelError, "part of type 'video'; only text and images"),
        ({"type": "input_audio", "input_audio": {}}, ModelError, "part of type 'input_audio'"),
        ({"type": "text", "text": "a", "image": PICTURE}, ModelError, "has text and image; the model sees one after"),
        ({"text": "a", "video": "a.mp4"}, ModelError, "has text and video"),
        ({}, ModelError, "part of type None"),
        (3, ModelError, "part of type 'int'"),
    ],
)
def test_a_part_that_cannot_be_shown_is_an_error(part: Any, error: type[Exception], reason: str) -> None:
    with pytest.raises(error, match=reason):
        content_of(said(TEXT, part))


def test_an_assistant_says_no_images() -> None:
    with pytest.raises(ModelError, match="an assistant's message has an image"):
        content_of(said(image_part(PICTURE), role="assistant"))
    assert Image.of(PICTURE) is PICTURE

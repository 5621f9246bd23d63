"""Images in calls of every protocol, sent with its own SDK: seen by the model, or refused by their place."""

import base64
import threading
from typing import Any

import pytest
from protocols import TOKENIZER, asked, told_by
from workflow.sighted_chats import SMALL, TALL, seeing, their_tokens

from arl.api.fakes import ScriptedEngine
from arl.api.images import Image
from arl.workflow.messages import image_part

SEES = seeing("qwen3_vl")
CALL = {"id": "c", "type": "function", "function": {"name": "add", "arguments": '{"a": 1, "b": 2}'}}
THEIRS: list[Any] = [
    {"role": "user", "content": ["what? ", image_part(SMALL)]},
    {"role": "assistant", "content": "", "tool_calls": [{"function": {"name": "add", "arguments": {"a": 1, "b": 2}}}]},
    {"role": "tool", "content": [image_part(TALL), "a crop"]},
]


def for_chat(image: Image) -> dict[str, Any]:
    return {"type": "image_url", "image_url": {"url": image.data_url, "detail": "high"}}


def for_responses(image: Image) -> dict[str, Any]:
    return {"type": "input_image", "image_url": image.data_url, "detail": "auto"}


def for_anthropic(image: Image) -> dict[str, Any]:
    data = base64.b64encode(image.data).decode()
    return {"type": "image", "source": {"type": "base64", "media_type": image.kind, "data": data}}


def text(said: str, kind: str = "text") -> dict[str, Any]:
    return {"type": kind, "text": said}


ASKED: list[tuple[str, dict[str, Any]]] = [
    (
        "chat",
        {
            "messages": [
                {"role": "user", "content": [text("what? "), for_chat(SMALL)]},
                {"role": "assistant", "tool_calls": [CALL]},
                {"role": "tool", "tool_call_id": "c", "content": [for_chat(TALL), text("a crop")]},
            ]
        },
    ),
    (
        "responses",
        {
            "input": [
                {"role": "user", "content": [text("what? ", "input_text"), for_responses(SMALL)]},
                {"type": "function_call", "call_id": "c", "name": "add", "arguments": '{"a": 1, "b": 2}'},
                {
                    "type": "function_call_output",
                    "call_id": "c",
                    "output": [for_responses(TALL), text("a crop", "input_text")],
                },
            ]
        },
    ),
    (
        "anthropic",
        {
            "messages": [
                {"role": "user", "content": [text("what? "), for_anthropic(SMALL)]},
                {
                    "role": "assistant",
                    "content": [{"type": "tool_use", "id": "c", "name": "add", "input": {"a": 1, "b": 2}}],
                },
                {
                    "role": "user",
                    "content": [
                        {"type": "tool_result", "tool_use_id": "c", "content": [for_anthropic(TALL), text("a crop")]}
                    ],
                },
            ]
        },
    ),
]


@pytest.mark.parametrize(("protocol", "fields"), ASKED, ids=lambda value: value if isinstance(value, str) else "")
async def test_the_model_sees_images_of_users_and_of_tools(protocol: str, fields: dict[str, Any]) -> None:
    engine = ScriptedEngine.saying(SEES, "a cat")
    session, answer, error = await asked(protocol, engine, tokenizer=SEES, tools=[], **fields)
    assert error is None
    assert answer is not None
    assert answer.text == "a cat"
    ids, images = their_tokens("qwen3_vl", THEIRS)
    assert list(engine.requests[0].input_ids) == ids
    (made,) = session.trajectories(1.0)
    assert [placed.image for placed in made.images] == images == [SMALL, TALL]
    assert made.images == engine.requests[0].images


@pytest.mark.parametrize(("protocol", "fields"), ASKED, ids=lambda value: value if isinstance(value, str) else "")
async def test_images_are_read_beside_the_event_loop(
    protocol: str, fields: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    readers = set[str]()
    monkeypatch.setattr(Image, "of", lambda url: readers.add(threading.current_thread().name) or SMALL)
    _, answer, _ = await asked(protocol, ScriptedEngine.saying(SEES, "a cat"), tokenizer=SEES, tools=[], **fields)
    assert answer is not None
    assert readers
    assert threading.main_thread().name not in readers


def user(*parts: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": [*parts]}]}


WEB, BROKEN = "https://a.test/b.png", "data:image/png;base64,aGVsbG8="
FROM_WEB = {"type": "image", "source": {"type": "url", "url": WEB}}
OF_FILE = {"type": "image", "source": {"type": "file", "file_id": "f"}}
BY_SYSTEM = {"role": "system", "content": [for_chat(SMALL)]}
IN_ANSWER = {"role": "assistant", "content": [for_chat(SMALL)]}


def of_url(url: str, **more: Any) -> dict[str, Any]:
    return {"type": "image_url", "image_url": {"url": url, **more}}


@pytest.mark.parametrize(
    ("protocol", "fields", "param", "reason"),
    [
        ("chat", user(of_url(WEB)), "messages[0].content[0].image_url", "nothing is fetched here"),
        ("chat", user(of_url("/etc/hostname")), "messages[0].content[0].image_url", "nothing is fetched here"),
        ("chat", user(text("a"), of_url(BROKEN)), "messages[0].content[1].image_url", "cannot read the image"),
        ("chat", user(of_url(SMALL.data_url, detail="low")), "messages[0].content[0].image_url.detail", "is low"),
        ("chat", {"messages": [IN_ANSWER]}, "messages[0].content[0]", "cannot be shown to the model here"),
        ("chat", {"messages": [BY_SYSTEM]}, "messages[0].content[0]", "cannot be shown to the model here"),
        (
            "responses",
            {"input": [{"role": "user", "content": [{"type": "input_image", "image_url": WEB}]}]},
            "input[0].content[0].image_url",
            "nothing is fetched here",
        ),
        (
            "responses",
            {"input": [{"role": "user", "content": [{"type": "input_image", "file_id": "f"}]}]},
            "input[0].content[0].file_id",
            "OpenAI keeps",
        ),
        ("anthropic", user(FROM_WEB), "messages[0].content[0].source.url", "nothing is fetched here"),
        ("anthropic", user(OF_FILE), "messages[0].content[0].source", "is of type"),
        (
            "anthropic",
            user({"type": "tool_result", "tool_use_id": "c", "content": [FROM_WEB]}),
            "messages[0].content[0].content[0].source.url",
            "nothing is fetched here",
        ),
    ],
)
async def test_an_image_that_cannot_be_shown_is_refused_by_its_place(
    protocol: str, fields: dict[str, Any], param: str, reason: str
) -> None:
    engine = ScriptedEngine.saying(SEES, "never")
    _, _, error = await asked(protocol, engine, tokenizer=SEES, **fields)
    message, kind, named = told_by(error)
    assert message.startswith(param)
    assert reason in message
    assert (error.status_code, kind, engine.requests) == (400, "invalid_request_error", [])
    assert named == (None if protocol == "anthropic" else param)


@pytest.mark.parametrize(
    ("protocol", "fields"),
    [
        ("chat", user(for_chat(SMALL))),
        ("responses", {"input": [{"role": "user", "content": [for_responses(SMALL)]}]}),
        ("anthropic", user(for_anthropic(SMALL))),
    ],
)
async def test_a_model_of_texts_refuses_images(protocol: str, fields: dict[str, Any]) -> None:
    engine = ScriptedEngine.saying(TOKENIZER, "never")
    _, _, error = await asked(protocol, engine, **fields)
    message, kind, _ = told_by(error)
    assert (error.status_code, kind, engine.requests) == (400, "invalid_request_error", [])
    assert "it is a model of texts" in message

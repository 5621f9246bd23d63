"""Messages in the one form that templates take."""

import copy
from typing import Any

import pytest

from arl.workflow.messages import HistoryKeys, Message, history_key, normalised, tools_key

CALL = {"id": "a", "type": "function", "function": {"name": "look", "arguments": '{"n": 1}'}}
CALLED = {"role": "assistant", "tool_calls": [CALL]}
OBJECT = {**CALL, "function": {"name": "look", "arguments": {"n": 1}}}
READ = {"role": "assistant", "content": None, "tool_calls": [OBJECT]}


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
    ],
)
def test_contents_are_texts_arguments_are_objects_and_none_fields_are_left_out(message: Message, form: Message) -> None:
    before = copy.deepcopy(message)
    assert normalised(message) == normalised(form) == form
    assert message == before


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


def test_keys_of_one_history_do_not_mix_with_those_that_another_thread_asks_for() -> None:
    messages, other = [{"role": "user", "content": "?"}], HistoryKeys()
    other.of(messages, [{"function": {"name": "hear"}}])

    class Shared(HistoryKeys):
        def __getattribute__(self, name: str) -> Any:
            value = super().__getattribute__(name)
            if name == "_last":
                self._last = other._last  # by the other thread, as soon as this one has looked
            return value

    keys = Shared()
    first = keys.of(messages, ())
    assert keys.of(messages, ()) == first == [history_key(tools_key(()), messages)]


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

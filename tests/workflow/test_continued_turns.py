"""Dialogue: which turn messages continue that come without a word of where."""

import json
from collections.abc import Mapping
from typing import Any

from talk import (
    CALL,
    OTHER_SPEC,
    QUESTION,
    QWEN2_5,
    QWEN3,
    RESULT,
    SPEC,
    SURE,
    THOUGHT,
    Talk,
    calling,
    model,
    result,
    user,
)


def sent_back(message: Mapping[str, Any]) -> dict[str, Any]:
    """A call as another program sends it back."""
    function = message["tool_calls"][0]["function"]
    arguments = json.dumps(dict(reversed(function["arguments"].items())), indent=1)
    call = {"id": "other", "type": "function", "function": {"arguments": arguments, "name": function["name"]}}
    return {"role": "assistant", "content": "", "refusal": None, "tool_calls": [call], "function_call": None}


def test_answers_that_come_back_in_another_form_are_those_that_were_recorded() -> None:
    talk = Talk(QWEN3)
    first = talk.say(QUESTION, THOUGHT + CALL, calling(thought="hm"))
    prompt = talk.prompt([*QUESTION, sent_back(calling()), result("42", of="other")])
    assert prompt.parent is first
    assert THOUGHT in talk.text(prompt)
    second = talk.answer(prompt, " It is 42.\n")
    stripped = {"role": "assistant", "content": "It is 42.", "tool_calls": []}
    messages = [*QUESTION, sent_back(calling()), result("42", of="other"), stripped, result("43")]
    assert talk.parent(messages) is second


def test_thoughts_need_not_come_back_and_others_are_another_branch() -> None:
    talk = Talk(QWEN3)
    first = talk.say(QUESTION, THOUGHT + CALL, calling(thought="hm"))
    for thought, parent in (("hm", first), ("hm\n", first), (None, first), ("", first), ("what else?", None)):
        prompt = talk.prompt([*QUESTION, calling(thought=thought), RESULT])
        assert prompt.parent is parent
    assert "what else?" in talk.text(prompt)


def test_history_that_was_edited_dropped_or_summarised_is_another_branch() -> None:
    talk = Talk(QWEN2_5)
    first = talk.say(QUESTION, "4")
    second = talk.say([*first.messages, SURE], "yes")
    history = [*second.messages, user("really?")]
    for messages, parent in (
        (history, second),
        ([*first.messages, user("Sure?"), second.message, user("really?")], first),
        ([*QUESTION, model("5"), SURE], None),
        ([user("A summary: 4."), user("really?")], None),
        ([{"role": "system", "content": "Be brief."}, *history], None),
        ([*history[:1], *history[2:]], None),
    ):
        assert talk.parent(messages) is parent


def test_another_set_of_tools_is_another_beginning() -> None:
    talk = Talk(QWEN2_5)
    first = talk.say(QUESTION, "4")
    messages = [*first.messages, SURE]
    for tools in ([], [OTHER_SPEC], [SPEC, OTHER_SPEC]):
        prompt, known = (talk.dialogue.prompt(messages, tools, after=after) for after in (None, first))
        assert prompt.parent is known.parent is None
        assert (known.input_ids, known.key) == (prompt.input_ids, prompt.key)


def test_of_several_answers_to_a_prompt_the_named_one_is_continued_and_else_the_last_of_equal_ones() -> None:
    talk = Talk(QWEN3)
    prompt, thoughts = talk.prompt(QUESTION), ("one", "two", "three")
    said = [calling(thought=thought, key=f"call{number}") for number, thought in enumerate(thoughts)]
    words = [f"<think>\n{thought}\n</think>\n\n{CALL}" for thought in thoughts]
    turns = [talk.answer(prompt, *answer) for answer in zip(words, said, strict=True)]
    assert [turn.parent for turn in turns] == [None] * 3
    for message, turn in zip(said, turns, strict=True):
        assert talk.parent([*QUESTION, message, RESULT]) is turn
    assert talk.parent([*QUESTION, sent_back(calling()), RESULT]) is turns[-1]


def test_a_turn_that_is_forgotten_is_continued_no_more_and_an_equal_one_takes_its_place() -> None:
    talk = Talk(QWEN2_5)
    first, second = talk.say(QUESTION, "4"), talk.say(QUESTION, "4")
    after = [*first.messages, SURE]
    for forgotten, left in ((None, (first, second)), (second, (first,)), (second, (first,)), (first, ())):
        if forgotten:
            talk.dialogue.forget(forgotten)
        assert talk.dialogue.turns == left
        assert talk.parent(after) is (left[-1] if left else None)


def test_a_turn_that_another_was_said_after_is_not_forgotten() -> None:
    for words, is_branched in (("4", False), (THOUGHT + "4", True)):
        talk = Talk(QWEN3)
        first = talk.say(QUESTION, words)
        second = talk.say([*first.messages, SURE], "yes")
        assert (second.parent is None) == is_branched
        talk.dialogue.forget(first)
        assert talk.dialogue.turns == (first, second)
        talk.dialogue.forget(second)
        talk.dialogue.forget(first)
        assert talk.dialogue.turns == ()


def test_a_turn_stays_though_the_turn_between_it_and_a_later_one_was_forgotten() -> None:
    talk = Talk(QWEN2_5)
    first = talk.say(QUESTION, "4")
    second = talk.say([*first.messages, SURE], "yes")
    prompt = talk.prompt([*second.messages, SURE])
    talk.dialogue.forget(second)
    third = talk.answer(prompt, "indeed")
    talk.dialogue.forget(first)
    assert talk.dialogue.turns == (first, third)

"""Dialogue: what stays as it was sampled, where the tree branches, what callers may hand in, and which turn messages
continue that come without a word of where."""

import json
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

import pytest
from talk import (
    ALPACA,
    CALL,
    CHATML,
    DEEPSEEK,
    GLM,
    LLAMA3,
    MISTRAL,
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
from transformers import PreTrainedTokenizerFast

from arl.api.errors import ModelError
from arl.workflow.messages import Message

# What stays as it was sampled -----------------------------------------------------------------------------------------


class Kept(NamedTuple):
    """An answer, and what comes after its tokens when more is said. text: the turn's, if not the words."""

    tokenizer: PreTrainedTokenizerFast
    words: str
    after: str
    message: Message | None = None
    said: Message = SURE
    end: str | None = ""
    text: str | None = None
    options: Mapping[str, Any] = {}


QWENS, LLAMAS, IPYTHON = (
    "\n<|im_start|>user\n",
    "<|start_header_id|>user",
    "<|start_header_id|>ipython<|end_header_id|>\n\n",
)
COMPACT = '<tool_call>{"arguments":{"n":1,"word":"é"},"name":"look"}</tool_call>'
BROKEN = ('{"word": ', "[" * 100_000)
A, BUILTIN = calling({"word": "a"}), {"builtin_tools": ["look"]}


@pytest.mark.parametrize(
    "case",
    [
        # Calls, however the template would write them.
        Kept(QWEN2_5, COMPACT, QWENS, calling(), RESULT),
        Kept(QWEN3, COMPACT, QWENS, calling(), RESULT),
        Kept(QWEN3, "<think>hm</think>" + CALL.replace("\n", ""), QWENS, calling(thought="hm"), RESULT),
        Kept(LLAMA3, '{"name":"look","parameters":{"n":1,"word":"é"}}', IPYTHON, calling(), RESULT),
        Kept(LLAMA3, '<|python_tag|>{"name": "look", "parameters": {"word": "é", "n": 1}}', IPYTHON, calling(), RESULT),
        # What a program has of an answer, and what the template would leave out or write otherwise.
        Kept(QWEN2_5, "...4", QWENS, model("4")),
        Kept(QWEN2_5, THOUGHT + CALL, QWENS, calling(thought="hm"), RESULT),
        Kept(QWEN2_5, CALL.replace("1}", '1.50, "n": 1e3}').replace("é", "\\u00e9"), QWENS, calling(), RESULT),
        # Thinking, while tools are called.
        *(
            Kept(QWEN3, words, QWENS, said=RESULT)
            for words in ("<think>hm</think>4", "4", "<think>\nhm", THOUGHT, " 4 \n")
        ),
        # Any special token may end a turn: Llama's <|eom_id|> is the template's own where built-in tools are in use.
        Kept(QWEN2_5, "4", QWENS, end="<|endoftext|>"),
        Kept(LLAMA3, '{"name": "look", "parameters": {"word": "a"}}', IPYTHON, A, RESULT, "<|eom_id|>"),
        Kept(LLAMA3, '<|python_tag|>look.call(word="a")', IPYTHON, A, RESULT, "<|eom_id|>", options=BUILTIN),
        Kept(LLAMA3, '<|python_tag|>look.call( word="a" )', IPYTHON, A, RESULT, "<|eom_id|>", options=BUILTIN),
        # A length limit, which an end of turn may reach, and any other special token may be cut by.
        Kept(LLAMA3, "4<|python_tag|>", "<|eot_id|>" + LLAMAS, end=None),
        Kept(QWEN2_5, "4<|im_end|>", QWENS, end=None, text="4"),
        # White space that the template trims, or that cleaning up would.
        Kept(LLAMA3, "\n 4 ", LLAMAS),
        Kept(QWEN2_5, "It is n't a , b .", QWENS),
        # Templates without special tokens, without an end, and with the beginning of the next turn for an end.
        Kept(ALPACA, "4", "\n\n### User:\nsure?\n\n### Assistant:\n", end=None),
        Kept(ALPACA, "4", "\n\n### User:\nsure?\n\n### Assistant:\n"),
        Kept(GLM, "4", "<|User|>sure?<|Assistant|>", end="<|EOS|>"),
        Kept(GLM, "4", "<|User|>sure?<|Assistant|>", end="<|Assistant|>"),
        Kept(GLM, "4", "sure?<|Assistant|>", end="<|User|>"),
    ],
)
def test_an_answer_stays_as_it_was_sampled_with_its_end(case: Kept) -> None:
    talk = Talk(case.tokenizer, **case.options)
    first = talk.say(QUESTION, case.words, case.message, end=case.end)
    assert first.text == (case.text or case.words)
    assert first.has_ended == (case.end is not None or case.text is not None)
    prompt = talk.prompt([*first.messages, case.said])
    assert prompt.parent is first
    assert talk.then(first, case.said) == talk.text(prompt)
    assert talk.text(prompt).removeprefix(talk.text(first)).startswith(case.after)


@pytest.mark.parametrize(
    ("tokenizer", "words", "message", "said", "shown"),
    [
        (
            DEEPSEEK,
            "hm</think>4",
            None,
            SURE,
            "<|BOS|><|User|>?<|Assistant|>4<|EOS|><|User|>sure?<|Assistant|><think>\n",
        ),
    ],
)
def test_words_that_the_template_shows_otherwise_make_a_branch(
    tokenizer: PreTrainedTokenizerFast, words: str, message: Message | None, said: Message, shown: str
) -> None:
    talk = Talk(tokenizer)
    first = talk.say(QUESTION, words, message)
    assert talk.parent([*first.messages, said]) is None
    assert shown in talk.then(first, said)


# Templates that rewrite earlier turns ---------------------------------------------------------------------------------


def test_thinking_stays_in_view_while_tools_are_called_and_goes_when_a_user_speaks() -> None:
    talk = Talk(QWEN3)
    first = talk.say(QUESTION, THOUGHT + CALL, calling(thought="hm"))
    second = talk.say([*first.messages, RESULT], THOUGHT + "It is 42.")
    assert second.parent is first
    seen = talk.then(second, SURE)
    assert THOUGHT not in seen
    assert seen.endswith(
        f"<|im_start|>assistant\n{CALL}<|im_end|>\n<|im_start|>user\n<tool_response>\n42\n</tool_response><|im_end|>\n"
        "<|im_start|>assistant\nIt is 42.<|im_end|>\n<|im_start|>user\nsure?<|im_end|>\n<|im_start|>assistant\n"
    )
    third = talk.say([*second.messages, SURE], THOUGHT + CALL, calling(thought="hm"))
    assert third.parent is None
    assert talk.say([*third.messages, RESULT], THOUGHT + "Yes.").parent is third


def test_a_branch_leaves_the_tree_after_the_last_turn_that_is_shown_as_it_was() -> None:
    talk = Talk(QWEN3)
    plain = talk.say(QUESTION, "4")
    thoughtful = talk.say([*plain.messages, SURE], THOUGHT + "4")
    assert thoughtful.parent is plain
    assert talk.say([*thoughtful.messages, user("really?")], "yes").parent is plain


# What callers hand in -------------------------------------------------------------------------------------------------


def test_a_caller_may_change_its_messages_and_tools_later_and_a_prompt_changes_nothing() -> None:
    talk, spec = Talk(QWEN2_5), json.loads(json.dumps(SPEC))
    messages, said = [dict(QUESTION[0])], calling()
    prompt = talk.dialogue.prompt(messages, [spec])
    first = talk.answer(prompt, CALL, said)
    before = talk.text(first)
    messages[0]["content"] = "!"
    spec["function"]["name"] = "gone"
    said["tool_calls"][0]["function"]["arguments"]["word"] = "gone"
    later = talk.prompt([*QUESTION, calling(), RESULT])
    assert later == talk.prompt([*QUESTION, calling(), RESULT])
    assert (later.parent, talk.dialogue.turns) == (first, (first,))
    assert talk.text(later).startswith(before)


def test_messages_and_tools_may_be_any_mappings_and_contents_may_be_parts_of_text() -> None:
    talk = Talk(QWEN2_5)
    plain = talk.prompt([user("one\ntwo"), calling(), RESULT])
    call = MappingProxyType({"id": "call00000", "function": MappingProxyType(calling()["tool_calls"][0]["function"])})
    parts = ({"type": "text", "text": "one"}, MappingProxyType({"type": "text", "text": "two"}))
    messages = [
        MappingProxyType({"role": "user", "content": parts}),
        MappingProxyType({"role": "assistant", "tool_calls": (call,)}),
        {"role": "tool", "content": ["42"], "tool_call_id": "call00000"},
    ]
    tools = [MappingProxyType({"type": "function", "function": MappingProxyType(SPEC["function"])})]
    prompt = talk.dialogue.prompt(messages, tools)
    assert (prompt.input_ids, prompt.key) == (plain.input_ids, plain.key)


TWO_CALLS = {**calling(), "tool_calls": calling()["tool_calls"] * 2}


@pytest.mark.parametrize(
    ("tokenizer", "tools", "messages", "reason"),
    [
        (CHATML, [], [user([{"type": "audio", "audio": "a"}])], "part of type 'audio'; only text"),
        (CHATML, [], [user([3])], "part of type 'int'"),
        (CHATML, [], [user(3)], "content is a int"),
        (MISTRAL, [], [user("one"), user("two")], r"does not take these messages: .*roles must alternate"),
        (LLAMA3, [], [user("one"), TWO_CALLS, RESULT], "only supports single tool-calls"),
        (CHATML, [SPEC], QUESTION, "shows no tools"),
        (CHATML, [], [*QUESTION, calling(), RESULT], "message 1 has tool_calls, which the chat template .* leaves out"),
        (QWEN3, [], [*QUESTION, calling("[1]"), RESULT], r"message 1 has a call of 'look' with the arguments '\[1\]'"),
        (
            DEEPSEEK,
            [],
            [{"role": "developer", "content": "?"}],
            "message 0 is of role 'developer', which .* leaves out",
        ),
    ],
)
def test_what_a_template_cannot_show_is_an_error_that_quotes_it(
    tokenizer: PreTrainedTokenizerFast, tools: Any, messages: Any, reason: str
) -> None:
    with pytest.raises(ModelError, match=reason):
        Talk(tokenizer).dialogue.prompt(messages, tools)


def test_a_long_dialogue_keeps_one_text_and_finds_where_a_rewritten_history_leaves_it() -> None:
    talk, messages = Talk(QWEN3), [user("begin")]
    for _ in range(40):
        messages = [*talk.say(messages, THOUGHT + CALL, calling(thought="hm")).messages, RESULT]
    last = talk.dialogue.turns[-1]
    assert len(last.path) == 40
    prompt = talk.prompt([*last.messages, SURE], after=last)
    assert prompt.parent is None, "the thinking is gone from all turns"
    texts = {id(text): len(text) for turn in last.path if isinstance(text := turn.prompt.shown.__dict__["_text"], str)}
    assert sum(texts.values()) == last.prompt.shown.length, "not a text for each turn"
    assert len(repr(last)) < 10 * len(talk.text(last)), "not a tree of all turns before it"


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

"""Dialogue: which turn a prompt continues, what stays as it was sampled, and where the tree branches."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType
from typing import Any

import pytest
from chat_templates import tokenizer_of
from transformers import PreTrainedTokenizerFast

from arl.api.errors import ModelError
from arl.api.types import ModelResponse
from arl.workflow.chat_template import ChatTemplate, Message
from arl.workflow.dialogue import Dialogue, Turn

QWEN2_5, QWEN3, LLAMA3, MISTRAL = map(tokenizer_of, ("qwen2_5", "qwen3", "llama3", "mistral"))
SPEC = {"type": "function", "function": {"name": "look", "description": "Look.", "parameters": {"type": "object"}}}
OTHER_SPEC = {
    "type": "function",
    "function": {"name": "hear", "description": "Hear.", "parameters": {"type": "object"}},
}
THOUGHT = "<think>\nhm\n</think>\n\n"
CALL = '<tool_call>\n{"name": "look", "arguments": {"word": "é", "n": 1}}\n</tool_call>'
QUESTION = [{"role": "user", "content": "?"}]


def user(text: str) -> Message:
    return {"role": "user", "content": text}


def result(text: str, of: str = "call00000") -> Message:
    return {"role": "tool", "content": text, "tool_call_id": of}


def calling(arguments: object = None, *, content: str | None = None, thought: str | None = None) -> dict[str, Any]:
    given = {"word": "é", "n": 1} if arguments is None else arguments
    call = {"type": "function", "id": "call00000", "function": {"name": "look", "arguments": given}}
    said: dict[str, Any] = {"role": "assistant", "content": content, "tool_calls": [call]}
    return said if thought is None else {**said, "reasoning_content": thought}


class Talk:
    """A dialogue on a tokenizer's template, in which answers are given as text."""

    def __init__(self, tokenizer: PreTrainedTokenizerFast, tools: Sequence[Message] = (), **options: Any) -> None:
        self.tokenizer, self.tools = tokenizer, tools
        self.dialogue = Dialogue(ChatTemplate(tokenizer, options))

    def say(
        self,
        messages: Sequence[Message],
        words: str,
        message: Message | None = None,
        *,
        end: str | None = "",
        after: Turn | None = None,
    ) -> Turn:
        """end: what ends the answer, by default as the tokenizer has it; None: a length limit did."""
        prompt = self.dialogue.prompt(messages, self.tools, after=after)
        said = words + (self.tokenizer.eos_token if end == "" else end or "")
        ids = tuple(self.tokenizer.encode(said, add_special_tokens=False))
        reason = "length" if end is None else "stop"
        n = len(ids)
        response = ModelResponse(
            output_ids=ids, output_logprobs=(-1.0,) * n, output_versions=(0,) * n, stop_reason=reason
        )
        return self.dialogue.record(prompt, response, message)

    def then(self, turn: Turn, *messages: Message) -> str:
        """What the model sees after the turn, when these are said."""
        return self.seen([*turn.messages, *messages], after=turn)

    def seen(self, messages: Sequence[Message], after: Turn | None = None) -> str:
        prompt = self.dialogue.prompt(messages, self.tools, after=after)
        return str(self.tokenizer.decode(list(prompt.input_ids)))

    def parent(self, messages: Sequence[Message]) -> Turn | None:
        """The turn that these messages continue, when they come without a word of where."""
        return self.dialogue.prompt(messages, self.tools).parent


# Thinking -------------------------------------------------------------------------------------------------------------


def test_thinking_stays_in_view_while_tools_are_called_and_goes_when_a_user_speaks() -> None:
    talk = Talk(QWEN3, [SPEC])
    first = talk.say(QUESTION, THOUGHT + CALL, calling(thought="hm"))
    second = talk.say([*first.messages, result("42")], THOUGHT + "It is 42.")
    assert second.parent is first
    seen = talk.then(second, user("sure?"))
    assert THOUGHT not in seen
    assert seen.endswith(
        f"<|im_start|>assistant\n{CALL}<|im_end|>\n<|im_start|>user\n<tool_response>\n42\n</tool_response><|im_end|>\n"
        "<|im_start|>assistant\nIt is 42.<|im_end|>\n<|im_start|>user\nsure?<|im_end|>\n<|im_start|>assistant\n"
    )
    third = talk.say([*second.messages, user("sure?")], THOUGHT + CALL, calling(thought="hm"))
    assert third.parent is None
    assert talk.say([*third.messages, result("42")], THOUGHT + "Yes.").parent is third


def test_a_branch_leaves_the_tree_after_the_last_turn_that_is_shown_as_it_was() -> None:
    talk = Talk(QWEN3)
    plain = talk.say(QUESTION, "4")
    thoughtful = talk.say([*plain.messages, user("sure?")], THOUGHT + "4")
    assert thoughtful.parent is plain
    assert talk.say([*thoughtful.messages, user("really?")], "yes").parent is plain


@pytest.mark.parametrize("words", ["<think>hm</think>4", "4", "<think>\nhm", THOUGHT, " 4 \n"])
def test_thinking_in_a_form_of_its_own_makes_no_branch_while_tools_are_called(words: str) -> None:
    talk = Talk(QWEN3, [SPEC])
    first = talk.say(QUESTION, words)
    assert talk.dialogue.prompt([*first.messages, result("42")], talk.tools).parent is first


def test_without_thinking_the_empty_thought_of_the_prompt_is_gone_when_more_is_said() -> None:
    talk = Talk(QWEN3, [SPEC], enable_thinking=False)
    first = talk.say(QUESTION, CALL, calling())
    assert str(QWEN3.decode(list(first.token_ids))).endswith(f"assistant\n<think>\n\n</think>\n\n{CALL}<|im_end|>")
    for message in (result("42"), user("so?")):
        prompt = talk.dialogue.prompt([*first.messages, message], talk.tools)
        assert prompt.parent is None
        assert f"assistant\n{CALL}<|im_end|>" in str(QWEN3.decode(list(prompt.input_ids)))


def test_a_template_that_never_shows_thoughts_makes_a_branch_of_each_turn() -> None:
    talk = Talk(tokenizer_of("deepseek_r1"))
    first = talk.say(QUESTION, "hm</think>4")
    assert talk.tokenizer.decode(list(first.token_ids)) == "<|BOS|><|User|>?<|Assistant|><think>\nhm</think>4<|EOS|>"
    prompt = talk.dialogue.prompt([*first.messages, user("sure?")])
    assert prompt.parent is None
    shown = "<|BOS|><|User|>?<|Assistant|>4<|EOS|><|User|>sure?<|Assistant|><think>\n"
    assert talk.tokenizer.decode(list(prompt.input_ids)) == shown


def test_thinking_that_the_caller_leaves_out_of_the_message_is_out_of_view() -> None:
    talk = Talk(QWEN2_5)
    first = talk.say(QUESTION, THOUGHT + "4", {"role": "assistant", "content": "4"})
    seen = talk.then(first, user("sure?"))
    assert "hm" not in seen
    assert "assistant\n4<|im_end|>" in seen
    assert talk.parent([*first.messages, user("sure?")]) is None


@pytest.mark.parametrize(("words", "shown"), [("4", "4, I think"), ("...4", "4"), ("4", "")])
def test_words_that_the_caller_changes_in_the_message_make_a_branch(words: str, shown: str) -> None:
    talk = Talk(QWEN2_5)
    first = talk.say(QUESTION, words, {"role": "assistant", "content": shown})
    assert talk.parent([*first.messages, user("sure?")]) is None
    assert f"assistant\n{shown}<|im_end|>" in talk.then(first, user("sure?"))


def test_thinking_that_a_template_does_not_know_is_out_of_view() -> None:
    talk = Talk(QWEN2_5, [SPEC])
    first = talk.say(QUESTION, THOUGHT + CALL, calling(thought="hm"))
    assert talk.parent([*first.messages, result("42")]) is None


# What stays as it was sampled -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("tokenizer", "words"),
    [
        (QWEN2_5, '<tool_call>{"arguments":{"n":1,"word":"é"},"name":"look"}</tool_call>'),
        (QWEN3, '<tool_call>{"arguments":{"n":1,"word":"é"},"name":"look"}</tool_call>'),
        (QWEN3, "<think>hm</think>" + CALL.replace("\n", "")),
        (LLAMA3, '{"name":"look","parameters":{"n":1,"word":"é"}}'),
        (LLAMA3, '<|python_tag|>{"name": "look", "parameters": {"word": "é", "n": 1}}'),
    ],
)
def test_a_call_stays_as_it_was_written_where_the_template_would_write_it_otherwise(
    tokenizer: PreTrainedTokenizerFast, words: str
) -> None:
    talk = Talk(tokenizer, [SPEC])
    first = talk.say(QUESTION, words, calling(thought="hm" if "<think>" in words else None))
    seen = talk.then(first, result("42"))
    assert words + tokenizer.eos_token in seen
    assert seen.count("look") == str(tokenizer.decode(list(first.token_ids))).count("look")
    assert talk.parent([*first.messages, result("42")]) is first


def test_a_call_that_the_template_shows_with_other_arguments_makes_a_branch() -> None:
    talk = Talk(QWEN2_5, [SPEC])
    first = talk.say(QUESTION, CALL, calling({"word": "other"}))
    assert '"word": "other"' in talk.then(first, result("42"))


def test_an_end_that_the_template_would_not_write_stays_and_no_other_is_put_beside_it() -> None:
    talk = Talk(QWEN2_5)
    first = talk.say(QUESTION, "4", end="<|endoftext|>")
    assert first.text == "4"
    assert "4<|endoftext|>\n<|im_start|>user\nsure?" in talk.then(first, user("sure?"))


@pytest.mark.parametrize("options", [{}, {"builtin_tools": ["look"]}])
def test_any_special_token_may_end_a_turn(options: dict[str, Any]) -> None:
    """Llama's <|eom_id|>, which is the template's own after a call where built-in tools are in use."""
    talk = Talk(LLAMA3, [SPEC], **options)
    words = '<|python_tag|>look.call(word="a")' if options else '{"name": "look", "parameters": {"word": "a"}}'
    first = talk.say(QUESTION, words, calling({"word": "a"}), end="<|eom_id|>")
    assert first.text == words
    assert first.has_ended
    assert words + "<|eom_id|><|start_header_id|>ipython<|end_header_id|>\n\n" in talk.then(first, result("42"))
    assert talk.parent([*first.messages, result("42")]) is first


def test_a_special_token_at_which_a_length_limit_cut_is_no_end() -> None:
    talk = Talk(LLAMA3)
    first = talk.say(QUESTION, "4<|python_tag|>", end=None)
    assert (first.text, first.has_ended) == ("4<|python_tag|>", False)
    assert "4<|python_tag|><|eot_id|><|start_header_id|>user" in talk.then(first, user("sure?"))


def test_an_end_of_turn_at_a_length_limit_is_an_end() -> None:
    talk = Talk(QWEN2_5)
    first = talk.say(QUESTION, "4<|im_end|>", end=None)
    assert first.text == "4"
    assert "4<|im_end|>\n<|im_start|>user" in talk.then(first, user("sure?"))


def test_space_before_punctuation_is_part_of_what_was_said() -> None:
    assert Talk(QWEN2_5).say(QUESTION, "It is n't a , b .").text == "It is n't a , b ."


def test_special_tokens_among_the_words_are_not_their_end() -> None:
    template = ChatTemplate(LLAMA3)
    shown = '<|python_tag|>look.call(word="a")<|eom_id|><|start_header_id|>'
    after = template.after_words('<|python_tag|>look.call( word="a" )', shown, has_calls=True)
    assert after == "<|eom_id|><|start_header_id|>"


def test_space_that_a_template_trims_stays_as_it_was_sampled() -> None:
    talk = Talk(LLAMA3)
    first = talk.say(QUESTION, "\n 4 ")
    assert "<|end_header_id|>\n\n\n 4 <|eot_id|><|start_header_id|>user" in talk.then(first, user("sure?"))
    assert talk.parent([*first.messages, user("sure?")]) is first


def test_a_template_without_special_tokens_goes_on_after_what_was_said() -> None:
    talk = Talk(tokenizer_of("alpaca"))
    first = talk.say(QUESTION, "4", end=None)
    assert talk.then(first, user("sure?")) == (
        "### User:\n?\n\n### Assistant:\n4\n\n### User:\nsure?\n\n### Assistant:\n"
    )
    assert talk.parent([*first.messages, user("sure?")]) is first


def test_an_end_stays_where_the_template_writes_none() -> None:
    talk = Talk(tokenizer_of("alpaca"))
    first = talk.say(QUESTION, "4")
    assert "### Assistant:\n4</s>\n\n### User:" in talk.then(first, user("sure?"))


@pytest.mark.parametrize("end", ["<|EOS|>", "<|Assistant|>"])
def test_the_beginning_of_another_turn_is_not_an_end(end: str) -> None:
    """As GLM's template has it, whose model ends its turn with whatever begins the next one."""
    tokenizer = tokenizer_of("deepseek_r1")
    tokenizer.chat_template = (
        "{% for m in messages %}<|{{ m.role | capitalize }}|>{{ m.content }}{% endfor %}"
        "{% if add_generation_prompt %}<|Assistant|>{% endif %}"
    )
    talk = Talk(tokenizer)
    first = talk.say(QUESTION, "4", end=end)
    assert talk.then(first, user("sure?")) == f"<|User|>?<|Assistant|>4{end}<|User|>sure?<|Assistant|>"
    first = talk.say(QUESTION, "5", end="<|User|>")
    assert talk.then(first, user("sure?")) == "<|User|>?<|Assistant|>5<|User|>sure?<|Assistant|>"


def test_tools_that_a_template_shows_beside_the_last_user_make_a_branch_when_they_move() -> None:
    talk = Talk(MISTRAL, [SPEC])
    words = '[TOOL_CALLS] [{"name": "look", "arguments": {"word": "é", "n": 1}, "id": "call00000"}]'
    first = talk.say(QUESTION, words, calling())
    second = talk.say([*first.messages, result("42")], "It is 42.")
    assert second.parent is first
    assert talk.parent([*second.messages, user("sure?")]) is None
    assert talk.then(second, user("sure?")).count("[AVAILABLE_TOOLS]") == 1


# Continued by messages alone ------------------------------------------------------------------------------------------


def sent_back(message: Mapping[str, Any]) -> dict[str, Any]:
    """A call as another program sends it back."""
    function = message["tool_calls"][0]["function"]
    arguments = json.dumps(dict(reversed(function["arguments"].items())), indent=1)
    call = {"id": "other", "type": "function", "function": {"arguments": arguments, "name": function["name"]}}
    return {"role": "assistant", "content": "", "refusal": None, "tool_calls": [call], "function_call": None}


def test_answers_that_come_back_in_another_form_are_those_that_were_recorded() -> None:
    talk = Talk(QWEN3, [SPEC])
    first = talk.say(QUESTION, THOUGHT + CALL, calling(thought="hm"))
    prompt = talk.dialogue.prompt([*QUESTION, sent_back(calling()), result("42", of="other")], [dict(SPEC)])
    assert prompt.parent is first
    assert THOUGHT in str(QWEN3.decode(list(prompt.input_ids)))
    second = talk.dialogue.record(prompt, response_of(QWEN3, " It is 42.\n"))
    stripped = {"role": "assistant", "content": "It is 42.", "tool_calls": []}
    messages = [*QUESTION, sent_back(calling()), result("42", of="other"), stripped, result("43")]
    assert talk.parent(messages) is second


def response_of(tokenizer: PreTrainedTokenizerFast, words: str) -> ModelResponse:
    ids = tuple(tokenizer.encode(words + tokenizer.eos_token, add_special_tokens=False))
    return ModelResponse(
        output_ids=ids, output_logprobs=(-1.0,) * len(ids), output_versions=(0,) * len(ids), stop_reason="stop"
    )


def test_thoughts_need_not_come_back_and_others_are_another_branch() -> None:
    talk = Talk(QWEN3, [SPEC])
    first = talk.say(QUESTION, THOUGHT + CALL, calling(thought="hm"))
    for thought, parent in (("hm", first), ("hm\n", first), (None, first), ("", first), ("what else?", None)):
        assert talk.parent([*QUESTION, calling(thought=thought), result("42")]) is parent
    assert "what else?" in talk.seen([*QUESTION, calling(thought="what else?"), result("42")])


def test_history_that_was_edited_dropped_or_summarised_is_another_branch() -> None:
    talk = Talk(QWEN2_5)
    first = talk.say(QUESTION, "4")
    second = talk.say([*first.messages, user("sure?")], "yes")
    history = [*second.messages, user("really?")]
    assert talk.parent(history) is second
    assert talk.parent([*first.messages, user("Sure?"), second.message, user("really?")]) is first
    assert talk.parent([*QUESTION, {"role": "assistant", "content": "5"}, user("sure?")]) is None
    assert talk.parent([user("A summary: 4."), user("really?")]) is None
    assert talk.parent([{"role": "system", "content": "Be brief."}, *history]) is None
    assert talk.parent([*history[:1], *history[2:]]) is None


def test_another_set_of_tools_is_another_beginning() -> None:
    talk = Talk(QWEN2_5, [SPEC])
    first = talk.say(QUESTION, "4")
    messages = [*first.messages, user("sure?")]
    for tools in ([], [OTHER_SPEC], [SPEC, OTHER_SPEC]):
        assert talk.dialogue.prompt(messages, tools).parent is None
        known = talk.dialogue.prompt(messages, tools, after=first)
        assert known.parent is None
        assert known.input_ids == talk.dialogue.prompt(messages, tools).input_ids
        assert known.key == talk.dialogue.prompt(messages, tools).key


def test_samples_of_one_prompt_are_siblings_and_each_may_be_continued() -> None:
    talk = Talk(QWEN2_5)
    prompt = talk.dialogue.prompt(QUESTION)
    turns = [talk.dialogue.record(prompt, response_of(QWEN2_5, words)) for words in ("4", "5", "6")]
    assert [turn.parent for turn in turns] == [None] * 3
    for turn in turns:
        assert talk.parent([*turn.messages, user("sure?")]) is turn


def test_a_named_answer_is_continued_and_else_the_last_of_equal_ones() -> None:
    talk = Talk(QWEN3, [SPEC])
    prompt = talk.dialogue.prompt(QUESTION, talk.tools)
    said = [calling(thought=thought) for thought in ("one", "two", "three")]
    for number, message in enumerate(said):
        message["tool_calls"][0]["id"] = f"call{number}"
    turns = [
        talk.dialogue.record(prompt, response_of(QWEN3, f"<think>\n{m['reasoning_content']}\n</think>\n\n{CALL}"), m)
        for m in said
    ]
    for message, turn in zip(said, turns, strict=True):
        assert talk.parent([*QUESTION, message, result("42")]) is turn
    assert talk.parent([*QUESTION, sent_back(calling()), result("42")]) is turns[-1]


def test_a_turn_that_is_forgotten_is_continued_no_more_and_an_equal_one_takes_its_place() -> None:
    talk = Talk(QWEN2_5)
    first, second = talk.say(QUESTION, "4"), talk.say(QUESTION, "4")
    after = [*first.messages, user("sure?")]
    assert talk.parent(after) is second
    talk.dialogue.forget(second)
    assert talk.dialogue.turns == (first,)
    assert talk.parent(after) is first
    talk.dialogue.forget(second)
    talk.dialogue.forget(first)
    assert talk.dialogue.turns == ()
    assert talk.parent(after) is None


def test_a_turn_that_another_was_said_after_is_not_forgotten() -> None:
    for words, is_branched in (("4", False), (THOUGHT + "4", True)):
        talk = Talk(QWEN3)
        first = talk.say(QUESTION, words)
        second = talk.say([*first.messages, user("sure?")], "yes")
        assert (second.parent is None) == is_branched
        talk.dialogue.forget(first)
        assert talk.dialogue.turns == (first, second)
        talk.dialogue.forget(second)
        talk.dialogue.forget(first)
        assert talk.dialogue.turns == ()


# What callers hand in -------------------------------------------------------------------------------------------------


def test_a_caller_may_change_its_messages_and_tools_later() -> None:
    talk, spec = Talk(QWEN2_5), json.loads(json.dumps(SPEC))
    messages, tools, said = [dict(QUESTION[0])], [spec], calling()
    prompt = talk.dialogue.prompt(messages, tools)
    first = talk.dialogue.record(prompt, response_of(QWEN2_5, CALL), said)
    before = str(QWEN2_5.decode(list(first.token_ids)))
    messages[0]["content"] = "!"
    spec["function"]["name"] = "gone"
    said["tool_calls"][0]["function"]["arguments"]["word"] = "gone"
    later = talk.dialogue.prompt([*QUESTION, calling(), result("42")], [SPEC])
    assert later.parent is first
    assert str(QWEN2_5.decode(list(later.input_ids))).startswith(before)


def test_messages_and_tools_may_be_any_mappings_and_contents_may_be_parts_of_text() -> None:
    talk = Talk(QWEN2_5)
    plain = talk.dialogue.prompt([user("one\ntwo"), calling(), result("42")], [SPEC])
    call = MappingProxyType({"id": "call00000", "function": MappingProxyType(calling()["tool_calls"][0]["function"])})
    parts = ({"type": "text", "text": "one"}, MappingProxyType({"type": "text", "text": "two"}))
    messages = [
        MappingProxyType({"role": "user", "content": parts}),
        MappingProxyType({"role": "assistant", "tool_calls": (call,)}),
        {"role": "tool", "content": ["42"], "tool_call_id": "call00000"},
    ]
    tools = [MappingProxyType({"type": "function", "function": MappingProxyType(SPEC["function"])})]
    assert talk.dialogue.prompt(messages, tools).input_ids == plain.input_ids
    assert talk.dialogue.prompt(messages, tools).key == plain.key


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        ([{"type": "image_url", "image_url": {"url": "data:"}}], "part of type 'image_url'; only text"),
        ([3], "part of type 'int'"),
        (3, "content is a int"),
    ],
)
def test_content_that_is_no_text_is_an_error(content: object, reason: str) -> None:
    with pytest.raises(ModelError, match=reason):
        Talk(QWEN2_5).seen([{"role": "user", "content": content}])


def test_an_error_of_the_template_is_quoted() -> None:
    with pytest.raises(ModelError, match=r"does not take these messages: .*roles must alternate"):
        Talk(MISTRAL).seen([user("one"), user("two")])
    twice = calling()
    twice["tool_calls"] *= 2
    with pytest.raises(ModelError, match="only supports single tool-calls"):
        Talk(LLAMA3).seen([user("one"), twice, result("42")])


def test_a_template_that_would_drop_tools_or_calls_in_silence_is_an_error() -> None:
    chatml = Talk(tokenizer_of("chatml"))
    with pytest.raises(ModelError, match="shows no tools"):
        chatml.dialogue.prompt(QUESTION, [SPEC])
    with pytest.raises(ModelError, match="shows no tool_calls"):
        chatml.seen([*QUESTION, calling(), result("42")])


def test_arguments_that_are_no_json_are_shown_as_they_are() -> None:
    for broken in ('{"word": ', "[" * 100_000):
        talk = Talk(QWEN3, [SPEC])
        words = f'<tool_call>\n{{"name": "look", "arguments": {broken}}}\n</tool_call>'
        first = talk.say(QUESTION, words, calling(broken))
        assert talk.parent([*QUESTION, calling(broken), result("error")]) is first


def test_half_a_character_in_a_calls_json_is_shown_as_another() -> None:
    talk = Talk(QWEN2_5, [SPEC])
    first = talk.say(QUESTION, CALL, calling('{"word": "\\ud800"}'))
    assert '{"word": "?"}' in talk.then(first, result("42"))


def test_a_prompt_changes_nothing() -> None:
    talk = Talk(QWEN2_5)
    first = talk.say(QUESTION, "4")
    messages = [*first.messages, user("sure?")]
    assert talk.dialogue.prompt(messages) == talk.dialogue.prompt(messages)
    assert talk.dialogue.turns == (first,)


def test_thousands_of_turns_are_a_path_like_any_other() -> None:
    talk = Talk(tokenizer_of("chatml"))
    turn = talk.say(QUESTION, "4")
    prompt = talk.dialogue.prompt([*turn.messages, user("more")], after=turn)
    for _ in range(3000):
        turn = talk.dialogue.record(prompt, response_of(talk.tokenizer, "4"))
        prompt = replace(prompt, parent=turn, after=turn, given_ids=(1,))
    assert len(turn.path) == 3001

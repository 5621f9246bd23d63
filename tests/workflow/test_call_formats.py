"""Call formats: every answer can be read; calls in it are found, and what could not be read says why."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st
from transformers import PreTrainedTokenizerFast

from arl.api.errors import ModelError
from arl.engine.tiny import tiny_tokenizer
from arl.workflow.call_formats import HERMES, LLAMA, CallFormat, MalformedCall, ToolCall, call_format_of

A, B = ToolCall(name="a", arguments={"x": {"y": [1, "}"]}}), ToolCall(name="b", arguments={})
WRITTEN_A = '{"name": "a", "arguments": {"x": {"y": [1, "}"]}}}'
WRITTEN_B = '{"name": "b", "arguments": {}}'
JSON = st.recursive(st.none() | st.booleans() | st.integers() | st.text(), lambda inner: st.lists(inner), max_leaves=4)
ARGUMENTS = st.dictionaries(st.text(), JSON, max_size=3)
TAGS = (
    "<tool_call>",
    "</tool_call>",
    "<think>",
    "</think>",
    "<|python_tag|>",
    "```json\n",
    '{"name":',
    '"parameters": {',
)
FRAGMENTS = st.sampled_from([*TAGS, *';{}"', WRITTEN_A, WRITTEN_B, "\ud800", "NaN", "[" * 3000])


def hermes(*bodies: str) -> str:
    return "".join(f"<tool_call>\n{body}\n</tool_call>" for body in bodies)


def reason_of(call: ToolCall | MalformedCall) -> str:
    assert isinstance(call, MalformedCall)
    return call.reason


@given(st.lists(st.text(max_size=5) | FRAGMENTS, max_size=12).map("".join))
@pytest.mark.parametrize("form", [HERMES, LLAMA], ids=repr)
def test_whatever_a_model_writes_can_be_read(form: CallFormat, text: str) -> None:
    answer = form.parse(text)
    assert all(isinstance(call, ToolCall) or call.reason for call in answer.calls)
    if not answer.calls:
        assert answer.content == text


@given(st.lists(st.tuples(st.text(min_size=1), ARGUMENTS), min_size=1, max_size=3))
def test_calls_of_hermes_are_read_as_they_were_written(calls: list[tuple[str, dict[str, object]]]) -> None:
    text = hermes(*(json.dumps({"name": name, "arguments": arguments}) for name, arguments in calls))
    assert HERMES.parse(text).calls == tuple(ToolCall(name=n, arguments=a) for n, a in calls)


@given(st.lists(st.tuples(st.text(min_size=1), ARGUMENTS), min_size=1, max_size=3), st.sampled_from(["parameters"]))
def test_calls_of_llama_are_read_as_they_were_written(calls: list[tuple[str, dict[str, object]]], key: str) -> None:
    text = "; ".join(json.dumps({"name": name, key: arguments}) for name, arguments in calls)
    expected = tuple(ToolCall(name=n, arguments=a) for n, a in calls)
    assert LLAMA.parse(text).calls == expected
    assert LLAMA.parse(f"Let me see. <|python_tag|>{text};").calls == expected


def test_the_text_outside_the_calls_is_the_content() -> None:
    answer = HERMES.parse(f"First {hermes(WRITTEN_A)} and {hermes(WRITTEN_B)}, so.\n")
    assert (answer.content, answer.calls) == ("First  and , so.", (A, B))
    answer = LLAMA.parse('I will. <|python_tag|>{"name": "b", "parameters": {}}')
    assert (answer.content, answer.calls) == ("I will.", (B,))


@pytest.mark.parametrize("form", [HERMES, LLAMA], ids=repr)
@pytest.mark.parametrize("text", ["", "42", '{"answer": 42}', "a; b", "{x}", '[{"name": 1}]', "\n x \n"])
def test_text_without_a_call_is_all_content(form: CallFormat, text: str) -> None:
    assert (form.parse(text).content, form.parse(text).calls) == (text, ())


def test_calls_within_thinking_are_no_calls() -> None:
    for thought in (f"<think>{hermes(WRITTEN_A)}</think>", f"{hermes(WRITTEN_A)}</think>"):  # opened in the prompt
        answer = HERMES.parse(f"{thought}\n\n{hermes(WRITTEN_B)}")
        assert (answer.content, answer.calls) == (thought, (B,))
    assert HERMES.parse(f"<think>hm {hermes(WRITTEN_A)}").calls == ()
    answer = LLAMA.parse(f'<think>{{"name": "a"}}</think>\n{WRITTEN_B}')
    assert (answer.content, answer.calls) == ('<think>{"name": "a"}</think>', (B,))


def test_tags_within_arguments_end_nothing() -> None:
    for tag in ("</tool_call>", "<tool_call>", "<think>", "</think>"):
        call = ToolCall(name="a", arguments={"text": f"x{tag}y"})
        text = hermes(json.dumps({"name": "a", "arguments": call.arguments}), WRITTEN_B)
        assert HERMES.parse(text).calls == (call, B)


def test_tags_within_the_arguments_of_llamas_calls_end_nothing() -> None:
    for tag in ("<|python_tag|>", "<think>", "</think>", ";"):
        calls = (B, ToolCall(name="a", arguments={"text": f"x{tag}y"}))
        text = "; ".join(json.dumps({"name": call.name, "parameters": call.arguments}) for call in calls)
        assert LLAMA.parse(text).calls == LLAMA.parse(f"So: <|python_tag|>{text}").calls == calls
    thought = '<think><|python_tag|>{"name": "b", "parameters": {}}</think>'
    assert LLAMA.parse(f"{thought} No.").calls == LLAMA.parse(f"{thought[7:]} No.").calls == ()


def test_an_unclosed_call_ends_where_the_next_one_begins_or_the_text_does() -> None:
    assert HERMES.parse(f"<tool_call>{WRITTEN_A}<tool_call>{WRITTEN_B}").calls == (A, B)
    half, whole = HERMES.parse(f'<tool_call>{{"name": "a", "argu<tool_call>{WRITTEN_B}</tool_call>').calls
    assert reason_of(half).startswith("a tool call must be one JSON object (Unterminated string")
    assert whole == B


@pytest.mark.parametrize(
    ("form", "text", "reason"),
    [
        (HERMES, hermes('{"name": "a", "arguments": {"x": 1'), "must be one JSON object (Expecting"),
        (HERMES, hermes(f"```json\n{WRITTEN_A}\n```"), "must be one JSON object (Expecting value"),
        (HERMES, hermes(WRITTEN_A + WRITTEN_B), "must be one JSON object (Extra data"),
        (HERMES, hermes('{"name": "a", "arguments": {"x": NaN}}'), "(NaN is not JSON)"),
        (HERMES, hermes('{"name": "a", "arguments": "{}"}'), 'needs "name", a string, and "arguments", an object'),
        (
            HERMES,
            hermes('{"name": "a", "arguments": {"x": ' + "[" * 9999),
            "must be one JSON object; this one is nested",
        ),
        (LLAMA, '{"name": "a", "parameters": {"x": 1', "must be one JSON object (Expecting"),
        (LLAMA, '{"name": "a", "parameters": 3}', 'needs "name", a string, and "parameters", an object'),
        (LLAMA, "<|python_tag|>print(1)", "must be one JSON object (Expecting value"),
        (LLAMA, '```json\n{"name": "a", "parameters": {}}\n```', "stands alone, without a code fence around it"),
        (LLAMA, f"{WRITTEN_B} and so on", "must be one JSON object (Extra data"),
    ],
)
def test_a_malformed_call_says_why_and_keeps_what_was_written(form: CallFormat, text: str, reason: str) -> None:
    (call,) = form.parse(text).calls
    assert reason in reason_of(call)
    assert isinstance(call, MalformedCall)
    assert call.text.strip() in text


def test_calls_after_one_that_is_malformed_are_read() -> None:
    _, call = HERMES.parse(hermes("nonsense", WRITTEN_B)).calls
    assert call == B
    call, half = LLAMA.parse('{"name": "b", "parameters": {}}; {"name": "a", ').calls
    assert call == B
    assert isinstance(half, MalformedCall)


def test_each_call_has_an_id_of_its_own() -> None:
    one, other = HERMES.parse(hermes(WRITTEN_B, WRITTEN_B)).calls
    assert one == other
    assert one.id != other.id


@pytest.mark.parametrize(
    ("template", "form"),
    [
        ('<tool_call>\\n{\\"name\\": <function-name>, \\"arguments\\": <args-json-object>}\\n</tool_call>', HERMES),
        ('{"name": <name>, "arguments": <object>} in <tool_call>', HERMES),
        ("<|start_header_id|>ipython {{ '<|python_tag|>' }}", LLAMA),
        ('<|start_header_id|> {"name": function name, "parameters": dictionary}', LLAMA),
    ],
)
def test_the_format_is_the_one_that_the_chat_template_asks_for(template: str, form: CallFormat) -> None:
    tokenizer = tiny_tokenizer()
    assert call_format_of(tokenizer) is HERMES
    for chat_template in (template, {"default": "{{ messages }}", "tool_use": template}):
        tokenizer.chat_template = chat_template
        assert call_format_of(tokenizer) is form


@pytest.mark.parametrize("template", ["{{ messages }}", "<tool_call>\n<function=name>", "", None])
def test_a_template_that_asks_for_another_format_is_an_error_that_says_what_to_pass(template: str | None) -> None:
    tokenizer: PreTrainedTokenizerFast = tiny_tokenizer()
    tokenizer.chat_template = template
    with pytest.raises(ModelError, match="pass call_format="):
        call_format_of(tokenizer)

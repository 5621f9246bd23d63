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
TAGS = ["<tool_call>", "</tool_call>", "<think>", "</think>", "<|python_tag|>", "```json\n"]
HALVES = ['{"name":', '"parameters": {', *';{}"', "\ud800", "NaN", "[" * 3000]
FRAGMENTS = st.sampled_from([*TAGS, *HALVES, WRITTEN_A, WRITTEN_B])


def hermes(*bodies: str) -> str:
    return "".join(f"<tool_call>\n{body}\n</tool_call>" for body in bodies)


@given(st.lists(st.text(max_size=5) | FRAGMENTS, max_size=12).map("".join))
@pytest.mark.parametrize("form", [HERMES, LLAMA], ids=repr)
def test_whatever_a_model_writes_can_be_read(form: CallFormat, text: str) -> None:
    answer = form.parse(text)
    assert all(isinstance(call, ToolCall) or call.reason for call in answer.calls)
    if not answer.calls:
        assert answer.content == text


@given(st.lists(st.tuples(st.text(min_size=1), ARGUMENTS), min_size=1, max_size=3))
def test_calls_are_read_as_they_were_written(calls: list[tuple[str, dict[str, object]]]) -> None:
    expected = tuple(ToolCall(name=n, arguments=a) for n, a in calls)
    assert HERMES.parse(hermes(*(json.dumps({"name": n, "arguments": a}) for n, a in calls))).calls == expected
    text = "; ".join(json.dumps({"name": n, "parameters": a}) for n, a in calls)
    assert LLAMA.parse(text).calls == LLAMA.parse(f"Let me see. <|python_tag|>{text};").calls == expected


THOUGHT = f"<think>{hermes(WRITTEN_A)}</think>"
B_OF_LLAMA = '{"name": "b", "parameters": {}}'


@pytest.mark.parametrize(
    ("form", "text", "content", "calls"),
    [
        (HERMES, f"First {hermes(WRITTEN_A)} and {hermes(WRITTEN_B)}, so.\n", "First  and , so.", (A, B)),
        (HERMES, f"<tool_call>{WRITTEN_A}<tool_call>{WRITTEN_B}", "", (A, B)),
        (HERMES, f"{THOUGHT}\n\n{hermes(WRITTEN_B)}", THOUGHT, (B,)),
        (HERMES, f"{THOUGHT[7:]}\n\n{hermes(WRITTEN_B)}", THOUGHT[7:], (B,)),  # the prompt began the thought
        (HERMES, f"<think>hm {hermes(WRITTEN_A)}", f"<think>hm {hermes(WRITTEN_A)}", ()),
        (LLAMA, f"I will. <|python_tag|>{B_OF_LLAMA}", "I will.", (B,)),
        (LLAMA, f'<think>{{"name": "a"}}</think>\n{WRITTEN_B}', '<think>{"name": "a"}</think>', (B,)),
        *(
            (LLAMA, text, text, ())
            for text in (f"<think><|python_tag|>{B_OF_LLAMA}</think> No.", f"<|python_tag|>{B_OF_LLAMA}</think> No.")
        ),
    ],
)
def test_calls_outside_of_thinking_are_read_and_the_rest_is_content(
    form: CallFormat, text: str, content: str, calls: tuple[ToolCall, ...]
) -> None:
    answer = form.parse(text)
    assert (answer.content, answer.calls) == (content, calls)


@pytest.mark.parametrize("tag", ["</tool_call>", "<tool_call>", "<|python_tag|>", "<think>", "</think>", ";"])
def test_tags_within_arguments_end_nothing(tag: str) -> None:
    calls = (ToolCall(name="a", arguments={"text": f"x{tag}y"}), B)
    written = [{"name": call.name, "arguments": call.arguments} for call in calls]
    assert HERMES.parse(hermes(*map(json.dumps, written))).calls == calls
    text = "; ".join(json.dumps({"name": call.name, "parameters": call.arguments}) for call in calls[::-1])
    assert LLAMA.parse(text).calls == LLAMA.parse(f"So: <|python_tag|>{text}").calls == calls[::-1]


@pytest.mark.parametrize(
    ("form", "text", "reason"),
    [
        (HERMES, hermes('{"name": "a", "arguments": {"x": 1'), "must be one JSON object (Expecting"),
        (HERMES, hermes(f"```json\n{WRITTEN_A}\n```"), "must be one JSON object (Expecting value"),
        (HERMES, hermes('{"name": "a", "arguments": {"x": NaN}}'), "(NaN is not JSON)"),
        (HERMES, hermes('{"name": "a", "arguments": "{}"}'), 'needs "name", a string, and "arguments", an object'),
        (HERMES, hermes('{"name": "a", "arguments": {"x": ' + "[" * 9999), "one JSON object; this one is nested"),
        (LLAMA, '{"name": "a", "parameters": {"x": 1', "must be one JSON object (Expecting"),
        (LLAMA, '{"name": "a", "parameters": 3}', 'needs "name", a string, and "parameters", an object'),
        (LLAMA, '```json\n{"name": "a", "parameters": {}}\n```', "stands alone, without a code fence around it"),
        (LLAMA, f"{WRITTEN_B} and so on", "must be one JSON object (Extra data"),
    ],
)
def test_a_malformed_call_says_why_and_keeps_what_was_written(form: CallFormat, text: str, reason: str) -> None:
    (call,) = form.parse(text).calls
    assert isinstance(call, MalformedCall)
    assert reason in call.reason
    assert call.text.strip() in text


HALF_A = '{"name": "a", "argu'


@pytest.mark.parametrize(
    ("form", "text"),
    [
        (HERMES, hermes("nonsense", WRITTEN_B)),
        (HERMES, f"<tool_call>{HALF_A}<tool_call>{WRITTEN_B}</tool_call>"),
        (LLAMA, f"{B_OF_LLAMA}; {HALF_A}"),
    ],
)
def test_calls_beside_one_that_is_malformed_are_read(form: CallFormat, text: str) -> None:
    calls = form.parse(text).calls
    assert [call for call in calls if isinstance(call, ToolCall)] == [B]
    (half,) = (call for call in calls if isinstance(call, MalformedCall))
    assert half.reason.startswith("a tool call must be one JSON object (")


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

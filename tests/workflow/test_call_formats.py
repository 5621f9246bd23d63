"""Call formats: every answer can be read; calls in it are found, and what could not be read says why."""

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import PreTrainedTokenizerFast
from workflow.chat_templates import tokenizer_of

from arl.api.errors import ModelError
from arl.engine.tiny import tiny_tokenizer
from arl.workflow.call_formats import (
    COHERE,
    DEEPSEEK_V3,
    FORMATS,
    GEMMA,
    GLM,
    HARMONY,
    HERMES,
    KIMI,
    LFM,
    LLAMA,
    LLAMA_PYTHONIC,
    MINIMAX,
    MISTRAL,
    MISTRAL_ARGS,
    MUSE,
    PHI,
    QWEN_XML,
    SEED,
    KnownFormat,
    MalformedCall,
    ToolCall,
)
from arl.workflow.chat_template import call_format_of

VALUES: dict[str, tuple[dict[str, Any], st.SearchStrategy[Any]]] = {
    "text": ({"type": "string"}, st.text("ab0 .,:;'\"\\\n{}[]()=é", max_size=9).map(str.strip)),
    "count": ({"type": "integer"}, st.integers(-(10**9), 10**9)),
    "ratio": ({"type": "number"}, st.floats(-1e6, 1e6).map(float)),
    "flag": ({"type": "boolean"}, st.booleans()),
    "items": ({"type": "array"}, st.lists(st.integers() | st.booleans() | st.text("ab 1", max_size=3), max_size=3)),
    "map": ({"type": "object"}, st.dictionaries(st.sampled_from("ab"), st.integers() | st.none(), max_size=2)),
    "maybe": ({"anyOf": [{"$ref": "#/$defs/Count"}, {"type": "null"}]}, st.none() | st.integers()),
}
SCHEMA = {
    "type": "object",
    "properties": {key: schema for key, (schema, _) in VALUES.items()},
    "$defs": {"Count": {"type": "integer"}},
}
TOOLS = [{"type": "function", "function": {"name": name, "parameters": SCHEMA}} for name in ("f", "g.h")]
CALLS = st.lists(
    st.builds(
        lambda name, arguments: ToolCall(name=name, arguments=arguments),
        st.sampled_from(["f", "g.h"]),
        st.fixed_dictionaries({}, optional={key: values for key, (_, values) in VALUES.items()}),
    ),
    min_size=1,
    max_size=3,
)
A, B = ToolCall(name="a", arguments={"x": {"y": [1, "}"]}}), ToolCall(name="b", arguments={})
WRITTEN_A = '{"name": "a", "arguments": {"x": {"y": [1, "}"]}}}'
WRITTEN_B = '{"name": "b", "arguments": {}}'
B_OF_LLAMA = '{"name": "b", "parameters": {}}'
HALF_A = '{"name": "a", "argu'
TAGS = sorted({piece for one in FORMATS for piece in (*one.thought, *one.write([B]).replace("{", " {").split())})
HALVES = ["<think>", "</tool_call>", "</parameter>", "[f(", '{"name":', *';{}"', "'", '<|"|>', "\ud800", "[" * 3000]
FRAGMENTS = st.sampled_from(
    [*TAGS, *HALVES, *(one.write([ToolCall(name="f", arguments={"text": "x"})]) for one in FORMATS)]
)
SOME = settings(max_examples=40)
every_format = pytest.mark.parametrize("form", FORMATS, ids=repr)


def hermes(*bodies: str) -> str:
    return "".join(f"<tool_call>\n{body}\n</tool_call>" for body in bodies)


@SOME
@given(st.lists(st.text(max_size=5) | FRAGMENTS, max_size=12).map("".join))
@every_format
def test_whatever_a_model_writes_can_be_read(form: KnownFormat, text: str) -> None:
    answer = form.parse(text, TOOLS)
    assert all(isinstance(call, ToolCall) or call.reason for call in answer.calls)
    if not answer.calls and form not in (HARMONY, MUSE):
        assert answer.content == text


@SOME
@given(CALLS)
@every_format
def test_calls_are_read_as_they_were_written(form: KnownFormat, calls: list[ToolCall]) -> None:
    text = form.write(calls)
    said = "" if form in (LLAMA, LLAMA_PYTHONIC, HARMONY, MUSE) else "Let me see."
    answer = form.parse(said + text, TOOLS)
    assert (answer.content, answer.calls) == (said, tuple(calls))
    assert form.write([call for call in answer.calls if isinstance(call, ToolCall)]) == text


@SOME
@given(CALLS, st.data())
@every_format
def test_a_text_that_is_cut_off_has_no_other_calls(
    form: KnownFormat, calls: list[ToolCall], data: st.DataObject
) -> None:
    text = form.write(calls)
    read = form.parse(text[: data.draw(st.integers(0, len(text)))], TOOLS).calls
    whole = [call for call in read if isinstance(call, ToolCall)]
    assert whole == calls[: len(whole)]
    assert len(read) <= len(whole) + 1


THOUGHT = f"<think>{hermes(WRITTEN_A)}</think>"


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
        (LLAMA, '{"answer": 4}', '{"answer": 4}', ()),
        (LLAMA_PYTHONIC, "[b()](a link)", "[b()](a link)", ()),
        (LLAMA_PYTHONIC, "So <|python_start|>[b()]<|python_end|>", "So", (B,)),
        (LFM, f"<|tool_call_start|>[{WRITTEN_A}, b()]<|tool_call_end|>ok", "ok", (A, B)),
        (PHI, f"functools[{WRITTEN_A}, {WRITTEN_B}]", "", (A, B)),
        (QWEN_XML, "So:\n<function=b>\n</function>", "So:", (B,)),
        *(
            (LLAMA, text, text, ())
            for text in (f"<think><|python_tag|>{B_OF_LLAMA}</think> No.", f"<|python_tag|>{B_OF_LLAMA}</think> No.")
        ),
    ],
)
def test_calls_outside_of_thinking_are_read_and_the_rest_is_content(
    form: KnownFormat, text: str, content: str, calls: tuple[ToolCall, ...]
) -> None:
    answer = form.parse(text)
    assert (answer.content, answer.calls) == (content, calls)


@pytest.mark.parametrize("form", [one for one in FORMATS if one not in (HARMONY, MUSE)], ids=repr)
def test_calls_within_thinking_are_none(form: KnownFormat) -> None:
    (opening, closing), quoted = form.thought, form.write([A])
    for text in (f"{opening}so {quoted}{closing}", f"so {quoted}{closing}", f"{opening}so {quoted}"):
        assert (form.parse(text).content, form.parse(text).calls) == (text, ())


@pytest.mark.parametrize(
    "header", ["<|channel|>commentary to=functions.b <|constrain|>json", " to=functions.b<|channel|>commentary json"]
)
@pytest.mark.parametrize(
    "before", ["", "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant", "Hm.<|end|><|start|>assistant"]
)
def test_the_analysis_of_harmony_is_reasoning_and_its_recipients_are_called(before: str, header: str) -> None:
    answer = HARMONY.parse(f"{before}{header}<|message|>{{}}<|call|>")
    assert (answer.content, answer.reasoning, answer.calls) == ("", "Hm." if before else None, (B,))
    said = HARMONY.parse(
        f"{before or '<|channel|>commentary<|message|>Go.<|end|><|start|>assistant'}<|channel|>final<|message|>4"
    )
    assert (said.content, said.calls) == ("4" if before else "Go.\n4", ())
    assert HARMONY.parse("4").content == "4"


@pytest.mark.parametrize(
    "tag", ["</tool_call>", "<tool_call>", "<|python_tag|>", "<think>", "</think>", ";", "<|call|>", "]"]
)
@every_format
def test_tags_within_arguments_end_nothing(form: KnownFormat, tag: str) -> None:
    calls = (ToolCall(name="a", arguments={"text": f"x{tag}y"}), B)
    assert form.parse(form.write(calls[::-1])).calls == calls[::-1]
    assert LLAMA.parse(f"So: <|python_tag|>{LLAMA.write(calls[::-1])}").calls == calls[::-1]


@pytest.mark.parametrize(
    ("schema", "text", "value"),
    [
        ({"type": "string"}, "02134", "02134"),
        ({"type": "string"}, " two\nlines ", " two\nlines "),
        ({"type": "integer"}, "5.0", 5),
        ({"type": "number"}, "1e3", 1000.0),
        ({"type": "boolean"}, "True", True),
        ({"type": "boolean"}, "false", False),
        ({"type": ["integer", "null"]}, "None", None),
        ({"type": "integer", "nullable": True}, "null", None),
        ({"type": "array"}, "(1, 'a', True)", [1, "a", True]),
        ({"type": "object"}, "{'a': None}", {"a": None}),
        ({"type": "object"}, '{"a": null}', {"a": None}),
        ({"type": ["string", "integer"]}, "12", 12),
        ({"type": ["string", "integer"]}, "012", "012"),
        ({"oneOf": [{"type": "null"}, {"$ref": "#/$defs/S"}]}, "12", "12"),
        ({"enum": [1, 2]}, "2", 2),
        ({"enum": ["1", "2"]}, "2", "2"),
        ({}, "[1]", [1]),
        ({}, "True story", "True story"),
        (None, "007", "007"),
    ],
)
@pytest.mark.parametrize("form", [QWEN_XML, GLM, SEED, MINIMAX], ids=repr)
def test_a_value_without_quotes_has_the_type_of_its_parameter(
    form: KnownFormat, schema: dict[str, Any] | None, text: str, value: object
) -> None:
    parameters = {"properties": {"x": schema} if schema is not None else {}, "$defs": {"S": {"type": "string"}}}
    tools = [{"type": "function", "function": {"name": "f", "parameters": parameters}}]
    (call,) = form.parse(form.write([ToolCall(name="f", arguments={"x": text})]), tools).calls
    assert isinstance(call, ToolCall)
    assert call == ToolCall(name="f", arguments={"x": value})
    assert json.dumps(call.arguments) == json.dumps({"x": value})  # 5, not 5.0; true, not 1


@pytest.mark.parametrize("form", [QWEN_XML, GLM, MINIMAX, LFM, GEMMA], ids=repr)
def test_a_bad_value_loses_its_parameter_and_says_so(form: KnownFormat) -> None:
    text = form.write([ToolCall(name="f", arguments={"count": 77, "text": "a"})]).replace("77", "many")
    (call,) = form.parse(text, TOOLS).calls
    assert call == ToolCall(name="f", arguments={"text": "a"})
    assert isinstance(call, ToolCall)
    assert call.complaints == ("argument count: 'many' is not an integer; it was left out",)


@pytest.mark.parametrize(
    "text",
    [
        "<tool_call>\n<function=f>\n<parameter=text>\na\n<parameter=count>\n5\n</parameter>\n</function>\n</tool_call>",
        "<tool_call>\n<function=f>\n<parameter=text>\na\n</parameter>\n<parameter=count>\n5\n</function>\n</tool_call>",
        "<tool_call>\n<function=f>\n<parameter=text>\na\n</parameter>\n<parameter=count>5</parameter>\n</tool_call>",
        "<tool_call><function=f><parameter=text>a</parameter><parameter=count>5.0</parameter></function>",
    ],
)
def test_a_missing_tag_keeps_what_is_there(text: str) -> None:
    assert QWEN_XML.parse(text, TOOLS).calls == (ToolCall(name="f", arguments={"text": "a", "count": 5}),)
    assert QWEN_XML.parse(f"{text}\n{QWEN_XML.write([B])}", TOOLS).calls[1:] == (B,)


@pytest.mark.parametrize(
    ("form", "text", "id"),
    [
        (MISTRAL, f'[TOOL_CALLS] [{WRITTEN_B[:-1]}, "id": "abcdefghi"}}]', "abcdefghi"),
        (MISTRAL_ARGS, "[TOOL_CALLS]b[CALL_ID]abcdefghi[ARGS]{}", "abcdefghi"),
        (KIMI, "<|tool_call_begin|>functions.b:3<|tool_call_argument_begin|>{}<|tool_call_end|>", "functions.b:3"),
        (COHERE, '<|START_ACTION|>[{"tool_call_id": "0", "tool_name": "b", "parameters": {}}]<|END_ACTION|>', "0"),
    ],
)
def test_the_ids_that_a_model_writes_are_kept(form: KnownFormat, text: str, id: str) -> None:
    (call,) = form.parse(text).calls
    assert (call, call.id) == (B, id)
    assert len(MISTRAL.parse(MISTRAL.write([B])).calls[0].id) == 9  # as its templates want them
    odd = MISTRAL.parse(f'[TOOL_CALLS] [{WRITTEN_B[:-1]}, "id": "call-1"}}]').calls[0].id
    assert (len(odd), odd.isalnum()) == (9, True)


@pytest.mark.parametrize("written", ['{"x": 1.50}', '{"x": 1e3, "x": "caf\\u00e9"}', '{ "b":1,\n"a": {} }', "{}"])
@pytest.mark.parametrize(
    "form", [HERMES, LLAMA, MISTRAL, MISTRAL_ARGS, DEEPSEEK_V3, KIMI, PHI, COHERE, HARMONY], ids=repr
)
def test_arguments_in_json_are_kept_as_written(form: KnownFormat, written: str) -> None:
    text = form.write([ToolCall(name="a", arguments={}, written=written)])
    (call,) = form.parse(text).calls
    assert isinstance(call, ToolCall)
    assert (call.written, call.arguments) == (written, json.loads(written))


BOTH = '{"name": "a", "arguments": {}, "parameters": {"x": 1}}'


@pytest.mark.parametrize(
    ("form", "text", "reason"),
    [
        (HERMES, hermes('{"name": "a", "arguments": {"x": 1'), "must be one JSON object (Expecting"),
        (HERMES, hermes(f"```json\n{WRITTEN_A}\n```"), "must be one JSON object (Expecting value"),
        (HERMES, hermes('{"name": "a", "arguments": {"x": NaN}}'), "(NaN is not JSON)"),
        (HERMES, hermes('{"name": "a", "arguments": "{}"}'), 'needs "name", a string, and "arguments", an object'),
        (HERMES, hermes('{"name": "a", "arguments": {"x": ' + "[" * 9999), "one JSON object (nested too deeply)"),
        (HERMES, hermes(BOTH), 'has its arguments once, in "arguments"; this one has "arguments" and "parameters"'),
        (LLAMA, BOTH, 'has its arguments once, in "parameters"'),
        (LLAMA, '{"name": "a", "parameters": {"x": 1', "must be one JSON object (Expecting"),
        (LLAMA, '{"name": "a", "parameters": 3}', 'needs "name", a string, and "parameters", an object'),
        (LLAMA, '```json\n{"name": "a", "parameters": {}}\n```', "stands alone, without a code fence around it"),
        (LLAMA, f"{WRITTEN_B} and so on", "must be one JSON object (Extra data"),
        (
            QWEN_XML,
            "<tool_call>\n<function=a>\n<parameter=x>\nrm -rf /t",
            "the call breaks off before its end; a tool call",
        ),
        (
            QWEN_XML,
            hermes(WRITTEN_A),
            "name is missing; a tool call is written as <tool_call>\n<function=NAME_OF_TOOL>",
        ),
        (QWEN_XML, '<tool_call>\n<function=a>\n{"x": 1}\n</function>\n</tool_call>', "no parameters that can be read"),
        (LFM, "<|tool_call_start|>[a(1)]<|tool_call_end|>", "an argument has no name; a tool call is written as"),
        (DEEPSEEK_V3, DEEPSEEK_V3.write([A]).replace("[1", "[1["), "arguments must be one JSON object (Expecting"),
        (
            HARMONY,
            '<|channel|>commentary to=browser.search<|message|>{"q": 1}<|call|>',
            "is no recipient browser.search",
        ),
    ],
)
def test_a_malformed_call_says_why_and_keeps_what_was_written(form: KnownFormat, text: str, reason: str) -> None:
    (call,) = form.parse(text).calls
    assert isinstance(call, MalformedCall)
    assert reason in call.reason
    assert call.text.strip() in text


@pytest.mark.parametrize(
    ("form", "text"),
    [
        (HERMES, hermes("nonsense", WRITTEN_B)),
        (HERMES, f"<tool_call>{HALF_A}<tool_call>{WRITTEN_B}</tool_call>"),
        (LLAMA, f"{B_OF_LLAMA}; {HALF_A}"),
        *(
            (one, one.write([A, B]).replace("[1", "[1]]"))
            for one in (MISTRAL, MISTRAL_ARGS, DEEPSEEK_V3, KIMI, PHI, HARMONY)
        ),
        (QWEN_XML, f"<tool_call>\n<function>a</function>\n</tool_call>\n{QWEN_XML.write([B])}"),
        (GLM, f"<tool_call>{{a</tool_call>\n{GLM.write([B])}"),
        (LFM, "<|tool_call_start|>[a(1), b()]<|tool_call_end|>"),
        (GEMMA, f"<|tool_call>call:a{{x:<tool_call|>{GEMMA.write([B])}"),
    ],
)
def test_calls_beside_one_that_is_malformed_are_read(form: KnownFormat, text: str) -> None:
    calls = form.parse(text).calls
    assert [call for call in calls if isinstance(call, ToolCall)] == [B]
    (bad,) = (call for call in calls if isinstance(call, MalformedCall))
    assert bad.reason


@pytest.mark.parametrize(
    ("template", "form"), [("qwen2_5", HERMES), ("qwen3", HERMES), ("llama3", LLAMA), ("mistral", MISTRAL)]
)
def test_the_format_is_the_one_that_reads_what_the_chat_template_renders(template: str, form: KnownFormat) -> None:
    tokenizer = tokenizer_of(template)
    assert call_format_of(tokenizer) is form
    tokenizer.chat_template = {"default": "{{ messages }}", "tool_use": tokenizer.chat_template}
    assert call_format_of(tokenizer) is form


@pytest.mark.parametrize(
    ("template", "form"),
    [
        ('<tool_call>\\n{\\"name\\": <function-name>, \\"arguments\\": <args-json-object>}\\n</tool_call>', HERMES),
        ("Call as <tool_call>\n<function=name>\n<parameter=key>", QWEN_XML),
        ("<|start_header_id|>ipython {{ '<|python_tag|>' }}", LLAMA),
    ],
)
def test_a_template_that_shows_no_calls_is_known_by_its_words(template: str, form: KnownFormat) -> None:
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = template
    assert call_format_of(tokenizer) is form


@pytest.mark.parametrize("template", ["{{ messages }}", "<tool_call>\n[name]", "", None])
def test_a_template_that_asks_for_another_format_is_an_error_that_says_what_to_pass(template: str | None) -> None:
    tokenizer: PreTrainedTokenizerFast = tiny_tokenizer()
    tokenizer.chat_template = template
    with pytest.raises(ModelError, match="pass call_format="):
        call_format_of(tokenizer)


FORCED = [one for one in FORMATS if one.syntax.can_be_forced]


@pytest.mark.parametrize("form", FORCED, ids=repr)
def test_a_grammar_lets_a_model_write_these_calls_and_no_others(form: KnownFormat) -> None:
    xgrammar = pytest.importorskip("xgrammar")
    accepts = pytest.importorskip("xgrammar.testing")._is_grammar_accept_string
    arguments = {"text": "it's a & b", "count": 2, "flag": True, "items": [1, "a"], "map": {"a": None}}
    calls = [ToolCall(name="f", arguments=arguments), ToolCall(name="g.h", arguments={})]
    tags = [form.syntax.tag(name, {**SCHEMA, "additionalProperties": False}) for name in ("f", "g.h")]
    forms = [form.syntax.calls(tags, only_one=False)]
    forms += [form.syntax.text_with_calls(tags, only_one=False)] if form.syntax.trigger else []
    for one, said in zip(forms, ("", "So: "), strict=False):
        grammar = xgrammar.Grammar.from_structural_tag({"type": "structural_tag", "format": one})
        assert accepts(grammar, said + form.write(calls))
        for wrong in (ToolCall(name="g.h", arguments={"other": 1}), ToolCall(name="f", arguments={"count": "many"})):
            assert not accepts(grammar, said + form.write([wrong]))

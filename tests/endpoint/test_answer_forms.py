"""The form that a program asks of an answer: which texts its grammar takes, and what the program gets."""

import json
import logging
from pathlib import Path
from typing import Any

import openai
import pytest
import xgrammar
from embedded_server import server_here
from programs import ADD, ASK, CALL_ADD, opened, saying, trained
from protocols import HI, TOKENIZER, Answer, asked, told_by
from workflow.chat_templates import tokenizer_of
from workflow.scripted_answers import calling
from workflow.template_families import family_tokenizer

from arl.api.errors import RefusedRequestError
from arl.api.fakes import ScriptedEngine
from arl.api.grammar import Grammar
from arl.api.settings.engines import ClientConfig
from arl.api.types import ModelRequest, ModelResponse, SamplingParams
from arl.engine.client.remote_engine import RemoteInferenceEngine
from arl.engine.tiny import TinyShape, write_tiny_model
from arl.workflow.call_formats import ParsedAnswer
from arl.workflow.messages import ToolSpecs

POINT = {"type": "object", "properties": {"x": {"type": "integer"}}, "required": ["x"], "additionalProperties": False}
NAMED = {"name": "point", "schema": POINT, "strict": True}
JSON_SCHEMA = {"type": "json_schema", "json_schema": NAMED}
OTHER = {"type": "function", "function": {"name": "stop", "parameters": {"type": "object", "properties": {}}}}
CALL_STOP = calling("stop")
ADD_BY_NAME = {"type": "function", "function": {"name": "add"}}
ALLOWED = {"type": "allowed_tools", "allowed_tools": {"mode": "required", "tools": [ADD_BY_NAME]}}
OF_RESPONSES = [{"type": "function", **tool["function"]} for tool in (ADD, OTHER)]
OF_ANTHROPIC = [
    {"name": tool["function"]["name"], "input_schema": tool["function"]["parameters"]} for tool in (ADD, OTHER)
]
BOTH = {"chat": [ADD, OTHER], "responses": OF_RESPONSES, "anthropic": OF_ANTHROPIC}
ADDS = ("add", {"a": 1, "b": 2})


def compiled(grammar: Grammar, tokenizer: Any = TOKENIZER) -> Any:
    info = xgrammar.TokenizerInfo.from_huggingface(
        tokenizer, vocab_size=len(tokenizer), stop_token_ids=[tokenizer.eos_token_id]
    )
    compiler = xgrammar.GrammarCompiler(info)
    compile_kind = {
        "json_schema": compiler.compile_json_schema,
        "regex": compiler.compile_regex,
        "structural_tag": compiler.compile_structural_tag,
    }
    return compile_kind[grammar.kind](grammar.text)


def takes(grammar: Grammar, text: str, tokenizer: Any = TOKENIZER) -> bool:
    """Whether a model that decodes under the grammar may say this text and end there."""
    matcher = xgrammar.GrammarMatcher(compiled(grammar, tokenizer))
    ids = tokenizer.encode(text, add_special_tokens=False)
    return all(matcher.accept_token(token) for token in [*ids, tokenizer.eos_token_id])


def said_as(ending: str, *calls: Any) -> Answer:
    return Answer("", ending, calls)


IN_TEXT = {"chat": "stop", "responses": "completed", "anthropic": "end_turn"}
TEXTS: list[tuple[str, dict[str, Any], str, str]] = [
    ("chat", {"response_format": JSON_SCHEMA}, '{"x": 4}', '{"x": "4"}'),
    ("chat", {"response_format": {"type": "json_object"}}, '{"y": [1, {}]}', "[1]"),
    ("chat", {"guided_json": POINT}, '{"x": 4}', "{}"),
    ("chat", {"regex": "[ab]+"}, "abba", "abc"),
    ("chat", {"guided_choice": ["yes", "no"]}, "no", "maybe"),
    ("chat", {"response_format": JSON_SCHEMA, "tool_choice": "none"}, '{"x": 4}', CALL_ADD),
    ("responses", {"text": {"format": {"type": "json_schema", **NAMED}}}, '{"x": 4}', '{"x": "4"}'),
    ("responses", {"text": {"format": {"type": "json_object"}}}, "{}", "[1]"),
    ("anthropic", {"output_format": {"type": "json_schema", "schema": POINT}}, '{"x": 4}', '{"x": "4"}'),
    ("anthropic", {"output_config": {"format": {"type": "json_schema", "schema": POINT}}}, '{"x": 4}', "{}"),
]
CALLS: list[tuple[str, dict[str, Any], str, str, Answer]] = [
    ("chat", {"tool_choice": "required"}, CALL_ADD, "3", said_as("tool_calls", ADDS)),
    ("chat", {"tool_choice": "required"}, f"{CALL_ADD}\n{CALL_STOP}", "", said_as("tool_calls", ADDS, ("stop", {}))),
    ("chat", {"tool_choice": ADD_BY_NAME}, CALL_ADD, CALL_STOP, said_as("stop", ADDS)),
    ("chat", {"tool_choice": ALLOWED}, CALL_ADD, CALL_STOP, said_as("tool_calls", ADDS)),
    (
        "chat",
        {"tool_choice": "required", "parallel_tool_calls": False},
        CALL_ADD,
        f"{CALL_ADD}\n{CALL_ADD}",
        said_as("tool_calls", ADDS),
    ),
    ("responses", {"tool_choice": "required"}, CALL_ADD, "3", said_as("completed", ADDS)),
    ("responses", {"tool_choice": {"type": "function", "name": "add"}}, CALL_ADD, "3", said_as("completed", ADDS)),
    ("anthropic", {"tool_choice": {"type": "any"}}, CALL_ADD, "3", said_as("tool_use", ADDS)),
    ("anthropic", {"tool_choice": {"type": "tool", "name": "add"}}, CALL_ADD, CALL_STOP, said_as("tool_use", ADDS)),
    (
        "anthropic",
        {"tool_choice": {"type": "any", "disable_parallel_tool_use": True}},
        CALL_ADD,
        f"{CALL_ADD}\n{CALL_ADD}",
        said_as("tool_use", ADDS),
    ),
]
CONSTRAINED = [
    *((protocol, fields, good, bad, Answer(good, IN_TEXT[protocol])) for protocol, fields, good, bad in TEXTS),
    *((protocol, {"tools": BOTH[protocol], **fields}, *rest) for protocol, fields, *rest in CALLS),
]


@pytest.mark.parametrize(("protocol", "fields", "good", "bad", "answer"), CONSTRAINED)
async def test_an_answer_is_held_to_the_form_that_was_asked_for_and_read_whole_or_streamed(
    protocol: str, fields: dict[str, Any], good: str, bad: str, answer: Answer
) -> None:
    engine = saying(good)
    for streams in (False, True):
        session, got, error = await asked(protocol, engine, streams=streams, **fields)
        assert error is None
        assert got is not None
        assert got._replace(usage=answer.usage) == answer
        (made,) = session.trajectories(1.0)
        assert trained(made) == [good]
    whole, streamed = (request.sampling.grammar for request in engine.requests)
    assert whole == streamed
    assert whole is not None
    assert (takes(whole, good), takes(whole, bad)) == (True, False)


async def test_with_tools_beside_a_form_the_model_may_call_or_answer_in_the_form() -> None:
    engine = saying(CALL_ADD, '{"x": 1}')
    async with opened(engine) as episode:
        first = (await episode.ask(tools=[ADD], response_format=JSON_SCHEMA)).choices[0].message
        result = {"role": "tool", "tool_call_id": first.tool_calls[0].id, "content": "3"}
        last = (await episode.ask([*ASK, first, result], tools=[ADD], response_format=JSON_SCHEMA)).choices[0]
        (made,) = episode.session.trajectories(1.0)
    assert (first.content, last.message.content, last.finish_reason) == (None, '{"x": 1}', "stop")
    grammar = engine.requests[0].sampling.grammar
    assert grammar == engine.requests[1].sampling.grammar
    assert [takes(grammar, text) for text in (CALL_ADD, '{"x": 1}', "Well.", f"Well. {CALL_ADD}")] == [1, 1, 0, 0]
    assert trained(made) == [CALL_ADD, '{"x": 1}'], "one line of turns, as without a grammar"


THOUGHT = "<think>\nx is 4, {so}\n</think>\n\n"
OPEN = "x is 4\n</think>\n\n"


@pytest.mark.parametrize(
    ("template", "more", "good", "bad"),
    [
        ("qwen3", {}, ['{"x": 4}', f'{THOUGHT}{{"x": 4}}'], ["Four.", f"{THOUGHT}Four.", "<think>", THOUGHT]),
        ("qwen3", {"chat_template_kwargs": {"enable_thinking": False}}, ['{"x": 4}'], [f'{THOUGHT}{{"x": 4}}']),
        ("deepseek_r1", {}, [f'{OPEN}{{"x": 4}}'], ['{"x": 4}', f"{OPEN}Four."]),
        ("qwen2_5", {}, ['{"x": 4}'], [f'{THOUGHT}{{"x": 4}}']),
    ],
)
async def test_a_model_that_thinks_may_think_before_the_form_begins(
    template: str, more: dict[str, Any], good: list[str], bad: list[str]
) -> None:
    tokenizer = tokenizer_of(template)
    end = tokenizer.eos_token
    engine = ScriptedEngine(lambda _: tokenizer.encode(good[-1] + end, add_special_tokens=False))
    async with opened(engine, tokenizer) as episode:
        said = (await episode.ask(response_format=JSON_SCHEMA, extra_body=more)).choices[0].message
    assert json.loads(said.content) == {"x": 4}
    assert ("x is 4" in (said.model_extra.get("reasoning_content") or "")) == ("x is 4" in good[-1])
    grammar = engine.requests[0].sampling.grammar
    assert grammar is not None
    assert [takes(grammar, text, tokenizer) for text in good] == [True] * len(good)
    assert [takes(grammar, text, tokenizer) for text in bad] == [False] * len(bad)


TAGGED = {
    "gpt-oss": "<|channel|>analysis<|message|>hm<|end|><|start|>assistant<|channel|>final<|message|>",
    "gemma4": "<|channel>thought\nhm<channel|>",
    "mistral-small-4": "[THINK]hm[/THINK]",
    "minimax-m2": "hm\n</think>\n\n",  # the prompt has begun it
    "seed-oss": "<seed:think>hm</seed:think>",
}


@pytest.mark.parametrize(("family", "thought"), TAGGED.items())
async def test_thinking_is_told_from_the_form_by_the_tags_of_the_template(family: str, thought: str) -> None:
    tokenizer, good = family_tokenizer(family), f'{thought}{{"x": 4}}'
    engine = ScriptedEngine.saying(tokenizer, good)
    _, answer, _ = await asked("chat", engine, tokenizer=tokenizer, tools=[], response_format=JSON_SCHEMA)
    assert answer is not None
    assert (answer.text, answer.thought) == ('{"x": 4}', "hm")
    grammar = engine.requests[0].sampling.grammar
    assert grammar is not None
    assert [takes(grammar, text, tokenizer) for text in (good, f"{thought}Four.")] == [True, False]


@pytest.mark.parametrize(("template", "before"), [("qwen3", "<think>\n"), ("deepseek_r1", "")])
async def test_thinking_ends_where_its_budget_does(template: str, before: str) -> None:
    tokenizer = tokenizer_of(template)
    end = tokenizer.eos_token
    engine = ScriptedEngine(lambda _: tokenizer.encode(f"{before}hm</think>So.{end}", add_special_tokens=False))
    _, answer, _ = await asked(
        "anthropic", engine, tokenizer=tokenizer, tools=[], thinking={"type": "enabled", "budget_tokens": 5}
    )
    assert answer is not None
    assert (answer.text, answer.thought) == ("So.", "hm")
    grammar = engine.requests[0].sampling.grammar
    assert grammar is not None
    matcher = xgrammar.GrammarMatcher(compiled(grammar, tokenizer))
    bits = xgrammar.allocate_token_bitmask(1, len(tokenizer))
    num_allowed = []
    for text in [*(["<think>"] if before else []), *"abcde"]:
        assert matcher.accept_token(tokenizer.encode(text, add_special_tokens=False)[0])
        matcher.fill_next_token_bitmask(bits, 0)
        num_allowed.append(sum(int(word).bit_count() for word in (bits[0].numpy().view("uint32"))))
    assert num_allowed[-1] == 2, "only the closing tag, as one token or as the first of its letters"
    assert min(num_allowed[:-1]) > 200
    assert matcher.accept_string("</think>So long: <tool_call>")


@pytest.mark.parametrize("holds", [False, True])
@pytest.mark.parametrize("protocol", list(BOTH))
async def test_calls_of_strict_tools_are_held_to_their_schemas_if_the_endpoint_is_told_so(
    protocol: str, holds: bool
) -> None:
    tools = {
        "chat": [{"type": "function", "function": {**ADD["function"], "strict": True}}, OTHER],
        "responses": [{**OF_RESPONSES[0], "strict": True}, OF_RESPONSES[1]],
        "anthropic": [{**OF_ANTHROPIC[0], "strict": True}, OF_ANTHROPIC[1]],
    }
    engine = saying("Well.")
    await asked(protocol, engine, options={"constrains_strict_tools": holds}, tools=tools[protocol])
    grammar = engine.requests[0].sampling.grammar
    if not holds:
        assert grammar is None
        return
    assert grammar is not None
    assert all(takes(grammar, text) for text in ("Well.", f"So: {CALL_ADD} and {CALL_STOP}."))
    assert not any(takes(grammar, text) for text in (calling("add", a="1"), calling("divide"), "<tool_call>?"))


async def test_forced_calls_are_written_as_the_model_writes_them() -> None:
    tokenizer = tokenizer_of("llama3")
    said = '{"name": "add", "parameters": {"a": 1, "b": 2}}; {"name": "stop", "parameters": {}}'
    engine = ScriptedEngine(lambda _: tokenizer.encode(f"{said}<|eot_id|>", add_special_tokens=False))
    async with opened(engine, tokenizer) as episode:
        answer = (await episode.ask(tools=[ADD, OTHER], tool_choice="required")).choices[0]
        with pytest.raises(Exception, match="LLAMA") as refused:
            await episode.ask(
                tools=[ADD], tool_choice={**ALLOWED, "allowed_tools": {**ALLOWED["allowed_tools"], "mode": "auto"}}
            )
    assert [call.function.name for call in answer.message.tool_calls] == ["add", "stop"]
    assert answer.finish_reason == "tool_calls"
    assert told_by(refused.value)[2] == "tool_choice"
    grammar = engine.requests[0].sampling.grammar
    assert grammar is not None
    assert takes(grammar, said, tokenizer)
    assert not takes(grammar, CALL_ADD, tokenizer)


async def test_a_schema_of_a_tool_that_is_not_strict_holds_calls_as_far_as_servers_can() -> None:
    fields = {"x": {"type": "array", "items": {"type": "number", "multipleOf": 2}, "uniqueItems": True, "minItems": 1}}
    tool = {"type": "function", "function": {"name": "add", "parameters": {"type": "object", "properties": fields}}}
    engine = saying(calling("add", x=[1, 1]))
    _, answer, _ = await asked("chat", engine, tools=[tool], tool_choice="required")
    assert answer is not None
    assert answer.calls == (("add", {"x": [1, 1]}),)
    grammar = engine.requests[0].sampling.grammar
    assert grammar is not None
    assert "uniqueItems" not in grammar.text
    assert [takes(grammar, calling("add", x=x)) for x in ([1, 1], [], ["1"])] == [True, False, False]


class Shouted:
    """A format of a user's own that does not say how its calls are written."""

    def __repr__(self) -> str:
        return "SHOUTED"

    def parse(self, text: str, tools: ToolSpecs = ()) -> ParsedAnswer:
        return ParsedAnswer(content=text)


DEEP = {"type": "object", "properties": {"x": {"type": "array", "items": {"type": "integer"}, "uniqueItems": True}}}


def schema(given: Any) -> dict[str, Any]:
    return {"response_format": {"type": "json_schema", "json_schema": {"name": "n", "schema": given}}}


WHERE = "response_format.json_schema"
FAULTY: list[tuple[str, dict[str, Any], str, str]] = [
    ("chat", schema("point"), f"{WHERE}.schema", "must be a JSON schema"),
    ("chat", schema(DEEP), f"{WHERE}.schema.properties.x.uniqueItems", "cannot be enforced"),
    ("chat", schema({"type": "string", "pattern": "a", "maxLength": 1}), f"{WHERE}.schema.maxLength", "beside pattern"),
    ("chat", schema({"allOf": [{"type": "object"}, POINT]}), f"{WHERE}.schema.allOf", "cannot be enforced"),
    ("chat", {"response_format": {"type": "json_schema"}}, WHERE, "is missing"),
    ("chat", {"response_format": {"type": "grammar"}}, "response_format.type", "must be 'text', 'json_object'"),
    ("chat", {"regex": ""}, "regex", "a regular expression"),
    ("chat", {"guided_choice": ["a", 1]}, "guided_choice", "a list of texts"),
    ("chat", {"regex": "a", **schema(POINT)}, "regex", "contradicts response_format"),
    ("chat", {"tool_choice": "sometimes"}, "tool_choice", 'must be "auto"'),
    ("chat", {"tool_choice": "required", "tools": []}, "tool_choice", "there are no tools"),
    ("chat", {"tool_choice": {"type": "function", "function": {"name": "sub"}}}, "tool_choice", "not among the tools"),
    ("responses", {"tool_choice": {"type": "web_search"}}, "tool_choice", 'must be "auto"'),
    ("responses", {"text": {"format": {"type": "json_schema"}}}, "text.format.schema", "must be a JSON schema"),
    ("anthropic", {"tool_choice": {"type": "tool", "name": "sub"}}, "tool_choice", "not among the tools"),
    ("anthropic", {"tool_choice": {"type": "some"}}, "tool_choice.type", "must be 'auto', 'any'"),
    (
        "anthropic",
        {"output_config": {"format": {"schema": POINT}}, "output_format": {"schema": POINT}},
        "output_format",
        "contradicts output_config.format",
    ),
    (
        "anthropic",
        {"output_format": {"schema": POINT}, "messages": [*HI, {"role": "assistant", "content": "{"}]},
        "output_format",
        "contradicts a prefilled answer",
    ),
]


@pytest.mark.parametrize(("protocol", "fields", "param", "reason"), FAULTY)
async def test_a_form_that_is_wrong_or_cannot_be_enforced_is_refused_by_its_place(
    protocol: str, fields: dict[str, Any], param: str, reason: str
) -> None:
    engine = saying("never")
    _, _, error = await asked(protocol, engine, **fields)
    message = told_by(error)[0]
    assert message.startswith(param)
    assert reason in message
    assert (error.status_code, engine.requests) == (400, [])


@pytest.mark.parametrize(
    ("fields", "param"),
    [({"tool_choice": "required"}, "tool_choice"), ({"response_format": JSON_SCHEMA}, "response_format")],
)
async def test_calls_in_a_format_that_does_not_say_how_it_is_written_cannot_be_forced(
    fields: dict[str, Any], param: str
) -> None:
    engine = saying("never")
    _, _, error = await asked("chat", engine, options={"call_format": Shouted()}, **fields)
    assert (error.status_code, told_by(error)[2], "SHOUTED" in told_by(error)[0]) == (400, param, True)


def without_grammars(request: ModelRequest) -> ModelResponse | list[int]:
    if request.sampling.grammar is not None:
        raise RefusedRequestError("this engine cannot decode under a grammar")
    return TOKENIZER.encode("Well.<|im_end|>", add_special_tokens=False)


@pytest.mark.parametrize(
    ("protocol", "fields", "param"),
    [
        ("chat", {"response_format": JSON_SCHEMA}, "response_format"),
        ("chat", {"tool_choice": "required"}, "tool_choice"),
        ("chat", {"guided_regex": "a"}, "guided_regex"),
        ("responses", {"text": {"format": {"type": "json_object"}}}, "text.format"),
        ("anthropic", {"output_config": {"format": {"schema": POINT}}}, "output_config.format"),
    ],
)
async def test_an_engine_that_cannot_decode_under_a_grammar_is_a_refusal_or_a_warning(
    protocol: str, fields: dict[str, Any], param: str, caplog: pytest.LogCaptureFixture
) -> None:
    session, _, error = await asked(protocol, ScriptedEngine(without_grammars), **fields)
    assert error.status_code == 400
    assert told_by(error)[0] == f"{param} cannot be honoured here: this engine cannot decode under a grammar"
    assert (session.counts.refused, session.turns()) == (1, ())
    for streams in (False, True):
        session, answer, _ = await asked(
            protocol, ScriptedEngine(without_grammars), streams=streams, options={"unsupported": "ignore"}, **fields
        )
        assert answer is not None
        assert (answer.text, session.metrics["fields_ignored"], session.metrics["calls"]) == ("Well.", 1, 1)
    assert [record.levelno for record in caplog.records] == [logging.WARNING] * 2


SHAPE = TinyShape(hidden_size=32, intermediate_size=64, num_layers=1, num_heads=2, num_kv_heads=2)


async def test_an_untrained_model_calls_a_tool_and_a_grammar_that_cannot_be_compiled_is_the_fields_fault(
    tmp_path: Path,
) -> None:
    model = write_tiny_model(tmp_path / "model", shape=SHAPE)
    with server_here(str(model)) as url:
        async with (
            RemoteInferenceEngine([url], ClientConfig()) as engine,
            opened(engine, sampling=SamplingParams(max_new_tokens=400)) as episode,
        ):
            said = (await episode.ask(tools=[ADD], tool_choice="required", parallel_tool_calls=False, seed=1)).choices[
                0
            ]
            with pytest.raises(openai.BadRequestError, match="regex cannot be honoured here") as refused:
                await episode.ask(extra_body={"regex": "(a"})
            schema = {"type": "json_schema", "json_schema": {"name": "n", "schema": {"type": "objekt"}}}
            with pytest.raises(openai.BadRequestError, match="response_format cannot be honoured here"):
                await episode.ask(response_format=schema)
            (made,) = episode.session.trajectories(1.0)
    (call,) = said.message.tool_calls
    assert (call.function.name, said.finish_reason) == ("add", "tool_calls")
    assert set(json.loads(call.function.arguments)) <= {"a", "b"}
    assert (refused.value.param, episode.session.counts.refused) == ("regex", 2)
    assert made.kept_ids is not None
    assert (made.kept_ids.index[made.loss_mask] >= 0).all(), "each sampled token has what it was sampled among"
    assert made.kept_ids.allows(made.token_ids)[made.loss_mask].all()
    assert TOKENIZER.decode(made.token_ids[made.loss_mask].tolist()).startswith('<tool_call>\n{"name": "add"')

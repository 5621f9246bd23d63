"""What holds for every protocol, asked with the protocol's own SDK."""

from dataclasses import replace
from typing import Any

import pytest
from programs import CALL_ADD, saying, shown, trained
from protocols import DEFAULTS, FUNCTION, HI, SHORT, TOKENIZER, Answer, asked, told_by
from workflow.chat_templates import tokenizer_of
from workflow.scripted_answers import calling

from arl.api.errors import ServerError
from arl.workflow.conversation import Conversation
from arl.workflow.tools import Tool

SOUND = [{"role": "user", "content": [{"type": "input_audio", "input_audio": {"data": "", "format": "wav"}}]}]
whole_or_streamed = pytest.mark.parametrize("streams", [False, True], ids=["whole", "streamed"])


BOTH, LONG, THOUGHTFUL = f"I add.{CALL_ADD}", "A long answer.", "<think>\nHm.\n</think>\n\nSo."
ADDS = ("add", {"a": 1, "b": 2})
HARMLESS_IN_CHAT = [
    {"user": "me", "metadata": {"run": "1"}, "store": False, "service_tier": "auto", "seed": None, "top_logprobs": 0},
    {"presence_penalty": 0, "frequency_penalty": 0.0, "logit_bias": {}, "response_format": {"type": "text"}},
    {"reasoning_effort": "low", "verbosity": "low", "tool_choice": None, "parallel_tool_calls": True},
]
ANSWERS: list[tuple[str, str, dict[str, Any], Answer]] = [
    ("chat", BOTH, {}, Answer("I add.", "tool_calls", (ADDS,))),
    ("chat", LONG, {"max_completion_tokens": 3}, Answer("A l", "length")),
    ("chat", CALL_ADD, {"tool_choice": "none"}, Answer(CALL_ADD, "stop")),
    ("chat", CALL_ADD * 2, {}, Answer("", "tool_calls", (ADDS, ADDS))),
    ("chat", CALL_ADD * 2, {"parallel_tool_calls": False}, Answer("", "tool_calls", (ADDS,))),
    ("chat", THOUGHTFUL, {}, Answer("So.", "stop", (), "Hm.")),
    ("chat", "Well\nSo:", {"stop": ["\nSo:", "never"]}, Answer("Well", "stop")),
    ("chat", half := CALL_ADD[:30], {}, Answer(half, "stop")),
    *(("chat", "fine", fields, Answer("fine", "stop")) for fields in HARMLESS_IN_CHAT),
    ("responses", BOTH, {}, Answer("I add.", "completed", (ADDS,))),
    ("responses", LONG, {"max_output_tokens": 3}, Answer("A l", "max_output_tokens")),
    ("responses", CALL_ADD, {"tool_choice": "none"}, Answer(CALL_ADD, "completed")),
    ("responses", CALL_ADD * 2, {"parallel_tool_calls": False}, Answer("", "completed", (ADDS,))),
    ("responses", THOUGHTFUL, {}, Answer("So.", "completed", (), "Hm.")),
    ("responses", "fine", {"reasoning": {"effort": "low"}, "text": {"verbosity": "low"}}, Answer("fine", "completed")),
    ("responses", "fine", {"metadata": {}, "include": ["reasoning.encrypted_content"]}, Answer("fine", "completed")),
    ("anthropic", BOTH, {}, Answer("I add.", "tool_use", (ADDS,))),
    ("anthropic", LONG, {"max_tokens": 3}, Answer("A l", "max_tokens")),
    ("anthropic", CALL_ADD, {"tool_choice": {"type": "none"}}, Answer(CALL_ADD, "end_turn")),
    ("anthropic", CALL_ADD * 2, {"tool_choice": {"disable_parallel_tool_use": True}}, Answer("", "tool_use", (ADDS,))),
    ("anthropic", THOUGHTFUL, {}, Answer("So.", "end_turn")),
    ("anthropic", THOUGHTFUL, {"thinking": {"type": "adaptive"}}, Answer("So.", "end_turn", (), "Hm.")),
    ("anthropic", "one. two", {"stop_sequences": ["two", "."]}, Answer("one", "stop_sequence .")),
    ("anthropic", "fine", {"metadata": {"user_id": "1"}, "service_tier": "auto"}, Answer("fine", "end_turn")),
    ("anthropic", "fine", {"cache_control": SHORT}, Answer("fine", "end_turn")),
]


@whole_or_streamed
@pytest.mark.parametrize(("protocol", "said", "fields", "answer"), ANSWERS)
async def test_a_program_gets_what_the_model_said_and_its_turn_is_trained(
    protocol: str, said: str, fields: dict[str, Any], answer: Answer, streams: bool
) -> None:
    engine = saying(said)
    session, got, _ = await asked(protocol, engine, streams=streams, **fields)
    (turn,) = session.turns()
    (made,) = session.trajectories(1.0)
    assert got is not None
    usage = (len(engine.requests[0].input_ids), len(turn.output_ids))
    assert got._replace(faults=()) == answer._replace(usage=usage)
    assert trained(made) == [answer.text if said == LONG else said]
    assert (made.is_truncated, session.counts.answered) == (said == LONG, 1)
    assert ("Add two numbers." in shown(engine.requests[0])) == ("none" not in str(fields.get("tool_choice")))


def by(role: str, content: Any) -> dict[str, Any]:
    return {"role": role, "content": content}


def text(said: str, kind: str = "text", **more: Any) -> dict[str, Any]:
    return {"type": kind, "text": said, **more}


USE = {"type": "tool_use", "id": "1", "name": "add", "input": {"a": 1}}
FAILED = {"type": "tool_result", "tool_use_id": "1", "is_error": True, "content": [text("no b")]}
THINKING = {"type": "thinking", "thinking": "1?"}
REASONING = {"type": "reasoning", "id": "r", "summary": [], "content": [text("Ann or Bob?", "reasoning_text")]}
NAMED = [by("user", [text("A name?", "input_text")]), REASONING, by("assistant", [text("Ann", "output_text")]), *HI]
FAILING = [*HI, by("assistant", [THINKING, text("I add."), USE]), by("user", [FAILED, text("Well?")])]
SYSTEM, USER, MODEL = (f"<|im_start|>{role}\n" for role in ("system", "user", "assistant"))
END = "<|im_end|>\n"
RESULT = "<tool_response>\nerror: no b\n</tool_response>"
SHOWN: list[tuple[str, dict[str, Any], tuple[str, ...]]] = [
    ("chat", {"messages": [by("user", [text("one"), text("two")])]}, (USER, "one\ntwo")),
    ("chat", {"messages": [by("developer", "Be kind."), *HI]}, (SYSTEM, "Be kind.", END, USER, "hi")),
    ("responses", {"instructions": "Be brief."}, (SYSTEM, "Be brief.", END, USER, "hi")),
    ("responses", {"input": NAMED}, (USER, "A name?", END, MODEL, "Ann or Bob?Ann", END, USER, "hi")),
    ("anthropic", {"system": [text("Be kind.", cache_control=SHORT)]}, (SYSTEM, "Be kind.", END, USER, "hi")),
    (
        "anthropic",
        {"messages": FAILING},
        (USER, "hi", END, MODEL, "1?I add.\n", calling("add", a=1), END, USER, RESULT, END, USER, "Well?"),
    ),
]


@pytest.mark.parametrize(("protocol", "fields", "prompt"), SHOWN)
async def test_the_model_is_shown_what_was_said_in_the_templates_words(
    protocol: str, fields: dict[str, Any], prompt: tuple[str, ...]
) -> None:
    engine = saying("a")
    await asked(protocol, engine, tools=[], **fields)
    assert shown(engine.requests[0]) == "".join((*prompt, END, MODEL))


def function(**more: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": "add", **more}}


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"description": "", "parameters": {}},
        {"parameters": {"type": "object"}, "strict": True, "description": None},
        {"parameters": FUNCTION["parameters"], "description": "Add two numbers."},
    ],
)
async def test_a_tool_is_shown_alike_to_models_of_every_protocol_and_in_conversations(fields: dict[str, Any]) -> None:
    schema = fields.get("parameters")
    of_anthropic = {name: value for name, value in fields.items() if name != "parameters"} | {"input_schema": schema}
    ways = {
        "chat": function(**fields),
        "responses": {"type": "function", "name": "add", **fields},
        "anthropic": {"name": "add", **of_anthropic},
    }
    prompts = set[str]()
    for protocol, tool in ways.items():
        engine = saying("a")
        await asked(protocol, engine, tools=[tool])
        prompts.add(shown(engine.requests[0]))
    parameters = schema or {"type": "object", "properties": {}}
    own = Tool.from_schema(sum, name="add", description=fields.get("description") or "", parameters=parameters)
    await Conversation(TOKENIZER, HI, tools=[own]).agenerate(engine := saying("a"), DEFAULTS)
    assert prompts == {shown(engine.requests[0])}


GIVEN, LAST = "function.arguments", "messages[1].content[0]"
ABSENT: Any = object()


def using(arguments: Any) -> dict[str, Any]:
    """A message with a call; without arguments, if they are absent."""
    call = {"name": "add", "arguments": arguments} if arguments is not ABSENT else {"name": "add"}
    return {"role": "assistant", "content": "", "tool_calls": [{"id": "1", "type": "function", "function": call}]}


def using_item(arguments: Any) -> dict[str, Any]:
    return {"type": "function_call", "call_id": "1", "name": "add", "arguments": arguments}


EMPTY: list[tuple[str, dict[str, Any]]] = [
    *(("chat", {"messages": [*HI, using(given), *HI]}) for given in ("{}", "", "null", None, ABSENT, {})),
    *(("responses", {"input": [*HI, using_item(given), *HI]}) for given in ("{}", "", None)),
    *(("anthropic", {"messages": [*HI, by("assistant", [{**USE, "input": given}]), *HI]}) for given in ({}, None)),
]


@pytest.mark.parametrize(("protocol", "fields"), EMPTY)
async def test_a_call_without_arguments_has_none_in_whatever_form_it_is_sent(
    protocol: str, fields: dict[str, Any]
) -> None:
    engine = saying("a")
    await asked(protocol, engine, tools=[], **fields)
    assert calling("add") in shown(engine.requests[0])


ANSWERED = {"type": "function_call_output", "call_id": "1", "output": "3"}
LEFT_OUT: list[tuple[str, dict[str, Any], str | None]] = [
    ("chat", {"messages": [*HI, {"role": "tool", "tool_call_id": "1", "content": "3"}]}, "messages"),
    ("responses", {"input": [*HI, ANSWERED]}, "input"),
    ("anthropic", {"messages": [*HI, by("user", [{**FAILED, "content": "3"}])]}, None),
]


@pytest.mark.parametrize(("protocol", "fields", "param"), LEFT_OUT)
async def test_a_message_that_the_template_leaves_out_is_refused_by_its_role(
    protocol: str, fields: dict[str, Any], param: str | None
) -> None:
    engine = saying("never")
    _, _, error = await asked(protocol, engine, tokenizer=tokenizer_of("deepseek_r1"), tools=[], **fields)
    message, _, named = told_by(error)
    assert (error.status_code, named, engine.requests) == (400, param, [])
    assert message.startswith("message 1 is of role 'tool'")


NUCLEUS = {"temperature": 0.2, "top_p": 0.5}


@pytest.mark.parametrize(
    ("protocol", "fields", "sampling"),
    [
        ("chat", {}, {}),
        ("chat", {"max_tokens": 9, **NUCLEUS}, {"max_new_tokens": 9, **NUCLEUS}),
        ("chat", {"min_p": 0, "top_k": 5, "stop": "x", "seed": 4}, {"min_p": 0, "top_k": 5, "stop": ("x",), "seed": 4}),
        ("chat", {"stop_token_ids": [3], "ignore_eos": True}, {"stop_token_ids": (3,), "ignore_eos": True}),
        ("responses", {"max_output_tokens": 9, **NUCLEUS}, {"max_new_tokens": 9, **NUCLEUS}),
        ("anthropic", {"max_tokens": 9, **NUCLEUS}, {"max_new_tokens": 9, **NUCLEUS}),
        ("anthropic", {"top_k": 5, "stop_sequences": ["x"]}, {"top_k": 5, "stop": ("x",)}),
    ],
)
async def test_a_call_is_sampled_as_it_says_and_else_as_the_proxy_says(
    protocol: str, fields: dict[str, Any], sampling: dict[str, Any]
) -> None:
    engine = saying("a")
    await asked(protocol, engine, **fields)
    assert engine.requests[0].sampling == replace(DEFAULTS, **sampling)


@pytest.mark.parametrize(
    ("protocol", "fields", "param", "reason"),
    [
        ("chat", {"temperature": -0.1}, "temperature", "must be"),
        ("chat", {"top_p": 0}, "top_p", "must be"),
        ("chat", {"max_tokens": 0}, "max_tokens", "at least 1"),
        ("chat", {"n": 0}, "n", "at least 1"),
        ("chat", {"seed": -1}, "seed", "at least 0"),
        ("chat", {"stop": [1]}, "stop", "list of strings"),
        ("chat", {"stream": "yes"}, "stream", "true or false"),
        ("chat", {"tools": [{"type": "web_search"}]}, "tools[0].type", "must be 'function'"),
        ("chat", {"tools": [function(parameters="a")]}, "tools[0].function.parameters", "a JSON object"),
        ("chat", {"tools": [function(returns={})]}, "tools[0].function.returns", "not known here"),
        ("chat", {"frequency_penalty": 0.5}, "frequency_penalty", "training could not follow it"),
        ("chat", {"logit_bias": {"7": 1}}, "logit_bias", "training could not follow it"),
        ("chat", {"top_logprobs": 2}, "top_logprobs", "of the sampled tokens alone"),
        ("chat", {"modalities": ["text", "audio"]}, "modalities", "reads and writes text"),
        ("chat", {"functions": [{"name": "add"}]}, "functions", "send tools"),
        ("chat", {"chat_template_kwargs": {"tokenize": True}}, "chat_template_kwargs.tokenize", "reads no option"),
        ("chat", {"audio": {"voice": "alloy"}}, "audio", "not known here"),
        ("chat", {"messages": []}, "messages", "not empty"),
        ("chat", {"messages": [{"role": "robot", "content": "?"}]}, "messages[0].role", "must be one of"),
        ("chat", {"messages": SOUND}, "messages[0].content[0]", "cannot be shown"),
        ("chat", {"messages": [{"role": "user", "content": None}]}, "messages[0].content", "must be a string"),
        ("chat", {"messages": [{"role": "assistant", "tool_calls": [{}]}]}, "messages[0].tool_calls[0]", "a call"),
        ("chat", {"messages": [*HI, using("not json {}")]}, f"messages[1].tool_calls[0].{GIVEN}", "a JSON object"),
        ("chat", {"messages": [*HI, using([1])]}, f"messages[1].tool_calls[0].{GIVEN}", "a JSON object"),
        ("responses", {"input": [using_item("[1]")]}, "input[0].arguments", "a JSON object"),
        (
            "anthropic",
            {"messages": [*HI, by("assistant", [{**USE, "input": [1]}]), *HI]},
            f"{LAST}.input",
            "a JSON object",
        ),
        ("responses", {"tools": [{"type": "web_search"}]}, "tools[0]", "there are no hosted tools"),
        ("responses", {"background": True}, "background", "while the program waits"),
        ("responses", {"conversation": "conv_1"}, "conversation", "OpenAI keeps"),
        ("responses", {"prompt": {"id": "pmpt_1"}}, "prompt", "OpenAI keeps"),
        ("responses", {"truncation": "auto"}, "truncation", "the program decides"),
        ("responses", {"include": ["message.output_text.logprobs"]}, "include", "cannot be honoured"),
        ("responses", {"input": [{"type": "web_search_call", "id": "1"}]}, "input[0]", "not known here"),
        ("responses", {"input": [{"role": "user", "content": [{"type": "input_file"}]}]}, "input[0].content[0]", ""),
        ("responses", {"input": [{"role": "robot", "content": "hi"}]}, "input[0].role", "must be user"),
        ("anthropic", {"tools": [{"type": "web_search_20250305"}]}, "tools[0]", "own tools are not available"),
        ("anthropic", {"thinking": {"type": "enabled", "budget_tokens": 200}}, "thinking.budget_tokens", "below max_"),
        ("anthropic", {"thinking": {"type": "enabled"}}, "thinking.budget_tokens", "at least 1"),
        ("anthropic", {"thinking": {"type": "deep"}}, "thinking.type", "'adaptive', 'disabled' or 'enabled'"),
        ("anthropic", {"container": "c"}, "container", "runs no code"),
        ("anthropic", {"mcp_servers": [{"name": "m"}]}, "mcp_servers", "the program calls"),
        ("anthropic", {"messages": [*HI, {"role": "assistant", "content": [USE]}]}, "messages", "answer the calls"),
        ("anthropic", {"messages": [*HI, {"role": "assistant", "content": ""}]}, "messages", "without text"),
        (
            "anthropic",
            {"messages": [{"role": "user", "content": [{"type": "document"}]}]},
            "messages[0].content[0]",
            "",
        ),
        ("anthropic", {"messages": [{"role": "robot", "content": "hi"}]}, "messages[0].role", "must be user"),
        ("anthropic", {"messages": []}, "messages", "is empty"),
        ("anthropic", {"max_tokens": None}, "max_tokens", "is missing"),
        ("anthropic", {"no_such_field": 1}, "no_such_field", "not known here"),
    ],
)
async def test_a_field_that_cannot_be_honoured_is_refused_by_its_name(
    protocol: str, fields: dict[str, Any], param: str, reason: str
) -> None:
    engine = saying("never")
    session, _, error = await asked(protocol, engine, **fields)
    message, kind, named = told_by(error)
    assert message.startswith(param)
    assert reason in message
    assert (error.status_code, kind) == (400, "invalid_request_error")
    assert named == (None if protocol == "anthropic" else param)
    assert (engine.requests, session.counts.refused) == ([], 1)


@whole_or_streamed
@pytest.mark.parametrize(
    ("protocol", "unauthorized", "overloaded"),
    [
        ("chat", "invalid_request_error", "server_error"),
        ("responses", "invalid_request_error", "server_error"),
        ("anthropic", "authentication_error", "overloaded_error"),
    ],
)
async def test_a_wrong_key_and_an_engine_that_is_down_are_errors_in_the_protocols_shape(
    protocol: str, unauthorized: str, overloaded: str, streams: bool
) -> None:
    engine = saying(ServerError("all servers are down"))
    _, _, error = await asked(protocol, engine, key="arl-wrong", streams=streams)
    assert (error.status_code, told_by(error)[1], engine.requests) == (401, unauthorized, [])
    session, _, error = await asked(protocol, engine, streams=streams)
    assert (error.status_code, session.counts.failed) == (503, 1)
    assert told_by(error)[:2] == ("all servers are down", overloaded)

"""What holds for every protocol, asked with the protocol's own SDK."""

import json
from collections.abc import Awaitable, Callable
from typing import Any, NamedTuple

import anthropic
import openai
import pytest
from programs import ADD, CALL_ADD, CERTIFICATES, saying, shown, trained
from workflow.scripted_answers import TOKENIZER

from arl.api.errors import ServerError
from arl.api.scripted import ScriptedEngine
from arl.api.types import SamplingParams
from arl.workflow.proxy.openai_proxy import OpenAIProxy
from arl.workflow.proxy.session import EpisodeSession

HI: Any = [{"role": "user", "content": "hi"}]
IMAGE = [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "data:"}}]}]
DEFAULTS = SamplingParams(max_new_tokens=200, temperature=0.7, min_p=0.1)
DISHONOURED = {
    "response_format": {"type": "json_object"}, "frequency_penalty": 0.5, "presence_penalty": -0.5,
    "logit_bias": {"7": 1}, "top_logprobs": 2, "modalities": ["text", "audio"], "functions": [{"name": "add"}],
}  # fmt: skip
FUNCTION: dict[str, Any] = {**ADD["function"], "strict": True}


class Answer(NamedTuple):
    text: str
    calls: list[tuple[str, Any]]
    ending: str | None


async def by_chat(session: EpisodeSession, key: str, has_tool: bool, streams: bool, fields: Any) -> Answer:
    asked: Any = {"messages": HI, "tools": [{"type": "function", "function": FUNCTION}] if has_tool else openai.omit}
    async with openai_client(session, key) as client:
        if streams:
            async with client.chat.completions.stream(model="any", **asked, extra_body=fields) as stream:
                choice = (await stream.get_final_completion()).choices[0]
        else:
            choice = (await client.chat.completions.create(model="any", **asked, extra_body=fields)).choices[0]
    calls: Any = choice.message.tool_calls or ()
    made = [(call.function.name, json.loads(call.function.arguments)) for call in calls]
    return Answer(choice.message.content or "", made, choice.finish_reason)


async def by_responses(session: EpisodeSession, key: str, has_tool: bool, streams: bool, fields: Any) -> Answer:
    asked: Any = {"input": "hi", "tools": [{"type": "function", **FUNCTION}] if has_tool else openai.omit}
    async with openai_client(session, key) as client:
        if streams:
            async with client.responses.stream(model="any", **asked, extra_body=fields) as stream:
                response: Any = await stream.get_final_response()
        else:
            response = await client.responses.create(model="any", **asked, extra_body=fields)
    made = [(item.name, json.loads(item.arguments)) for item in response.output if item.type == "function_call"]
    details = response.incomplete_details
    return Answer(response.output_text, made, details.reason if details else response.status)


async def by_anthropic(session: EpisodeSession, key: str, has_tool: bool, streams: bool, fields: Any) -> Answer:
    tool = {"name": "add", "description": FUNCTION["description"], "input_schema": FUNCTION["parameters"]}
    asked: Any = {"max_tokens": 200, "messages": HI, "tools": [tool] if has_tool else anthropic.omit}
    http = anthropic.DefaultAsyncHttpxClient(verify=CERTIFICATES)
    async with anthropic.AsyncAnthropic(base_url=session.url, api_key=key, max_retries=0, http_client=http) as client:
        if streams:
            async with client.messages.stream(model="any", **asked, extra_body=fields) as stream:
                message: Any = await stream.get_final_message()
        else:
            message = await client.messages.create(model="any", **asked, extra_body=fields)
    made = [(block.name, block.input) for block in message.content if block.type == "tool_use"]
    return Answer("".join(block.text for block in message.content if block.type == "text"), made, message.stop_reason)


def openai_client(session: EpisodeSession, key: str) -> openai.AsyncOpenAI:
    http = openai.DefaultAsyncHttpxClient(verify=CERTIFICATES)
    return openai.AsyncOpenAI(base_url=session.base_url, api_key=key, max_retries=0, http_client=http)


PROTOCOLS: dict[str, Callable[[EpisodeSession, str, bool, bool, Any], Awaitable[Answer]]] = {
    "chat": by_chat,
    "responses": by_responses,
    "anthropic": by_anthropic,
}
every_protocol = pytest.mark.parametrize("protocol", PROTOCOLS)
whole_or_streamed = pytest.mark.parametrize("streams", [False, True], ids=["whole", "streamed"])


class Asked(NamedTuple):
    """An episode after its call."""

    session: EpisodeSession
    answer: Answer | None
    error: openai.APIStatusError | anthropic.APIStatusError | None


async def asked(
    protocol: str,
    engine: ScriptedEngine,
    *,
    key: str | None = None,
    has_tool: bool = False,
    streams: bool = False,
    **fields: Any,
) -> Asked:
    async with OpenAIProxy(TOKENIZER, sampling=DEFAULTS) as proxy, proxy.episode(engine) as session:
        try:
            answer = await PROTOCOLS[protocol](session, key or session.api_key, has_tool, streams, fields)
        except (openai.APIStatusError, anthropic.APIStatusError) as error:
            return Asked(session, None, error)
        return Asked(session, answer, None)


@whole_or_streamed
@every_protocol
async def test_text_and_calls_are_answered_and_their_turn_is_trained(protocol: str, streams: bool) -> None:
    engine = saying(f"I add.{CALL_ADD}")
    session, answer, _ = await asked(protocol, engine, has_tool=True, streams=streams)
    assert answer is not None
    assert answer[:2] == ("I add.", [("add", {"a": 1, "b": 2})])
    assert "Add two numbers." in shown(engine.requests[0])
    assert trained(session.trajectories(1.0)[0]) == [f"I add.{CALL_ADD}"]
    assert session.counts.answered == 1


@pytest.mark.parametrize(
    ("protocol", "limit", "ending"),
    [
        ("chat", "max_completion_tokens", "length"),
        ("chat", "max_tokens", "length"),
        ("responses", "max_output_tokens", "max_output_tokens"),
        ("anthropic", "max_tokens", "max_tokens"),
    ],
)
async def test_an_answer_that_ran_out_of_tokens_says_so_and_its_trajectory_is_truncated(
    protocol: str, limit: str, ending: str
) -> None:
    session, answer, _ = await asked(protocol, saying("A long answer."), **{limit: 3})
    assert answer == ("A l", [], ending)
    assert session.trajectories(1.0)[0].is_truncated


@pytest.mark.parametrize(
    ("protocol", "none"), [("chat", "none"), ("responses", "none"), ("anthropic", {"type": "none"})]
)
async def test_tools_that_may_not_be_called_are_not_shown_and_calls_are_text(protocol: str, none: Any) -> None:
    engine = saying(CALL_ADD)
    _, answer, _ = await asked(protocol, engine, has_tool=True, tool_choice=none)
    assert answer is not None
    assert answer[:2] == (CALL_ADD, [])
    assert "Add two numbers." not in shown(engine.requests[0])


@pytest.mark.parametrize(
    ("protocol", "fields"),
    [
        ("chat", {"parallel_tool_calls": False}),
        ("responses", {"parallel_tool_calls": False}),
        ("anthropic", {"tool_choice": {"type": "auto", "disable_parallel_tool_use": True}}),
    ],
)
async def test_a_program_that_wants_one_call_gets_the_first(protocol: str, fields: dict[str, Any]) -> None:
    for more, number in (({}, 2), (fields, 1)):
        _, answer, _ = await asked(protocol, saying(CALL_ADD + CALL_ADD), has_tool=True, **more)
        assert answer is not None
        assert answer.calls == [("add", {"a": 1, "b": 2})] * number


SAMPLED = {"max_new_tokens": 9, "temperature": 0.2, "top_p": 0.5, "min_p": 0.1}


@pytest.mark.parametrize(
    ("protocol", "fields", "sampling"),
    [
        ("chat", {}, {"max_new_tokens": 200, "temperature": 0.7, "min_p": 0.1}),
        (
            "chat",
            {"max_tokens": 9, "temperature": 0.2, "top_p": 0.5, "min_p": 0, "top_k": 5, "stop": "x", "seed": 4},
            {**SAMPLED, "min_p": 0, "top_k": 5, "stop": ("x",), "seed": 4},
        ),
        ("chat", {"stop_token_ids": [3], "ignore_eos": True}, {"stop_token_ids": (3,), "ignore_eos": True}),
        ("responses", {"max_output_tokens": 9, "temperature": 0.2, "top_p": 0.5}, SAMPLED),
        (
            "anthropic",
            {"max_tokens": 9, "temperature": 0.2, "top_p": 0.5, "top_k": 5, "stop_sequences": ["x"]},
            {**SAMPLED, "top_k": 5, "stop": ("x",)},
        ),
    ],
)
async def test_a_call_is_sampled_as_it_says_and_else_as_the_proxy_says(
    protocol: str, fields: dict[str, Any], sampling: dict[str, Any]
) -> None:
    engine = saying("a")
    await asked(protocol, engine, **fields)
    defaults = {"max_new_tokens": 200, "temperature": 0.7, "min_p": 0.1}
    assert engine.requests[0].sampling == SamplingParams(**{**defaults, **sampling})


@pytest.mark.parametrize(
    ("protocol", "fields"),
    [
        (
            "chat",
            {
                "user": "me", "metadata": {"run": "1"}, "store": False, "service_tier": "auto", "seed": None,
                "presence_penalty": 0, "frequency_penalty": 0.0, "logit_bias": {}, "response_format": {"type": "text"},
                "reasoning_effort": "low", "verbosity": "low", "tool_choice": None, "top_logprobs": 0,
                "parallel_tool_calls": True,
            },
        ),
        (
            "responses",
            {
                "reasoning": {"effort": "low"}, "text": {"verbosity": "low"}, "metadata": {"run": "1"},
                "include": ["reasoning.encrypted_content"],
            },
        ),
        ("anthropic", {"metadata": {"user_id": "1"}, "service_tier": "auto", "cache_control": {"type": "ephemeral"}}),
    ],
)  # fmt: skip
async def test_fields_that_change_nothing_are_taken(protocol: str, fields: dict[str, Any]) -> None:
    session, answer, _ = await asked(protocol, saying("fine"), **fields)
    assert answer is not None
    assert (answer.text, session.counts.answered) == ("fine", 1)


@pytest.mark.parametrize(
    ("protocol", "fields", "param", "reason"),
    [
        ("chat", {"temperature": -0.1}, "temperature", "must be"),
        ("chat", {"top_p": 0}, "top_p", "must be"),
        ("chat", {"max_tokens": 0}, "max_tokens", "at least 1"),
        ("chat", {"max_completion_tokens": 0}, "max_completion_tokens", "at least 1"),
        ("chat", {"n": 0}, "n", "at least 1"),
        ("chat", {"n": 129}, "n", "at most 128"),
        ("chat", {"seed": -1}, "seed", "at least 0"),
        ("chat", {"stop": [1]}, "stop", "list of strings"),
        ("chat", {"stream": "yes"}, "stream", "true or false"),
        ("chat", {"tools": [{"type": "web_search"}]}, "tools[0]", "must be a function"),
        ("chat", {"tool_choice": "required"}, "tool_choice", "cannot be forced here"),
        ("chat", {"tool_choice": {"type": "function", "function": {"name": "add"}}}, "tool_choice", "cannot be forced"),
        *(("chat", {field: value}, field, "cannot be honoured") for field, value in DISHONOURED.items()),
        ("chat", {"audio": {"voice": "alloy"}}, "audio", "not known here"),
        ("chat", {"best_of": 2}, "best_of", "not known here"),
        ("chat", {"messages": []}, "messages", "not empty"),
        ("chat", {"messages": [{"role": "robot", "content": "?"}]}, "messages[0].role", "must be one of"),
        ("chat", {"messages": IMAGE}, "messages[0].content[0]", "only text"),
        ("chat", {"messages": [{"role": "user", "content": None}]}, "messages[0].content", "must be a string"),
        ("chat", {"messages": [{"role": "assistant", "tool_calls": [{}]}]}, "messages[0].tool_calls[0]", "a call"),
        ("responses", {"tools": [{"type": "web_search"}]}, "tools[0]", "there are no hosted tools"),
        ("responses", {"tool_choice": "required"}, "tool_choice", "cannot be forced here"),
        ("responses", {"tool_choice": {"type": "function", "name": "add"}}, "tool_choice", "cannot be forced here"),
        ("responses", {"background": True}, "background", "cannot be honoured"),
        ("responses", {"conversation": "conv_1"}, "conversation", "OpenAI keeps"),
        ("responses", {"prompt": {"id": "pmpt_1"}}, "prompt", "OpenAI keeps"),
        ("responses", {"truncation": "auto"}, "truncation", "cannot be honoured"),
        ("responses", {"include": ["message.output_text.logprobs"]}, "include", "cannot be honoured"),
        ("responses", {"text": {"format": {"type": "json_object"}}}, "text.format", "must be text"),
        ("responses", {"temperature": -1}, "temperature", "must be"),
        ("responses", {"input": [{"type": "web_search_call", "id": "1"}]}, "input[0]", "not known here"),
        ("responses", {"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, "input[0].content[0]", ""),
        ("responses", {"input": [{"role": "robot", "content": "hi"}]}, "input[0].role", "must be user"),
        ("responses", {"no_such_field": 1}, "no_such_field", "not known here"),
        ("anthropic", {"tools": [{"type": "web_search_20250305"}]}, "tools[0]", "own tools are not available"),
        ("anthropic", {"tool_choice": {"type": "any"}}, "tool_choice", "cannot be forced here"),
        (
            "anthropic",
            {"thinking": {"type": "enabled", "budget_tokens": 1024}},
            "thinking",
            "length of thinking",
        ),
        ("anthropic", {"container": "c"}, "container", "runs no code"),
        ("anthropic", {"mcp_servers": [{"name": "m"}]}, "mcp_servers", "the program calls"),
        (
            "anthropic",
            {"messages": [*HI, {"role": "assistant", "content": "Well,"}]},
            "messages",
            "cannot be prefilled",
        ),
        ("anthropic", {"messages": [{"role": "user", "content": [{"type": "image"}]}]}, "messages[0].content[0]", ""),
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
    assert error is not None
    message, kind, named = told_by(error)
    assert message.startswith(param)
    assert reason in message
    assert (error.status_code, kind) == (400, "invalid_request_error")
    assert named == (None if protocol == "anthropic" else param)
    assert (engine.requests, session.counts.refused) == ([], 1)


def told_by(error: Any) -> tuple[str, str, str | None]:
    """The message, the type and the parameter of an error."""
    body = error.body.get("error", error.body)
    return body["message"], body["type"], body.get("param")


@whole_or_streamed
@every_protocol
async def test_a_wrong_key_and_an_engine_that_is_down_are_errors_in_the_protocols_shape(
    protocol: str, streams: bool
) -> None:
    is_anthropic = protocol == "anthropic"
    engine = saying(ServerError("all servers are down"))
    _, _, error = await asked(protocol, engine, key="arl-wrong", streams=streams)
    assert error is not None
    assert (error.status_code, engine.requests) == (401, [])
    assert told_by(error)[1] == ("authentication_error" if is_anthropic else "invalid_request_error")
    session, _, error = await asked(protocol, engine, streams=streams)
    assert error is not None
    assert (error.status_code, session.counts.failed) == (503, 1)
    assert told_by(error)[:2] == ("all servers are down", "overloaded_error" if is_anthropic else "server_error")

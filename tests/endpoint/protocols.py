"""One call of an episode with the SDK of each protocol, and what the SDK made of the answer."""

import json
from collections.abc import Awaitable, Callable
from typing import Any, NamedTuple

import anthropic
import openai
from programs import ADD, CERTIFICATES, client_of

from arl.api.fakes import ScriptedEngine
from arl.api.types import SamplingParams
from arl.endpoint.proxy import OpenAIProxy
from arl.endpoint.session import EpisodeSession
from arl.engine.tiny import CHAT_TEMPLATE, tiny_tokenizer

HI: Any = [{"role": "user", "content": "hi"}]
SHORT = {"type": "ephemeral"}
DEFAULTS = SamplingParams(max_new_tokens=200, temperature=0.7, min_p=0.1)
FUNCTION: dict[str, Any] = {**ADD["function"], "strict": True}
TOKENIZER = tiny_tokenizer()
TOKENIZER.chat_template = CHAT_TEMPLATE.replace(
    "(message.content", "(message.reasoning_content or '') + (message.content"
)


class Answer(NamedTuple):
    """What the SDK made of a response. usage: tokens of the prompt, and of the answer. faults: the unreadable calls."""

    text: str
    ending: str | None
    calls: tuple[tuple[str, Any], ...] = ()
    thought: str | None = None
    usage: tuple[int, int] = (0, 0)
    faults: tuple[Any, ...] = ()


def faults_in(made: Any) -> tuple[Any, ...]:
    return tuple((made.model_extra or {}).get("malformed_tool_calls", ()))


async def by_chat(session: EpisodeSession, key: str, streams: bool, fields: Any) -> Answer:
    body = {"tools": [{"type": "function", "function": FUNCTION}], **fields}
    async with client_of(session, api_key=key, max_retries=0) as client:
        if streams:
            body["stream_options"] = {"include_usage": True}
            async with client.chat.completions.stream(model="any", messages=HI, extra_body=body) as stream:
                await stream.until_done()
                made: Any = stream.current_completion_snapshot
        else:
            made = await client.chat.completions.create(model="any", messages=HI, extra_body=body)
    said, ending = made.choices[0].message, made.choices[0].finish_reason
    calls = tuple((call.function.name, json.loads(call.function.arguments)) for call in said.tool_calls or ())
    usage = (made.usage.prompt_tokens, made.usage.completion_tokens)
    return Answer(said.content or "", ending, calls, said.model_extra.get("reasoning_content"), usage, faults_in(said))


async def by_responses(session: EpisodeSession, key: str, streams: bool, fields: Any) -> Answer:
    body = {"tools": [{"type": "function", **FUNCTION}], **fields}
    async with client_of(session, api_key=key, max_retries=0) as client:
        if streams:
            async with client.responses.stream(model="any", input="hi", extra_body=body) as stream:
                *_, last = [event async for event in stream]
                made: Any = last.response
        else:
            made = await client.responses.create(model="any", input="hi", extra_body=body)
    ending = made.incomplete_details.reason if made.incomplete_details else made.status
    calls = tuple((item.name, json.loads(item.arguments)) for item in made.output if item.type == "function_call")
    thought = next((item.content[0].text for item in made.output if item.type == "reasoning"), None)
    usage = (made.usage.input_tokens, made.usage.output_tokens)
    return Answer(made.output_text, ending, calls, thought, usage, faults_in(made))


async def by_anthropic(session: EpisodeSession, key: str, streams: bool, fields: Any) -> Answer:
    tool = {"name": "add", "description": FUNCTION["description"], "input_schema": FUNCTION["parameters"]}
    body = {"tools": [{**tool, "cache_control": SHORT}], **fields}
    asked: Any = {"model": "any", "max_tokens": 200, "messages": HI, "extra_body": body}
    http = anthropic.DefaultAsyncHttpxClient(verify=CERTIFICATES)
    async with anthropic.AsyncAnthropic(base_url=session.url, api_key=key, max_retries=0, http_client=http) as client:
        if streams:
            async with client.messages.stream(**asked) as stream:
                made: Any = await stream.get_final_message()
        else:
            made = await client.messages.create(**asked)
    ending = f"{made.stop_reason} {made.stop_sequence}" if made.stop_sequence else made.stop_reason
    calls = tuple((block.name, block.input) for block in made.content if block.type == "tool_use")
    thought = next((block.thinking for block in made.content if block.type == "thinking"), None)
    text = "".join(block.text for block in made.content if block.type == "text")
    return Answer(text, ending, calls, thought, (made.usage.input_tokens, made.usage.output_tokens), faults_in(made))


PROTOCOLS: dict[str, Callable[[EpisodeSession, str, bool, Any], Awaitable[Answer]]] = {
    "chat": by_chat,
    "responses": by_responses,
    "anthropic": by_anthropic,
}


class Asked(NamedTuple):
    """An episode after its call."""

    session: EpisodeSession
    answer: Answer | None
    error: Any


async def asked(
    protocol: str,
    engine: ScriptedEngine,
    *,
    key: str | None = None,
    streams: bool = False,
    options: Any = None,
    tokenizer: Any = TOKENIZER,
    **fields: Any,
) -> Asked:
    """Ask with one tool, `add`, unless the fields say otherwise. options: of the proxy."""
    proxy = OpenAIProxy(tokenizer, sampling=DEFAULTS, **(options or {}))
    async with proxy, proxy.episode(engine) as session:
        try:
            answer = await PROTOCOLS[protocol](session, key or session.api_key, streams, fields)
        except (openai.APIStatusError, anthropic.APIStatusError) as error:
            return Asked(session, None, error)
        return Asked(session, answer, None)


def told_by(error: Any) -> tuple[str, str, str | None]:
    """The message, the type and the parameter of an error."""
    body = error.body.get("error", error.body)
    return body["message"], body["type"], body.get("param")

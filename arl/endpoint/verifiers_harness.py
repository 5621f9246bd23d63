"""Runs the agent of a verifiers environment as a coroutine of this process: it speaks, calls tools, and speaks again.

verifiers' own `bash` and `null` harnesses run a program for each rollout. This one executes nothing, and many rollouts
share one event loop. verifiers_workflow.local_environment registers it as `arl-chat`.
"""

from __future__ import annotations

import json
import ssl
from collections.abc import Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from functools import cache
from typing import Any

from openai import APIStatusError, AsyncOpenAI, DefaultAsyncHttpxClient, omit
from openai.types.chat import ChatCompletionMessageToolCallUnion
from verifiers.v1 import Harness, HarnessConfig, ModelContext, ProgramResult, Runtime, TaskData, Trace
from verifiers.v1.dialects.chat import message_to_wire
from verifiers.v1.harnesses.utils.compaction import is_context_overflow
from verifiers.v1.harnesses.utils.mcp import MCPConnection, call_mcp, connect_mcp

__all__ = ["ChatHarness"]


class ChatHarnessConfig(HarnessConfig):
    """The settings of every harness. Only tool_timeout is used; env is not, since no program is started."""


class ChatHarness(Harness[ChatHarnessConfig]):
    """Goes on until the model answers without calling a tool. The environment's servers provide the tools.

    A conversation also ends when it outgrows the model's context, or when the environment stops it (at a limit or by a
    stop condition). Any other refusal of the model's endpoint is an error of the rollout.
    """

    APPENDS_SYSTEM_PROMPT = True
    SUPPORTS_MCP = True
    SUPPORTS_RESUME = True
    EXECUTES_CODE = False
    NEEDS_CONTAINER = False

    async def launch(
        self,
        ctx: ModelContext,
        trace: Trace,
        runtime: Runtime,
        endpoint: str,
        secret: str,
        mcp_urls: dict[str, str],
        data: TaskData,
        tool_interception_url: str | None = None,
    ) -> ProgramResult:
        servers = {name: {"url": url, "timeout": self.config.tool_timeout} for name, url in mcp_urls.items()}
        async with (
            AsyncExitStack() as stack,
            DefaultAsyncHttpxClient(verify=_tls(), timeout=None) as http,
            AsyncOpenAI(base_url=endpoint, api_key=secret, max_retries=0, http_client=http) as client,
        ):
            tools = _Tools(*await connect_mcp({"mcpServers": servers}, stack))
            try:
                await _converse(client, ctx.model, self._opening(data), tools)
            except APIStatusError as refused:
                has_outgrown = is_context_overflow(refused)
                return ProgramResult(exit_code=0 if has_outgrown else 1, stdout="", stderr=str(refused))
        return ProgramResult(exit_code=0, stdout="", stderr="")

    def _opening(self, data: TaskData) -> list[dict[str, Any]]:
        system, prompt = self.resolve_prompt(data)
        messages: list[dict[str, Any]] = [{"role": "system", "content": system}] if system else []
        if isinstance(prompt, str):
            return [*messages, {"role": "user", "content": prompt}]
        return [*messages, *(message_to_wire(message) for message in prompt or ())]


@cache
def _tls() -> ssl.SSLContext:
    """One context for all rollouts, since making one blocks the event loop for 50 ms."""
    return ssl.create_default_context()


@dataclass(frozen=True, slots=True)
class _Tools:
    """specs: the tools as the model sees them. dispatch: name -> (server, the server's name for the tool)."""

    specs: Sequence[Mapping[str, Any]]
    dispatch: dict[str, tuple[str, str]]
    servers: dict[str, MCPConnection]

    async def answer(self, call: ChatCompletionMessageToolCallUnion) -> dict[str, Any]:
        assert call.type == "function"
        answer = await self._run(call.function.name, call.function.arguments)
        return {"role": "tool", "tool_call_id": call.id, "name": call.function.name, "content": answer}

    async def _run(self, name: str, arguments: str) -> str | list[dict[str, Any]]:
        if name not in self.dispatch:
            return f"error: there is no tool {name!r}; the tools are {', '.join(self.dispatch) or 'none'}"
        try:
            given = json.loads(arguments or "{}")
        except ValueError:
            given = None
        if not isinstance(given, dict):
            return "error: the arguments of a tool call must be one JSON object"
        return await call_mcp(self.servers, self.dispatch, name, given)


async def _converse(client: AsyncOpenAI, model: str, messages: list[Any], tools: _Tools) -> None:
    shown: Any = tools.specs or omit
    while True:
        completion = await client.chat.completions.create(model=model, messages=messages, tools=shown)
        message = completion.choices[0].message
        if not message.tool_calls:
            return
        messages.append(message.model_dump(exclude_none=True))
        messages += [await tools.answer(call) for call in message.tool_calls]

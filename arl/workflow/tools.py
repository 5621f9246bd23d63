"""Tools for agents: makes tools of typed functions, and answers a model's calls of them.

    answer --CallFormat.parse--> calls --arun_tools--> results --> messages of role `tool`

docs/workflows.md says which failures the model reads, and which ones end the episode.
"""

from __future__ import annotations

import asyncio
import functools
import inspect
import logging
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from pydantic import ValidationError

from arl.api.errors import ArlError, ConfigError, ToolError
from arl.api.events import EPISODE, ToolEnded, short
from arl.rewards.threads import THREADS, CallTimeoutError, together
from arl.workflow.call_formats import MalformedCall, ToolCall
from arl.workflow.content import Content
from arl.workflow.tool_results import content_of_result, cut, cut_content, has_images
from arl.workflow.tool_schema import Arguments, first_complaint, signature_of

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolLimits:
    """Limits on the tools of a turn."""

    timeout_s: float = 30.0
    """The longest a call may take, counted from its start."""
    max_output_chars: int = 2000
    """Characters of a result that the model reads. Digits and rare symbols take a token each, so mind the context."""
    max_calls: int = 16
    """Calls in one turn. Those beyond get an error."""

    def __post_init__(self) -> None:
        if self.timeout_s <= 0 or self.max_output_chars < 1 or self.max_calls < 1:
            raise ConfigError(f"{self} does not allow anything; timeout_s must be above 0, the others at least 1")


DEFAULT_LIMITS = ToolLimits()


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Tool:
    """Something a model may call."""

    name: str
    spec: Mapping[str, Any]
    """The specification for chat templates: OpenAI's form, with a JSON schema."""
    function: Callable[..., Any]
    """A sync function runs in a thread, so it must not use the event loop's objects. A thread cannot be killed: it runs
    on after the time limit. Make a tool that can hang `async`."""
    accept: Callable[..., Arguments] | None = None
    """Converts and validates arguments. None: the function does so itself."""
    owner: object | None = None
    """Calls of tools with the same owner run one after another within a turn, in the model's order."""
    max_output_chars: int | None = None
    """Characters of a result that the model reads; None: as ToolLimits says."""
    timeout_s: float | None = None
    """The longest a call may take; None: as ToolLimits says."""

    @classmethod
    def from_function(
        cls, function: Callable[..., Any], *, parallel: bool | None = None, max_output_chars: int | None = None
    ) -> Tool:
        """A tool with the function's name, docstring and types.

        `Args:` or `:param name:` in the docstring describe arguments, and so does `Annotated[..., Field(...)]`. Methods
        of an object are stateful tools: two calls of them in one turn run one after another, unless `parallel` is set.
        Raises ToolError if the function has no docstring or an argument without a type.
        """
        about = signature_of(function)
        spec = {"name": about.name, "description": about.description, "parameters": about.parameters}
        return cls(
            name=about.name,
            spec={"type": "function", "function": spec},
            function=function,
            accept=about.accept,
            owner=None if parallel else getattr(function, "__self__", None),
            max_output_chars=max_output_chars,
        )

    @classmethod
    def from_schema(
        cls, function: Callable[..., Any], *, name: str, description: str, parameters: Mapping[str, Any]
    ) -> Tool:
        """A tool whose arguments already have a JSON schema. The function takes them by name, as the model wrote them,
        and must raise ToolError for wrong arguments."""
        spec = {"name": name, "description": description, "parameters": parameters}
        return cls(name=name, spec={"type": "function", "function": spec}, function=function)

    def __reduce__(self) -> tuple[Any, ...]:
        """pydantic's `accept` does not pickle: a copy in another process makes it of the function again."""
        fields = (self.name, self.spec, self.function, self.owner, self.max_output_chars, self.timeout_s)
        return _copied, (*fields, self.accept is not None)

    @classmethod
    def of(cls, tool: Tool | Callable[..., Any]) -> Tool:
        """The tool itself, or a tool made from a function."""
        return tool if isinstance(tool, Tool) else cls.from_function(tool)

    async def acall(self, arguments: Mapping[str, Any], limits: ToolLimits = DEFAULT_LIMITS) -> Content:
        """Return the tool's result as text, cut, or as texts and images.

        Raises ToolError (bad arguments, time limit), ImageError for an image that cannot be shown, and the tool's
        errors.
        """
        if self.accept is None:
            args, kwargs = (), dict(arguments)
        else:
            try:
                args, kwargs = self.accept(**arguments)
            except ValidationError as error:
                raise ToolError(first_complaint(error)) from error
        call = functools.partial(self.function, *args, **kwargs)
        content = await self._acall(call, self.timeout_s or limits.timeout_s)
        return cut_content(content, self.max_output_chars or limits.max_output_chars)

    async def _acall(self, call: Callable[[], Any], timeout_s: float) -> Content:
        if _is_async(self.function):
            return await self._acontent(await _within(call, timeout_s))
        try:
            result = await THREADS.acall(lambda: self._unless_awaitable(call()), timeout_s)
        except CallTimeoutError as error:
            raise ToolError(str(error)) from None
        if not inspect.isawaitable(result):
            return result
        return await self._acontent(await _within(lambda: result, timeout_s))

    async def _acontent(self, result: Any) -> Content:
        """An async tool's result for the model. Images are read on a thread, as that may take long."""
        if not has_images(result):
            return content_of_result(result, self.name)
        return await THREADS.acall(lambda: content_of_result(result, self.name))

    def _unless_awaitable(self, result: Any) -> Any:
        """A result for the model, made in the tool's thread since it may take long. The event loop awaits an awaitable
        result."""
        return result if inspect.isawaitable(result) else content_of_result(result, self.name)


def _copied(
    name: str,
    spec: Mapping[str, Any],
    function: Callable[..., Any],
    owner: object,
    limit: int | None,
    timeout_s: float | None,
    has_types: bool,
) -> Tool:
    accept = signature_of(function).accept if has_types else None
    own = {"max_output_chars": limit, "timeout_s": timeout_s}
    return Tool(name=name, spec=spec, function=function, accept=accept, owner=owner, **own)


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolResult:
    """The result of a call."""

    call: ToolCall | MalformedCall
    content: Content
    """What the model reads."""
    failure: Literal["malformed", "refused", "failed"] | None = None
    """None: the tool answered. malformed: the call was unreadable. refused: an error for the model. failed: a bug."""

    @property
    def message(self) -> dict[str, Any]:
        name = self.call.name if isinstance(self.call, ToolCall) else "malformed_call"
        return {"role": "tool", "name": name, "content": self.content, "tool_call_id": self.call.id}


async def acall_tools(
    calls: Sequence[ToolCall | MalformedCall], tools: Sequence[Tool], limits: ToolLimits = DEFAULT_LIMITS
) -> list[dict[str, Any]]:
    """Run the calls, and return a message of role `tool` for each, in their order. Raises as arun_tools does."""
    return [result.message for result in await arun_tools(calls, tools, limits)]


async def arun_tools(
    calls: Sequence[ToolCall | MalformedCall], tools: Sequence[Tool], limits: ToolLimits = DEFAULT_LIMITS
) -> list[ToolResult]:
    """Run calls and return their results in order. Calls of one owner run one after another, others at the same time.

    Raises ConfigError for two tools of one name, and any of arl's errors except ToolError that a tool raises.
    """
    named = tools_by_name(tools)
    results: dict[int, ToolResult] = {}

    async def run(indices: Iterable[int]) -> None:
        for index in indices:
            began = time.monotonic()
            results[index] = await _result(calls[index], index, named, limits)
            _report(results[index], time.monotonic() - began)

    lines = _lines(calls, named)
    if len(lines) == 1:
        await run(lines[0])
    else:
        await together(run(line) for line in lines)
    return [results[index] for index in range(len(calls))]


def _report(result: ToolResult, seconds: float) -> None:
    if context := EPISODE.get():
        name = result.call.name if isinstance(result.call, ToolCall) else ""
        context.events.emit(
            ToolEnded(episode=context.episode, tool=short(name), seconds=seconds, failure=result.failure or "")
        )


def tools_by_name(tools: Iterable[Tool]) -> dict[str, Tool]:
    """name -> tool. Raises ConfigError for two tools of one name: a model could call only one of them."""
    named: dict[str, Tool] = {}
    for tool in tools:
        if tool.name in named:
            raise ConfigError(f"two tools are named {tool.name!r}; give one of them another name")
        named[tool.name] = tool
    return named


def _lines(calls: Sequence[ToolCall | MalformedCall], named: Mapping[str, Tool]) -> list[list[int]]:
    """Indices of the calls, in lines. The calls of a line run one after another."""
    lines: dict[object, list[int]] = {}
    for index, call in enumerate(calls):
        tool = named.get(call.name) if isinstance(call, ToolCall) else None
        key = ("owner", id(tool.owner)) if tool is not None and tool.owner is not None else ("call", index)
        lines.setdefault(key, []).append(index)
    return list(lines.values())


async def _result(
    call: ToolCall | MalformedCall, index: int, named: Mapping[str, Tool], limits: ToolLimits
) -> ToolResult:
    """The one place that turns a failure of a call or a tool into text for the model."""
    if isinstance(call, MalformedCall):
        return ToolResult(call=call, content=_error(call.reason, limits), failure="malformed")
    try:
        if index >= limits.max_calls:
            raise ToolError(f"at most {limits.max_calls} calls are answered in one turn")
        if call.name not in named:
            raise ToolError(f"there is no tool {call.name!r}; the tools are {', '.join(sorted(named)) or 'none'}")
        return ToolResult(call=call, content=await named[call.name].acall(call.arguments, limits))
    except ToolError as error:
        return ToolResult(call=call, content=_error(str(error), limits), failure="refused")
    except ArlError:
        raise
    except (Exception, SystemExit) as error:  # noqa: BLE001 - a tool's failure is data; argparse exits, for instance
        return _failed(call, error, limits)
    except asyncio.CancelledError as error:
        if (task := asyncio.current_task()) is None or task.cancelling():
            raise
        return _failed(call, error, limits)  # the tool raised it, and nobody cancelled


def _failed(call: ToolCall, error: BaseException, limits: ToolLimits) -> ToolResult:
    log.warning("the tool %s failed; the model is told so, and the episode goes on", call.name, exc_info=error)
    return ToolResult(call=call, content=_error(f"the tool failed: {type(error).__name__}", limits), failure="failed")


def _error(reason: str, limits: ToolLimits) -> str:
    return cut(f"error: {reason}", limits.max_output_chars)


def _is_async(function: Callable[..., Any]) -> bool:
    while isinstance(function, functools.partial):
        function = function.func
    return inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(type(function).__call__)


async def _within(call: Callable[[], Any], timeout_s: float) -> Any:
    limit = asyncio.timeout(timeout_s)
    try:
        async with limit:
            return await call()
    except Exception as error:
        if limit.expired():
            raise ToolError(f"there was no answer within {timeout_s:g} s") from error
        raise

"""Tools for agents: makes tools of typed functions, and answers a model's calls of them.

    answer --CallFormat.parse--> calls --arun_tools--> results --> messages of role `tool`

docs/workflows.md says which failures the model reads, and which ones end the episode.
"""

from __future__ import annotations

import asyncio
import dataclasses
import functools
import inspect
import logging
import re
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, cast

from pydantic import BaseModel, ValidationError
from pydantic_core import PydanticSerializationError, to_json

from arl.api.errors import ArlError, ConfigError, ImageError, ToolError
from arl.api.events import EPISODE, ToolEnded, short
from arl.api.images import Image
from arl.rewards.threads import THREADS, CallTimeoutError, together
from arl.workflow.call_formats import MalformedCall, ToolCall
from arl.workflow.messages import Content, image_part, text_part
from arl.workflow.tool_schema import Arguments, code_of, first_complaint, signature_of, without_partial

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

    def __post_init__(self) -> None:
        code = code_of(self.function)
        if inspect.isgeneratorfunction(code) or inspect.isasyncgenfunction(code):
            raise ToolError(f"the tool {self.name} is a generator (it has `yield`); return one text or list instead")

    @classmethod
    def from_function(
        cls, function: Callable[..., Any], *, parallel: bool | None = None, max_output_chars: int | None = None
    ) -> Tool:
        """A tool with the function's name, docstring and types.

        `Args:` or `:param name:` in the docstring describe arguments, and so does `Annotated[..., Field(...)]`. Methods
        of an object are stateful tools: two calls of them in one turn run one after another, unless `parallel` is set.
        Raises ToolError for a generator, and if the function has no docstring or an argument without a type.
        """
        about = signature_of(function)
        spec = {"name": about.name, "description": about.description, "parameters": about.parameters}
        return cls(
            name=about.name,
            spec={"type": "function", "function": spec},
            function=function,
            accept=about.accept,
            owner=None if parallel else getattr(without_partial(function), "__self__", None),
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
        names = [field.name for field in dataclasses.fields(self) if field.name != "accept"]
        return _copied, ({name: getattr(self, name) for name in names}, self.accept is not None)

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
        def run() -> Any:
            """In the tool's thread; so is a result made into what the model reads, since that may take long."""
            result = call()
            return result if inspect.isawaitable(result) else content_of_result(result, self.name)

        if inspect.iscoroutinefunction(code_of(self.function)):
            result = await _within(call, timeout_s)
        else:
            try:
                made = await THREADS.acall(run, timeout_s)
            except CallTimeoutError as error:
                raise ToolError(str(error)) from None
            if not inspect.isawaitable(made):
                return made
            result = await _within(lambda: made, timeout_s)
        if not has_images(result):
            return content_of_result(result, self.name)
        return await THREADS.acall(lambda: content_of_result(result, self.name))


def _copied(fields: dict[str, Any], has_types: bool) -> Tool:
    return Tool(**fields, accept=signature_of(fields["function"]).accept if has_types else None)


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
            result = results[index] = _noted(await _result(calls[index], index, named, limits))
            if context := EPISODE.get():
                name = short(result.call.name if isinstance(result.call, ToolCall) else "")
                seconds, failure = time.monotonic() - began, result.failure or ""
                context.events.emit(ToolEnded(episode=context.episode, tool=name, seconds=seconds, failure=failure))

    lines: dict[object, list[int]] = {}  # the calls of a line run one after another
    for index, call in enumerate(calls):
        tool = named.get(call.name) if isinstance(call, ToolCall) else None
        key = ("owner", id(tool.owner)) if tool is not None and tool.owner is not None else ("call", index)
        lines.setdefault(key, []).append(index)
    await together(run(line) for line in lines.values())
    return [results[index] for index in range(len(calls))]


def tools_by_name(tools: Iterable[Tool]) -> dict[str, Tool]:
    """name -> tool. Raises ConfigError for two tools of one name: a model could call only one of them."""
    named: dict[str, Tool] = {}
    for tool in tools:
        if tool.name in named:
            raise ConfigError(f"two tools are named {tool.name!r}; give one of them another name")
        named[tool.name] = tool
    return named


async def _result(
    call: ToolCall | MalformedCall, index: int, named: Mapping[str, Tool], limits: ToolLimits
) -> ToolResult:
    """The one place that turns a failure of a call or a tool into text for the model."""
    if isinstance(call, MalformedCall):
        return _failed(call, "malformed", call.reason, limits)
    try:
        if index >= limits.max_calls:
            raise ToolError(f"at most {limits.max_calls} calls are answered in one turn")
        if call.name not in named:
            raise ToolError(f"there is no tool {call.name!r}; the tools are {', '.join(sorted(named)) or 'none'}")
        return ToolResult(call=call, content=await named[call.name].acall(call.arguments, limits))
    except ToolError as error:
        return _failed(call, "refused", str(error), limits)
    except ArlError:
        raise
    except (Exception, SystemExit) as error:  # noqa: BLE001 - a tool's failure is data; argparse exits, for instance
        return _broken(call, error, limits)
    except asyncio.CancelledError as error:
        if (task := asyncio.current_task()) is None or task.cancelling():
            raise
        return _broken(call, error, limits)  # the tool raised it, and nobody cancelled


def _noted(result: ToolResult) -> ToolResult:
    """With what the call's reader left out before the content."""
    notes = "".join(f"note: {said}\n" for said in getattr(result.call, "complaints", ()))
    content = notes + result.content if isinstance(result.content, str) else [text_part(notes), *result.content]
    return dataclasses.replace(result, content=content) if notes else result


def _failed(
    call: ToolCall | MalformedCall, failure: Literal["malformed", "refused", "failed"], reason: str, limits: ToolLimits
) -> ToolResult:
    return ToolResult(call=call, content=cut(f"error: {reason}", limits.max_output_chars), failure=failure)


def _broken(call: ToolCall, error: BaseException, limits: ToolLimits) -> ToolResult:
    log.warning("the tool %s failed; the model is told so, and the episode goes on", call.name, exc_info=error)
    return _failed(call, "failed", f"the tool failed: {type(error).__name__}", limits)


async def _within(call: Callable[[], Any], timeout_s: float) -> Any:
    limit = asyncio.timeout(timeout_s)
    try:
        async with limit:
            return await call()
    except Exception as error:
        if limit.expired():
            raise ToolError(f"there was no answer within {timeout_s:g} s") from error
        raise


# What the model reads of a result: text, or texts and images.


def content_of_result(result: object, tool: str) -> Content:
    """A tool's result for the model: an Image or a PIL image, a list in which there are some, or text as by `text_of`.

    Raises ImageError, with the tool's name, for an image that cannot be shown, or that lies deeper, and for an array
    of pixels.
    """
    items = _items(result)
    if any(map(_is_pixels, items)):
        raise ImageError(
            f"the tool {tool} returned an array of pixels, which the model would read as numbers; return "
            "PIL.Image.fromarray(array) for an image, or array.tolist() for numbers"
        )
    if any(_hides_image(item) for item in items):
        raise ImageError(
            f"the tool {tool} returned an image within a {type(result).__name__}, of which the model would read the "
            "text alone; return the image itself, or a list of texts and images"
        )
    if not has_images(result):
        return text_of(result)
    try:
        return [image_part(Image.of(item)) if _is_image(item) else text_part(text_of(item)) for item in items]
    except ImageError as error:
        raise ImageError(f"the tool {tool} returned an image that cannot be shown: {error}") from error


def has_images(result: object) -> bool:
    """Whether it is an image, or a list with images."""
    return any(map(_is_image, _items(result)))


def _items(result: object) -> list[object]:
    return cast("list[object]", list(result)) if isinstance(result, list | tuple) else [result]


def _hides_image(item: object) -> bool:
    """Whether an image lies within it."""
    match item:
        case str() | bytes() | int() | float() | None | Image():
            return False
        case Mapping():
            inner = list(cast("Mapping[object, object]", item).values())
        case list() | tuple() | set() | frozenset():
            inner = list(cast("Sequence[object]", item))
        case _ if dataclasses.is_dataclass(item) and not isinstance(item, type):
            inner = [getattr(item, field.name) for field in dataclasses.fields(item)]
        case _:
            return False
    try:
        return any(_is_image(one) or _hides_image(one) for one in inner)
    except RecursionError:  # circular
        return False


def cut_content(content: Content, max_chars: int) -> Content:
    """The content with its first max_chars characters, and all of its images."""
    if isinstance(content, str):
        return cut(content, max_chars)
    left, parts = max_chars, list[dict[str, Any]]()
    for part in content:
        if "text" in part:
            parts.append(text_part(cut(part["text"], max(left, 0))))
            left -= len(part["text"])
        else:
            parts.append(part)
    return parts


def _is_image(result: object) -> bool:
    is_picture = "PIL.Image" in sys.modules and isinstance(result, sys.modules["PIL.Image"].Image)
    return is_picture or isinstance(result, Image)


def _is_pixels(result: object) -> bool:
    """Whether it is an array as environments render their screens: bytes of height x width x channels."""
    shape = getattr(result, "shape", ())
    return str(getattr(result, "dtype", "")) in ("uint8", "torch.uint8") and len(shape) == 3 and shape[2] in (1, 3, 4)


def text_of(result: object) -> str:
    """A tool's result for the model: JSON for mappings, sequences and records, else `str(result)`, which may raise.

    Raises TypeError for one whose text is an address in memory, such as a generator.
    """
    match result:
        case str():
            return result
        case bytes() | bytearray() | memoryview():
            try:
                return bytes(result).decode()
            except UnicodeDecodeError:
                return f"[{len(bytes(result))} bytes that are not text]"
        case Mapping() | list() | tuple() | set() | frozenset() | BaseModel():
            return _json(result)
    is_record = dataclasses.is_dataclass(result) and not isinstance(result, type)
    text = _json(result) if is_record else str(result)
    if _ADDRESS.fullmatch(text):
        raise TypeError(f"it returned {text}, which tells the model nothing; return text, numbers, lists or records")
    return text


_ADDRESS = re.compile(r"<.+ at 0x[0-9a-fA-F]+>", re.S)


def cut(text: str, max_chars: int) -> str:
    """The first max_chars characters of the text, without lone surrogates, and a note of how many are missing."""
    kept = text[:max_chars].encode("utf-8", "replace").decode("utf-8")
    missing = len(text) - max_chars
    return f"{kept}\n[cut here: {missing} more characters]" if missing > 0 else kept


def _json(result: Any) -> str:
    try:
        return to_json(result, inf_nan_mode="constants", serialize_unknown=True, bytes_mode="base64").decode()
    except (PydanticSerializationError, ValueError, RecursionError):  # circular, or with lone surrogates
        return str(result)

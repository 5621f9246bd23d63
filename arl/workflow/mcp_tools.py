"""Tools of an MCP server (modelcontextprotocol.io), through the official `mcp` package.

    workflow = ToolAgentWorkflow(tokenizer, reward, tools=[MCPTools.http("http://127.0.0.1:8000/mcp")])
    workflow = ToolAgentWorkflow(tokenizer, reward, open_tools=lambda data: MCPTools.stdio("python", ["server.py"]))

The first shares one connection among all episodes. The second starts a server for each episode. One task owns a
connection, since the task that enters anyio's scopes must also leave them:

    MCPTools --opens, closes--> owner: async with Client <--call_tool-- episodes
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack
from functools import partial
from typing import TYPE_CHECKING, Any, TextIO

from arl.api.errors import ArlError, ConfigError, ImageError, ServerError, ToolError, first_error
from arl.api.images import Image
from arl.api.version import install_command
from arl.rewards.threads import THREADS
from arl.workflow.tools import Tool

if TYPE_CHECKING:
    from mcp import Client
    from mcp.client import Transport
    from mcp_types import CallToolResult, ContentBlock

    Connect = Callable[["_LastWords", AsyncExitStack], Awaitable[Transport]]

log = logging.getLogger(__name__)

_END_S = 10.0
"""The longest that a server may take to answer the end of a session."""


class MCPTools(AbstractAsyncContextManager[Sequence[Tool]]):
    """The tools of one server, with its names and JSON schemas. Make it with `stdio` or `http`; `async with` connects.

    start_timeout_s: the longest that connecting may take. images: whether the model sees the images that tools return;
    otherwise it reads their type and size. Raises ServerError if no server answers, or if it offers no
    tools. If the server goes away, the call raises ServerError; the next call connects again.
    """

    def __init__(self, name: str, connect: Connect, start_timeout_s: float, images: bool) -> None:
        self.name = name
        self._images = images
        self._connect = connect
        self._start_timeout_s = start_timeout_s
        self._connection: _Connection | None = None
        self._connecting = asyncio.Lock()

    @classmethod
    def stdio(
        cls,
        command: str,
        args: Sequence[str] = (),
        *,
        env: Mapping[str, str] | None = None,
        cwd: str | os.PathLike[str] | None = None,
        start_timeout_s: float = 60.0,
        images: bool = True,
    ) -> MCPTools:
        """Starts a server as a child process, and ends it with all its children.

        env: variables to add. The server inherits only PATH, HOME, LOGNAME, SHELL, TERM and USER. If the server dies,
        the error has the end of its stderr.
        """
        _check_installed()
        where = None if cwd is None else os.fspath(cwd)
        connect = partial(_connect_stdio, command, tuple(args), dict(env or {}), where)
        return cls(f"the MCP server `{' '.join([command, *args])}`", connect, start_timeout_s, images)

    @classmethod
    def http(
        cls, url: str, *, headers: Mapping[str, str] | None = None, start_timeout_s: float = 60.0, images: bool = True
    ) -> MCPTools:
        """A running server that speaks streamable HTTP. headers: sent with each request."""
        _check_installed()
        connect = partial(_connect_http, url, dict(headers or {}))
        return cls(f"the MCP server at {url}", connect, start_timeout_s, images)

    async def __aenter__(self) -> tuple[Tool, ...]:
        if self._connection is not None:
            raise ConfigError(f"{self.name} is open already; make another MCPTools for another connection")
        self._connection = await self._connected()
        return self._connection.tools

    async def __aexit__(self, *exc: object) -> None:
        connection, self._connection = self._connection, None
        if connection is not None:
            await connection.aclose()

    async def _connected(self) -> _Connection:
        connection = _Connection(self.name, self._connect, self._acall, self._images)
        await connection.aopen(self._start_timeout_s)
        return connection

    async def _acall(self, tool: str, /, **arguments: Any) -> str | list[str | Image]:
        async with self._connecting:
            if self._connection is None:
                raise ServerError(f"{self.name} is not open; call its tools within `async with`")
            if self._connection.client is None:
                log.warning("%s is gone; connecting anew", self.name)
                self._connection = await self._connected()
            connection = self._connection
        return await connection.acall(tool, arguments)


class _Connection:
    """client: None before the connection is open, and after it broke or was closed. error: why it broke."""

    def __init__(self, name: str, connect: Connect, acall: Callable[..., Any], images: bool) -> None:
        self._name = name
        self._images = images
        self._connect = connect
        self._call_of_tool = acall
        self._closing = asyncio.Event()
        self._owner: asyncio.Task[None] | None = None
        self._words = _LastWords()
        self.client: Client | None = None
        self.error: Exception | None = None
        self.tools: tuple[Tool, ...] = ()

    async def aopen(self, timeout_s: float) -> None:
        is_open = asyncio.get_running_loop().create_future()
        self._owner = owner = asyncio.create_task(self._own(is_open), name=f"owner of {self._name}")
        try:
            await asyncio.wait([owner, is_open], timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
        except BaseException:
            owner.cancel()
            await _ended(owner)
            raise
        if self.client is None:
            owner.cancel()
            await _ended(owner)
            if self.error is None:
                raise ServerError(f"{self._name} was not ready within {timeout_s:g} s{self._words}")
            first = first_error(self.error) if isinstance(self.error, ExceptionGroup) else self.error
            if isinstance(first, ArlError):
                raise first
            said = str(first) or type(first).__name__
            raise ServerError(f"{self._name} could not be used: {said}{self._words}") from first

    async def aclose(self) -> None:
        self._closing.set()
        if self._owner is not None:
            await _ended(self._owner)

    async def acall(self, tool: str, arguments: Mapping[str, Any]) -> str | list[str | Image]:
        from mcp import MCPError

        try:
            if self.client is None:
                raise ServerError(f"{self._name} is gone")
            result = await self.client.call_tool(tool, dict(arguments))
        except MCPError as error:
            from mcp_types import CONNECTION_CLOSED, INTERNAL_ERROR, INVALID_REQUEST, METHOD_NOT_FOUND, PARSE_ERROR

            if error.code in (CONNECTION_CLOSED, INVALID_REQUEST):  # it is dead, or has forgotten the session
                await self.aclose()
            elif error.code not in (INTERNAL_ERROR, METHOD_NOT_FOUND, PARSE_ERROR):
                raise ToolError(error.message) from error  # wrong arguments, the tool's own errors: the model reads it
            raise ServerError(f"{self._name} failed in a call of {tool}: {error.message}{self._words}") from error
        if result.is_error:
            raise ToolError(_text_of(result))
        if not self._images or all(part.type != "image" for part in result.content):
            return _text_of(result)
        try:
            seen = [one if one.type == "image" else _text_of_part(one) for one in result.content]
            return await THREADS.acall(
                lambda: [
                    one if isinstance(one, str) else Image.of(f"data:{one.mime_type};base64,{one.data}") for one in seen
                ]
            )
        except ImageError as error:
            raise ImageError(f"{self._name} returned an image from {tool} that cannot be shown: {error}") from error

    async def _own(self, is_open: asyncio.Future[None]) -> None:
        from mcp import Client

        try:
            async with AsyncExitStack() as stack:
                transport = await self._connect(self._words, stack)
                client = await stack.enter_async_context(Client(transport, cache=None))
                self.tools = await self._listed(client)
                self.client = client
                is_open.set_result(None)
                await self._closing.wait()
        except Exception as error:  # noqa: BLE001 - raised where the connection is opened or a tool is called
            self.error = error
        finally:
            self.client = None

    async def _listed(self, client: Client) -> tuple[Tool, ...]:
        page = await client.list_tools(cursor=None)
        found = [*page.tools]
        while page.next_cursor is not None:
            page = await client.list_tools(cursor=page.next_cursor)
            found += page.tools
        if not found:
            raise ServerError(f"{self._name} offers no tools")
        return tuple(
            Tool.from_schema(
                partial(self._call_of_tool, tool.name),
                name=tool.name,
                description=tool.description or tool.title or tool.name,
                parameters=tool.input_schema,
            )
            for tool in found
        )


async def _ended(owner: asyncio.Task[None]) -> None:
    """Wait for the owner, however often this call is cancelled: mcp bounds how long it takes to end a process.

    An owner left behind would be cancelled a second time, by the event loop's end. Then mcp leaves the process running
    and waits for its output for ever.
    """
    cancelled: asyncio.CancelledError | None = None
    while not owner.done():
        try:
            await asyncio.wait([owner])
        except asyncio.CancelledError as error:
            cancelled = error
    if cancelled is not None:
        raise cancelled


class _LastWords(asyncio.Protocol):
    """The end of what a process writes to stderr, for the message when it dies."""

    def __init__(self) -> None:
        self._tail = b""

    async def aopen(self, stack: AsyncExitStack) -> TextIO:
        read_fd, write_fd = os.pipe()
        pipe, errlog = stack.enter_context(os.fdopen(read_fd, "rb")), stack.enter_context(os.fdopen(write_fd, "w"))
        transport, _ = await asyncio.get_running_loop().connect_read_pipe(lambda: self, pipe)
        stack.callback(transport.close)
        return errlog

    def data_received(self, data: bytes) -> None:
        self._tail = (self._tail + data)[-2000:]

    def __str__(self) -> str:
        words = self._tail.decode(errors="replace").strip()
        return f"; it said:\n{words}" if words else ""


async def _connect_stdio(
    command: str, args: Sequence[str], env: dict[str, str], cwd: str | None, words: _LastWords, stack: AsyncExitStack
) -> Transport:
    from mcp import StdioServerParameters, stdio_client

    settings = StdioServerParameters(command=command, args=list(args), env=env, cwd=cwd)
    return stdio_client(settings, errlog=await words.aopen(stack))


async def _connect_http(url: str, headers: dict[str, str], _: _LastWords, stack: AsyncExitStack) -> Transport:
    import httpx2
    from mcp.client.streamable_http import streamable_http_client

    async def limit(request: httpx2.Request) -> None:
        if request.method == "DELETE":  # the end of the session, which nothing else limits
            request.extensions["timeout"]["read"] = _END_S

    client = httpx2.AsyncClient(
        headers=headers,
        timeout=httpx2.Timeout(30.0, read=None),  # each call has its own limit
        limits=httpx2.Limits(max_connections=None, max_keepalive_connections=64),
        follow_redirects=True,
        event_hooks={"request": [limit]},
    )
    stack.push_async_callback(client.aclose)
    return streamable_http_client(url, http_client=client)


def _text_of(result: CallToolResult) -> str:
    if not result.content and result.structured_content is not None:
        return json.dumps(result.structured_content, ensure_ascii=False)
    return "\n".join(_text_of_part(part) for part in result.content)


def _text_of_part(part: ContentBlock) -> str:
    match part.type:
        case "text":
            return part.text
        case "image" | "audio":
            return f"[{part.type}, {part.mime_type}, {len(part.data) * 3 // 4 - part.data[-2:].count('=')} bytes]"
        case "resource_link":
            return f"[resource {part.name}: {part.uri}]"
        case "resource":
            text = getattr(part.resource, "text", None)
            return text if text is not None else f"[resource {part.resource.uri}, no text]"


def _check_installed() -> None:
    try:
        import mcp
    except ImportError as error:
        raise ConfigError(f"tools of MCP servers need the mcp package: {install_command('mcp')}") from error
    if not hasattr(mcp, "Client"):
        raise ConfigError(f"tools of MCP servers need mcp 2 or later: {install_command('mcp')}")

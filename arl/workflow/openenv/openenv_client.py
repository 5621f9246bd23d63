"""A session with an OpenEnv server, over its WebSocket: reset, step, close. It needs no package of OpenEnv's.

The messages are those of OpenEnv's servers from 0.2 to 0.10 (openenv.core.env_server): {"type": "step", "data": action}
is answered by {"type": "observation", "data": {"observation", "reward", "done"}} or {"type": "error", "data": ...}.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any, Protocol

import aiohttp

from arl.api.errors import EnvironmentFailedError, ToolError

_MOST_BYTES = 100 << 20
"""The longest message, as in OpenEnv's own client."""
_HEARTBEAT_S = 20.0
_CLOSE_S = 5.0
_REFUSED = ("VALIDATION_ERROR", "INVALID_JSON")
"""The codes of errors that are the action's fault."""


class StepResult(Protocol):
    """What reset and step return: OpenEnv's own class of that name, or SessionResult."""

    observation: Any
    reward: float | None
    done: bool


class EnvSession(Protocol):
    """What an episode needs of a client: OpenEnv's EnvClient, or OpenEnvSession."""

    async def reset(self, **arguments: Any) -> StepResult: ...

    async def step(self, action: Any) -> StepResult: ...


@dataclass(slots=True, kw_only=True)
class SessionResult:
    observation: Any
    reward: float | None
    done: bool


class OpenEnvSession:
    """One environment on a server, for one episode."""

    def __init__(self, socket: aiohttp.ClientWebSocketResponse, url: str) -> None:
        self._socket = socket
        self._url = url

    async def reset(self, **arguments: Any) -> SessionResult:
        """Begin an episode. Raises EnvironmentFailedError."""
        return await self._ask("reset", arguments)

    async def step(self, action: Mapping[str, Any]) -> SessionResult:
        """Take an action. Raises ToolError if it is no action of this environment, else EnvironmentFailedError."""
        return await self._ask("step", action)

    async def _ask(self, kind: str, data: Mapping[str, Any]) -> SessionResult:
        with contextlib.suppress(ConnectionError, aiohttp.ClientError):  # it says why it refuses a session
            await self._socket.send_str(json.dumps({"type": kind, "data": data}))
        message = await self._socket.receive()
        if message.type is not aiohttp.WSMsgType.TEXT:
            raise EnvironmentFailedError(f"the OpenEnv server at {self._url} ended the session during {kind}")
        answer = json.loads(message.data)
        if answer.get("type") == "error":
            raise _failure(answer.get("data") or {}, self._url, kind)
        said = answer["data"]
        return SessionResult(
            observation=said.get("observation", {}), reward=said.get("reward"), done=bool(said.get("done"))
        )


@asynccontextmanager
async def opened_session(client: aiohttp.ClientSession, url: str, timeout_s: float) -> AsyncIterator[OpenEnvSession]:
    """A session with the server at `url`, closed at the end. Raises EnvironmentFailedError if none can be opened."""
    try:
        async with asyncio.timeout(timeout_s):
            socket = await client.ws_connect(
                f"{url.rstrip('/')}/ws",
                heartbeat=_HEARTBEAT_S,
                max_msg_size=_MOST_BYTES,
                timeout=aiohttp.ClientWSTimeout(ws_close=_CLOSE_S),  # pyright: ignore[reportCallIssue]
            )
    except (aiohttp.ClientError, OSError, TimeoutError) as error:
        why = str(error) or f"no answer within {timeout_s:g} s"
        raise EnvironmentFailedError(f"there is no OpenEnv server at {url}: {why}") from error
    try:
        yield OpenEnvSession(socket, url)
    finally:
        await socket.close()


async def action_field(client: aiohttp.ClientSession, url: str, timeout_s: float) -> str:
    """The only field that an action of the server's environment must have. Raises EnvironmentFailedError if there is
    no only one."""
    try:
        async with asyncio.timeout(timeout_s), client.get(f"{url.rstrip('/')}/schema") as reply:
            schema = (await reply.json())["action"]
    except (aiohttp.ClientError, OSError, TimeoutError, ValueError, KeyError) as error:
        raise EnvironmentFailedError(
            f"the OpenEnv server at {url} does not say what its actions are: {error!r}"
        ) from error
    required = schema.get("required", [])
    if len(required) != 1:
        fields = ", ".join(schema.get("properties", {})) or "none"
        raise EnvironmentFailedError(
            f"an action of the environment at {url} has the fields {fields}, and must have "
            f"{', '.join(required) or 'none'} of them; pass action=, the name of the field that takes the turn's text, "
            "or a function from the text to an action; or tools=True for an environment of MCP tools"
        )
    return required[0]


def _failure(data: Mapping[str, Any], url: str, kind: str) -> Exception:
    code, text = str(data.get("code")), str(data.get("message"))
    if kind == "step" and code in _REFUSED:
        return ToolError("; ".join(map(_complaint, data.get("errors") or [])) or text)
    hint = "; pass max_sessions=, or let the server have more" if code == "CAPACITY_REACHED" else ""
    return EnvironmentFailedError(f"the OpenEnv server at {url} failed in {kind} ({code}): {text}{hint}")


def _complaint(error: Mapping[str, Any]) -> str:
    return f"{'.'.join(map(str, error.get('loc', ())))}: {error.get('msg')}"

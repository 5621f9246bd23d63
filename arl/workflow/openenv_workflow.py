"""OpenEnvWorkflow: episodes in an environment of OpenEnv (Meta's and Hugging Face's), which lives on a server.

    workflow = OpenEnvWorkflow(tokenizer, "http://127.0.0.1:8000")
    dataset = [{"seed": seed} for seed in range(1000)]

reset -> observation -> turn -> action -> step -> observation, reward -> turn -> ... -> done

OpenEnvSession is a session over the server's WebSocket, for which no package of OpenEnv's is needed. The messages are
those of OpenEnv's servers from 0.2 to 0.10 (openenv.core.env_server): {"type": "step", "data": action} is answered by
{"type": "observation", "data": {"observation", "reward", "done"}} or {"type": "error", "data": ...}.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import json
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, nullcontext
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, TypeVar, cast

import aiohttp

from arl.api.errors import ArlError, ConfigError, DatasetError, EnvironmentFailedError, ToolError
from arl.api.types import Example, SamplingParams, Trajectory
from arl.api.workflow import RolloutWorkflow, Shared
from arl.workflow.agent import with_system
from arl.workflow.call_formats import CallFormat, MalformedCall, ToolCall
from arl.workflow.chat_template import call_format_of
from arl.workflow.conversation import Conversation
from arl.workflow.dialogue import Rewriting
from arl.workflow.messages import Message
from arl.workflow.tools import DEFAULT_LIMITS, Tool, ToolLimits, cut, text_of

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from arl.api.engine import Sampler

log = logging.getLogger(__name__)
ResultT = TypeVar("ResultT")

_MOST_BYTES = 100 << 20
"""The longest message, as in OpenEnv's own client."""
_HEARTBEAT_S = 20.0
_CLOSE_S = 5.0
_CLIENTS_CLOSE_S = 10.0
_REFUSED = ("VALIDATION_ERROR", "INVALID_JSON")
"""The codes of errors that are the action's fault."""
_COLUMNS = ("messages", "prompt", "question")
"""Columns that tell the model something; all others are arguments of reset."""


@dataclass(slots=True, kw_only=True)
class SessionResult:
    """What reset and step return; OpenEnv's own StepResult has the same fields."""

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
            fault = answer.get("data") or {}
            code, text = str(fault.get("code")), str(fault.get("message"))
            if kind == "step" and code in _REFUSED:
                errors = fault.get("errors") or ()
                complaints = [f"{'.'.join(map(str, e.get('loc', ())))}: {e.get('msg')}" for e in errors]
                raise ToolError("; ".join(complaints) or text)
            hint = "; pass max_sessions=, or let the server have more" if code == "CAPACITY_REACHED" else ""
            raise EnvironmentFailedError(f"the OpenEnv server at {self._url} failed in {kind} ({code}): {text}{hint}")
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


@dataclass(kw_only=True, eq=False)
class EnvPlay:
    """An episode as the environment sees it: its steps and their rewards."""

    session: Any
    """OpenEnv's EnvClient, or an OpenEnvSession."""
    timeout_s: float
    rewards: list[float] = field(default_factory=list[float])
    num_steps: int = 0
    num_refused: int = 0
    done: bool = False

    async def step(self, action: Any) -> SessionResult:
        """Raises ToolError if the environment refuses the action."""
        result = await self.answered("step", self.session.step(action))
        self.num_steps += 1
        self.done = bool(result.done)
        if result.reward is not None:
            self.rewards.append(float(result.reward))
        return result

    async def tools(self) -> list[Tool]:
        """The environment's MCP tools. Raises EnvironmentFailedError if it has none."""
        try:
            result = await self.answered("list_tools", self.session.step({"type": "list_tools"}))
        except ToolError as error:
            raise EnvironmentFailedError(f"the environment has no MCP tools ({error}); leave out tools=True") from error
        listed = plain(result.observation).get("tools") or []
        if not listed:
            raise EnvironmentFailedError("the environment lists no MCP tools; leave out tools=True")
        return [
            Tool.from_schema(  # a call is a step, so that its function is never called
                self.step, name=tool["name"], description=tool["description"], parameters=tool["input_schema"]
            )
            for tool in map(plain, listed)
        ]

    def refused(self, error: ToolError) -> str:
        self.num_refused += 1
        return f"error: {error}"

    async def answered(self, what: str, answer: Awaitable[ResultT]) -> ResultT:
        """The environment's answer in time. Raises ToolError for a refused action, else EnvironmentFailedError."""
        try:
            async with asyncio.timeout(self.timeout_s):
                return await answer
        except ArlError:
            raise
        except TimeoutError as error:
            raise EnvironmentFailedError(
                f"the environment did not answer {what} within {self.timeout_s:g} s"
            ) from error
        except Exception as error:
            if "VALIDATION_ERROR" in str(error):  # OpenEnv's own client says so only in words
                raise ToolError("this is no action of the environment") from error
            raise EnvironmentFailedError(f"the environment failed in {what}: {error!r}") from error


def plain(record: Any) -> Any:
    """A record of OpenEnv's as a dict."""
    if hasattr(record, "model_dump"):
        return record.model_dump()
    if dataclasses.is_dataclass(record) and not isinstance(record, type):
        return dataclasses.asdict(record)
    return record


def tool_text(observation: Mapping[str, Any]) -> str:
    """What a tool returned. Raises ToolError if it failed."""
    if error := observation.get("error"):
        raise ToolError(str(plain(error).get("message", error)))
    result = plain(observation.get("result"))
    if not isinstance(result, Mapping):
        return text_of(result)
    parts = cast("Mapping[str, Any]", result)
    texts = [part["text"] for part in parts.get("content") or () if isinstance(part, Mapping) and "text" in part]
    text = "\n".join(texts) or text_of(parts.get("structured_content") or dict(parts))
    if parts.get("is_error"):
        raise ToolError(text)
    return text


@dataclass(kw_only=True, eq=False, repr=False)
class OpenEnvWorkflow(Shared, RolloutWorkflow):
    """Plays an episode of an OpenEnv environment, and rewards it as the environment does.

    An example's columns are the arguments of reset, `seed` for instance, so that a group's episodes are the same task;
    its `messages`, `prompt` or `question`, if it has one, come before the first observation. An action that the
    environment refuses is a message to the model. Metrics: turns, steps, invalid_actions, done and context_full.
    Raises EnvironmentFailedError if the environment fails, or does not answer.
    """

    tokenizer: PreTrainedTokenizerBase = field(kw_only=False)
    """Must have a chat template."""
    env: str | Callable[[Example], Any] = field(kw_only=False)
    """The server's address; or a function that makes a client for an episode, an EnvClient of OpenEnv's."""
    headers: Mapping[str, str] | None = None
    """Sent to the server's address: an Authorization, for instance."""
    sampling: SamplingParams = field(default_factory=SamplingParams)
    system: str | None = None
    """The system prompt, unless the example's messages have one."""
    action: str | Callable[[str], Any] | None = None
    """Makes an action of a turn's text, and may raise ToolError, which the model reads; or the name of the action's
    field that takes the text. If unset, the only one that the server's schema requires."""
    observation: Callable[[Any], str] | None = None
    """The text of an observation. If unset, its only text, or all of it as JSON, metadata apart."""
    tools: bool = False
    """Whether the environment has MCP tools: the model calls them, each call is a step, and a turn without a call ends
    the episode."""
    reward: Literal["sum", "last"] = "sum"
    """The episode's reward: the sum of its steps' rewards, or the last reward that a step had."""
    max_turns: int = 16
    """How often the model may speak."""
    timeout_s: float = 60.0
    """The longest that connecting, reset and each step may take."""
    max_sessions: int | None = None
    """Episodes that have a session with the server at once; others wait. None: any number."""
    limits: ToolLimits = DEFAULT_LIMITS
    """Its max_output_chars: characters of an observation that the model reads."""
    call_format: CallFormat | None = None
    """How the model writes calls; if unset, as the chat template asks."""
    template_options: Mapping[str, Any] | None = None
    """Passed to the chat template."""
    rewriting: Rewriting = "branch"
    """What to do when the chat template rewrites an earlier turn (see Conversation)."""

    def __post_init__(self) -> None:
        Shared.__init__(self)
        if self.reward not in ("sum", "last") or self.max_turns < 1 or self.timeout_s <= 0:
            raise ConfigError(
                f"reward is {self.reward!r}, max_turns {self.max_turns} and timeout_s {self.timeout_s}; they must be "
                "sum or last, at least 1, and above 0"
            )
        if self.action is None and not self.tools and not isinstance(self.env, str):
            raise ConfigError("with a client of your own, pass action=, which makes an action of a text, or tools=True")
        self._format = (self.call_format or call_format_of(self.tokenizer)) if self.tools else None
        self._places = nullcontext() if self.max_sessions is None else asyncio.Semaphore(self.max_sessions)
        self._act = self.action
        self._client: aiohttp.ClientSession | None = None

    async def _open(self, opened: AsyncExitStack) -> None:
        self._client = await opened.enter_async_context(aiohttp.ClientSession(headers=self.headers))
        if isinstance(self.env, str) and self._act is None and not self.tools:
            self._act = await action_field(self._client, self.env, self.timeout_s)

    def check_example(self, data: Example) -> None:
        """Raise DatasetError for an example without arguments for reset."""
        if not _reset_arguments(data):
            raise DatasetError(
                f"an example has the columns {', '.join(map(str, data)) or 'none'}, and none for reset, so that the "
                'episodes of its group would be different tasks; give it a seed: {"seed": 7}'
            )

    async def arun_episode(self, engine: Sampler, data: Example) -> Sequence[Trajectory]:
        if self._client is None or not self.is_open:
            raise ArlError("this OpenEnvWorkflow is not open; use it within `async with`")
        async with self._places, self._session(data) as session:
            play = EnvPlay(session=session, timeout_s=self.timeout_s)
            first = await play.answered("reset", session.reset(**_reset_arguments(data)))
            tools = await play.tools() if self.tools else []
            messages = with_system(self.system, self._beginning(data, self._text(first.observation)))
            options = self.template_options
            chat = Conversation(
                self.tokenizer, messages, tools=tools, template_options=options, rewriting=self.rewriting
            )
            play.done = bool(first.done)
            if play.done:
                raise EnvironmentFailedError(f"reset with {_reset_arguments(data)} began an episode that is done")
            await self._play(engine, chat, play, tools)
        reward = sum(play.rewards if self.reward == "sum" else play.rewards[-1:], 0.0)
        counts = {"steps": play.num_steps, "invalid_actions": play.num_refused, "done": float(play.done)}
        return chat.trajectories(reward, {"turns": chat.num_turns, **counts})

    async def _play(self, engine: Sampler, chat: Conversation, play: EnvPlay, tools: Sequence[Tool]) -> None:
        for _ in range(self.max_turns):
            turn = await chat.agenerate(engine, self.sampling)
            if chat.is_full:
                return
            if self._format is None:
                assert self._act is not None
                try:
                    action = {self._act: turn.text} if isinstance(self._act, str) else self._act(turn.text)
                    result = await play.step(action)
                except ToolError as error:
                    said = play.refused(error)
                else:
                    said = self._text(result.observation)
                chat.add({"role": "user", "content": said})
            else:
                calls = self._format.parse(turn.words, [tool.spec for tool in tools]).calls
                if not calls:
                    return
                chat.add(*[await self._call(play, call) for call in calls])
            if play.done:
                return

    async def _call(self, play: EnvPlay, call: ToolCall | MalformedCall) -> Message:
        name = call.name if isinstance(call, ToolCall) else "malformed_call"
        said = {"role": "tool", "name": name, "tool_call_id": call.id}
        if play.done:
            return {**said, "content": "error: the episode is over"}
        try:
            if isinstance(call, MalformedCall):
                raise ToolError(call.reason)
            action = {"type": "call_tool", "tool_name": call.name, "arguments": dict(call.arguments)}
            result = await play.step(action)
            content = tool_text(plain(result.observation))
        except ToolError as error:
            content = play.refused(error)
        return {**said, "content": cut(content, self.limits.max_output_chars)}

    def _beginning(self, data: Example, observed: str) -> str | list[Message]:
        """The first messages: the example's, if it has any, and the first observation."""
        given = next((data[name] for name in _COLUMNS if data.get(name) is not None), None)
        if given is None or isinstance(given, str):
            text = "\n\n".join(part for part in (given, observed) if part)
            if not text:
                raise DatasetError("neither the example nor reset's observation tells the model anything; give the "
                                   "examples a column `prompt`, or pass observation=")  # fmt: skip
            return text
        return [*given, {"role": "user", "content": observed}] if observed else [*given]

    def _text(self, observation: Any) -> str:
        if self.observation is not None:
            text = self.observation(observation)
        elif isinstance(fields := plain(observation), Mapping):  # its only text, or all of it as JSON
            shown = {name: value for name, value in fields.items() if name not in ("metadata", "reward", "done")}
            texts = [value for value in shown.values() if isinstance(value, str)]
            is_text = len(texts) == len(shown) <= 1
            text = "".join(texts) if is_text else json.dumps(shown, ensure_ascii=False, default=str)
        else:
            text = text_of(fields)
        return cut(text, self.limits.max_output_chars)

    @asynccontextmanager
    async def _session(self, data: Example) -> AsyncIterator[Any]:
        if isinstance(self.env, str):
            assert self._client is not None
            async with opened_session(self._client, self.env, self.timeout_s) as session:
                yield session
            return
        client = self.env(data)
        try:
            yield client
        finally:
            try:
                async with asyncio.timeout(_CLIENTS_CLOSE_S):
                    await client.close()
            except Exception as error:  # noqa: BLE001 - the episode is over, whatever a user's client raises
                log.warning("closing an environment's client failed: %r", error)


def _reset_arguments(data: Example) -> dict[str, Any]:
    return {name: value for name, value in data.items() if name not in _COLUMNS and value is not None}

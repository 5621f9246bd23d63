"""VerifiersWorkflow: trains in environments of verifiers (0.4), with their tasks, agents and rewards.

    env = local_environment({"taskset": {"id": "gsm8k-v1"}})
    workflow = VerifiersWorkflow(env, tokenizer, sampling=SamplingParams(max_new_tokens=1024))
    dataset = workflow.rows(env.taskset.take(1000))

verifiers runs the rollout and scores the result. Its calls of the model go to an OpenAIProxy, which records the tokens.
All of it runs in this process and event loop, and uses only loopback, unless the environment itself does otherwise.
"""

from __future__ import annotations

import json
import ssl
import sys
from collections.abc import Iterable, Mapping, Sequence
from contextlib import AsyncExitStack, ExitStack
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Any

from arl.api.errors import ArlError, EnvironmentFailedError
from arl.api.types import Example, SamplingParams, Trajectory
from arl.api.version import install_command
from arl.api.workflow import RolloutWorkflow, Shared
from arl.endpoint.proxy import KEY_HEADER, MODEL, OpenAIProxy, SharedURL
from arl.endpoint.session import EpisodeSession
from arl.workflow.conversation import trajectories

try:
    import verifiers.v1 as vf
    from openai import APIStatusError, AsyncOpenAI, DefaultAsyncHttpxClient, omit
    from verifiers.v1.dialects.chat import message_to_wire
    from verifiers.v1.harnesses.utils.compaction import is_context_overflow
    from verifiers.v1.harnesses.utils.mcp import MCPConnection, call_mcp, connect_mcp
except ImportError as error:
    raise ArlError(f"environments of verifiers need the package: {install_command('verifiers')}") from error

if TYPE_CHECKING:
    from openai.types.chat import ChatCompletionMessageToolCallUnion
    from transformers import PreTrainedTokenizerBase

    from arl.api.engine import Sampler
    from arl.workflow.call_formats import CallFormat

__all__ = ["ChatHarness", "VerifiersWorkflow", "local_environment"]

HARNESS = "arl-chat"
"""The id of ChatHarness: verifiers imports the module that it names, and takes the exported class."""
sys.modules.setdefault("arl_chat", sys.modules[__name__])
_NO_KEY = "ARL_HAS_NO_API_KEY"
"""verifiers reads keys from environment variables. arl sends its key in KEY_HEADER, and leaves this variable unset."""


def local_environment(config: Mapping[str, Any]) -> vf.Env:
    """The environment of a verifiers config, `{"taskset": {"id": ...}, ...}`, with agents that run in this process.

    This applies to agents whose harness is `null`, or was chosen neither by the config nor by the environment's author:
    unlike verifiers' default `bash`, they execute nothing. The default runtime is this machine, unconfined. Raises
    verifiers' own errors for a config that it refuses.
    """
    given, taskset_id = dict(config), dict(config.get("taskset") or {}).get("id", "")
    has_harness = vf.default_harness_id(taskset_id) != "bash"
    for name, field in vf.env_config_type(taskset_id, given.get("id", "")).model_fields.items():
        if not isinstance(field.default, vf.AgentConfig):
            continue
        harness = field.default.harness
        ours = {} if has_harness or (harness and harness.id != "null") else {"harness": {"id": HARNESS}}
        if "runtime" not in field.default.model_fields_set:
            ours["runtime"] = {"type": "subprocess"}
        given[name] = {**ours, **dict(given.get(name) or {})}
    return vf.load_environment(vf.resolve_env_config(given))


class VerifiersWorkflow(Shared, RolloutWorkflow):
    """Runs a task of `env` in each episode. Each agent that the environment trains returns its own trajectories, with
    its reward, the reward's named parts, its metrics, and its name as their role.

    env: an environment of verifiers, or a config for local_environment. sampling: for agents whose config sets none.
    context_length: the model's context in tokens; a rollout that outgrows it ends. call_format: how the model writes
    tool calls; by default as its chat template says. Where the template would rewrite an earlier turn, the model keeps
    seeing the turn as it was sampled.
    """

    def __init__(
        self,
        env: vf.Env | Mapping[str, Any],
        tokenizer: PreTrainedTokenizerBase,
        *,
        sampling: SamplingParams = SamplingParams(),  # noqa: B008 - it is frozen
        context_length: int | None = None,
        call_format: CallFormat | None = None,
    ) -> None:
        super().__init__()
        self.env = local_environment(env) if isinstance(env, Mapping) else env
        self._sampling = sampling
        self._proxy = OpenAIProxy(
            tokenizer, sampling=sampling, context_length=context_length, call_format=call_format, rewriting="keep"
        )
        self._tasks: list[vf.Task] = []
        self._context: vf.ModelContext
        self._shared: SharedURL

    def rows(self, tasks: Iterable[vf.Task]) -> list[Example]:
        """A dataset of these tasks. The workflow keeps the tasks, so it cannot use rows of another workflow or run."""
        first = len(self._tasks)
        self._tasks += tasks
        return [
            {"task": i, **task.data.model_dump(mode="json", exclude_defaults=True)}
            for i, task in enumerate(self._tasks[first:], start=first)
        ]

    async def _open(self, opened: AsyncExitStack) -> None:
        await opened.enter_async_context(self._proxy)
        self._shared = opened.enter_context(self._proxy.shared_url())
        await opened.enter_async_context(self.env.serving())
        sampling = self._sampling
        params = vf.SamplingConfig(
            temperature=sampling.temperature, top_p=sampling.top_p, max_tokens=sampling.max_new_tokens
        )
        headers = {KEY_HEADER: self._shared.api_key}
        client = vf.EvalClientConfig(base_url=self._shared.base_url, api_key_var=_NO_KEY, headers=headers)
        self._context = vf.ModelContext(model=MODEL, client=client, sampling=params)

    async def arun_episode(self, engine: Sampler, data: Example) -> Sequence[Trajectory]:
        """Raises EnvironmentFailedError, with the rollout's first error, if the rollout did not finish."""
        if not self.is_open:
            raise ArlError("this VerifiersWorkflow is not open; use it within `async with`")
        slot = self.env.slots(self._tasks[data["task"]])[0]
        async with self._proxy.episode(engine) as session:
            with ExitStack() as admitted:
                episode = await self.env.run_slot(
                    slot,
                    self._context,
                    on_trace=lambda trace: admitted.enter_context(
                        self._shared.admitting(trace.id, session, trace.agent.name)
                    ),
                )
        if self.env.complete(episode):
            return _trajectories(episode, session)
        why = "ended without a result, and does not say why"
        errors = [(trace.agent.name, error) for trace in episode.traces for error in trace.errors]
        errors += [("environment", error) for error in episode.errors]
        if errors:
            where, error = errors[0]
            traceback = f"\n{error.traceback}" if error.traceback else ""
            why = f"failed in its {where}: {error.type}: {error.message}{traceback}"
        cause = session.errors[0] if session.errors else None
        raise EnvironmentFailedError(f"the environment {episode.env.id} {why}") from cause


def _trajectories(episode: vf.Episode, session: EpisodeSession) -> list[Trajectory]:
    """The trajectories of each agent's run that is to be trained. A run's turns are the calls under its id."""
    made: list[Trajectory] = []
    runs = [trace for trace in episode.traces if trace.agent.trainable and session.turns(trace.id)]
    for trace in runs:
        prefix = "" if len(episode.traces) == 1 else f"{trace.agent.name}/"
        is_cut = trace.is_truncated or trace.calls[-1].error is not None
        turns = session.turns(trace.id)
        numbers = {f"{prefix}{name}": value for name, value in trace.metrics.items() if value is not None}
        made += trajectories(
            turns,
            trace.reward,
            metrics={f"{prefix}turns": trace.num_turns, **numbers},
            role=trace.agent.name,
            rewards={name: part.value for name, part in trace.rewards.items() if part is not None},
            cut_after=turns[-1] if is_cut else None,
        )
    if not made:
        ended = ", ".join(str(trace.stop_condition) for trace in episode.traces)
        raise EnvironmentFailedError(f"no trained agent called the model; the agents ended by: {ended}")
    return made


class ChatHarnessConfig(vf.HarnessConfig):
    """The settings of every harness. Only tool_timeout is used; env is not, since no program is started."""


class ChatHarness(vf.Harness[ChatHarnessConfig]):
    """Runs an agent as a coroutine of this process, until the model answers without calling a tool.

    verifiers' own `bash` and `null` harnesses run a program for each rollout. This one executes nothing, and many
    rollouts share one event loop. The environment's servers provide the tools.

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
        ctx: vf.ModelContext,
        trace: vf.Trace,
        runtime: vf.Runtime,
        endpoint: str,
        secret: str,
        mcp_urls: dict[str, str],
        data: vf.TaskData,
        tool_interception_url: str | None = None,
    ) -> vf.ProgramResult:
        system, prompt = self.resolve_prompt(data)
        messages: list[dict[str, Any]] = [{"role": "system", "content": system}] if system else []
        given = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else map(message_to_wire, prompt or ())
        messages += given
        servers = {name: {"url": url, "timeout": self.config.tool_timeout} for name, url in mcp_urls.items()}
        async with (
            AsyncExitStack() as stack,
            DefaultAsyncHttpxClient(verify=_tls(), timeout=None) as http,
            AsyncOpenAI(base_url=endpoint, api_key=secret, max_retries=0, http_client=http) as client,
        ):
            tools = _Tools(*await connect_mcp({"mcpServers": servers}, stack))
            shown: Any = tools.specs or omit
            try:
                while True:
                    asked: Any = {"model": ctx.model, "messages": messages, "tools": shown}
                    message = (await client.chat.completions.create(**asked)).choices[0].message
                    if not message.tool_calls:
                        return vf.ProgramResult(exit_code=0, stdout="", stderr="")
                    messages.append(message.model_dump(exclude_none=True))
                    messages += [await tools.answer(call) for call in message.tool_calls]
            except APIStatusError as refused:
                has_outgrown = is_context_overflow(refused)
                return vf.ProgramResult(exit_code=0 if has_outgrown else 1, stdout="", stderr=str(refused))


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
        name = call.function.name
        try:
            given = json.loads(call.function.arguments or "{}")
        except ValueError:
            given = None
        content: str | list[dict[str, Any]]
        if name not in self.dispatch:
            content = f"error: there is no tool {name!r}; the tools are {', '.join(self.dispatch) or 'none'}"
        elif not isinstance(given, dict):
            content = "error: the arguments of a tool call must be one JSON object"
        else:
            content = await call_mcp(self.servers, self.dispatch, name, given)
        return {"role": "tool", "tool_call_id": call.id, "name": name, "content": content}

"""SDKWorkflow: trains a program that calls a model over HTTP, without changes to the program."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import inspect
import json
import os
import signal
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryFile
from typing import TYPE_CHECKING, Any

from arl.api.errors import ConfigError, ProgramError
from arl.api.types import Example, SamplingParams, Trajectory
from arl.api.workflow import RolloutWorkflow, Shared
from arl.endpoint.proxy import OpenAIProxy, proxy_of
from arl.endpoint.session import EpisodeSession
from arl.rewards.adapt import RewardLike, as_reward, try_rewards
from arl.rewards.threads import CallThreads
from arl.runtime.clocks import off_the_clock

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from arl.api.engine import Sampler

Program = Callable[[str, str, Example], "str | Awaitable[str]"]
"""Takes `(base_url, api_key, data)` and returns the agent's final answer. A coroutine function runs on the event loop,
any other function in a thread. The end of the episode cannot kill a thread, but its next call gets a 401."""

PROCESSES_PER_CORE = 8
"""A program waits for the model most of its time."""
_MAX_OUTPUT_BYTES = 1 << 20
_MAX_TOLD = 2000
_DRAIN_S = 2.0
_THREADS = CallThreads(max_threads=4096, max_hung=4096)
"""A program runs as long as its episode, so each running episode needs a thread."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Command:
    """A program in any language that runs as a separate process, without a sandbox.

    It reads the example from standard input, as JSON, and prints its answer. Any exit status but 0 is an error. Its
    environment has OPENAI_BASE_URL and OPENAI_API_KEY, ANTHROPIC_BASE_URL and ANTHROPIC_API_KEY. The end of the episode
    kills the program and its process group.
    """

    arguments: Sequence[str]
    """The command line, without a shell."""
    cwd: Path | None = None
    env: Mapping[str, str] = field(default_factory=dict[str, str])
    """Added to this process's environment."""
    max_processes: int | None = None
    """How many of them an SDKWorkflow runs at once, in each episode worker; other episodes wait for a place, without a
    time limit. Unset: eight for each core that this process may use."""

    def __post_init__(self) -> None:
        if isinstance(self.arguments, str) or not self.arguments:
            raise ConfigError(f"arguments is {self.arguments!r}; give it as a list, such as ['python', 'agent.py']")
        if self.max_processes is not None and self.max_processes < 1:
            raise ConfigError(f"max_processes is {self.max_processes}; it must be at least 1")

    @property
    def num_places(self) -> int:
        """How many run at once: max_processes, or its default on this machine."""
        return self.max_processes or PROCESSES_PER_CORE * len(os.sched_getaffinity(0))

    async def arun(self, session: EpisodeSession, data: Example) -> str:
        """Run the program and return its output. Raises ProgramError."""
        keys = {"OPENAI_API_KEY": session.api_key, "ANTHROPIC_API_KEY": session.api_key}
        urls = {"OPENAI_BASE_URL": session.base_url, "ANTHROPIC_BASE_URL": session.url}
        with TemporaryFile() as example:  # unlike a pipe, it does not wait to be read
            example.write(json.dumps(dict(data), default=str).encode())
            example.seek(0)
            try:
                transport, running = await asyncio.get_running_loop().subprocess_exec(
                    _Running,
                    *self.arguments,
                    stdin=example,
                    cwd=self.cwd,
                    env={**os.environ, **keys, **urls, **self.env},
                    start_new_session=True,
                )
            except OSError as error:
                raise ProgramError(f"{self.arguments[0]} could not be started: {error}") from error
        with contextlib.closing(transport):
            try:
                await running.exited.wait()
                _kill(transport)  # processes that it left running hold its output open
                with contextlib.suppress(TimeoutError):  # so do processes that left its group
                    async with asyncio.timeout(_DRAIN_S):
                        await running.drained.wait()
            finally:
                _kill(transport)
                await running.exited.wait()
        line, status = " ".join(self.arguments), transport.get_returncode()
        if status != 0:
            said = running.complained[-_MAX_TOLD:].decode(errors="replace").strip()
            raise ProgramError(f"{line} ended with status {status}: {said or '(nothing on its stderr)'}")
        if len(running.printed) > _MAX_OUTPUT_BYTES:
            raise ProgramError(f"{line} printed more than {_MAX_OUTPUT_BYTES} bytes")
        return running.printed.decode(errors="replace").strip()


class _Running(asyncio.SubprocessProtocol):
    """A process, the beginning of its stdout, and the end of its stderr."""

    def __init__(self) -> None:
        self.printed = bytearray()
        self.complained = bytearray()
        self.exited = asyncio.Event()
        self.drained = asyncio.Event()
        """Set once all output is here."""
        self._open = {1, 2}

    def pipe_data_received(self, fd: int, data: bytes) -> None:
        if fd == 2:
            self.complained = (self.complained + data)[-_MAX_TOLD:]
        elif len(self.printed) <= _MAX_OUTPUT_BYTES:
            self.printed += data

    def pipe_connection_lost(self, fd: int, exc: Exception | None) -> None:
        self._open.discard(fd)
        if not self._open:
            self.drained.set()

    def process_exited(self) -> None:
        self.exited.set()


def _kill(transport: asyncio.SubprocessTransport) -> None:
    """Kill the program and its group. The group's id stays taken while any process in it lives."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(transport.get_pid(), signal.SIGKILL)


class SDKWorkflow(Shared, RolloutWorkflow):
    """Gives a program a base URL and a key, and trains on the calls that it makes with them.

        workflow = SDKWorkflow(program, reward, tokenizer, sampling=SamplingParams(max_new_tokens=1024))

    program: a function, sync or async, or a Command. reward: scores the text that the program returns; see as_reward.
    proxy: instead of tokenizer and sampling, for further settings. If the program fails, its episode fails, unless a
    call found no room in the model's context and earlier calls were answered: then the episode ends truncated, with the
    answer "". Metrics: context_full, the proxy's metrics and, for a Command, program_wait_s: the time for which the
    episode waited until fewer than Command.max_processes ran.
    """

    def __init__(
        self,
        program: Program | Command,
        reward: RewardLike,
        tokenizer: PreTrainedTokenizerBase | None = None,
        *,
        sampling: SamplingParams | None = None,
        proxy: OpenAIProxy | None = None,
    ) -> None:
        super().__init__()
        self._program = program
        self.proxy = proxy_of(tokenizer, sampling, proxy)
        self.reward = reward
        self._score = as_reward(reward)
        self._places: asyncio.Semaphore | None = None

    async def _open(self, opened: contextlib.AsyncExitStack) -> None:
        if isinstance(self._program, Command):
            self._places = asyncio.Semaphore(self._program.num_places)
        await opened.enter_async_context(self.proxy)
        await opened.enter_async_context(self._score)

    async def arehearse(self, examples: Sequence[Example]) -> None:
        await try_rewards([self._score], examples, gets_text=False, is_open=self.is_open)

    async def arun_episode(self, engine: Sampler, data: Example) -> Sequence[Trajectory]:
        waited: dict[str, float] = {}
        async with contextlib.AsyncExitStack() as held:
            if self._places is not None:  # a function needs none
                waited["program_wait_s"] = await self._take_place(self._places, held)
            async with self.proxy.episode(engine) as session:
                answer = await self._answer(session, data)
        score = await self._score(answer, data)
        metrics = {**score.metrics, **waited, "context_full": float(session.is_truncated)}
        return session.trajectories(score.value, metrics, rewards=score.parts)

    async def _take_place(self, places: asyncio.Semaphore, held: contextlib.AsyncExitStack) -> float:
        """The seconds that it took. The watchdog tells this wait by the coroutine's name."""
        began = time.monotonic()
        with off_the_clock():
            await held.enter_async_context(places)
        return time.monotonic() - began

    async def _answer(self, session: EpisodeSession, data: Example) -> str:
        program: Any = self._program
        try:
            if isinstance(program, Command):
                return await program.arun(session, data)
            call = functools.partial(program, session.base_url, session.api_key, data)
            is_async = inspect.iscoroutinefunction(program) or inspect.iscoroutinefunction(type(program).__call__)
            answer = await (call() if is_async else _THREADS.acall(call))
            if inspect.isawaitable(answer):
                answer = await answer
        except Exception as error:
            if session.is_truncated and session.roles:
                return ""
            for failure in session.errors:
                error.add_note(f"a call of the program had failed: {failure!r}")
            raise
        if not isinstance(answer, str):
            raise ProgramError(f"the program returned {str(answer)[:200]!r}; it must return its final answer, a text")
        return answer

"""HarborWorkflow: the model works on a task of Harbor's in a terminal, and the task's tests are its reward.

    workflow = HarborWorkflow(tokenizer, sampling=SamplingParams(max_new_tokens=512))
    dataset = harbor_tasks("tasks/")

instruction -> turn -> bash -> its output -> turn -> ... -> a turn without a call -> tests/test.sh -> /logs/verifier
"""

from __future__ import annotations

import json
import math
import os
import posixpath
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field, replace
from types import MethodType
from typing import Literal

from arl.api.errors import ConfigError, DatasetError, EnvironmentFailedError
from arl.api.types import Example
from arl.rewards.adapt import RewardLike
from arl.rewards.score import Score
from arl.sandbox.bubblewrap import BubblewrapSandbox
from arl.sandbox.bubblewrap_terminal import BubblewrapTerminal, CommandOutcome, Terminal
from arl.sandbox.contract import Limits
from arl.sandbox.docker import DockerImages
from arl.workflow.agent import ToolEpisode, with_system
from arl.workflow.harbor_task import HarborTask, PlainImage, task_at
from arl.workflow.messages import Message
from arl.workflow.tool_agent import ToolAgentWorkflow
from arl.workflow.tools import DEFAULT_LIMITS, Tool, ToolLimits, cut

DIRECTORIES = ("/app", "/workspace", "/work", "/data", "/logs", "/tests", "/solution")
REWARD_JSON, REWARD_TEXT = "/logs/verifier/reward.json", "/logs/verifier/reward.txt"
TEST_OUTPUT = "/logs/verifier/test-stdout.txt"
_TESTS = f"mkdir -p /logs/verifier /logs/agent /logs/artifacts; /tests/test.sh > {TEST_OUTPUT} 2>&1"
_HIDDEN = ("/tests", "/logs/verifier", "/solution")
"""Removed before the tests, so that none of it is the agent's."""
_MIB = 1 << 20
_NO_LIMIT_S = 1e6
"""command_timeout_s ends a command; a wait for a place to run does not count."""
_NOTE_CHARS = 200
"""Room for the notes after a command's output."""
SANDBOXES = ("auto", "bubblewrap", "docker")


@dataclass(kw_only=True, eq=False, repr=False)
class HarborWorkflow(ToolAgentWorkflow):
    """Lets the model work in a terminal until it answers without a call, and rewards it by the task's tests.

    Its examples are rows of `harbor_tasks`. The tests run at the end of each episode, however it ended, and are not
    there before. Their `reward`, or their only number, is the reward; all numbers are its parts. Metrics: those of
    ToolAgentWorkflow, `verifier_s`, and `verifier_cut`: 1 if a limit ended the tests, and the reward is 0.
    """

    reward: RewardLike = field(default_factory=lambda: _decided_by_tests, init=False)
    system: str | None = "Solve the task in the terminal. When you are done, answer without a call."
    max_turns: int = 20
    limits: ToolLimits = field(default=DEFAULT_LIMITS, init=False)
    max_output_chars: int = 4000
    """Characters of a command's output that the model reads: the first ones, and how many are missing."""
    sandbox: Literal["auto", "bubblewrap", "docker"] = "auto"
    """Where tasks run: "bubblewrap" has this machine's programs and no image, "docker" the task's image. "auto" takes
    bubblewrap for tasks whose Dockerfile only copies files onto an ordinary Linux, and Docker for others."""
    directories: Sequence[str] = DIRECTORIES
    """In bubblewrap: where the files of tasks may lie, /tmp apart. Elsewhere programs can only read."""
    command_timeout_s: float = 60.0
    """The longest a command may take. The model reads that it was ended; what it wrote stays."""
    terminal_limits: Limits = Limits(memory_bytes=1 << 30, cpu_s=60.0, processes=64)  # noqa: RUF009 - it is frozen
    """Of each command and of the tests, but wall_s, which follows from the timeouts. A task that asks for less memory
    or space gets less."""
    network: bool = False
    """In Docker: whether tasks that allow it have the network."""
    concurrency: int | None = None
    """Commands at once; by default as many as there are processors."""

    def __post_init__(self) -> None:
        self.limits = ToolLimits(timeout_s=_NO_LIMIT_S, max_output_chars=self.max_output_chars + _NOTE_CHARS)
        super().__post_init__()
        if self.sandbox not in SANDBOXES:
            raise ConfigError(f"there is no sandbox {self.sandbox!r} for tasks; it is auto, bubblewrap or docker")
        self._docker = DockerImages(network=self.network, concurrency=self.concurrency or os.cpu_count() or 1)
        self._bubblewrap: BubblewrapSandbox | None = None

    async def _open(self, opened: AsyncExitStack) -> None:
        await super()._open(opened)
        if self.sandbox != "docker":
            found = BubblewrapSandbox(directories=self.directories, concurrency=self.concurrency)
            self._bubblewrap = await opened.enter_async_context(found)
        await opened.enter_async_context(self._docker)

    def messages(self, data: Example) -> Sequence[Message]:
        given = self.prompt(data) if self.prompt is not None else task_at(data["path"]).instruction
        return with_system(self.system, given)

    def check_example(self, data: Example) -> None:
        """Raise DatasetError for a row that is no task, or a task that the sandbox cannot play."""
        if "path" not in data:
            raise DatasetError(f"an example has the columns {', '.join(map(str, data))}, and no `path` of a task; "
                               "make the dataset with harbor_tasks")  # fmt: skip
        task = task_at(data["path"])
        if self._runs_in_docker(task):
            self._docker.check()
        else:
            self._plain_image(task)

    @asynccontextmanager
    async def episode_tools(self, data: Example) -> AsyncIterator[list[Tool]]:
        """The tool bash, and the workflow's own."""
        if not self.is_open:
            raise ConfigError(f"{type(self).__name__} is not open; run episodes in `async with workflow`")
        async with super().episode_tools(data) as others, self._terminal(task_at(data["path"])) as terminal:
            shell = Shell(terminal, task_at(data["path"]), self.command_timeout_s, self.max_output_chars)
            yield [Tool.from_function(shell.bash), *others]

    @staticmethod
    def tool() -> Tool:
        """The tool bash as models see it, for demonstrations; it cannot be called."""
        return Tool.from_function(MethodType(Shell.bash, Shell))

    async def ascore_episode(self, episode: ToolEpisode) -> Score:
        """The reward of the tests. Raises EnvironmentFailedError if they end by themselves and leave none."""
        shell = episode.tools[0].owner
        assert isinstance(shell, Shell)
        return await shell.verify()

    def _runs_in_docker(self, task: HarborTask) -> bool:
        if self.sandbox == "auto":
            try:
                task.plain_image()
            except DatasetError:
                return True
        return self.sandbox == "docker"

    @asynccontextmanager
    async def _terminal(self, task: HarborTask) -> AsyncIterator[Terminal]:
        if self._runs_in_docker(task):
            async with self._docker.terminal(
                task.docker_image or task.dockerfile.parent,
                workdir=task.workdir,
                env=task.env,
                limits=self._limits_of(task),
                cpus=task.cpus,
                allows_network=task.allows_network,
            ) as terminal:
                yield terminal
        else:
            assert self._bubblewrap is not None
            image = self._plain_image(task)
            yield BubblewrapTerminal(
                self._bubblewrap,
                workdir=image.workdir,
                files=image.sources,
                env={**image.env, **task.env},
                limits=self._limits_of(task),
            )

    def _plain_image(self, task: HarborTask) -> PlainImage:
        """What bubblewrap gives the task. Raises DatasetError if that is not what it needs."""
        image = task.plain_image()
        places = (*self.directories, "/tmp")
        for path in (image.workdir, *image.sources):
            if path not in places and not path.startswith(tuple(f"{place}/" for place in places)):
                raise DatasetError(
                    f"the task {task.directory} has {path}, which is not below {', '.join(self.directories)}; pass "
                    f"directories=[..., '/{path.split('/')[1]}'] unless that is a directory of the system, or "
                    "sandbox='docker'"
                )
        return image

    def _limits_of(self, task: HarborTask) -> Limits:
        given = self.terminal_limits
        memory, disk = (given.memory_bytes, task.memory_mb), (given.disk_bytes, task.storage_mb)
        memory_bytes, disk_bytes = (most if mib is None else min(most, mib * _MIB) for most, mib in (memory, disk))
        return replace(given, memory_bytes=memory_bytes, disk_bytes=disk_bytes)


async def _decided_by_tests(answer: str, data: Example) -> float:
    """A coroutine function, so that no worker process waits for its calls."""
    raise AssertionError("ascore_episode runs the tests instead")


class Shell:
    """A task's terminal as the model's tool, and its tests."""

    def __init__(self, terminal: Terminal, task: HarborTask, timeout_s: float, max_output_chars: int) -> None:
        self._terminal = terminal
        self._task = task
        self._timeout_s = timeout_s
        self._max_output_chars = max_output_chars
        self._left_s = math.inf if task.agent_timeout_s is None else task.agent_timeout_s

    async def bash(self, command: str) -> str:
        """Run a command in bash and return its output. Files stay; a change of directory and variables do not.

        Args:
            command: one line or several
        """
        if self._left_s <= 0:
            return "[no time is left for commands]"
        outcome = await self._terminal.run(command, timeout_s=min(self._timeout_s, self._left_s))
        self._left_s -= outcome.wall_s
        return told(outcome, self._max_output_chars)

    async def verify(self) -> Score:
        """Run the tests and read the reward that they leave."""
        task = self._task
        outcome = await self._terminal.run(
            _TESTS,
            timeout_s=task.verifier_timeout_s,
            env=task.verifier_env,
            fresh=_HIDDEN,
            files=task.tests,
            read=(REWARD_JSON, REWARD_TEXT, TEST_OUTPUT),
        )
        metrics = {"verifier_s": outcome.wall_s, "verifier_cut": float(outcome.ended_by != "exit")}
        if outcome.ended_by != "exit":
            return Score(0.0, metrics=metrics)
        rewards = rewards_of(outcome.files, task.name)
        if "reward" not in rewards and len(rewards) > 1:
            raise EnvironmentFailedError(
                f"the tests of the task {task.name} left the numbers {', '.join(rewards)}, and none is called reward; "
                "override ascore_episode to make a reward of them"
            )
        return Score(rewards.get("reward", next(iter(rewards.values()))), parts=rewards, metrics=metrics)


def told(outcome: CommandOutcome, max_chars: int) -> str:
    """What the model reads of a command: its output, cut, and how it ended unless that was well."""
    text = cut(outcome.output, max_chars)
    if outcome.num_dropped and len(outcome.output) <= max_chars:
        text += f"\n[cut here: {outcome.num_dropped} more bytes]"
    match outcome.ended_by:
        case "exit":
            note = f"[exit code {outcome.exit_code}]" if outcome.exit_code else ""
        case "timeout":
            note = "[the command took too long, and was ended]"
        case "signal":
            note = "[the command killed its terminal; the files are as they were before it]"
        case limit:
            note = f"[the command was ended: too much {limit}; the files are as they were before it]"
    return "\n".join(part for part in (text.rstrip("\n"), note) if part) or "[no output]"


def rewards_of(files: Mapping[str, bytes], name: str) -> dict[str, float]:
    """The numbers that the tests left: of reward.json, else of reward.txt. Raises EnvironmentFailedError."""
    path = next((path for path in (REWARD_JSON, REWARD_TEXT) if path in files), None)
    said = files.get(TEST_OUTPUT, b"").decode(errors="replace")[-2000:]
    if path is None:
        raise EnvironmentFailedError(
            f"the tests of the task {name} left neither {REWARD_TEXT} nor {posixpath.basename(REWARD_JSON)}; they said:"
            f"\n{said}"
        )
    text = files[path].decode(errors="replace")
    try:
        found = json.loads(text) if path == REWARD_JSON else float(text)
        rewards = {
            key: float(value) for key, value in (found if isinstance(found, dict) else {"reward": found}).items()
        }
    except (TypeError, ValueError) as error:
        raise EnvironmentFailedError(
            f"the tests of the task {name} left {path} with {text[:200]!r}: {error}"
        ) from error
    if not rewards or not all(map(math.isfinite, rewards.values())):
        raise EnvironmentFailedError(
            f"the tests of the task {name} left {path} with {text[:200]!r}; it must hold numbers"
        )
    return rewards

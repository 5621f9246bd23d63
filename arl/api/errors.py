"""Every error that arl raises on purpose. A message says what was wrong, where, and what to do about it."""

from __future__ import annotations

import sysconfig
import traceback
from asyncio import CancelledError, TaskGroup
from collections.abc import Awaitable
from pathlib import Path
from typing import NoReturn, TypeVar, cast

ErrorT = TypeVar("ErrorT", bound=BaseException)


def brief_traceback(error: BaseException) -> list[str]:
    """For IPython, of an error whose message says enough: the user's frames, and the message."""
    shown = traceback.format_list(users_frames(error))
    return [part.rstrip("\n") for part in (*shown, *traceback.format_exception_only(error))]


def users_frames(error: BaseException) -> list[traceback.FrameSummary]:
    """The frames of its traceback that are neither arl's nor a library's."""
    paths = sysconfig.get_paths()
    libraries = (str(Path(__file__).parents[1]), *{paths[name] for name in ("stdlib", "purelib", "platlib")}, "<")
    return [f for f in traceback.extract_tb(error.__traceback__) if not f.filename.startswith(libraries)]


class ArlError(Exception):
    """The base of all of arl's errors. IPython shows the user's own frames and the message."""

    def _render_traceback_(self) -> list[str]:
        return brief_traceback(self)


def says_all(error: BaseException) -> bool:
    """Whether an error needs no traceback: it is arl's, and no code of the user's led to it or to what caused it."""
    caused: BaseException | None = error
    while caused is not None:
        if caused.__traceback__ is None or users_frames(caused):  # one of another process may have such frames
            return False
        caused = caused.__cause__ or (None if caused.__suppress_context__ else caused.__context__)
    return isinstance(error, ArlError)


class ConfigError(ArlError, ValueError):
    """A setting is unknown, out of range, contradicts another, or cannot be honoured by the chosen backend."""


class ModelError(ArlError):
    """A model directory or tokenizer is missing or broken, or lacks something that is needed."""


class DatasetError(ArlError):
    """A dataset is missing, empty, or lacks a needed column."""


class CurriculumError(ArlError):
    """A curriculum raised, or named no examples, an unknown one, or one twice."""


class TrajectoryError(ArlError, ValueError):
    """A workflow returned a malformed trajectory, or asked to continue tokens that the model does not have."""


class RoleError(ConfigError):
    """An agent has a role that no policy plays, or its tokens are of another policy. It ends the run."""


class PromptTooLongError(ArlError, ValueError):
    """A prompt (plus the tokens asked for) does not fit into the model's context."""


class StalenessError(ArlError):
    """A token older than max_staleness reached the trainer: a bug in the buffer, never a setting."""


class ServerError(ArlError):
    """An inference server could not be reached, answered with an error, or died."""


class ServerFailedError(ServerError):
    """A server did not answer, or answered that it failed: the same request may succeed later, or elsewhere."""

    def __init__(self, message: str, retry_after_s: float = 0.0) -> None:
        """retry_after_s: how long the server asks its clients to wait."""
        super().__init__(message)
        self.retry_after_s = retry_after_s


class RefusedRequestError(ServerError):
    """A server refused to generate: the request asks for what it cannot do, and would be refused again."""


class NoSuchPathError(ServerError):
    """A server has no such path: it is older than expected, or another kind of server."""


class TrainingError(ArlError):
    """The train engine cannot go on: weights are not finite, there is no room for ranks, or they are lost too often."""


class ProcessLostError(TrainingError):
    """The trainer's process, or a rank, died, hung or failed. What it held is lost; another one can compute it."""


class TransportError(ArlError):
    """A snapshot of the weights could not be put together, written, or sent to the servers."""


class UnseenDirectoryError(TransportError):
    """The process that writes weights does not share a directory with this one."""


class RequestTimeoutError(ArlError, TimeoutError):
    """A generate request took longer than engine.request_timeout_s."""


class EpisodeTimeoutError(ArlError, TimeoutError):
    """An episode took longer than rollout.episode_timeout_s."""


class RewardTimeoutError(ArlError, TimeoutError):
    """A reward function ran longer than its timeout, counted from when it started to run."""


class RewardError(ArlError):
    """A reward function raised, or its worker process died."""


class WorkerError(ArlError):
    """An episode worker (rollout.num_workers) died, and the episodes that ran there; or none could be started."""


class FailureBudgetError(ArlError):
    """More episodes failed than rollout.max_failure_rate allows; the first failure is the cause."""

    def _render_traceback_(self) -> list[str]:
        cause = self.__cause__
        first = () if cause is None or says_all(cause) else traceback.format_exception(cause)
        return ["".join(first), *brief_traceback(self)]


class HookError(ArlError):
    """An experiment's on_step raised; its own error is the cause."""


class StarvedError(ArlError):
    """Training needs groups and none can come, since every example is rejected or dropped."""


class StalledError(ArlError):
    """Nothing has moved for stall_timeout_s; the message says what waits for what."""


class EngineClosedError(ArlError):
    """The engine was closed while, or before, this call was made."""


class RunFileError(ArlError):
    """A file that a run keeps for its users, such as metrics.jsonl, cannot be written or read."""


class CheckpointError(ArlError):
    """A checkpoint cannot be written or read, or was written by a run with other settings."""


class DamagedCheckpointError(CheckpointError):
    """A checkpoint lacks a file, or one of its files cannot be read; an earlier one may be whole."""


class RecordingError(ArlError):
    """Recorded steps are missing or damaged, or belong to another model or arl."""


class ImageError(ArlError):
    """An image is missing, damaged, too large, or of a mode that models do not take; or it does not fit its tokens."""


class ToolError(ArlError):
    """A tool cannot do what the model asked, and the model reads the message. Also: a function cannot be a tool."""


class ToolsHungError(ArlError):
    """Too many tool calls hang in threads of this process, so no other can begin. The model cannot change that."""


class SandboxError(ArlError):
    """A program could not be run in isolation, or was given limits or files that no sandbox can have."""


class ProgramError(ArlError):
    """A program that ran as an agent ended with an error, or with nothing that can be rewarded."""


class EnvironmentFailedError(ArlError):
    """Somebody else's environment failed or did not answer, left no reward, or got no answer of the model."""


def first_error(group: BaseExceptionGroup[BaseException]) -> BaseException:
    """The error that ended a TaskGroup, out of its groups. It gets a note for each error that came with it."""
    first, *others = _leaves(group)
    for other in others:
        first.add_note(f"at the same time: {other!r}")
    return first


async def left(leaving: Awaitable[object], block_error: BaseException | None) -> None:
    """Leave the TaskGroups of a block. Raises a task's error, which cancelled the block, unless it had one of its own.

    leaving: exits the groups without the block's error, which they would wrap into an ExceptionGroup.
    """
    try:
        await leaving
    except BaseExceptionGroup as errors:
        failure = first_error(errors)
        if block_error is None or isinstance(block_error, CancelledError):
            raise failure from None
        block_error.add_note(f"at the same time: {failure!r}")


def end_with(error: Exception, tasks: TaskGroup) -> None:
    """Cancel the block of a TaskGroup, which then raises this error; do nothing if it ends already."""

    async def fail() -> NoReturn:
        raise error

    ending = fail()
    try:
        tasks.create_task(ending)
    except RuntimeError:  # the group takes no more tasks
        ending.close()


def _leaves(error: BaseException) -> list[BaseException]:
    if not isinstance(error, BaseExceptionGroup):
        return [error]
    inner = cast("BaseExceptionGroup[BaseException]", error).exceptions
    return [leaf for member in inner for leaf in _leaves(member)]

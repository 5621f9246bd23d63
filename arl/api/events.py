"""What happens in a run, as records: components emit them, the event log writes them, readers get them back.

docs/events.md describes each record. A field with a default is left out of the file where it has this default, so
fields and kinds may be added within a schema. SCHEMA grows when the meaning of what is there changes.
"""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from enum import StrEnum
from itertools import groupby
from typing import TYPE_CHECKING, Any, ClassVar, Protocol, Union

import msgspec

if TYPE_CHECKING:
    import numpy as np

    from arl.api.images import Image
    from arl.api.types import Trajectory

SCHEMA = 2

LONGEST_NAME = 200
"""Characters of a name (of a tool, reward, metric, role, column) that the event log holds: models invent some."""


def short(name: str, longest: int = LONGEST_NAME) -> str:
    """The name, or another text, as a record holds it."""
    return name if len(name) <= longest else f"{name[:longest]}..."


def short_names(values: Mapping[str, float]) -> dict[str, float]:
    for name in values:  # seldom more than a few, and once an episode
        if len(name) > LONGEST_NAME:
            return {short(name): value for name, value in values.items()}
    return dict(values)


class _Clock:
    """Seconds since 1970. It follows a system clock that is set forward, or a machine that sleeps, and never goes back.

    Else an episode's calls could seem to have happened before it began.
    """

    def __init__(self) -> None:
        self._offset = -math.inf

    def __call__(self) -> float:
        system, steady = time.time(), time.monotonic()
        if system - steady > self._offset:
            self._offset = system - steady
        return steady + self._offset


timestamp = _Clock()
"""The clock of all records of a process."""


class Event(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, tag_field="event", tag=True):
    """The base of all. A record of an interval is emitted at its end."""

    is_call: ClassVar[bool] = False
    """An episode may have many of these, so they are written to files of their own."""
    t: float = msgspec.field(default_factory=timestamp)
    """Seconds since 1970, by `timestamp`."""


# What runs where: the table at a run's start, and its record


class PlacedPart(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A part of a run, and where it runs. A field is empty where that is not known."""

    part: str
    """controller, trainer, server, workers, mirror, ray."""
    name: str = ""
    """policy rank 3; else empty."""
    host: str = ""
    address: str = ""
    pid: int | None = None
    device: str = ""
    """cpu, GPU 0, GPUs 0-3."""
    note: str = ""


class SharedPath(msgspec.Struct, frozen=True, kw_only=True):
    """A directory that several machines must see."""

    name: str
    """The setting: run_dir, weights.directory, model."""
    path: str
    seen: dict[str, str]
    """Machine -> yes, no, read only, another one (the same path, other files), or not checked and why."""


class Finding(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A sentence that says what is wrong with a placement, and what to do about it."""

    text: str
    is_mistake: bool = True
    """False: a warning, because the run may work."""
    ends_start: bool = True
    """A mistake keeps a run from starting, unless the run could train in spite of it."""


class Placed(msgspec.Struct, frozen=True, kw_only=True):
    """The part of the placement that the trainer's process knows."""

    parts: list[PlacedPart] = []
    """Its ranks, in order."""
    shared: list[SharedPath] = []
    findings: list[Finding] = []


def gpus_text(numbers: Sequence[int]) -> str:
    """GPU 0, or GPUs 0-3; empty for none."""
    if not numbers:
        return ""
    return f"GPU{'s' * (len(numbers) > 1)} {ranges_text(numbers)}"


def ranges_text(numbers: Sequence[int]) -> str:
    """0-3, 6."""
    runs = [
        [number for _, number in run] for _, run in groupby(enumerate(sorted(numbers)), lambda one: one[1] - one[0])
    ]
    return ", ".join(str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs)


# The run


class RunBegan(Event, frozen=True, kw_only=True):
    """A process began, or continued, the run. Each is a `life` of the run."""

    version: int
    """The version of the checkpoint from which it continues; 0 at the beginning. Later steps of earlier lives are
    undone."""
    waiting: list[int] = []
    """Groups of that checkpoint, finished by earlier lives, that this one may train."""
    arl: str
    host: str
    pid: int
    cores: int = 0
    """That the process may use; 0: unknown."""
    workflow: str
    num_examples: int
    num_eval_examples: int = 0
    tasks: list[str] = []
    """The names of its tasks, if it has any."""
    settings: dict[str, Any]
    """All settings. Keys, passwords and users in URLs are masked."""


class RunPlaced(Event, frozen=True, kw_only=True):
    """What runs where, recorded when everything has started."""

    parts: list[PlacedPart]
    shared: list[SharedPath] = []
    findings: list[Finding] = []
    """Warnings, and mistakes that do not keep the run from training."""


class RunEnded(Event, frozen=True, kw_only=True):
    how: str
    """finished, interrupted, or the name of the error that ended the run."""
    why: str = ""


class Warned(Event, frozen=True, kw_only=True):
    """arl logged a warning or an error."""

    level: str
    logger: str
    text: str


class Lost(Event, frozen=True, kw_only=True):
    """Records or tokens that could not be written."""

    num_events: int = 0
    num_episodes: int = 0
    """Episodes whose tokens are not kept."""
    why: str


# Groups and episodes. An episode is named GROUP.INDEX (GROUP.greedy for a baseline), or eN.INDEX in evaluation N.


class GroupAdmitted(Event, frozen=True, kw_only=True):
    group: int
    epoch: int
    row: int
    """The example's index in the dataset, of its task if there are several."""
    stamp: int
    """The published version."""
    example: dict[str, Any] = {}
    """The example's columns, cut to some 20,000 characters."""
    task: str = ""
    """The name of its task; "" in a run without tasks."""


class EpisodeBegan(Event, frozen=True, kw_only=True):
    episode: str
    example: dict[str, Any] = {}
    """The example of a held-out episode, as in GroupAdmitted, which has the example of other episodes."""
    task: str = ""
    """The task of a held-out episode."""
    row: int | None = None
    """The index of a held-out episode's example. None: as its name says."""


class AttemptFailed(Event, frozen=True, kw_only=True):
    episode: str
    attempt: int
    error: str
    """The name of its class."""
    message: str
    runs_again: bool = False


class TrajectorySummary(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One trajectory of an episode, in numbers."""

    role: str = "agent"
    reward: float
    """Outcome and process rewards."""
    rewards: dict[str, float] = {}
    metrics: dict[str, float] = {}
    tokens: int
    trained: int
    turns: int = 0
    oldest: int | None = None
    newest: int | None = None
    """Versions of trained tokens."""
    is_truncated: bool = False


class EpisodeEnded(Event, frozen=True, kw_only=True):
    episode: str
    how: str
    """finished, rejected (arun_episode returned None), failed, timed_out; or cancelled: overtaken (enough others had
    finished), straggler, stopped (with the run)."""
    began: float
    attempts: int = 1
    reward: float | None = None
    """The mean over roles; None if it did not finish."""
    error: str = ""
    message: str = ""
    trajectories: list[TrajectorySummary] = []


class GroupEnded(Event, frozen=True, kw_only=True):
    """A group is in the buffer (kept), or is not trained (rejected, dropped)."""

    group: int
    outcome: str
    reason: str = ""
    detail: str = ""


class BatchTaken(Event, frozen=True, kw_only=True):
    version: int
    """The trainer's."""
    groups: list[int]
    replayed: list[int] = []
    waited_s: float


class TrainedSummary(msgspec.Struct, frozen=True, array_like=True):
    """The values that training computed for one trajectory, over its trained tokens."""

    episode: str
    number: int
    """The number of the trajectory in the episode."""
    advantage: float
    """Mean."""
    weight: float
    """Largest behavior weight."""
    clipped: float
    """Share of tokens."""
    entropy: float
    """Mean."""


class BatchTrained(Event, frozen=True, kw_only=True):
    version: int
    """The one that training made."""
    groups: list[int]
    seconds: float
    cpu_s: float = 0.0
    """CPU seconds of the trainer's process, without those of ranks in other processes; 0: unknown."""
    trajectories: list[TrainedSummary] = []


class TokensKept(Event, frozen=True, kw_only=True):
    """The tokens of these episodes are in a batch of the life's file `segment` of tokens, at this byte."""

    segment: int
    offset: int
    rows: list[tuple[str, int]]
    """The episode of each row of the batch, and the number of its trajectory. -1: what a failed episode last saw."""


# Calls, in files of their own, with all their fields


class TurnEnded(Event, frozen=True, kw_only=True, omit_defaults=False):
    is_call: ClassVar[bool] = True
    episode: str
    rid: str
    server: str = ""
    queued_s: float = 0.0
    """How long the request waited for a server."""
    server_s: float = 0.0
    """How long servers had it, by their own clocks."""
    seconds: float
    """All of it, from the workflow's call to the response."""
    prompt: int
    output: int
    """Tokens."""
    cached: int = 0
    """Prompt tokens that the server found in its cache."""
    oldest: int | None = None
    newest: int | None = None
    sends: int = 1
    """How often it was sent: pauses that abort, and failed servers, make it more than one."""
    stop: str = ""
    """stop, length or abort; else the name of the error."""


class ToolEnded(Event, frozen=True, kw_only=True, omit_defaults=False):
    is_call: ClassVar[bool] = True
    episode: str
    tool: str
    seconds: float
    failure: str = ""
    """malformed, refused, failed; empty if it answered."""


class RewardEnded(Event, frozen=True, kw_only=True, omit_defaults=False):
    is_call: ClassVar[bool] = True
    episode: str
    reward: str
    """The reward function's name."""
    seconds: float
    value: float | None = None
    parts: dict[str, float] = {}
    error: str = ""


# Weights and servers


class SnapshotTaken(Event, frozen=True, kw_only=True):
    version: int
    seconds: float


class ServerPaused(Event, frozen=True, kw_only=True):
    server: str


class ServerLoaded(Event, frozen=True, kw_only=True):
    server: str
    version: int
    seconds: float


class ServerResumed(Event, frozen=True, kw_only=True):
    server: str


class ServerSlept(Event, frozen=True, kw_only=True):
    """A paused server has let go of its memory, until ServerWoke."""

    server: str
    seconds: float
    """How long that took."""


class ServerWoke(Event, frozen=True, kw_only=True):
    """It has memory for its weights again, which are loaded next."""

    server: str
    seconds: float
    """How long that took."""


class TrainerMoved(Event, frozen=True, kw_only=True):
    """The trainer's weights and optimizer state came onto its device, or left it for the CPU's memory."""

    is_on_device: bool
    seconds: float


class IterationSums(msgspec.Struct, frozen=True, array_like=True):
    """Sums over iterations of a server that decoded about as many requests: 0, 1, 2 to 3, 4 to 7, and so on."""

    reads: bool
    """Whether they also read prompts."""
    number: float
    """The number of iterations; the other fields are sums over them."""
    decoded: float
    """Requests that were running, each of which got a token."""
    context: float
    """Tokens that these held."""
    prompt: float
    """Prompt tokens computed."""
    begun: float
    """Requests that got their first token."""
    seconds: float


class ServerWorked(Event, frozen=True, kw_only=True):
    """What an embedded server has done since its process began, recorded whenever it is paused."""

    server: str
    is_cpu_time: bool = False
    """Whether seconds are CPU seconds of the thread that computes. Otherwise they are those of the clock."""
    iterations: list[IterationSums] = []


class Published(Event, frozen=True, kw_only=True):
    """Every serving server holds the version."""

    version: int
    snapshot_s: float
    transfer_s: float
    pause_s: float
    num_bytes: int
    resume_s: float = 0.0
    """How long servers that slept took to get their memory again."""


class ServerJoined(Event, frozen=True, kw_only=True):
    server: str


class ServerLeft(Event, frozen=True, kw_only=True):
    server: str


class ServerFenced(Event, frozen=True, kw_only=True):
    server: str
    reason: str


class ServerReturned(Event, frozen=True, kw_only=True):
    """A fenced server serves again (readmission)."""

    server: str
    out_s: float


class CpuUsed(Event, frozen=True, kw_only=True):
    """CPU seconds since each process began, all its threads together; now and then, on Linux."""

    controller: float
    """The process of the run itself."""
    loop: float = 0.0
    """The part of these that the thread of the event loop used."""
    processes: dict[str, float] = {}
    """The CPU seconds of the processes that it started, each with its own children. The key is a server's address, else
    the name of the process's log, such as trainer, else `others`."""


class ProcessRestarted(Event, frozen=True, kw_only=True):
    """A server or worker that arl started had died, or hung."""

    name: str
    how: str


class TrainerRecovered(Event, frozen=True, kw_only=True):
    """The trainer's process, or one of its ranks, was lost; another one holds the same weights."""

    version: int
    from_version: int
    """The version of the checkpoint from which it began; 0: the model."""
    num_batches: int
    """Trained again."""
    num_ranks: int = 1
    seconds: float
    reason: str


# The token ledger (arl/rollout/token_ledger.py)


class Fate(StrEnum):
    """The fate of a token that a server sampled and the client received."""

    TRAINED = "trained"
    """It was in a trained batch, with loss_mask 1."""
    MASKED = "masked"
    """It was in a trained batch, but not trained: loss_mask 0, in no trajectory, or in one that the algorithm leaves
    out, as truncated or compared with nothing."""
    REJECTED = "rejected"
    """Its episode returned None, or its group was rejected."""
    DROPPED = "dropped"
    """Its group was dropped: too many others failed, or advantages could not compare them."""
    FAILED = "failed"
    """Its episode raised or timed out."""
    RETRIED = "retried"
    """Its attempt failed, and another attempt followed."""
    SURPLUS = "surplus"
    """Its episode finished after enough others of its group had finished."""
    OVERTAKEN = "overtaken"
    """Its episode was cut because enough others of its group had finished."""
    STRAGGLER = "straggler"
    """Its group was cut because it kept the trainer waiting."""
    BASELINE = "baseline"
    """It belongs to a greedy episode, of which only the reward is used."""
    EVALUATION = "evaluation"
    STOPPED = "stopped"
    """In flight, or not yet in a checkpoint, when a start of the run ended: its example runs again."""
    RETURNED = "returned"
    """Its group was in a checkpoint, but changed settings made it too old for any batch: its example runs again."""


class TokenTally(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The tokens of one fate."""

    tokens: int = 0
    episodes: int = 0
    """Episodes, or attempts for RETRIED. An episode with both trained and masked tokens counts as trained."""
    server_s: float = 0.0
    """How long servers had their requests, by the servers' clocks; divided by tokens if an episode has several
    fates."""
    by_length: dict[str, int] = {}
    """Tokens by the length of their episode, in received tokens: n stands for 2^(n-1) to 2^n - 1, and 0 for none."""


class TokensCounted(Event, frozen=True, kw_only=True):
    """The token ledger, over all starts of the run. `received` is the sum of `open`, `waiting` and the fates.

    `asked` is the sum of `received` and `unreceived`: tokens that episodes asked for, by requests that have ended.
    """

    received: int
    open: int = 0
    """Tokens of episodes that run, or whose group runs."""
    waiting: int = 0
    """Tokens of groups that wait to be trained."""
    fates: dict[str, TokenTally] = msgspec.field(default_factory=dict[str, TokenTally])
    asked: int = 0
    unreceived: int = 0
    """Tokens that were asked for and not received: max_new_tokens of each unanswered request. Servers generated at most
    so many for them."""
    unanswered: int = 0
    """Requests that were cancelled, timed out, or failed too often."""
    trained_again: int = 0
    """Trained in a later batch, too (rollout.replay_groups). Not part of the sum."""
    unknown: int = 0
    """Trained, but no response to their episode had them: of another sampler, or twice in an episode's trajectories.
    Not part of the sum."""


# Beside training


class EvaluationEnded(Event, frozen=True, kw_only=True):
    number: int
    version: int
    reward: float
    num_episodes: int
    num_failed: int
    seconds: float
    metrics: dict[str, float] = {}
    standard_error: float | None = None


class CheckpointWritten(Event, frozen=True, kw_only=True):
    version: int
    seconds: float
    error: str = ""


KINDS: dict[str, type[Event]] = {kind.__name__: kind for kind in Event.__subclasses__()}
"""Every kind of record, by name."""
DECODER = msgspec.json.Decoder[Any](Union[tuple(KINDS.values())])  # noqa: UP007 - as many as there are
"""Made while one thread imports this: msgspec 0.22 crashes if two threads decode a type for the first time at once."""

CALLS = (TurnEnded, ToolEnded, RewardEnded)


class KeptTokens(msgspec.Struct, frozen=True, kw_only=True):
    """Trajectories whose tokens the log may keep, and what training computed for their trained tokens."""

    rows: Sequence[tuple[str, int, Trajectory]]
    """The episode, the number of the trajectory in it, and the trajectory."""
    trained: Mapping[str, np.ndarray] = {}
    """Name -> float32: for the tokens with loss_mask 1 of all rows end to end."""

    @property
    def num_tokens(self) -> int:
        return sum(len(trajectory.token_ids) for _, _, trajectory in self.rows)


class TokenFrame(msgspec.Struct, frozen=True, kw_only=True):
    """Trajectories chosen from their batch, as the log's files hold them.

    The trainer's process packs them, so the episodes' process does not need to.
    """

    rows: list[tuple[str, int]]
    """As in TokensKept."""
    num_tokens: int
    frame: bytes
    """A stream of Arrow with one batch (arl.observe.events.batches)."""
    is_renamed: bool = False
    """Whether the batch has other names than `rows`: the log writes these."""
    images: Sequence[Image] = ()
    """What the frame names, each once: the log keeps their files before it. Empty in a frame that crosses from the
    trainer's process, as the episodes' has them."""


class Events(Protocol):
    """Where components put records. Neither call waits, blocks or raises. Any thread may call."""

    def emit(self, event: Event) -> None: ...

    def keep(self, tokens: KeptTokens | TokenFrame) -> None: ...


FLUSH_S = 10.0
"""How long a checkpoint waits for the event log, in seconds."""


class EventStore(Events, Protocol):
    """Where records end up."""

    def flush(self, timeout_s: float = FLUSH_S) -> bool:
        """Wait until all that was given before is on the disk, or recorded as Lost. It never raises.

        Returns False if that did not come about in `timeout_s` seconds: the disk hangs or is full, or the log is over.
        """
        ...


class _Nowhere:
    def emit(self, event: Event) -> None:
        pass

    def keep(self, tokens: KeptTokens | TokenFrame) -> None:
        pass

    def flush(self, timeout_s: float = FLUSH_S) -> bool:
        return True


NOWHERE: EventStore = _Nowhere()


@dataclass(frozen=True, slots=True)
class EpisodeContext:
    """The episode that a piece of code runs in, and where its records go."""

    episode: str
    events: Events
    is_evaluation: bool = False
    """Whether it scores the model, and is not trained."""


EPISODE: ContextVar[EpisodeContext | None] = ContextVar("EPISODE", default=None)
"""Tools and rewards report to it, so no function has to pass it on."""

"""What a run's parts cost: seconds, tokens, bytes and money, as records that JSON files hold.

`fitted` (fitting.py) makes them from the event log of a run; made by hand, or from a table of GPUs, they are guesses.
All seconds are those of a process that computes alone: `SharedCores` says which processes compete for cores.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec

from arl.api.engine_config import PauseMode
from arl.api.errors import ConfigError
from arl.plan.workload import Record, Workload


class DecodeCosts(Record, frozen=True, kw_only=True):
    """One server's decoding: an iteration samples one token for each running request.

    An iteration with n running requests, whose prompts and answers so far are c tokens together, takes
    `points` at n + per_context_token_s * c seconds.
    """

    points: tuple[tuple[int, float], ...]
    """(n, seconds): requests of an iteration, ascending, and how long it takes without context. Straight lines lead
    from one point to the next; the first and the last go on."""
    per_context_token_s: float = 0.0
    """Seconds for each token of context, such as for reading its keys and values."""
    max_running_requests: int = 128
    """Requests that one server decodes at once; more wait in its queue."""
    kv_tokens: int | None = None
    """Tokens whose keys and values the memory of one server holds; None: the limit is max_running_requests."""

    def __post_init__(self) -> None:
        super().__post_init__()
        numbers = [n for n, _ in self.points]
        if not numbers or numbers != sorted(set(numbers)) or numbers[0] < 1:
            raise ValueError(f"decode.points are for {numbers} requests; give at least one, ascending from 1 or more")
        if self.max_running_requests < 1:
            raise ValueError("decode.max_running_requests is 0; give at least 1")
        if any(self.base_s(n) <= 0 for n in (1, *numbers, self.max_running_requests)):
            raise ValueError(f"decode.points make an iteration take no time: {self.points}")

    def base_s(self, n: int) -> float:
        """Seconds of an iteration with n requests and no context."""
        points = self.points
        if len(points) == 1:
            return points[0][1]
        i = next((i for i, (at, _) in enumerate(points[1:-1], start=1) if n <= at), len(points) - 1)
        (n0, s0), (n1, s1) = points[i - 1], points[i]
        return s0 + (s1 - s0) * (n - n0) / (n1 - n0)

    def iteration_s(self, n: int, context_tokens: int) -> float:
        """Seconds of an iteration with n requests that hold `context_tokens` together."""
        return self.base_s(n) + self.per_context_token_s * context_tokens


class PrefillCosts(Record, frozen=True, kw_only=True):
    """One server's reading of prompts. An iteration reads uncached prompt tokens of one or several requests.

    A request whose prompt is read to its end samples its first token in the same iteration.
    """

    base_s: float = 0.0
    """Seconds that an iteration takes longer because it reads prompts, however few tokens."""
    per_token_s: float
    """Seconds for each uncached prompt token."""
    per_request_s: float = 0.0
    """Seconds that an iteration takes longer for each request whose prompt it reads to its end: HTTP, a first token."""
    chunk_tokens: int = 8192
    """The most prompt tokens that one iteration reads."""
    stops_decoding: bool = True
    """Whether running requests wait while prompts are read (stock SGLang). Otherwise the same iteration decodes, too,
    and takes as long as both (the embedded server, mixed chunks)."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.chunk_tokens < 1 or self.base_s + self.per_token_s + self.per_request_s <= 0:
            raise ValueError("prefill takes no time, or reads no tokens: give chunk_tokens and seconds above 0")


class TrainerCosts(Record, frozen=True, kw_only=True):
    """A training step, from the batch taken to the weights changed.

    seconds = base_s + per_episode_s * episodes + (per_token_s + forward_per_token_s) * tokens / ranks
              + communication_s * (ranks - 1) / ranks
    """

    base_s: float = 0.0
    """Seconds of a step whatever its batch: the optimizer, calls, metrics."""
    per_episode_s: float = 0.0
    """Seconds for each episode of the batch: packing, advantages, its way between processes."""
    per_token_s: float
    """Seconds of one rank for each token forwarded and trained (forward, backward)."""
    forward_per_token_s: float = 0.0
    """Seconds of one rank for each token of passes without gradients: proximal and reference logprobs, values."""
    communication_s: float = 0.0
    """Seconds that exchanging gradients and weights takes in a step with very many data-parallel ranks: a ring sends
    (ranks - 1) / ranks of it."""
    snapshot_s: float = 0.0
    """Seconds that training waits while the new weights are copied for the servers."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.base_s + self.per_episode_s + self.per_token_s + self.forward_per_token_s <= 0:
            raise ValueError("a step of the trainer takes no time: give base_s, per_episode_s or per_token_s above 0")

    def step_s(self, tokens: float, num_episodes: int, num_ranks: int) -> float:
        """Seconds of a step. tokens: those forwarded. num_ranks: data-parallel ones."""
        work_s = (self.per_token_s + self.forward_per_token_s) * tokens / num_ranks
        fixed_s = self.base_s + self.per_episode_s * num_episodes
        return fixed_s + work_s + self.communication_s * (num_ranks - 1) / num_ranks


class PublishCosts(Record, frozen=True, kw_only=True):
    """The way of new weights to the servers, beside the next step. How they pause and in which order: Deployment."""

    transfer_s: float = 0.0
    """Seconds from the snapshot until the first server may load: gathering, writing, sending."""
    per_server_s: float = 0.0
    """More seconds for each server, before any pauses: 0 where all read one file, or share one send."""
    load_s: float = 0.0
    """Seconds for which a server stands still while it takes the weights."""


class ControllerCosts(Record, frozen=True, kw_only=True):
    """The script's process: one event loop, which does one thing at a time."""

    per_request_s: float = 0.0
    """CPU seconds for each request: choosing the server, HTTP, the workflow's code for one turn."""
    per_episode_s: float = 0.0
    """CPU seconds for each episode: beginning and end, checks, the event log, its way to the trainer."""
    latency_s: float = 0.0
    """Seconds for each request in which nobody computes: the network, the server's HTTP, its scheduling."""


class SharedCores(Record, frozen=True, kw_only=True):
    """A machine whose processes compete: if they want more cores than there are, all slow down alike."""

    cores: int
    controller: int = 1
    """Cores that the controller keeps busy while it computes; below likewise. 0: it has cores of its own."""
    rank: int = 1
    """Each of the trainer's ranks."""
    server: int = 1
    """Each server. 0: they compute on GPUs, or on other machines."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.cores < 1:
            raise ValueError("shared.cores is 0; give at least 1, or no shared at all")


class Prices(Record, frozen=True, kw_only=True):
    """Money, in one currency."""

    server_hour: float = 0.0
    """For one server, with all its GPUs."""
    rank_hour: float = 0.0
    """For one of the trainer's ranks."""
    currency: str = "$"


class MemoryCosts(Record, frozen=True, kw_only=True):
    """Bytes. 0: unknown."""

    server_weights: int = 0
    """The weights that one server holds."""
    kv_per_token: int = 0
    """Keys and values of one token."""
    server_total: int = 0
    """The memory of one server for weights, keys and values."""
    trainer_state: int = 0
    """Weights, gradients and optimizer state, split over the ranks."""
    per_rank: int = 0
    """The memory that each rank needs besides its part of trainer_state: activations, logits."""
    rank_total: int = 0
    """The memory of one rank."""


class Deployment(Record, frozen=True, kw_only=True):
    """The settings that `arl plan` varies. Those with a setting's name mean the same."""

    num_servers: int = 1
    num_ranks: int = 1
    """Data-parallel ranks of the trainer."""
    gpus_per_server: int = 1
    gpus_per_rank: int = 1
    batch_size: int = 32
    group_size: int = 8
    max_staleness: int = 2
    max_concurrent_episodes: int = 1024
    extra_episodes: int = 0
    min_group_size: int = 2
    episode_retries: int = 1
    replay_groups: int = 0
    drop_equal_rewards: bool = False
    """algorithm.dynamic_sampling."""
    drop_stragglers_after_s: float | None = None
    update_order: str = "all"
    pause_mode: PauseMode = "in_place"
    tool_factor: float = 1.0
    """All tools take this many times as long as measured."""

    def __post_init__(self) -> None:
        super().__post_init__()
        counts = ("num_servers", "num_ranks", "batch_size", "group_size", "max_concurrent_episodes")
        for name in counts:
            if getattr(self, name) < 1:
                raise ValueError(f"{name} is {getattr(self, name)}; give at least 1")
        if self.update_order not in ("all", "rolling"):
            raise ValueError(f"update_order is {self.update_order!r}; it is all or rolling")

    @property
    def num_gpus(self) -> int:
        return self.num_servers * self.gpus_per_server + self.num_ranks * self.gpus_per_rank

    @property
    def most_in_flight(self) -> int:
        """Episodes that may run at once, by the buffer's room and max_concurrent_episodes."""
        room = (self.max_staleness + 1) * self.batch_size * (self.group_size + self.extra_episodes)
        return min(room, self.max_concurrent_episodes)


Range = tuple[float, float]
"""The lowest and the highest value that was seen."""


class Measured(Record, frozen=True, kw_only=True):
    """The measured ranges. Predictions outside of a range are extrapolated; None: nothing was measured."""

    num_servers: Range | None = None
    num_ranks: Range | None = None
    running_requests: Range | None = None
    """The running requests of one server."""
    context_tokens: Range | None = None
    """Tokens of all running requests of one server."""
    step_tokens: Range | None = None
    """Tokens forwarded in a step."""
    notes: tuple[str, ...] = ()
    """Notes for the reader: costs that could not be distinguished, and were guessed."""


class Costs(Record, frozen=True, kw_only=True):
    """Everything that a simulated run costs."""

    decode: DecodeCosts
    prefill: PrefillCosts
    trainer: TrainerCosts
    publish: PublishCosts = PublishCosts()
    controller: ControllerCosts = ControllerCosts()
    shared: SharedCores | None = None
    """None: each process has cores, or GPUs, of its own."""
    workload: Workload
    prices: Prices = Prices()
    memory: MemoryCosts = MemoryCosts()
    deployment: Deployment = Deployment()
    """The run that was measured; where a plan begins."""
    measured: Measured = Measured()
    source: str = ""
    """Where the costs come from."""


def read_costs(path: Path) -> Costs:
    """Raises ConfigError naming the field that is wrong."""
    try:
        return msgspec.json.decode(path.read_bytes(), type=Costs)
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror or error}") from error
    except msgspec.DecodeError as error:
        raise ConfigError(f"{path} is not a file of costs: {error}") from error


def write_costs(path: Path, costs: Costs) -> None:
    path.write_bytes(msgspec.json.format(msgspec.json.encode(costs), indent=1) + b"\n")


def with_changes(deployment: Deployment, **changes: Any) -> Deployment:
    """A copy with other values; raises ConfigError for one that is out of range."""
    try:
        return msgspec.convert({**msgspec.structs.asdict(deployment), **changes}, Deployment)
    except msgspec.ValidationError as error:
        raise ConfigError(str(error)) from error

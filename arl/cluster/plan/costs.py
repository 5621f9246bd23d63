"""What the parts of a run cost, and what its episodes ask for: the records that `arl plan` computes with.

`fitted` (fitting.py) makes them from a run's event log, `guessed` (gpus.py) from public facts, and `--costs` reads them
from a JSON file. All seconds are those of a process that computes alone: `SharedCores` says which compete for cores.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec
import numpy as np

from arl.api.errors import ConfigError
from arl.api.settings.engines import PauseMode

Amount = Annotated[float, msgspec.Meta(ge=0)]
"""Seconds, unless the field says otherwise."""
Number = Annotated[int, msgspec.Meta(ge=0)]
Count = Annotated[int, msgspec.Meta(ge=1)]
Range = tuple[float, float]


class Record(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The base of all."""


class MeasuredTurn(Record, frozen=True, kw_only=True, omit_defaults=True):
    """One request to the model, and what the episode does after it."""

    prompt_tokens: Count
    """Cached ones included."""
    cached_tokens: Number = 0
    new_tokens: Count
    tool_s: Amount = 0.0
    """From the answer to the next request, or to the end of the episode."""


class MeasuredEpisode(Record, frozen=True, kw_only=True, omit_defaults=True):
    """One episode. Turns of attempts that failed before it ended are turns of it, too."""

    group: int
    """Episodes with the same number are of one example."""
    turns: tuple[MeasuredTurn, ...]
    before_s: Amount = 0.0
    """From its beginning to its first request."""
    tokens: Number
    """Tokens that the trainer forwards for it."""
    shared_tokens: Number = 0
    """Of these, those that the trainer forwards once for the whole group."""
    reward: float = 0.0
    how: Literal["finished", "rejected", "failed"] = "finished"


class Workload(Record, frozen=True, kw_only=True):
    """The episodes that a plan takes for all."""

    episodes: tuple[MeasuredEpisode, ...]

    def __post_init__(self) -> None:
        if not any(episode.turns for episode in self.episodes):
            raise ValueError("no episode of the workload has a turn")


class DecodeCosts(Record, frozen=True, kw_only=True):
    """One server's decoding: an iteration samples one token for each running request."""

    points: tuple[tuple[Count, float], ...]
    """(requests, seconds of an iteration without context), ascending. Between and beyond them it is linear."""
    per_context_token_s: Amount = 0.0
    """For each token that the running requests hold."""
    max_running_requests: Count = 128
    kv_tokens: Count | None = None
    """Tokens whose keys and values one server can hold; None: unlimited."""

    def __post_init__(self) -> None:
        numbers = [n for n, _ in self.points]
        if not numbers or numbers != sorted(set(numbers)) or min(s for _, s in self.points) <= 0:
            raise ValueError(f"decode.points are {self.points}; give ascending requests, each with seconds above 0")

    def iteration_s(self, n: np.ndarray, context: float) -> np.ndarray:
        """Seconds of iterations with n requests, each of which holds so many tokens."""
        numbers, seconds = np.array(self.points).T
        slope = (seconds[-1] - seconds[-2]) / (numbers[-1] - numbers[-2]) if len(numbers) > 1 else 0.0
        beyond_s = slope * np.maximum(n - numbers[-1], 0.0)
        return np.interp(n, numbers, seconds) + beyond_s + self.per_context_token_s * context * n


class PrefillCosts(Record, frozen=True, kw_only=True):
    """One server's reading of prompts."""

    per_token_s: Amount
    """For each prompt token that is not cached."""
    per_request_s: Amount = 0.0


class TrainerCosts(Record, frozen=True, kw_only=True):
    """The steps of the trainer."""

    base_s: Amount = 0.0
    per_episode_s: Amount = 0.0
    per_token_s: Amount
    """Of one rank, for each forwarded token: all passes, with and without gradients."""
    communication_s: Amount = 0.0
    """For gradients and weights with very many ranks: a ring sends (ranks - 1) / ranks of it."""
    snapshot_s: Amount = 0.0
    """Training waits while new weights are copied for the servers."""

    def step_s(self, tokens: float, num_episodes: float, num_ranks: int) -> float:
        """Seconds of a step without its snapshot. tokens: those forwarded."""
        fixed_s = self.base_s + self.per_episode_s * num_episodes
        return fixed_s + self.per_token_s * tokens / num_ranks + self.communication_s * (num_ranks - 1) / num_ranks


class PublishCosts(Record, frozen=True, kw_only=True):
    """The way of new weights to the servers, while the next step trains."""

    transfer_s: Amount = 0.0
    """From the snapshot until the first server may load."""
    per_server_s: Amount = 0.0
    load_s: Amount = 0.0
    """A server stands still while it takes the weights."""


class ControllerCosts(Record, frozen=True, kw_only=True):
    """The script's process: one event loop, which does one thing at a time."""

    per_request_s: Amount = 0.0
    per_episode_s: Amount = 0.0
    latency_s: Amount = 0.0
    """Of a request, in which nobody computes: the network, scheduling."""


class SharedCores(Record, frozen=True, kw_only=True):
    """A machine whose processes compete: if they want more cores than there are, all slow down alike."""

    cores: Count
    controller: Number = 1
    """Cores that it keeps busy while it computes; 0: it has its own. Below likewise."""
    rank: Number = 1
    server: Number = 1


class Prices(Record, frozen=True, kw_only=True):
    """Money for an hour of a whole server, and of one rank; 0: unknown."""

    server_hour: Amount = 0.0
    rank_hour: Amount = 0.0
    currency: str = "$"


class MemoryCosts(Record, frozen=True, kw_only=True):
    """Bytes. 0: unknown."""

    server_weights: Number = 0
    kv_per_token: Number = 0
    server_total: Number = 0
    """Of one server, for weights, keys and values."""
    trainer_state: Number = 0
    """Weights, gradients and optimizer state, split over the ranks."""
    per_rank: Number = 0
    """What each rank needs besides: activations, logits."""
    rank_total: Number = 0


class Deployment(Record, frozen=True, kw_only=True):
    """The settings that `arl plan` varies. Those with a setting's name mean the same."""

    num_servers: Count = 1
    num_ranks: Count = 1
    gpus_per_server: Number = 1
    gpus_per_rank: Number = 1
    batch_size: Count = 32
    group_size: Count = 8
    max_staleness: Number = 2
    max_concurrent_episodes: Count = 1024
    extra_episodes: Number = 0
    min_group_size: Number = 2
    drop_equal_rewards: bool = False
    """algorithm.dynamic_sampling."""
    update_order: Literal["all", "rolling"] = "all"
    pause_mode: PauseMode = "in_place"
    tool_factor: Amount = 1.0
    """All tools take this many times as long as measured."""

    @property
    def num_gpus(self) -> int:
        return self.num_servers * self.gpus_per_server + self.num_ranks * self.gpus_per_rank

    def changed(self, **changes: Any) -> Deployment:
        """A copy with other values; raises ConfigError for one that is out of range."""
        try:
            return msgspec.convert({**msgspec.structs.asdict(self), **changes}, Deployment)
        except msgspec.ValidationError as error:
            raise ConfigError(str(error)) from error


class Measured(Record, frozen=True, kw_only=True):
    """The lowest and highest values that were seen: others are extrapolated. None: nothing was measured."""

    num_servers: Range | None = None
    num_ranks: Range | None = None
    running_requests: Range | None = None
    """On one server."""
    step_tokens: Range | None = None
    """Forwarded in a step."""
    episodes_per_s: Amount = 0.0
    """Trained by the measured run; 0: unknown. The model is off by so much there."""
    notes: tuple[str, ...] = ()
    """What could not be fitted, and what was assumed instead."""


class Costs(Record, frozen=True, kw_only=True):
    """Everything that a run costs."""

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

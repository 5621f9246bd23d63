"""What the parts of a run cost, and what its episodes ask for: the records that `arl plan` computes with.

`fitted` (fitting.py) makes them from a run's event log, `guessed` from public facts, and `--costs` reads them from a
JSON file. All seconds are those of a process that computes alone: `SharedCores` says which compete for cores.
"""

from __future__ import annotations

import math
import random
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple

import msgspec
import numpy as np

from arl.api.errors import ConfigError
from arl.api.settings.engines import PauseMode

Amount = Annotated[float, msgspec.Meta(ge=0)]
"""Seconds, unless the field says otherwise."""
Number = Annotated[int, msgspec.Meta(ge=0)]
Count = Annotated[int, msgspec.Meta(ge=1)]
Range = tuple[float, float]


class Record(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True): ...


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
    """One server's reading of prompts: of tokens that are not cached."""

    per_token_s: Amount
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
    """Dollars for an hour of a whole server, and of one rank; 0: unknown."""

    server_hour: Amount = 0.0
    rank_hour: Amount = 0.0


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


# Before anything was measured: bandwidth, FLOPs and memory are the makers' figures, of which programs reach a part.
# Prices are what a GPU cost for an hour at usual providers in 2025. Only the controller's cost of a request was
# measured (benchmarks/fleet.py), on another machine.


class Gpu(NamedTuple):
    """memory: bytes. bandwidth: bytes/s. flops: dense bfloat16, 1/s. hour: US dollars."""

    memory: float
    bandwidth: float
    flops: float
    hour: float


GPUS = {
    "l4": Gpu(24e9, 0.30e12, 121e12, 0.7),
    "a10g": Gpu(24e9, 0.60e12, 70e12, 1.0),
    "rtx4090": Gpu(24e9, 1.01e12, 165e12, 0.4),
    "l40s": Gpu(48e9, 0.86e12, 362e12, 1.0),
    "a100-40": Gpu(40e9, 1.56e12, 312e12, 1.3),
    "a100": Gpu(80e9, 2.04e12, 312e12, 1.8),
    "h100": Gpu(80e9, 3.35e12, 989e12, 2.5),
    "h200": Gpu(141e9, 4.80e12, 989e12, 3.3),
    "b200": Gpu(180e9, 8.00e12, 2250e12, 5.0),
    "mi300x": Gpu(192e9, 5.30e12, 1307e12, 2.5),
}
_KV_BYTES = {0.6: 114_688, 1.7: 114_688, 4.0: 147_456, 8.0: 147_456, 14.0: 163_840, 32.0: 262_144, 70.0: 327_680}
"""Billions of parameters -> bytes of one token's keys and values in bfloat16: Qwen3 (8 heads of 128), Llama 3."""
_BANDWIDTH, _DECODE_FLOPS, _PREFILL_FLOPS, _TRAIN_FLOPS, _TENSOR_PARALLEL = 0.7, 0.5, 0.45, 0.35, 0.85
"""The shares of the makers' figures that programs reach; the last is of those of several GPUs."""


def guessed(
    gpu_name: str,
    size: float,
    deployment: Deployment,
    *,
    prompt_tokens: int = 500,
    new_tokens: int = 500,
    turns: int = 1,
    tool_s: float = 0.0,
) -> Costs:
    """Costs of a model of `size` billion parameters on GPUs of this name. Raises ConfigError for unknown ones.

    new_tokens and tool_s are means over turns, of lognormal distributions; the prompt of a later turn has a tenth of
    new_tokens more from tools.
    """
    gpu = GPUS.get(gpu_name.lower())
    if gpu is None:
        raise ConfigError(f"{gpu_name} is not among the known GPUs: {', '.join(GPUS)}; give a file with --costs")
    parameters, num_gpus, per_rank = size * 1e9, deployment.gpus_per_server, deployment.gpus_per_rank
    weights, kv_bytes = 2 * parameters, _KV_BYTES[min(_KV_BYTES, key=lambda known: abs(math.log(known / size)))]
    if (room := 0.9 * num_gpus * gpu.memory - weights) < 0:
        needed = 1 << math.ceil(math.log2(weights / (0.8 * gpu.memory)))
        raise ConfigError(
            f"the weights of a {size:g}B model do not fit into {num_gpus} {gpu_name}; try --gpus-per-server {needed}"
        )
    share = 1.0 if num_gpus == 1 else num_gpus * _TENSOR_PARALLEL
    bandwidth, flops, train_flops = gpu.bandwidth * _BANDWIDTH * share, gpu.flops * share, gpu.flops * per_rank
    reads_s, token_s = weights / bandwidth, 2 * parameters / (flops * _DECODE_FLOPS)
    turning_point = max(round(reads_s / token_s), 2)
    draw, sigma, episodes = random.Random(0), 0.8, list[MeasuredEpisode]()

    def around(mean: float) -> float:
        return draw.lognormvariate(math.log(mean) - sigma**2 / 2, sigma) if mean else 0.0

    for i in range(1600):
        played, held, prompt = list[MeasuredTurn](), 0, prompt_tokens
        for _ in range(turns):
            new = min(max(round(around(new_tokens)), 1), 8192)
            turn = MeasuredTurn(prompt_tokens=prompt, cached_tokens=held, new_tokens=new, tool_s=around(tool_s))
            played.append(turn)
            held, prompt = prompt + new, prompt + new + max(new_tokens // 10, 1)
        reward = float(draw.random() < 0.5)
        episodes.append(
            MeasuredEpisode(group=i // 8, turns=tuple(played), tokens=held, shared_tokens=prompt_tokens, reward=reward)
        )
    return Costs(
        decode=DecodeCosts(
            points=((1, reads_s), (turning_point, reads_s), (2 * turning_point, 2 * reads_s)),
            per_context_token_s=kv_bytes / bandwidth,
            max_running_requests=256,
            kv_tokens=int(room / kv_bytes),
        ),
        prefill=PrefillCosts(per_token_s=2 * parameters / (flops * _PREFILL_FLOPS), per_request_s=3e-3),
        trainer=TrainerCosts(
            base_s=0.5,
            per_episode_s=2e-4,
            per_token_s=8 * parameters / (train_flops * _TRAIN_FLOPS),  # proximal logprobs, forward, backward
            communication_s=8 * parameters / 50e9,  # 400 Gbit/s a rank
            snapshot_s=weights / 20e9,
        ),
        publish=PublishCosts(transfer_s=weights / 5e9, load_s=weights / num_gpus / 20e9),
        controller=ControllerCosts(per_request_s=2.5e-4, per_episode_s=2e-4, latency_s=5e-3),
        workload=Workload(episodes=tuple(episodes)),
        prices=Prices(server_hour=gpu.hour * num_gpus, rank_hour=gpu.hour * per_rank),
        memory=MemoryCosts(
            server_weights=int(weights),
            kv_per_token=kv_bytes,
            server_total=int(num_gpus * gpu.memory),
            trainer_state=int(18 * parameters),  # float32 weights, gradients, two moments; weights in bfloat16
            per_rank=int(0.25 * gpu.memory * per_rank),
            rank_total=int(gpu.memory * per_rank),
        ),
        deployment=deployment,
        measured=Measured(notes=("nothing was measured: every number is a guess from public facts",)),
        source=f"guessed for {size:g}B parameters on {gpu_name}",
    )

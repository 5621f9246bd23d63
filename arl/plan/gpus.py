"""Guessed costs of GPUs and models, from public facts: for a plan before anything was measured.

Bandwidth, FLOPs and memory are the makers' figures, of which programs reach a part: `_BANDWIDTH_REACHED` and the
following. Prices are what a GPU cost for an hour at usual providers in 2025. Only the controller's cost of a request
was measured (benchmarks/fleet.py), on another machine. Everything is extrapolated.
"""

from __future__ import annotations

import math
import random
from dataclasses import dataclass

from arl.api.errors import ConfigError
from arl.plan.costs import (
    ControllerCosts,
    Costs,
    DecodeCosts,
    Deployment,
    Measured,
    MemoryCosts,
    PrefillCosts,
    Prices,
    PublishCosts,
    TrainerCosts,
)
from arl.plan.workload import MeasuredEpisode, MeasuredTurn, Workload

_BANDWIDTH_REACHED = 0.7
_DECODE_FLOPS_REACHED, _PREFILL_FLOPS_REACHED, _TRAIN_FLOPS_REACHED = 0.5, 0.45, 0.35
_TENSOR_PARALLEL_REACHED = 0.85
"""The share of the bandwidth and FLOPs of a server's GPUs that tensor parallelism reaches."""
_STATE_BYTES = 18
"""The trainer's bytes for a parameter: float32 weights, gradients, two moments; weights in bfloat16."""
_NETWORK_BYTES_PER_S = 50e9
"""The bandwidth of each rank to others: 400 Gbit/s."""
_PUBLISH_BYTES_PER_S, _LOAD_BYTES_PER_S = 5e9, 20e9


@dataclass(frozen=True, slots=True)
class Gpu:
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


@dataclass(frozen=True, slots=True, kw_only=True)
class Guess:
    """Episodes that nobody has measured. Tokens and tools' seconds are means of lognormal distributions."""

    prompt_tokens: int = 500
    """Prompt tokens of the first turn."""
    new_tokens: int = 500
    """New tokens of a turn. A later turn's prompt also has a tenth of this number from tools."""
    turns: int = 1
    tool_s: float = 0.0
    """After each turn."""
    max_new_tokens: int = 8192


def billions(text: str) -> float:
    """A model's size, such as 8B or 0.6b. Raises ValueError."""
    number = float(text.lower().removesuffix("b"))
    if not 0 < number < 10_000:
        raise ValueError(text)
    return number


def guessed(gpu_name: str, size: float, guess: Guess, deployment: Deployment) -> Costs:
    """Costs of a model of `size` billion parameters, on GPUs of this name. Raises ConfigError for unknown ones."""
    gpu = GPUS.get(gpu_name.lower())
    if gpu is None:
        raise ConfigError(f"{gpu_name} is not among the known GPUs: {', '.join(GPUS)}; give a file with --costs")
    parameters = size * 1e9
    weights, kv_bytes = 2 * parameters, _KV_BYTES[min(_KV_BYTES, key=lambda known: abs(math.log(known / size)))]
    num_gpus = deployment.gpus_per_server
    share = 1.0 if num_gpus == 1 else num_gpus * _TENSOR_PARALLEL_REACHED
    if (room := 0.9 * num_gpus * gpu.memory - weights) < 0:
        needed = 1 << math.ceil(math.log2(weights / (0.8 * gpu.memory)))
        raise ConfigError(
            f"the weights of a {size:g}B model do not fit into {num_gpus} {gpu_name}; try --gpus-per-server {needed}"
        )
    bandwidth, flops = gpu.bandwidth * _BANDWIDTH_REACHED * share, gpu.flops * share
    reads_s, token_s = weights / bandwidth, 2 * parameters / (flops * _DECODE_FLOPS_REACHED)
    turning_point = max(round(reads_s / token_s), 2)
    return Costs(
        decode=DecodeCosts(
            points=((1, reads_s), (turning_point, reads_s), (2 * turning_point, 2 * reads_s)),
            per_context_token_s=kv_bytes / bandwidth,
            max_running_requests=256,
            kv_tokens=int(room / kv_bytes),
        ),
        prefill=PrefillCosts(base_s=0.003, per_token_s=2 * parameters / (flops * _PREFILL_FLOPS_REACHED)),
        trainer=_trainer(gpu, parameters, deployment.gpus_per_rank),
        publish=PublishCosts(transfer_s=weights / _PUBLISH_BYTES_PER_S, load_s=weights / num_gpus / _LOAD_BYTES_PER_S),
        controller=ControllerCosts(per_request_s=2.5e-4, per_episode_s=2e-4, latency_s=5e-3),
        workload=_workload(guess),
        prices=Prices(server_hour=gpu.hour * num_gpus, rank_hour=gpu.hour * deployment.gpus_per_rank),
        memory=MemoryCosts(
            server_weights=int(weights),
            kv_per_token=kv_bytes,
            server_total=int(num_gpus * gpu.memory),
            trainer_state=int(_STATE_BYTES * parameters),
            per_rank=int(0.25 * gpu.memory * deployment.gpus_per_rank),
            rank_total=int(gpu.memory * deployment.gpus_per_rank),
        ),
        deployment=deployment,
        measured=Measured(notes=("nothing was measured: every number is a guess from public facts",)),
        source=f"guessed for {size:g}B parameters on {gpu_name}",
    )


def _trainer(gpu: Gpu, parameters: float, gpus_per_rank: int) -> TrainerCosts:
    flops = gpu.flops * _TRAIN_FLOPS_REACHED * gpus_per_rank
    return TrainerCosts(
        base_s=0.5,
        per_episode_s=2e-4,
        per_token_s=6 * parameters / flops,
        forward_per_token_s=2 * parameters / flops,
        communication_s=8 * parameters / _NETWORK_BYTES_PER_S,
        snapshot_s=2 * parameters / 20e9,
    )


def _workload(guess: Guess) -> Workload:
    draw = random.Random(0)
    episodes = [_episode(guess, draw, group) for group in range(200) for _ in range(8)]
    return Workload(episodes=tuple(episodes))


def _episode(guess: Guess, draw: random.Random, group: int) -> MeasuredEpisode:
    turns: list[MeasuredTurn] = []
    held, prompt = 0, guess.prompt_tokens
    for _ in range(guess.turns):
        new = min(max(round(_lognormal(draw, guess.new_tokens)), 1), guess.max_new_tokens)
        tool_s = _lognormal(draw, guess.tool_s) if guess.tool_s else 0.0
        turns.append(MeasuredTurn(prompt_tokens=prompt, cached_tokens=held, new_tokens=new, tool_s=tool_s))
        held = prompt + new
        prompt = held + max(guess.new_tokens // 10, 1)
    return MeasuredEpisode(
        group=group,
        turns=tuple(turns),
        tokens=held,
        shared_tokens=guess.prompt_tokens,
        reward=float(draw.random() < 0.5),
    )


def _lognormal(draw: random.Random, mean: float, sigma: float = 0.8) -> float:
    return draw.lognormvariate(math.log(mean) - sigma**2 / 2, sigma)

"""guessed: costs of GPUs and models from public facts, for a plan before anything was measured.

Bandwidth, FLOPs and memory are the makers' figures, of which programs reach a part. Prices are what a GPU cost for an
hour at usual providers in 2025. Only the controller's cost of a request was measured (benchmarks/fleet.py), on another
machine.
"""

from __future__ import annotations

import math
import random
from typing import NamedTuple

from arl.api.errors import ConfigError
from arl.cluster.plan.costs import (
    ControllerCosts,
    Costs,
    DecodeCosts,
    Deployment,
    Measured,
    MeasuredEpisode,
    MeasuredTurn,
    MemoryCosts,
    PrefillCosts,
    Prices,
    PublishCosts,
    TrainerCosts,
    Workload,
)


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
_MAX_NEW_TOKENS = 8192


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
        workload=_workload(prompt_tokens, new_tokens, turns, tool_s),
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


def _workload(prompt_tokens: int, new_tokens: int, num_turns: int, tool_s: float) -> Workload:
    draw, sigma = random.Random(0), 0.8

    def around(mean: float) -> float:
        return draw.lognormvariate(math.log(mean) - sigma**2 / 2, sigma) if mean else 0.0

    episodes: list[MeasuredEpisode] = []
    for i in range(1600):
        turns, held, prompt = list[MeasuredTurn](), 0, prompt_tokens
        for _ in range(num_turns):
            new = min(max(round(around(new_tokens)), 1), _MAX_NEW_TOKENS)
            turns.append(MeasuredTurn(prompt_tokens=prompt, cached_tokens=held, new_tokens=new, tool_s=around(tool_s)))
            held, prompt = prompt + new, prompt + new + max(new_tokens // 10, 1)
        reward = float(draw.random() < 0.5)
        episodes.append(
            MeasuredEpisode(group=i // 8, turns=tuple(turns), tokens=held, shared_tokens=prompt_tokens, reward=reward)
        )
    return Workload(episodes=tuple(episodes))

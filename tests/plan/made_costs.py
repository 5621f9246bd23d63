"""Costs and workloads made up for tests of simulated runs."""

import random
from typing import Any

import msgspec

from arl.plan.costs import (
    ControllerCosts,
    Costs,
    DecodeCosts,
    Deployment,
    MemoryCosts,
    PrefillCosts,
    Prices,
    PublishCosts,
    SharedCores,
    TrainerCosts,
)
from arl.plan.workload import MeasuredEpisode, MeasuredTurn, Workload


def episode(draw: random.Random, group: int, num_turns: int) -> MeasuredEpisode:
    turns: list[MeasuredTurn] = []
    held, context = 0, 20
    for _ in range(num_turns):
        prompt, new = context + draw.randint(1, 30), draw.randint(1, 60)
        turns.append(MeasuredTurn(prompt_tokens=prompt, cached_tokens=held, new_tokens=new, tool_s=draw.random()))
        held = context = prompt + new
    return MeasuredEpisode(
        group=group, turns=tuple(turns), tokens=context, shared_tokens=20, reward=float(draw.random() < 0.5)
    )


def made_workload(seed: int = 0, num_groups: int = 12, num_turns: int = 3, **changes: Any) -> Workload:
    draw = random.Random(seed)
    episodes = [episode(draw, g, draw.randint(1, num_turns)) for g in range(num_groups) for _ in range(4)]
    return Workload(episodes=tuple(msgspec.structs.replace(one, **changes) for one in episodes), num_examples=500)


def made_costs(seed: int = 0, shared: bool = True, **changes: Any) -> Costs:
    costs = Costs(
        decode=DecodeCosts(points=((1, 0.01), (8, 0.012), (64, 0.04)), per_context_token_s=1e-7),
        prefill=PrefillCosts(base_s=0.002, per_token_s=1e-5, chunk_tokens=256, stops_decoding=False),
        trainer=TrainerCosts(base_s=0.1, per_episode_s=1e-3, per_token_s=1e-4, communication_s=0.2, snapshot_s=0.01),
        publish=PublishCosts(transfer_s=0.1, load_s=0.05),
        controller=ControllerCosts(per_request_s=1e-4, per_episode_s=2e-4, latency_s=2e-3),
        shared=SharedCores(cores=2) if shared else None,
        workload=made_workload(seed),
        prices=Prices(server_hour=2.0, rank_hour=3.0),
        memory=MemoryCosts(server_weights=10**9, kv_per_token=1000, server_total=2 * 10**9),
        deployment=Deployment(batch_size=4, group_size=4, max_staleness=2),
    )
    return msgspec.structs.replace(costs, **changes)

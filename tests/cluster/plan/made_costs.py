"""Costs made up for tests."""

import random
from typing import Any

import msgspec

from arl.cluster.plan.costs import (
    ControllerCosts,
    Costs,
    DecodeCosts,
    Deployment,
    MeasuredEpisode,
    MeasuredTurn,
    MemoryCosts,
    PrefillCosts,
    Prices,
    PublishCosts,
    SharedCores,
    TrainerCosts,
    Workload,
)


def episode(draw: random.Random, group: int, num_turns: int) -> MeasuredEpisode:
    turns, held = list[MeasuredTurn](), 0
    for _ in range(num_turns):
        prompt, new = held + draw.randint(1, 30), draw.randint(1, 60)
        turns.append(MeasuredTurn(prompt_tokens=prompt, cached_tokens=held, new_tokens=new, tool_s=draw.random()))
        held = prompt + new
    reward = float(draw.random() < 0.5)
    return MeasuredEpisode(
        group=group, turns=tuple(turns), tokens=held, shared_tokens=turns[0].prompt_tokens, reward=reward
    )


def made_workload(seed: int = 0, **changes: Any) -> Workload:
    draw = random.Random(seed)
    episodes = [episode(draw, group, draw.randint(1, 3)) for group in range(12) for _ in range(4)]
    return Workload(episodes=tuple(msgspec.structs.replace(one, **changes) for one in episodes))


def made_costs(seed: int = 0, shared: bool = True, **changes: Any) -> Costs:
    costs = Costs(
        decode=DecodeCosts(points=((1, 0.01), (8, 0.012), (64, 0.04)), per_context_token_s=1e-7),
        prefill=PrefillCosts(per_token_s=1e-5, per_request_s=0.002),
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

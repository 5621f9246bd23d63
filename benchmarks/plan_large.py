"""How long `arl plan` takes to simulate a large run: 1,000 servers with 100,000 episodes in flight.

    python benchmarks/plan_large.py [--scale 0.1] [--ranks 220] [--turns 2]

Costs are guessed for an 8B model on H100s (arl/plan/gpus.py). An episode takes --turns turns of 500 tokens (mean of a
lognormal distribution), and tools that take 100 s together. --scale makes servers, ranks, episodes and batches fewer.
Printed: the seconds of the simulation, and what it says of trainer, servers and controller.
"""

from __future__ import annotations

import argparse
import math
import random
import resource
import time

from msgspec.structs import replace

from arl.plan.costs import Costs, Deployment
from arl.plan.gpus import Guess, guessed
from arl.plan.prediction import predict
from arl.plan.workload import MeasuredEpisode, MeasuredTurn, Workload

PROMPT, NEW, MOST_NEW, TOOLS_S = 500, 500, 4096, 100.0


def costs_of(deployment: Deployment, turns: int) -> Costs:
    draw = random.Random(0)
    episodes = tuple(episode(draw, group, turns) for group in range(200) for _ in range(8))
    return replace(guessed("h100", 8.0, Guess(), deployment), workload=Workload(episodes=episodes))


def episode(draw: random.Random, group: int, num_turns: int) -> MeasuredEpisode:
    turns, held, prompt = list[MeasuredTurn](), 0, PROMPT
    for _ in range(num_turns):
        new = min(max(round(lognormal(draw, NEW, 0.8)), 1), MOST_NEW)
        tool_s = lognormal(draw, TOOLS_S / num_turns, 0.3)
        turns.append(MeasuredTurn(prompt_tokens=prompt, cached_tokens=held, new_tokens=new, tool_s=tool_s))
        held = prompt + new
        prompt = held + NEW // 10
    reward = float(draw.random() < 0.5)
    return MeasuredEpisode(group=group, turns=tuple(turns), tokens=held, shared_tokens=PROMPT, reward=reward)


def lognormal(draw: random.Random, mean: float, sigma: float) -> float:
    return draw.lognormvariate(math.log(mean) - sigma**2 / 2, sigma)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--scale", type=float, default=1.0)
    parser.add_argument("--servers", type=int, default=1000)
    parser.add_argument("--ranks", type=int, default=220)
    parser.add_argument("--episodes", type=int, default=100_000, help="that may run at once")
    parser.add_argument("--batch-size", type=int, default=3125, help="groups of 4")
    parser.add_argument("--max-staleness", type=int, default=15)
    parser.add_argument("--turns", type=int, default=2)
    parser.add_argument("--steps", type=int, default=2, help="after the filling")
    args = parser.parse_args()
    deployment = Deployment(
        num_servers=round(args.scale * args.servers),
        num_ranks=max(round(args.scale * args.ranks), 1),
        batch_size=round(args.scale * args.batch_size),
        group_size=4,
        max_staleness=args.max_staleness,
        max_concurrent_episodes=round(args.scale * args.episodes),
    )
    costs = costs_of(deployment, args.turns)
    began, began_cpu = time.monotonic(), time.process_time()
    said = predict(costs, deployment, num_steps=args.steps)
    seconds, cpu_s = time.monotonic() - began, time.process_time() - began_cpu
    peak_gb = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e6
    print(f"{deployment.num_servers} servers, {deployment.num_ranks} ranks, {said.running_episodes:,.0f} episodes run")
    print(f"simulated in {seconds:.0f} s ({cpu_s:.0f} s of CPU, {peak_gb:.1f} GB)")
    print(f"{said.episodes_per_s:.0f} episodes/s; a step of {4 * deployment.batch_size} every {said.step_s:.1f} s")
    print(f"trainer idle {said.waits.trainer_idle:.1%}, controller busy {said.waits.controller:.1%}")
    print(f"the limit: {said.limit}; staleness {said.mean_staleness:.1f}")


if __name__ == "__main__":
    main()

"""How long `arl plan` takes to simulate a large run: 1,000 servers with 100,000 episodes in flight.

    python benchmarks/plan_large.py [--scale 0.05] [--ranks 230] [--turns 2]

Costs are guessed for an 8B model on H100s (arl/plan/gpus.py). An episode takes --turns turns of 500 tokens (mean of a
lognormal distribution), and tools that take 100 s together. --scale makes servers, ranks, episodes and batches fewer.
Printed: the seconds of the simulation, and what it says of trainer, servers and controller. It says so of the --steps
steps after the filling, which should take longer than an episode: both times are printed, and the throughput of either
half of these steps, which shows whether they are a steady state.
"""

from __future__ import annotations

import argparse
import math
import random
import resource
import time
from collections.abc import Sequence

from msgspec.structs import replace

from arl.plan.costs import Costs, Deployment
from arl.plan.gpus import Guess, guessed
from arl.plan.prediction import told_by
from arl.plan.simulated_run import SimulatedStep, simulate
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
    parser.add_argument("--ranks", type=int, default=230)
    parser.add_argument("--episodes", type=int, default=100_000, help="that may run at once")
    parser.add_argument("--batch-size", type=int, default=3125, help="groups of 4")
    parser.add_argument("--max-staleness", type=int, default=14)
    parser.add_argument("--turns", type=int, default=2)
    parser.add_argument("--steps", type=int, default=11, help="after the filling")
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
    filling = deployment.max_staleness + 2
    run = simulate(costs, deployment, filling + args.steps)
    seconds, cpu_s = time.monotonic() - began, time.process_time() - began_cpu
    peak_gb = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e6
    said, steps, turns = told_by(run, costs, filling), run.steps[filling - 1 :], run.steps[-1].num_answered
    print(f"{deployment.num_servers} servers, {deployment.num_ranks} ranks, {said.running_episodes:,.0f} episodes run")
    print(f"simulated in {seconds:.0f} s ({cpu_s:.0f} s of CPU, {peak_gb:.1f} GB): {turns:,} turns, ", end="")
    print(f"{1e6 * cpu_s / turns:.0f} us of CPU each")
    window_s, episode_s = steps[-1].ended - steps[0].ended, run.counters["finished_episode_s"]
    print(f"measured: {said.num_steps} steps of {4 * deployment.batch_size} episodes in {window_s:.0f} s, ", end="")
    print(f"{window_s / episode_s:.1f} times the {episode_s:.0f} s of an episode")
    middle = len(steps) // 2
    print(f"{said.episodes_per_s:.0f} episodes/s ({rate(steps[: middle + 1]):.0f}, then {rate(steps[middle:]):.0f})")
    print(f"trainer idle {said.waits.trainer_idle:.1%}, controller busy {said.waits.controller:.1%}, ", end="")
    print(f"servers compute {said.waits.servers_compute:.0%}")
    print(f"the limit: {said.limit}; staleness {said.mean_staleness:.1f}")


def rate(steps: Sequence[SimulatedStep]) -> float:
    """Episodes a second, from the end of the first of these steps."""
    return sum(step.num_episodes for step in steps[1:]) / (steps[-1].ended - steps[0].ended)


if __name__ == "__main__":
    main()

"""Whether slow tools and slow rewards of different episodes overlap: many episodes, each with a tool of a second.

    python benchmarks/tool_overlap.py --episodes 256 --seconds 1

Runs the real ToolAgentWorkflow, Conversation, tools and rewards in one process; only the model is scripted. Prints how
long all episodes took together, for an async tool, a sync one, and the same two as rewards; and the event loop's lag.
"""

from __future__ import annotations

import argparse
import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from rich.console import Console
from rich.table import Table

from arl.api.fakes import ScriptedEngine
from arl.api.types import Example, ModelRequest
from arl.engine.tiny import tiny_tokenizer
from arl.rewards import InlineReward, ThreadReward
from arl.rollout.episode import EpisodeRunner
from arl.rollout.monitors import LagMonitor
from arl.workflow.agent import AgentWorkflow, SingleTurnWorkflow
from arl.workflow.tool_agent import ToolAgentWorkflow

TOKENIZER = tiny_tokenizer()
QUESTION: Example = {"question": "How long does it take?"}


@dataclass(frozen=True)
class Measured:
    """seconds: from the first episode's start to the last one's end. lag_ms: the longest that the loop stood still."""

    name: str
    seconds: float
    lag_ms: float


def engine_of(*answers: str) -> ScriptedEngine:
    """Says the answers in each episode, one a turn."""
    texts = [[*TOKENIZER.encode(answer), TOKENIZER.eos_token_id] for answer in answers]
    turns: dict[str | None, int] = {}

    def script(request: ModelRequest) -> list[int]:
        turn = turns.get(request.session_id, 0)
        turns[request.session_id] = turn + 1
        return texts[turn]

    return ScriptedEngine(script)


async def measure(name: str, workflow: AgentWorkflow, engine: ScriptedEngine, episodes: int) -> Measured:
    runner = EpisodeRunner(workflow=workflow, timeout_s=600)
    lag = LagMonitor("the benchmark", period_s=0.005, keep=1_000_000)
    async with workflow, asyncio.TaskGroup() as background:
        watching = background.create_task(lag.run())
        began = time.perf_counter()
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(runner.run(engine, QUESTION, name=f"episode {i}")) for i in range(episodes)]
        seconds = time.perf_counter() - began
        watching.cancel()
    assert all(task.result().reward == 1.0 for task in tasks), "a tool or a reward failed"
    return Measured(name, seconds, 1000 * lag.worst_s)


async def measure_all(episodes: int, seconds: float) -> list[Measured]:
    async def wait() -> str:
        """Wait."""
        await asyncio.sleep(seconds)
        return "waited"

    def block() -> str:
        """Wait in a thread."""
        time.sleep(seconds)
        return "waited"

    async def wait_to_judge(answer: str, data: Example) -> float:
        await asyncio.sleep(seconds)
        return 1.0

    def block_to_judge(answer: str, data: Example) -> float:
        time.sleep(seconds)
        return 1.0

    def by_tool(tool: Callable[..., Any]) -> tuple[AgentWorkflow, ScriptedEngine]:
        call = f'<tool_call>{{"name": "{tool.__name__}", "arguments": {{}}}}</tool_call>'
        reward = InlineReward(lambda answer, data: float(answer == "done"))
        return ToolAgentWorkflow(TOKENIZER, reward, tools=[tool]), engine_of(call, "done")

    runs = {
        "an async tool": by_tool(wait),
        "a sync tool, in threads": by_tool(block),
        "an async reward": (SingleTurnWorkflow(TOKENIZER, wait_to_judge), engine_of("done")),
        "a sync reward, in threads": (
            SingleTurnWorkflow(TOKENIZER, ThreadReward(block_to_judge, workers=episodes)),
            engine_of("done"),
        ),
    }
    return [await measure(name, workflow, engine, episodes) for name, (workflow, engine) in runs.items()]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--episodes", type=int, default=256)
    parser.add_argument("--seconds", type=float, default=1.0, help="of each tool call and each reward")
    args = parser.parse_args()
    table = Table("what is slow", "all episodes, s", "longest lag of the loop, ms", title=f"{args.episodes} episodes")
    for result in asyncio.run(measure_all(args.episodes, args.seconds)):
        table.add_row(result.name, f"{result.seconds:.2f}", f"{result.lag_ms:.0f}")
    Console().print(table)


if __name__ == "__main__":
    main()

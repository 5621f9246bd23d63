"""openai-agents with output_type, over both protocols."""

import asyncio

from agents import Agent, OpenAIProvider, RunConfig, Runner
from point import Point, told


async def run() -> None:
    agent = Agent(name="drawer", instructions="Draw.", output_type=Point)
    for uses_responses in (False, True):
        config = RunConfig(model_provider=OpenAIProvider(use_responses=uses_responses), tracing_disabled=True)
        told((await Runner.run(agent, "A point.", run_config=config)).final_output)


asyncio.run(run())

"""Episodes of the examples' agents, with a model that says what it is told."""

from typing import Any

from arl.api.fakes import ScriptedEngine
from arl.api.types import Example, Trajectory
from arl.api.workflow import RolloutWorkflow
from arl.engine.tiny import tiny_tokenizer

TOKENIZER = tiny_tokenizer()


async def played(
    agent: RolloutWorkflow, data: Example, *answers: str, tokenizer: Any = TOKENIZER
) -> list[tuple[Trajectory, str]]:
    """Each trajectory, and the text of all that its model saw and said. Every answer must be asked for."""
    engine = ScriptedEngine.saying(tokenizer, *answers)
    async with agent:
        made: Any = await agent.arun_episode(engine, data)
    assert len(engine.requests) == len(answers)
    return [(trajectory, str(tokenizer.decode(trajectory.token_ids))) for trajectory in made]

"""A run of two tasks as users start it, with a tiny model and the embedded server. Tests start it as a process."""

import sys

from agent_script import TOKENIZER, SayDigits

import arl
from arl.api.engine import Sampler
from arl.api.types import Example, Trajectory


class SayLetters(arl.RolloutWorkflow):
    """One turn; the reward is the share of letters."""

    async def arun_episode(self, engine: Sampler, data: Example) -> list[Trajectory]:
        conversation = arl.Conversation(TOKENIZER, [{"role": "user", "content": f"Say {data['number']}"}])
        turn = await conversation.agenerate(engine, arl.SamplingParams(max_new_tokens=8))
        return conversation.trajectories(sum(c.isalpha() for c in turn.text) / 8)


async def main(config: arl.Config) -> None:
    numbers = [{"number": n} for n in range(40)]
    tasks = [
        arl.Task(name="digits", workflow=SayDigits(), dataset=numbers, eval_dataset=numbers[:2], weight=2.0),
        arl.Task(name="letters", workflow=SayLetters(), dataset=numbers[:7], eval_dataset=numbers[:2], group_size=3),
    ]
    async with arl.launch(config, tasks=tasks) as trainer:
        async for step in trainer:
            sys.stdout.write(f"trained {step.version}\n")
            sys.stdout.flush()


if __name__ == "__main__":
    arl.run_script(main, arl.Config)

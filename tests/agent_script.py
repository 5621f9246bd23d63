"""A run as users start it: a script with flags, a tiny model, the embedded server. Tests start it as a process."""

import sys
from collections.abc import Sequence

from arl.api.engine import Sampler
from arl.api.settings.run import Config
from arl.api.types import Example, SamplingParams, Trajectory
from arl.api.workflow import RolloutWorkflow
from arl.engine.tiny import tiny_tokenizer
from arl.run.launch import launch
from arl.run.script import run_script
from arl.workflow.conversation import Conversation

TOKENIZER = tiny_tokenizer(["Say a number"])


class SayDigits(RolloutWorkflow):
    """Two turns; the reward is the share of digits in what the model said last."""

    async def arun_episode(self, engine: Sampler, data: Example) -> Sequence[Trajectory]:
        conversation = Conversation(TOKENIZER, [{"role": "user", "content": f"Say a number {data['number']}"}])
        await conversation.agenerate(engine, SamplingParams(max_new_tokens=6, temperature=0.8))
        conversation.add({"role": "user", "content": "Say a number"})
        turn = await conversation.agenerate(engine, SamplingParams(max_new_tokens=6, temperature=0.8))
        digits = sum(c.isdigit() for c in turn.text) / 6
        return conversation.trajectories(digits, {"turns": 2.0}, rewards={"digits": digits})


async def main(config: Config) -> None:
    examples = [{"number": n} for n in range(200)]
    async with launch(config, workflow=SayDigits(), dataset=examples, eval_dataset=examples[:4]) as trainer:
        async for step in trainer:
            sys.stdout.write(f"trained {step.version}\n")
            sys.stdout.flush()


if __name__ == "__main__":
    run_script(main, Config)

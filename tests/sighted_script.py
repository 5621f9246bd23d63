"""An agent that sees, as users write it: its examples have an image, and its tool returns one."""

from collections.abc import Sequence

from PIL import Image as Pictures

import arl
from arl.workflow.call_formats import ToolCall
from arl.workflow.tools import Tool, acall_tools

COLOURS = ("red", "green", "blue", "white")
SIDE, HALF = 48, 24


async def zoom(colour: str) -> list[object]:
    """Look closer."""
    return ["closer", Pictures.new("RGB", (HALF, HALF), colour)]


class Looker(arl.AgentWorkflow):
    """Two turns. Before the second one it sees what its tool returns."""

    async def arun_episode(self, engine: arl.Sampler, data: arl.Example) -> Sequence[arl.Trajectory]:
        tools = [Tool.of(zoom)]
        chat = self.conversation(data, tools)
        await chat.agenerate(engine, self.sampling)
        call = ToolCall(name="zoom", arguments={"colour": data["answer"]})
        chat.add(*await acall_tools([call], tools))
        turn = await chat.agenerate(engine, self.sampling)
        score = await self.ascore(turn.text, data)
        return chat.trajectories(score.value, {"turns": 2.0}, rewards=score.parts)


def vowels(answer: str, data: arl.Example) -> float:
    return sum(answer.count(vowel) for vowel in "aeiou") / 8


def prepare(config: arl.ExperimentConfig) -> arl.Setup:
    examples = [
        {"question": f"{n}: <image> has which colour?", "image": Pictures.new("RGB", (SIDE, SIDE), colour),
         "answer": colour}
        for n in range(10) for colour in COLOURS
    ]  # fmt: skip
    sampling = arl.SamplingParams(max_new_tokens=8)
    workflow = Looker(arl.load_tokenizer(config.model), vowels, sampling=sampling)
    return arl.Setup(model=config.model, workflow=workflow, dataset=examples, eval_dataset=examples[:2])


experiment = arl.Experiment(config=arl.ExperimentConfig, prepare=prepare)


if __name__ == "__main__":
    experiment.main()

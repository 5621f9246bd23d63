"""An environment of verifiers for tests: which letter of a word? One turn, with a reward of two parts and a metric."""

from collections.abc import Iterable
from typing import Any

import verifiers.v1 as vf

WORDS = ("stone", "river", "cloud")


class LettersData(vf.TaskData):
    answer: str


class LettersTask(vf.Task[LettersData]):
    @vf.reward
    async def correct(self, trace: vf.Trace) -> float:
        return float(said(trace) == self.data.answer)

    @vf.reward(weight=0.5)
    async def short(self, trace: vf.Trace) -> float:
        return float(len(said(trace)) == 1)

    @vf.metric
    async def length(self, trace: vf.Trace) -> float:
        return float(len(said(trace)))


class Letters(vf.Taskset[LettersTask]):
    def load(self) -> Iterable[LettersTask]:
        for word in WORDS:
            data = LettersData(prompt=f"The last letter of {word}?", system_prompt="Answer.", answer=word[-1])
            yield LettersTask(data, self.config.task)


class LettersEnv(vf.SingleAgentEnv):
    """Keeps what verifiers recorded, for tests to compare."""

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.episodes: list[vf.Episode] = []

    async def finalize(self, task: vf.Task, episode: vf.Episode) -> None:
        self.episodes.append(episode)


def said(trace: vf.Trace) -> str:
    return (trace.assistant_messages[-1].content or "").strip()


__all__ = ["Letters", "LettersEnv"]

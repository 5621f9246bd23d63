"""An environment of verifiers for tests: which letter of a word? One turn, with a reward of two parts and a metric.

The tasks after those of WORDS fail, each in its own way.
"""

import asyncio
from collections.abc import Iterable

import verifiers.v1 as vf

WORDS = ("stone", "river", "cloud")
FAILURES = ("reward raises", "setup hangs", "stops at once")


class LettersData(vf.TaskData):
    answer: str


class LettersTask(vf.Task[LettersData]):
    async def setup(self, trace: vf.Trace, runtime: vf.Runtime) -> None:
        if self.data.name == "setup hangs":
            await asyncio.Event().wait()

    @vf.reward
    async def correct(self, trace: vf.Trace) -> float:
        if self.data.name == "reward raises":
            raise ZeroDivisionError("nobody was fair")
        return float(said(trace) == self.data.answer)

    @vf.reward(weight=0.5)
    async def short(self, trace: vf.Trace) -> float:
        return float(len(said(trace)) == 1)

    @vf.metric
    async def length(self, trace: vf.Trace) -> float:
        return float(len(said(trace)))

    @vf.stop
    async def never_begins(self, request: vf.Request) -> bool:
        return self.data.name == "stops at once"


class Letters(vf.Taskset[LettersTask]):
    def load(self) -> Iterable[LettersTask]:
        for word in (*WORDS, *FAILURES):
            prompt = f"The last letter of {word}?"
            data = LettersData(name=word, prompt=prompt, system_prompt="Answer.", answer=word[-1])
            yield LettersTask(data, self.config.task)


def said(trace: vf.Trace) -> str:
    return "".join((message.content or "").strip() for message in trace.assistant_messages[-1:])


__all__ = ["Letters"]

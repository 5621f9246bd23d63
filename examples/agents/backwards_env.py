"""An environment of verifiers: spell a word backwards, and try again if it was wrong.

It is written like verifiers' own environments: a package or module that exports a taskset. If a rollout is more than
one question and one answer, the module also exports an environment. verifiers finds it by its module's name.
"""

from __future__ import annotations

import random
from collections.abc import Iterable, Iterator
from string import ascii_lowercase

import verifiers.v1 as vf

SYSTEM = "Spell words backwards."
TRY_AGAIN = "No. Try again."


class BackwardsData(vf.TaskData):
    answer: str


class BackwardsTask(vf.Task[BackwardsData]):
    @vf.reward
    async def spelled(self, trace: vf.Trace) -> float:
        """1 if the first try is right, 1/2 if the second is, and so on."""
        tries = [(message.content or "").strip() for message in trace.assistant_messages]
        return 1 / len(tries) if tries and tries[-1] == self.data.answer else 0.0

    @vf.metric
    async def at_once(self, trace: vf.Trace) -> float:
        return float((trace.assistant_messages[0].content or "").strip() == self.data.answer)


class BackwardsTasksetConfig(vf.TasksetConfig):
    seed: int = 0
    min_letters: int = 4
    max_letters: int = 6


class BackwardsTaskset(vf.Taskset[BackwardsTask, BackwardsTasksetConfig]):
    """An endless stream of made-up words, all different."""

    INFINITE = True

    def load(self) -> Iterable[BackwardsTask]:
        for word in words(self.config.seed, self.config.min_letters, self.config.max_letters):
            data = BackwardsData(prompt=question(word), system_prompt=SYSTEM, answer=word[::-1])  # pyright: ignore[reportCallIssue]  (all else has a default)
            yield BackwardsTask(data, self.config.task)


class BackwardsEnvConfig(vf.EnvConfig):
    speller: vf.AgentConfig = vf.AgentConfig()
    max_tries: int = 2


class BackwardsEnv(vf.Env[BackwardsEnvConfig]):
    async def run(self, task: vf.Task, agents: vf.Agents) -> None:
        async with agents.speller.interaction(task) as speller:
            said = await speller.turn()
            for _ in range(self.config.max_tries - 1):
                if said.terminated or said.last_reply == task.data.answer:
                    return
                said = await speller.turn(TRY_AGAIN)


def question(word: str) -> str:
    return f"Spell {word}"


def words(seed: int, min_letters: int, max_letters: int) -> Iterator[str]:
    rng = random.Random(seed)
    known: set[str] = set()
    while True:
        word = "".join(rng.choices(ascii_lowercase, k=rng.randint(min_letters, max_letters)))
        if word not in known:
            known.add(word)
            yield word


__all__ = ["BackwardsEnv", "BackwardsTaskset"]

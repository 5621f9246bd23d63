"""An environment of verifiers for tests: a number is guessed, and the one who knows it says higher or lower."""

from collections.abc import Iterable
from typing import Any

import verifiers.v1 as vf
from letters_env import said


class GuessData(vf.TaskData):
    number: int


class GuessTask(vf.Task[GuessData]):
    @vf.reward
    async def guessed(self, trace: vf.Trace) -> float:
        return float(said(trace) == str(self.data.number))


class Guess(vf.Taskset[GuessTask]):
    def load(self) -> Iterable[GuessTask]:
        yield GuessTask(GuessData(prompt="Guess a number.", number=7), self.config.task)


class GuessConfig(vf.EnvConfig):
    player: vf.AgentConfig = vf.AgentConfig()


class GuessEnv(vf.Env[GuessConfig]):
    """The player speaks until the number is right. Keeps what verifiers recorded."""

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.episodes: list[vf.Episode] = []

    async def run(self, task: GuessTask, agents: vf.Agents) -> None:
        async with agents.player.interaction(task) as player:
            segment = await player.turn()
            while not segment.terminated and segment.last_reply != str(task.data.number):
                segment = await player.turn("Higher." if int(segment.last_reply) < task.data.number else "Lower.")

    async def finalize(self, task: vf.Task, episode: vf.Episode) -> None:
        self.episodes.append(episode)


__all__ = ["Guess", "GuessEnv"]

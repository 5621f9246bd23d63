"""An author and a critic that say anything; a model without mind learns how often to say which letter."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import arl
from arl.engine.tiny import TinyShape, tiny_tokenizer, write_tiny_model

SHAPE = TinyShape(hidden_size=32, num_layers=1, head_dim=8, context_length=128)


def a_model(directory: Path, seed: int = 0) -> str:
    return str(write_tiny_model(directory, shape=SHAPE, seed=seed))


class Pair(arl.RolloutWorkflow):
    """The author is rewarded for vowels, the critic for consonants; `roles` speak, all others are silent."""

    def __init__(self, roles: Sequence[str] = ("author", "critic")) -> None:
        self.roles = tuple(roles)

    @property
    def declared_roles(self) -> frozenset[str]:
        return frozenset(self.roles)

    async def arun_episode(self, engine: arl.Sampler, data: Mapping[str, Any]) -> list[arl.Trajectory]:
        made: list[arl.Trajectory] = []
        for role in self.roles:
            chat = arl.Conversation(tiny_tokenizer(), [{"role": "user", "content": data["question"]}], role=role)
            turn = await chat.agenerate(engine, arl.SamplingParams(max_new_tokens=6))
            vowels = sum(turn.text.count(vowel) for vowel in "aeiou")
            made += chat.trajectories(float(vowels if role == "author" else -vowels))
        return made

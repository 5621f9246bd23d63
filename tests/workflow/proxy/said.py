"""What a scripted model says behind the endpoint, and what of it is trained."""

from __future__ import annotations

import json
from collections.abc import Sequence

from arl.api import ModelRequest, ScriptedEngine, Trajectory
from arl.engine.tiny import tiny_tokenizer

TOKENIZER = tiny_tokenizer()


def encode(text: str) -> list[int]:
    return TOKENIZER.encode(text, add_special_tokens=False)


def saying(*answers: str) -> ScriptedEngine:
    """An engine that gives one answer after another, each with its end-of-turn token."""
    remaining = iter(answers)
    return ScriptedEngine(lambda _: [*encode(next(remaining)), TOKENIZER.eos_token_id])


def calling(name: str, **arguments: object) -> str:
    """A tool call as the model writes it."""
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"


def trained(trajectory: Trajectory) -> list[str]:
    """The turns that are trained, as text without their ends."""
    return [
        TOKENIZER.decode(trajectory.token_ids[turn.start : turn.stop]).removesuffix("<|im_end|>")
        for turn in trajectory.turns
    ]


def shown(request: ModelRequest) -> str:
    return str(TOKENIZER.decode(list(request.input_ids)))


def seen(trajectories: Sequence[Trajectory]) -> list[str]:
    return [str(TOKENIZER.decode(list(trajectory.token_ids))) for trajectory in trajectories]

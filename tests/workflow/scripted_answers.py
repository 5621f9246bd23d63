"""Engines that say what a test wants said."""

import json
from collections.abc import Callable, Sequence
from itertools import chain, repeat
from typing import Any

from arl.api.errors import PromptTooLongError
from arl.api.fakes import ScriptedEngine
from arl.api.types import ModelRequest, ModelResponse, Trajectory
from arl.engine.tiny import tiny_tokenizer

TOKENIZER = tiny_tokenizer()


def encode(text: str) -> list[int]:
    return TOKENIZER.encode(text, add_special_tokens=False)


def decode(token_ids: Sequence[int]) -> str:
    return str(TOKENIZER.decode(list(token_ids)))


def ended(text: str) -> list[int]:
    """The tokens of an answer, with its end of turn."""
    return encode(text + str(TOKENIZER.eos_token))


def calling(name: str, **arguments: object) -> str:
    """A tool call as the model writes it."""
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"


def saying(*answers: str | Exception, forever: bool = False) -> ScriptedEngine:
    """Gives one answer after another, each with its end of turn; an exception is raised. forever: repeats the last."""
    left = chain(answers, repeat(answers[-1])) if forever else iter(answers)

    def script(request: ModelRequest) -> list[int]:
        answer = next(left)
        if isinstance(answer, Exception):
            raise answer
        return ended(answer)

    return ScriptedEngine(script)


def replying(reply: Callable[[str], str]) -> ScriptedEngine:
    """Answers what was said last, whoever says it and whenever: for agents that speak at the same time."""

    def script(request: ModelRequest) -> list[int]:
        seen = decode(request.input_ids)
        last = seen.removesuffix("<|im_start|>assistant\n").rpartition("<|im_start|>")[2]
        return ended(reply(last.removesuffix("\n").removesuffix("<|im_end|>")))

    return ScriptedEngine(script)


def too_long() -> PromptTooLongError:
    return PromptTooLongError("no room")


def seen_by(engine: ScriptedEngine, index: int = -1) -> str:
    """What the model was shown."""
    return decode(engine.requests[index].input_ids)


def said_in(trajectory: Trajectory) -> str:
    """What is trained of it."""
    return decode(trajectory.token_ids[trajectory.loss_mask].tolist())


def response_of(ids: Sequence[int], *, version: int = 0, logprob: float = -1.0, **fields: Any) -> ModelResponse:
    """A response whose tokens have one version and one logprob, ended by a stop unless the fields say otherwise."""
    same = {"output_logprobs": (logprob,) * len(ids), "output_versions": (version,) * len(ids), "stop_reason": "stop"}
    return ModelResponse(output_ids=tuple(ids), **{**same, **fields})


def cut_off(text: str) -> ModelResponse:
    """An answer that a length limit ended."""
    return response_of(encode(text), stop_reason="length")


async def exact(answer: str, data: Any) -> float:
    return float(answer == data["answer"])

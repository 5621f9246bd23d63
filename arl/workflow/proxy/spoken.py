"""From sampled text to what a program is told: thinking apart, stop strings cut off, tool calls read."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any, Literal

from arl.api.types import StopReason
from arl.workflow.proxy.calls import Spoken

THINK, END_OF_THINK = "<think>", "</think>"

Reasoning = Literal["apart", "inline"]
"""Where a program finds what the model thought: in `reasoning_content`, or in `content` with its tags."""


def before_stop(text: str, stop: Sequence[str]) -> str:
    """The text up to the first stop string in it."""
    found = [at for string in stop if (at := text.find(string)) >= 0]
    return text[: min(found)] if found else text


def split_reasoning(text: str, *, is_thinking: bool) -> tuple[str | None, str]:
    """What was thought, and what was said. is_thinking: the prompt had opened <think> already."""
    head, tag, rest = text.partition(THINK)
    if tag and not head.strip():
        text, is_thinking = rest, True
    if not is_thinking:
        return None, text
    thought, _, said = text.partition(END_OF_THINK)
    return thought.strip("\n"), said.lstrip("\n")


def message_of(spoken: Spoken) -> dict[str, Any]:
    """The answer as a message, to be shown to the model again."""
    message: dict[str, Any] = {"role": "assistant", "content": spoken.content}
    if spoken.reasoning is not None:
        message["reasoning_content"] = spoken.reasoning
    if spoken.tool_calls:
        message["tool_calls"] = [
            {
                "id": call.id,
                "type": "function",
                "function": {"name": call.name, "arguments": json.loads(call.arguments)},
            }
            for call in spoken.tool_calls
        ]
    return message


def finish_reason_of(stop_reason: StopReason) -> Literal["stop", "length"]:
    """An answer that was aborted is as incomplete as one that ran out of tokens."""
    return "stop" if stop_reason == "stop" else "length"

"""What a turn of a long conversation costs the controller, in CPU time.

    python benchmarks/turns.py [--turns 10 100 1000] [--branches 300]

The template renders the whole history in each turn, and the engine answers at once. With Qwen3's template the model
thinks and calls a tool in each turn; with ChatML a user speaks, and once more through the endpoint, to which a program
sends the whole history each time. Then a conversation in which a user speaks in each turn and the template drops the
thinking before, so that each turn is a branch. Compare two commits with PYTHONPATH. A token is one byte here.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
import time
import tracemalloc
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import aiohttp

from arl.api.engine import Sampler
from arl.api.types import ModelRequest, ModelResponse, SamplingParams
from arl.endpoint.proxy import OpenAIProxy
from arl.workflow.conversation import Conversation
from arl.workflow.tools import Tool

sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "workflow"))
from chat_templates import tokenizer_of

THOUGHT = "<think>\nThe word may stand in this file, as far as I can tell from here.\n</think>\n\n"
CALL = '<tool_call>\n{"name": "look", "arguments": {"word": "a"}}\n</tool_call>'
RESULT = "The word is there, and it is a good one, on line 42."


def look(word: str) -> str:
    """Look for a word."""
    return word


class AtOnce(Sampler):
    """Says the same in each turn."""

    def __init__(self, ids: Sequence[int]) -> None:
        n = len(ids)
        same = {"output_logprobs": (-0.5,) * n, "output_versions": (3,) * n}
        self._response = ModelResponse(output_ids=tuple(ids), **same, stop_reason="stop")
        self.num_tokens = 0

    async def agenerate(self, request: ModelRequest) -> ModelResponse:
        self.num_tokens = len(request.input_ids)
        return self._response


def report(name: str, number: int, took: float, last: list[float], made: Sequence[Any], building: float) -> None:
    tokens = sum(len(trajectory.token_ids) for trajectory in made)
    print(
        f"{name}, {number} turns: {1000 * took / number:.2f} ms of CPU a turn, the last {1000 * min(last):.2f}; "
        f"{len(made)} trajectories of {tokens} tokens together in {1000 * building:.0f} ms",
        flush=True,
    )


async def converse(name: str, number: int, *, is_branching: bool = False) -> None:
    tokenizer = tokenizer_of(name)
    words = THOUGHT + ("well" if is_branching else CALL) if name == "qwen3" else "well"
    engine = AtOnce(tokenizer.encode(words + str(tokenizer.eos_token), add_special_tokens=False))
    has_tools = name == "qwen3" and not is_branching
    chat = Conversation(
        tokenizer, [{"role": "user", "content": "begin"}], tools=[Tool.from_function(look)] if has_tools else []
    )
    said = {"role": "tool" if has_tools else "user", "content": RESULT}
    last: list[float] = []
    began = time.process_time()
    for _ in range(number):
        started = time.process_time()
        await chat.agenerate(engine, SamplingParams())
        last = [*last[-9:], time.process_time() - started]
        chat.add(said)
    ended = time.process_time()
    tracemalloc.start()
    before = time.process_time()
    made = chat.trajectories(1.0)
    building = time.process_time() - before
    held = tracemalloc.get_traced_memory()[0] >> 20
    tracemalloc.stop()
    kind = "each turn a branch" if is_branching else "a conversation"
    report(f"{name}, {kind}", number, ended - began, last, made, building)
    if is_branching:
        print(f"  its trajectories hold {held} MB")


async def program(name: str, number: int) -> None:
    tokenizer = tokenizer_of(name)
    engine = AtOnce(tokenizer.encode("well" + str(tokenizer.eos_token), add_special_tokens=False))
    messages = [{"role": "user", "content": "begin"}]
    last: list[float] = []
    async with OpenAIProxy(tokenizer) as proxy, proxy.episode(engine) as session, aiohttp.ClientSession() as client:
        headers = {"Authorization": f"Bearer {session.api_key}"}
        took = 0.0
        for _ in range(number):
            body = json.dumps({"messages": messages, "model": "m"})
            started = time.process_time()
            async with client.post(f"{session.base_url}/chat/completions", data=body, headers=headers) as response:
                answer = json.loads(await response.read())
            last = [*last[-9:], time.process_time() - started]
            took += last[-1]
            messages += [answer["choices"][0]["message"], {"role": "user", "content": RESULT}]
        before = time.process_time()
        made = session.trajectories(1.0)
        report(f"{name}, through the endpoint", number, took, last, made, time.process_time() - before)


async def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--turns", type=int, nargs="*", default=[10, 100, 1000])
    parser.add_argument("--branches", type=int, default=300)
    args = parser.parse_args()
    for number in args.turns:
        await converse("qwen3", number)
        await converse("chatml", number)
        await program("chatml", number)
    if args.branches:
        await converse("qwen3", args.branches, is_branching=True)


if __name__ == "__main__":
    asyncio.run(main())

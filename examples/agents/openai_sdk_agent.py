"""Trains a program written with openai-agents without changing it: the order desk of order_desk.py.

    python examples/agents/openai_sdk_agent.py

builds a tiny model, warm-starts it on demonstrations, and trains it behind the desk on two CPU cores in minutes. The
desk's calls go to an endpoint that looks like OpenAI's and records the tokens of each call. The same desk with a real
model:

    python examples/agents/openai_sdk_agent.py --model Qwen/Qwen3-0.6B \\
        --engine.kind sglang --engine.addresses http://127.0.0.1:30000 \\
        --train.device cuda --train.dtype bfloat16 --run_dir runs/orders

Read and score its episodes without training:

    arl try examples/agents/openai_sdk_agent.py --n 4
    arl eval examples/agents/openai_sdk_agent.py --n 8

To train your own program, put its call into `program`, and questions with answers into `questions`.
"""

from __future__ import annotations

import random
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, ClassVar

from agents import FunctionTool, OpenAIProvider
from order_desk import CITIES, DESK, Order, reply, shop
from pydantic import PositiveFloat, PositiveInt

from arl import (
    Example,
    Experiment,
    ExperimentConfig,
    SamplingParams,
    SDKWorkflow,
    Setup,
    TinyShape,
    Tool,
    finetuning,
    load_tokenizer,
)
from arl.rewards import NumericMatch

SHARES = {"demonstrations": 0.6, "training": 0.35, "held_out": 0.05}
"""The share of the shop's orders for each set of questions."""

NUM_CAREFUL, NUM_MIXED = 5200, 800
"""First only careful demonstrations, which teach a model to copy; then mixed ones, which teach it bad habits."""
MIX = {"guess": 0.45, "halfway": 0.25, "careful": 0.3}
"""Shares of the habits in mixed demonstrations: answer at once, guess once the order is found, neither."""


class OpenAISDKAgentConfig(ExperimentConfig):
    """The settings for training the desk, in addition to the settings of every run."""

    tiny_settings: ClassVar[Mapping[str, Any]] = {
        "run_dir": "runs/openai_sdk_agent",
        "steps": 24,
        "rollout": {"batch_size": 8, "group_size": 8, "max_staleness": 2},
        "train": {"optimizer": {"lr": 1e-4, "schedule": "linear", "total_steps": 24, "min_lr_ratio": 0.1}},
        "evaluation": {"every": 8},
        "max_new_tokens": 24,
    }

    num_held_out: PositiveInt = 96
    """How many held-out questions to evaluate on, at most."""
    max_new_tokens: PositiveInt = 1024
    """Tokens that each turn may have, if the program does not say."""
    temperature: PositiveFloat = 1.0
    """The temperature that turns are sampled at, if the program does not say."""


async def program(base_url: str, api_key: str, data: Example) -> str:
    """To be trained, the desk needs only the URL of its model and a key. The SDK's providers share their connections; a
    new client for each episode would cost more than its calls."""
    return await reply(data["question"], OpenAIProvider(base_url=base_url, api_key=api_key))


def prepare(config: OpenAISDKAgentConfig) -> Setup:
    model = config.model
    if config.is_tiny:
        model = str(tiny_model(config))
    sampling = SamplingParams(max_new_tokens=config.max_new_tokens, temperature=config.temperature)
    workflow = SDKWorkflow(program, NumericMatch(), load_tokenizer(model), sampling=sampling)
    held_out = questions("held_out")[: config.num_held_out]
    return Setup(model=model, workflow=workflow, dataset=questions("training"), eval_dataset=held_out)


def tiny_model(config: OpenAISDKAgentConfig) -> Path:
    """A tiny model, warm-started on good and bad conversations about orders that no question is about."""

    def demonstrations() -> list[list[Example]]:
        return lessons(config.seed)

    directory, shape = config.run_dir / "model", TinyShape()
    return finetuning.warm_start(
        directory, demonstrations, seed=config.seed, shape=shape, phrases=phrases(), batch_size=8
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Kind:
    """A kind of question about an order. call: the tool call to make once the order is found, and the answer."""

    question: str
    call: Callable[[Order], tuple[str, str]]


def _price(order: Order) -> tuple[str, str]:
    call = finetuning.tool_call("price", item=order.item, quantity=order.quantity)
    return call, str(shop().prices[order.item] * order.quantity)


def _delivery(order: Order) -> tuple[str, str]:
    return finetuning.tool_call("delivery_days", city=order.city), str(shop().days[order.city])


KINDS = (
    Kind(question="What does order {} cost?", call=_price),
    Kind(question="How many days does order {} take?", call=_delivery),
)


@cache
def questions(region: str) -> list[dict[str, Any]]:
    """The questions about the orders of a region, shuffled. No order is in two regions."""
    numbers = list(shop().orders)
    random.Random(1).shuffle(numbers)
    begin = 0.0
    for name, share in SHARES.items():
        if name == region:
            break
        begin += share
    own = numbers[round(begin * len(numbers)) : round((begin + SHARES[region]) * len(numbers))]
    rows = [_row(kind, number) for number in own for kind in range(len(KINDS))]
    random.Random(2).shuffle(rows)
    return rows


def _row(kind: int, number: int) -> dict[str, Any]:
    _, answer = KINDS[kind].call(shop().orders[number])
    return {"question": KINDS[kind].question.format(number), "answer": answer, "kind": kind, "order": number}


def lessons(seed: int) -> list[list[Example]]:
    """The tiny model's demonstrations, in the messages that the SDK sends."""
    rng = random.Random(seed)
    rows = questions("demonstrations")
    by_kind = [[row for row in rows if row["kind"] == kind] for kind in range(len(KINDS))]

    def shown(habit: str) -> Example:
        row = rng.choice(rows)
        return demonstration(row, habit, guess=rng.choice(by_kind[row["kind"]])["answer"])

    habits = rng.choices(list(MIX), weights=list(MIX.values()), k=NUM_MIXED)
    return [[shown("careful") for _ in range(NUM_CAREFUL)], [shown(habit) for habit in habits]]


def demonstration(row: Mapping[str, Any], habit: str, guess: str) -> Example:
    order = shop().orders[row["order"]]
    calls = [(finetuning.tool_call("find_order", number=row["order"]), str(order)), KINDS[row["kind"]].call(order)]
    calls = calls[: {"guess": 0, "halfway": 1}.get(habit)]
    answer = row["answer"] if habit == "careful" else guess
    messages = [{"role": "system", "content": str(DESK.instructions)}, {"role": "user", "content": row["question"]}]
    for call, result in calls:
        messages += [{"role": "assistant", "content": call}, {"role": "tool", "content": result}]
    return {"messages": [*messages, {"role": "assistant", "content": answer}], "tools": [tool.spec for tool in tools()]}


@cache
def tools() -> tuple[Tool, ...]:
    """The desk's tools, as its model sees them."""
    return tuple(
        Tool.from_schema(
            tool.on_invoke_tool, name=tool.name, description=tool.description, parameters=tool.params_json_schema
        )
        for tool in DESK.tools
        if isinstance(tool, FunctionTool)
    )


def phrases() -> list[str]:
    """The tokens of the tiny model's tokenizer: names, the text around them, and pairs of digits, since a number then
    has fewer tokens to copy."""
    calls = (
        finetuning.tool_call("find_order", number=0),
        finetuning.tool_call("price", item="|", quantity=0),
        finetuning.tool_call("delivery_days", city="|"),
    )
    around = [piece for call in calls for piece in re.split(r"[|0]", call)]
    return [*dict.fromkeys(around), " x ", ", to ", *shop().prices, *CITIES, *(f"{pair:02}" for pair in range(100))]


experiment = Experiment(config=OpenAISDKAgentConfig, prepare=prepare)

if __name__ == "__main__":
    experiment.main()

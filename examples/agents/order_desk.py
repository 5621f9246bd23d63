"""A shop's order desk, written with openai-agents for a hosted model: it answers customers about their orders.

    answer = await reply("What does order 4821 cost?", OpenAIProvider())

It has no training code; openai_sdk_agent.py trains it without changes.
"""

from __future__ import annotations

import random
from dataclasses import dataclass
from functools import cache

from agents import Agent, OpenAIProvider, RunConfig, Runner, function_tool

ADJECTIVES = ("Amber", "Coral", "Golden", "Hollow", "Ivory", "Velvet")
NOUNS = ("Basket", "Candle", "Kettle", "Lantern", "Mirror", "Pillow")
CITIES = (
    "Aldmoor", "Brixham", "Carrow", "Dunmere", "Elsford", "Farley", "Grimsby", "Hexton", "Ilmouth", "Kelso", "Lorne",
    "Malden", "Norwick", "Oakham", "Penrith", "Queensbury",
)  # fmt: skip
MAX_QUANTITY = 9


@dataclass(frozen=True, slots=True)
class Order:
    """The items of an order, and the city that they go to."""

    item: str
    quantity: int
    city: str

    def __str__(self) -> str:
        return f"{self.quantity} x {self.item}, to {self.city}"


@dataclass(frozen=True, slots=True)
class Shop:
    """prices: item -> price of one. days: city -> days that a parcel takes. orders: number -> order."""

    prices: dict[str, int]
    days: dict[str, int]
    orders: dict[int, Order]


@cache
def shop() -> Shop:
    """The shop's data: always the same."""
    rng = random.Random(5)
    items = [f"{adjective} {noun}" for adjective in ADJECTIVES for noun in NOUNS]
    orders = {
        number: Order(rng.choice(items), rng.randint(1, MAX_QUANTITY), rng.choice(CITIES))
        for number in range(1000, 10000)
    }
    return Shop(
        prices=dict(zip(items, rng.sample(range(11, 100), len(items)), strict=True)),
        days=dict(zip(CITIES, rng.sample(range(2, 60), len(CITIES)), strict=True)),
        orders=orders,
    )


@function_tool
async def find_order(number: int) -> str:
    """Look up an order: how many of which item, and to which city."""
    return str(shop().orders.get(number, f"there is no order {number}"))


@function_tool
async def price(item: str, quantity: int) -> str:
    """What so many of an item cost together."""
    one = shop().prices.get(item)
    return f"there is no {item!r}" if one is None else str(one * quantity)


@function_tool
async def delivery_days(city: str) -> str:
    """How many days a parcel takes to a city."""
    return str(shop().days.get(city, f"no parcels go to {city!r}"))


DESK = Agent(
    name="Order desk",
    instructions="You answer customers of a shop. Look up what you are asked about; end with the number, alone.",
    tools=[find_order, price, delivery_days],
)


async def reply(question: str, provider: OpenAIProvider, max_turns: int = 6) -> str:
    """The desk's answer, from the provider's default model."""
    run = await Runner.run(
        DESK,
        question,
        max_turns=max_turns,
        run_config=RunConfig(
            model_provider=provider, tracing_disabled=True, tool_not_found_behavior="return_error_to_model"
        ),
        error_handlers={"max_turns": lambda _: "I could not find out."},
    )
    return str(run.final_output)

"""What servers say of themselves when they join, and whether they serve the same model."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from arl.api.engine import ServedModel
from arl.api.errors import ServerFailedError
from arl.engine.client.server_client import NONSENSE, Greeting, ServerClient


async def greet(client: ServerClient, *, sets_going: bool = True) -> Greeting:
    """Ask a server what it serves; see ServerClient.describe. Raises ServerError with its address."""
    limit_s = client.greeting_timeout_s
    try:
        async with asyncio.timeout(limit_s):
            return await client.describe(sets_going=sets_going)
    except TimeoutError:
        raise ServerFailedError(f"{client.address} gave no answer within {limit_s:g} s") from None
    except NONSENSE as error:
        what = f"{client.address} describes itself in a way that makes no sense ({type(error).__name__}: {error})"
        raise ServerFailedError(what) from error


def expected_of(model: ServedModel) -> Greeting:
    """The greeting that a server of this model would give, as far as the model is known."""
    traits = {"model type": model.model_type, "vocabulary's size": model.vocab_size, **model.shape}
    return Greeting(address=f"{model.name} (the model to serve)", label="", num_late=0, traits=traits)


def difference(greetings: Sequence[Greeting]) -> str | None:
    """A sentence about the first trait in which two servers differ; None if all serve the same model."""
    for name in dict.fromkeys(name for greeting in greetings for name in greeting.traits):
        told = [(trait, one.address) for one in greetings if (trait := one.traits.get(name)) is not None]
        for trait, address in told[1:]:
            first, first_address = told[0]
            if trait != first:
                return f"the {name} is {first} at {first_address}, but {trait} at {address}"
    return None

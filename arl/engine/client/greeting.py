"""What a server says of itself when it is first spoken to, and whether several serve the same model.

Directories do not tell: they differ from machine to machine, and SGLang names the one it was last updated from. What is
compared is what stays: the model's type and architecture, the context length, and, where servers tokenize for
clients, the tokens of a probe.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from arl.api.errors import ServerError
from arl.engine.client.server_client import ServerClient

_TIMEOUT_S = 10.0
_PROBE_TEXT = "Agent 12345 said:\n\t'déjà vu' <|im_start|>def f(x): return x**2  # 你好"


@dataclass(frozen=True, slots=True, kw_only=True)
class Greeting:
    """label: of the weights that it holds. num_ranks: its tensor-parallel size. traits: None where it does not say.

    num_late: tokens of a request that may still be on their way out of the model when a pause in place takes effect.
    """

    address: str
    label: str
    num_ranks: int
    num_late: int
    traits: Mapping[str, Any]


async def greet(client: ServerClient, *, sets_going: bool = True) -> Greeting:
    """Ask a server who it is. Raises ServerError, with its address.

    sets_going: one that a killed run left paused is resumed, and has to generate.
    """
    try:
        async with asyncio.timeout(_TIMEOUT_S):
            info = await client.model_info()
            if sets_going:
                await client.resume()
                await client.check_health()
            settings = await client.look_up("server_info") or await client.look_up("get_server_info")
            models = (await client.look_up("v1/models")).get("data") or [{}]
            tokens = await _probe_tokens(client)
    except TimeoutError:
        raise ServerError(f"{client.address} gave no answer within {_TIMEOUT_S:g} s") from None
    return Greeting(
        address=client.address,
        label=str(info.get("weight_version", "default")),
        num_ranks=int(settings.get("tp_size") or 1),
        num_late=_num_late(settings),
        traits={
            "model type": info.get("model_type"),
            "architecture": info.get("architectures"),
            "context length": models[0].get("max_model_len"),
            f"tokenization of {_PROBE_TEXT!r}": tokens,
        },
    )


def _num_late(settings: Mapping[str, Any]) -> int:
    """One step's, of a server that launches the next step before it reads what the last one gave."""
    runs_ahead = settings.get("disable_overlap_schedule") is False
    return int(settings.get("speculative_num_draft_tokens") or 1) if runs_ahead else 0


async def _probe_tokens(client: ServerClient) -> list[int] | None:
    try:
        return (await client.look_up("tokenize", {"prompt": _PROBE_TEXT})).get("tokens")
    except ServerError:
        return None  # started without a tokenizer, as some are


def difference(greetings: Sequence[Greeting]) -> str | None:
    """The first trait in which a server differs from another, as a sentence; None if all serve alike."""
    for name in greetings[0].traits if greetings else ():
        told = [
            (greeting.traits[name], greeting.address) for greeting in greetings if greeting.traits[name] is not None
        ]
        for trait, address in told[1:]:
            first, first_address = told[0]
            if trait != first:
                return f"the {name} is {first} at {first_address}, but {trait} at {address}"
    return None

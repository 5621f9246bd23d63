"""A server's description of itself when it joins, and whether it serves the same model as the others."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from yarl import URL

from arl.api.engine import MODEL_SIZES, ServedModel
from arl.api.errors import ServerError, ServerFailedError
from arl.engine.client.server_client import NONSENSE, ServerClient
from arl.engine.frames import FORMAT

_GREETING_TIMEOUT_S = 10.0
_PROBE_TEXT = "Agent 12345 said:\n\t'déjà vu' <|im_start|>def f(x): return x**2  # 你好"


@dataclass(frozen=True, slots=True, kw_only=True)
class Greeting:
    """A server's description of itself."""

    address: str
    label: str
    """The version label of its weights."""
    num_late: int
    """Most tokens of a request that may still be on their way out of the model when a pause in place takes effect."""
    unreached: str | None = None
    """The setting that keeps updates from reaching all of the server, and what to do instead."""
    device: str = ""
    """The device on which it computes: cpu, GPU 0, GPUs 0-3; empty if it does not say."""
    returns_routes: bool = False
    """It can say which experts computed a token."""
    traits: Mapping[str, Any]
    """Traits that servers of the same model share; absent or None if this server does not report it."""


async def greet(client: ServerClient, *, sets_going: bool = True) -> Greeting:
    """Ask a server what it serves, and note its ranks in `client`. Raises ServerError with its address.

    sets_going: resume a server that a killed run left paused, and have it generate.
    """
    try:
        async with asyncio.timeout(_GREETING_TIMEOUT_S):
            info = await client.model_info()
            if sets_going:
                await client.resume()
                await client.check_health()
            settings = await client.look_up("server_info") or await client.look_up("get_server_info")
            models = (await client.look_up("v1/models")).get("data") or [{}]
            tokens = await _probe_tokens(client)
    except TimeoutError:
        raise ServerFailedError(f"{client.address} gave no answer within {_GREETING_TIMEOUT_S:g} s") from None
    try:
        client.num_ranks = int(settings.get("tp_size") or 1)
        client.takes_frames = info.get("frames") == FORMAT
        client.is_embedded = "frames" in info
        client.most_kept = int(settings.get("sampling_mask_max_tokens") or 0) or None
        return _greeting(client.address, info, settings, models[0], tokens)
    except NONSENSE as error:
        what = f"{client.address} describes itself in a way that makes no sense ({type(error).__name__}: {error})"
        raise ServerFailedError(what) from error


def _greeting(
    address: str, info: Mapping[str, Any], settings: Mapping[str, Any], card: Mapping[str, Any], tokens: Any
) -> Greeting:
    return Greeting(
        address=address,
        label=str(info.get("weight_version", "default")),
        num_late=_num_late(settings),
        unreached=_unreached(settings),
        device=_device(settings),
        returns_routes=settings.get("enable_return_routed_experts") is True,
        traits={
            "model type": info.get("model_type"),
            "vocabulary's size": info.get("vocab_size"),
            **_shape(address, str(info["model_path"])),
            "architecture": info.get("architectures"),
            "context length": card.get("max_model_len"),
            f"tokenization of {_PROBE_TEXT!r}": tokens,
        },
    )


_UNREACHED = {
    "dp_size": "start one server for each replica, and name them all",
    "pp_size": "split the model by tensor parallelism (--tp-size) instead",
    "tokenizer_worker_num": "a pause reaches only one of them: leave the option out",
}
"""Settings of SGLang that keep updates from reaching every process of a server; what to do instead."""


def _unreached(settings: Mapping[str, Any]) -> str | None:
    wrong = (f"{name}={settings[name]}: {advice}" for name, advice in _UNREACHED.items() if _above_one(settings, name))
    return next(wrong, None)


def _device(settings: Mapping[str, Any]) -> str:
    device = str(settings.get("device") or "")
    if not device.startswith("cuda"):
        return device
    first = int(settings.get("base_gpu_id") or device.partition(":")[2] or 0)
    last = first + int(settings.get("tp_size") or 1) - 1
    return f"GPU {first}" if first == last else f"GPUs {first}-{last}"


def _above_one(settings: Mapping[str, Any], name: str) -> bool:
    return int(settings.get(name) or 1) > 1


def _shape(address: str, model_path: str) -> dict[str, Any]:
    """The shape of a server's model, if server and model are on this machine; else empty."""
    if URL(address).host not in ("127.0.0.1", "localhost", "::1"):
        return {}
    try:
        config = json.loads((Path(model_path) / "config.json").read_bytes())
        text = config.get("text_config") or config
        return {name: text.get(name) for name in MODEL_SIZES}
    except (OSError, ValueError, AttributeError):
        return {}


def expected_of(model: ServedModel) -> Greeting:
    """The greeting that a server of this model would give, as far as the model is known."""
    traits = {"model type": model.model_type, "vocabulary's size": model.vocab_size, **model.shape}
    return Greeting(address=f"{model.name} (the model to serve)", label="", num_late=0, traits=traits)


def _num_late(settings: Mapping[str, Any]) -> int:
    """The tokens of one step, for a server that launches the next step before it has read the last one."""
    runs_ahead = settings.get("disable_overlap_schedule") is False
    return int(settings.get("speculative_num_draft_tokens") or 1) if runs_ahead else 0


async def _probe_tokens(client: ServerClient) -> list[int] | None:
    try:
        return (await client.look_up("tokenize", {"prompt": _PROBE_TEXT})).get("tokens")
    except ServerError:
        return None  # started without a tokenizer, as some are


def difference(greetings: Sequence[Greeting]) -> str | None:
    """A sentence about the first trait in which two servers differ; None if all serve the same model."""
    for name in dict.fromkeys(name for greeting in greetings for name in greeting.traits):
        told = [(trait, one.address) for one in greetings if (trait := one.traits.get(name)) is not None]
        for trait, address in told[1:]:
            first, first_address = told[0]
            if trait != first:
                return f"the {name} is {first} at {first_address}, but {trait} at {address}"
    return None

"""The memory that a model takes, from the files of its directory."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

from arl.plan.costs import MemoryCosts

STATE_BYTES = 16
"""The trainer's bytes for a parameter: float32 weights, gradients, and AdamW's two moments."""
_DTYPE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}


_TOWERS = ("visual.", "model.visual.")
"""How the names of a vision tower's tensors begin."""


def model_memory(
    directory: Path,
    *,
    served_as: str | None,
    trains_adapter: bool,
    freezes_tower: bool = False,
    num_models: int = 1,
    num_references: int = 0,
) -> MemoryCosts:
    """Of servers and trainer, without activations.

    served_as: the servers' dtype; None: as the model's config says. trains_adapter: an adapter is trained, which is
    small, beside frozen float32 weights. freezes_tower: a vision tower is not trained. num_models: the policy, and a
    critic or reward model as large. num_references: frozen first models. Raises OSError or ValueError if the directory
    does not say.
    """
    config = json.loads((directory / "config.json").read_text())
    # A model that sees describes its language model apart.
    config |= config.get("text_config") or {}
    try:
        value_bytes = _DTYPE_BYTES[served_as or config.get("dtype") or config["torch_dtype"]]
        heads = int(config["num_attention_heads"])
        head_dim = int(config.get("head_dim") or config["hidden_size"] // heads)
        kv_heads = int(config.get("num_key_value_heads") or heads)
        kv_values = 2 * int(config["num_hidden_layers"]) * kv_heads * head_dim
    except (KeyError, TypeError) as error:
        raise ValueError(f"{directory / 'config.json'} has no usable {error}") from error
    parameters, of_tower = _num_parameters(directory)
    frozen = parameters if trains_adapter else of_tower if freezes_tower else 0
    trained = (STATE_BYTES * num_models + 4 * num_references) * (parameters - frozen)
    return MemoryCosts(
        server_weights=value_bytes * parameters,
        kv_per_token=value_bytes * kv_values,
        trainer_state=4 * num_models * frozen + trained,
    )


def _num_parameters(directory: Path) -> tuple[int, int]:
    """Of the whole model, and of its vision tower."""
    from safetensors import safe_open  # not needed where costs are guessed

    files = sorted(directory.glob("*.safetensors"))
    if not files:
        raise FileNotFoundError(f"{directory} has no *.safetensors")
    total, of_tower = 0, 0
    for path in files:
        with safe_open(path, "numpy") as opened:
            opened_file: Any = opened
            for name in opened_file.keys():  # noqa: SIM118
                size = math.prod(opened_file.get_slice(name).get_shape())
                total += size
                of_tower += size if name.startswith(_TOWERS) else 0
    return total, of_tower

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


def model_memory(directory: Path, *, served_as: str | None, trains_adapter: bool) -> MemoryCosts:
    """Of servers and trainer, without activations.

    served_as: the servers' dtype; None: as the model's config says. trains_adapter: an adapter is trained, which is
    small, beside frozen float32 weights. Raises OSError or ValueError if the directory does not say.
    """
    config = json.loads((directory / "config.json").read_text())
    try:
        value_bytes = _DTYPE_BYTES[served_as or config.get("dtype") or config["torch_dtype"]]
        heads = int(config["num_attention_heads"])
        head_dim = int(config.get("head_dim") or config["hidden_size"] // heads)
        kv_heads = int(config.get("num_key_value_heads") or heads)
        kv_values = 2 * int(config["num_hidden_layers"]) * kv_heads * head_dim
    except (KeyError, TypeError) as error:
        raise ValueError(f"{directory / 'config.json'} has no usable {error}") from error
    parameters = _num_parameters(directory)
    return MemoryCosts(
        server_weights=value_bytes * parameters,
        kv_per_token=value_bytes * kv_values,
        trainer_state=(4 if trains_adapter else STATE_BYTES) * parameters,
    )


def _num_parameters(directory: Path) -> int:
    from safetensors import safe_open  # not needed where costs are guessed

    files = sorted(directory.glob("*.safetensors"))
    if not files:
        raise FileNotFoundError(f"{directory} has no *.safetensors")
    total = 0
    for path in files:
        with safe_open(path, "numpy") as opened:
            opened_file: Any = opened
            total += sum(math.prod(opened_file.get_slice(name).get_shape()) for name in opened_file.keys())  # noqa: SIM118
    return total

"""model_memory: the memory that a run's model takes, from its settings and the files of its directory."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

from arl.cluster.plan.costs import MemoryCosts

STATE_BYTES = 16
"""The trainer's bytes for a parameter: float32 weights, gradients, and AdamW's two moments."""
_DTYPE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
_TOWERS = ("visual.", "model.visual.")
"""How the names of a vision tower's tensors begin."""


def model_memory(settings: dict[str, Any]) -> MemoryCosts:
    """Of servers and trainer, without activations. settings: those of a run.

    An adapter is small next to the frozen float32 weights. A critic or reward model is as large as the policy; a KL
    penalty, DPO, KTO and a reward model hold a frozen copy. Raises OSError or ValueError if the files do not say.
    """
    directory = Path(settings.get("model") or "")
    algorithm, train = settings.get("algorithm") or {}, settings.get("train") or {}
    config = json.loads((directory / "config.json").read_text())
    config |= config.get("text_config") or {}  # a model that sees describes its language model apart
    try:
        dtype = (settings.get("engine") or {}).get("dtype") or config.get("dtype") or config["torch_dtype"]
        value_bytes, heads = _DTYPE_BYTES[dtype], int(config["num_attention_heads"])
        head_dim = int(config.get("head_dim") or config["hidden_size"] // heads)
        kv_values = 2 * int(config["num_hidden_layers"]) * int(config.get("num_key_value_heads") or heads) * head_dim
    except (KeyError, TypeError) as error:
        raise ValueError(f"{directory / 'config.json'} has no usable {error}") from error
    parameters, of_tower = _num_parameters(directory)
    frozen = parameters if train.get("lora") else of_tower if train.get("freeze_vision_tower") else 0
    has_reward_model = algorithm.get("reward_model") is not None
    num_models = 1 + (algorithm.get("critic") is not None) + has_reward_model
    has_reference = (algorithm.get("kl") or {}).get("coefficient", 0) > 0
    has_reference |= (algorithm.get("loss") or {}).get("kind") in ("dpo", "kto")
    trained_bytes = STATE_BYTES * num_models + 4 * (has_reference + has_reward_model)
    return MemoryCosts(
        server_weights=value_bytes * parameters,
        kv_per_token=value_bytes * kv_values,
        trainer_state=4 * num_models * frozen + trained_bytes * (parameters - frozen),
    )


def _num_parameters(directory: Path) -> tuple[int, int]:
    """Of the whole model, and of its vision tower."""
    from safetensors import safe_open  # not needed where costs are guessed

    sizes: dict[str, int] = {}
    for path in sorted(directory.glob("*.safetensors")):
        with safe_open(path, "numpy") as opened:
            file: Any = opened
            sizes |= {name: math.prod(file.get_slice(name).get_shape()) for name in file.keys()}  # noqa: SIM118
    if not sizes:
        raise FileNotFoundError(f"{directory} has no *.safetensors")
    return sum(sizes.values()), sum(size for name, size in sizes.items() if name.startswith(_TOWERS))

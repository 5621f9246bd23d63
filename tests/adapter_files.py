"""Adapters as peft writes them, with weights that say something, and the models that they make when merged."""

from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM

ALL = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]


def write_adapter(
    directory: Path,
    base: str | Path,
    seed: int,
    *,
    merged: Path | None = None,
    kind: Any = AutoModelForCausalLM,
    **changes: Any,
) -> Path:
    """An adapter of the model in `base`; merged: where the model with the adapter in its weights goes, if anywhere.

    kind: the class of transformers that loads the model.
    """
    model = kind.from_pretrained(base, dtype=torch.float32)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        adapted = get_peft_model(model, LoraConfig(**{"r": 4, "lora_alpha": 8, "target_modules": ALL, **changes}))
        for name, parameter in adapted.named_parameters():
            if "lora_B" in name:
                torch.nn.init.normal_(parameter, std=0.1)
    adapted.save_pretrained(str(directory))
    if merged is not None:
        whole: Any = adapted
        whole.merge_and_unload().save_pretrained(merged)
    return directory

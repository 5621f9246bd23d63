"""Peak memory of the train engine on a CPU, for docs/sizes.md.

    python benchmarks/memory.py

Each row is a process of its own: it makes a model with random weights, and trains three optimizer steps on packed rows.
"""

from __future__ import annotations

import re
import subprocess
import sys
import tempfile
from pathlib import Path

from arl import OptimizerConfig, TinyShape, TrainConfig, finetuning, load_train_engine, write_tiny_model

SMALLEST = TinyShape(hidden_size=32, intermediate_size=32, num_layers=1, num_heads=1, num_kv_heads=1)
SHAPES = {"256x6": (256, 6), "512x12": (512, 12), "768x16": (768, 16)}
"""Name -> hidden size, number of layers."""
VARIANTS = ((256, False), (2048, False), (2048, True))
"""Tokens of a microbatch; whether activations are checkpointed."""
STEPS = 3


def measure(model: Path, tokens: int, is_checkpointed: bool) -> None:
    """Print the peak in bytes, beside what the process held after it had trained the smallest of models."""
    with tempfile.TemporaryDirectory() as directory:
        train(write_tiny_model(Path(directory) / "model", (), SMALLEST), 16, False)
    before = resident("VmRSS")
    train(model, tokens, is_checkpointed)
    print(resident("VmHWM") - before)


def train(model: Path, tokens: int, is_checkpointed: bool) -> None:
    settings = TrainConfig(
        optimizer=OptimizerConfig(lr=1e-5),
        activation_checkpointing=is_checkpointed,
        max_tokens_per_microbatch=tokens,
    )
    engine = load_train_engine(model, settings)
    length = tokens // 4
    row = ([5 + i % 4 for i in range(length)], [0] + [1] * (length - 1))
    finetuning.finetune(engine, [row] * (4 * STEPS), batch_size=4)
    engine.close()


def resident(field: str) -> int:
    """Bytes that this process holds (VmRSS), or its peak (VmHWM). The peak of getrusage counts the parent's as well."""
    found = re.search(rf"{field}:\s+(\d+) kB", Path("/proc/self/status").read_text())
    assert found is not None
    return int(found[1]) * 1024


def main() -> None:
    print("shape    tokens  checkpointing  parameters  peak MB  16 bytes a parameter, MB")
    for name, (hidden, layers) in SHAPES.items():
        shape = TinyShape(
            hidden_size=hidden, intermediate_size=4 * hidden, num_layers=layers, num_heads=8, num_kv_heads=8
        )
        with tempfile.TemporaryDirectory() as directory:
            model = write_tiny_model(Path(directory) / "model", (), shape)
            parameters = (model / "model.safetensors").stat().st_size / 4e6
            for tokens, is_checkpointed in VARIANTS:
                command = [sys.executable, __file__, str(model), str(tokens), str(is_checkpointed)]
                said = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout
                cells = f"{name:7}  {tokens:6}  {is_checkpointed!s:13}  {parameters:9.1f}M"
                print(f"{cells}  {int(said.split()[-1]) / 1e6:7.0f}  {16 * parameters:6.0f}", flush=True)


if __name__ == "__main__":
    if len(sys.argv) > 1:
        measure(Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3] == "True")
    else:
        main()

"""Writing the trained weights as a Hugging Face model directory, quickly enough to do so after every step."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors.torch import save_file
from transformers.core_model_loading import revert_weight_conversion

from arl.engine.model import LoadedModel


class ModelWriter:
    """Writes model directories. Config, generation config and tokenizer are rendered once, and only copied after."""

    def __init__(self, loaded: LoadedModel) -> None:
        self._model = loaded.model
        self._companions = _companion_files(loaded)
        self._dtype = loaded.stored_config.dtype or torch.float32
        tied = getattr(loaded.model, "all_tied_weights_keys", None) or {}
        self._names = [name for name in loaded.model.state_dict() if name not in tied]

    @property
    def names(self) -> list[str]:
        """The model's tensors that `write` wants, in order; tied ones once."""
        return self._names

    def write(self, directory: Path, tensors: Mapping[str, torch.Tensor]) -> int:
        """Write `tensors` (name -> whole tensor on the CPU) and the rest to `directory`; returns the bytes written.

        The directory appears complete or not at all: it is written aside and renamed. It is not forced to the disk,
        which would make a step wait for it: a checkpoint is what survives a power cut.
        """
        directory = Path(os.path.abspath(directory))
        directory.parent.mkdir(parents=True, exist_ok=True)
        aside = Path(tempfile.mkdtemp(prefix=f".{directory.name}.", dir=directory.parent))
        try:
            # transformers fuses some tensors when it loads (experts, for one); files hold them apart again.
            weights = revert_weight_conversion(self._model, {name: tensors[name] for name in self._names})
            weights = {name: self._stored(value) for name, value in weights.items()}
            save_file(weights, aside / "model.safetensors", metadata={"format": "pt"})
            for name, content in self._companions.items():
                (aside / name).write_bytes(content)
            num_bytes = sum(file.stat().st_size for file in aside.iterdir())
            aside.chmod(0o755)
            replace_directory(aside, directory)
        except BaseException:
            shutil.rmtree(aside, ignore_errors=True)
            raise
        return num_bytes

    def _stored(self, tensor: torch.Tensor) -> torch.Tensor:
        return (tensor.to(self._dtype) if tensor.is_floating_point() else tensor).contiguous()


def replace_directory(source: Path, target: Path) -> None:
    """Rename `source` to `target`, moving an older `target` out of the way and deleting it afterwards."""
    if not target.exists():
        source.rename(target)
        return
    retired = Path(tempfile.mkdtemp(prefix=f".{target.name}.old.", dir=target.parent))
    target.rename(retired / target.name)
    source.rename(target)
    shutil.rmtree(retired, ignore_errors=True)


def _companion_files(loaded: LoadedModel) -> dict[str, bytes]:
    with tempfile.TemporaryDirectory() as scratch:
        loaded.stored_config.save_pretrained(scratch)
        loaded.tokenizer.save_pretrained(scratch)
        if loaded.model.can_generate() and loaded.model.generation_config is not None:
            # Not save_pretrained, which refuses to write what some published models have in theirs.
            loaded.model.generation_config.to_json_file(Path(scratch) / "generation_config.json")
        return {file.name: file.read_bytes() for file in Path(scratch).iterdir() if file.is_file()}

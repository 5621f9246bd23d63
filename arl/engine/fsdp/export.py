"""Writes the trained weights as a Hugging Face model directory, quickly enough to do so after every step."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import torch
from safetensors.torch import save_file
from transformers.core_model_loading import revert_weight_conversion

from arl.api.engine import TensorSpec
from arl.engine.fsdp.model import LoadedModel
from arl.engine.weights.layout import spec_of


class ModelWriter:
    """Writes model directories. Config, generation config and tokenizer are rendered once and copied from then on."""

    def __init__(self, loaded: LoadedModel) -> None:
        """To be made before the model is sharded."""
        self.model = loaded.model
        self._companions = _companion_files(loaded)
        tied = getattr(loaded.model, "all_tied_weights_keys", None) or {}
        own = {name: tensor for name, tensor in loaded.model.state_dict().items() if name not in tied}
        self.own_specs = _specs(own, loaded)
        """The model's tensors by its own names, in its order and in the files' dtypes; tied ones once."""
        served = _specs(self.served({name: tensor.to("meta") for name, tensor in own.items()}), loaded)
        self.is_converted = set(served) != set(self.own_specs)
        """Whether the tensors of files and servers differ from the model's, as with fused experts."""
        self.specs = served if self.is_converted else self.own_specs
        """The tensors as files and servers have them."""

    def served(self, tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """The model's tensors as files have them: transformers fuses some when it loads, such as experts."""
        return revert_weight_conversion(self.model, dict(tensors))

    def write(self, directory: Path, tensors: Mapping[str, torch.Tensor]) -> int:
        """Write `tensors` (as own_specs, on the CPU) and the rest to `directory`; returns the bytes written.

        The directory appears complete or not at all.
        """
        with whole_directory(directory) as aside:
            weights = {name: tensor.contiguous() for name, tensor in self.served(tensors).items()}
            save_file(weights, aside / "model.safetensors", metadata={"format": "pt"})
            for name, content in self._companions.items():
                (aside / name).write_bytes(content)
            return sum(file.stat().st_size for file in aside.iterdir())


def _specs(tensors: Mapping[str, torch.Tensor], loaded: LoadedModel) -> tuple[TensorSpec, ...]:
    return tuple(
        spec_of(name, tensor, loaded.stored_dtype(name) if tensor.is_floating_point() else tensor.dtype)
        for name, tensor in tensors.items()
    )


@contextmanager
def whole_directory(directory: Path) -> Iterator[Path]:
    """A directory to write to. It is renamed to `directory` at the end, and deleted on an error.

    It is not forced to the disk, as a step would have to wait for that. A checkpoint survives a power cut.
    """
    directory = Path(os.path.abspath(directory))
    directory.parent.mkdir(parents=True, exist_ok=True)
    aside = Path(tempfile.mkdtemp(prefix=f".{directory.name}.", dir=directory.parent))
    try:
        yield aside
        aside.chmod(0o755)
        replace_directory(aside, directory)
    except BaseException:
        shutil.rmtree(aside, ignore_errors=True)
        raise


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
            # save_pretrained refuses the generation configs of some published models.
            loaded.model.generation_config.to_json_file(Path(scratch) / "generation_config.json")
        return {file.name: file.read_bytes() for file in Path(scratch).iterdir() if file.is_file()}

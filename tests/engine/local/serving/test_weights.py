"""Reading and checking the weights of a model directory."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from arl.engine.local.weight_receiver import WeightsError, read_directory

TENSORS = {"embed": torch.arange(6.0).reshape(2, 3), "norm": torch.ones(3)}
SHAPES = {name: tensor.shape for name, tensor in TENSORS.items()}
INDEX = "model.safetensors.index.json"


def write(directory: Path, tensors: dict[str, torch.Tensor]) -> str:
    save_file(tensors, directory / "model.safetensors")
    return str(directory)


def test_one_file_is_read_as_it_is_and_what_was_read_does_not_change_with_it(tmp_path: Path) -> None:
    read = read_directory(write(tmp_path, TENSORS), SHAPES, is_tied=False)
    file = tmp_path / "model.safetensors"
    with file.open("r+b") as opened:
        opened.write(b"\xff" * file.stat().st_size)
    assert read.keys() == TENSORS.keys()
    assert all(torch.equal(read[name], tensor) for name, tensor in TENSORS.items())


def test_shards_are_read_together(tmp_path: Path) -> None:
    for i, (name, tensor) in enumerate(TENSORS.items()):
        save_file({name: tensor}, tmp_path / f"{i}.safetensors")
    weight_map = {name: f"{i}.safetensors" for i, name in enumerate(TENSORS)}
    (tmp_path / INDEX).write_text(json.dumps({"weight_map": weight_map}))
    read = read_directory(str(tmp_path), SHAPES, is_tied=False)
    assert all(torch.equal(read[name], tensor) for name, tensor in TENSORS.items())


def test_a_tied_output_layer_may_be_stored_once_more(tmp_path: Path) -> None:
    directory = write(tmp_path, {**TENSORS, "lm_head.weight": torch.zeros(2, 3)})
    assert read_directory(directory, SHAPES, is_tied=True).keys() == TENSORS.keys()
    with pytest.raises(WeightsError, match=r"the served model has no lm_head\.weight"):
        read_directory(directory, SHAPES, is_tied=False)


def write_file(name: str, content: bytes) -> Callable[[Path], object]:
    return lambda directory: (directory / name).write_bytes(content)


REFUSED: list[tuple[Callable[[Path], object], str]] = [
    (lambda at: write(at, {"embed": TENSORS["embed"]}), "lacks norm, which the served model has"),
    (lambda at: write(at, {**TENSORS, "norm": torch.ones(4)}), r"norm has shape \[4\]; the served model's has \[3\]"),
    (lambda at: None, r"holds neither model\.safetensors nor"),
    (write_file(INDEX, b"{bad"), "is not an index of weight files"),
    (write_file(INDEX, b"{}"), "is not an index of weight files"),
    (write_file(INDEX, b"[]"), "is not an index of weight files"),
    (write_file("model.safetensors", b"\x10" + bytes(7) + b"not a header"), r"cannot read .*model\.safetensors"),
]


@pytest.mark.parametrize(("prepare", "sentence"), REFUSED)
def test_what_cannot_be_loaded_is_refused_with_a_reason(
    tmp_path: Path, prepare: Callable[[Path], object], sentence: str
) -> None:
    prepare(tmp_path)
    with pytest.raises(WeightsError, match=sentence):
        read_directory(str(tmp_path), SHAPES, is_tied=False)


def test_many_missing_tensors_are_counted(tmp_path: Path) -> None:
    shapes = {f"layer{i}": torch.Size([1]) for i in range(8)}
    with pytest.raises(WeightsError, match="lacks layer0, layer1, layer2, layer3, layer4 and 3 more"):
        read_directory(write(tmp_path, {}), shapes, is_tied=False)

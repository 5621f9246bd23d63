"""Which models are the same: by what they are, not by where they lie."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from huggingface_hub import constants

from arl.engine.fsdp.model import model_digest
from arl.engine.tiny import TinyShape, write_tiny_model


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("model") / "tiny", ["Say a number"])


@pytest.fixture
def copy(model: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(model, tmp_path / "copy"))


def test_a_copy_is_the_same_model_also_in_the_hubs_cache_and_with_another_chat_template(
    model: Path, copy: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (copy / "chat_template.jinja").write_text("{{ messages }}")
    config = json.loads((copy / "config.json").read_text())
    (copy / "config.json").write_text(json.dumps({"transformers_version": "9.9", **config, "_name_or_path": "x"}))
    assert model_digest(str(copy)) == model_digest(str(model)) is not None
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    assert model_digest("org/tiny") is None
    cached = tmp_path / "hub" / "models--org--tiny"
    (cached / "refs").mkdir(parents=True)
    (cached / "refs" / "main").write_text("0123456789abcdef0123456789abcdef01234567")
    shutil.copytree(model, cached / "snapshots" / "0123456789abcdef0123456789abcdef01234567")
    assert model_digest("org/tiny") == model_digest(str(model))


@pytest.mark.parametrize(
    "change",
    [
        lambda directory: write_tiny_model(directory, ["Say a number"], seed=1),
        lambda directory: write_tiny_model(directory, ["Say a letter"]),
        lambda directory: write_tiny_model(directory, ["Say a number"], TinyShape(num_layers=1)),
    ],
    ids=["weights", "vocabulary", "shape"],
)
def test_other_weights_another_vocabulary_or_shape_make_another_model(
    model: Path, tmp_path: Path, change: Callable[[Path], Path]
) -> None:
    digest = model_digest(str(change(tmp_path / "other")))
    assert digest is not None
    assert digest != model_digest(str(model))


def test_weights_of_terabytes_are_not_read(copy: Path) -> None:
    with (copy / "model.safetensors").open("r+b") as file:
        file.truncate(10**12)
    assert model_digest(str(copy)) is not None


@pytest.mark.parametrize("name", ["config.json", "model.safetensors"])
def test_a_directory_without_its_files_has_no_digest(copy: Path, name: str) -> None:
    (copy / name).unlink()
    assert model_digest(str(copy)) is None

"""Placeholders, pixels and positions, against transformers' own."""

import io
import json
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image as Pictures
from transformers import AutoModelForImageTextToText

from arl.api.errors import ImageError, ModelError
from arl.api.images import Image, PlacedImage
from arl.data.image_processor import ImageProcessor
from arl.engine.tiny import VisionFamily, write_tiny_model, write_tiny_vision_model

SIZES = [(16, 16), (40, 25), (200, 64), (31, 90)]


@pytest.fixture(scope="module", params=["qwen2_vl", "qwen2_5_vl", "qwen3_vl"])
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    family: VisionFamily = request.param
    return write_tiny_vision_model(tmp_path_factory.mktemp(family) / "model", family=family)


def image_of(size: tuple[int, int]) -> Image:
    noise = np.random.default_rng(size[0]).integers(0, 255, (size[1], size[0], 3), dtype=np.uint8)
    return Image.of(Pictures.fromarray(noise))


@pytest.mark.parametrize("size", SIZES)
def test_an_images_size_tells_its_grid_and_its_placeholders(model: Path, size: tuple[int, int]) -> None:
    processor = ImageProcessor(model)
    pixels = processor.pixels(image_of(size))
    assert processor.grid(image_of(size)) == pixels.grid
    assert processor.num_placeholders(image_of(size)) == pixels.num_placeholders == len(pixels.values) // 4


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("format", ["PNG", "JPEG"])
def test_a_scaled_image_is_a_png_with_the_same_pixels_which_needs_no_scaling(
    model: Path, size: tuple[int, int], format: str
) -> None:
    processor, written = ImageProcessor(model), io.BytesIO()
    image_of(size).picture().save(written, format)
    image = Image.of(written.getvalue())
    scaled = processor.scaled(image)
    assert np.array_equal(processor.pixels(scaled).values, processor.pixels(image).values)
    assert (scaled.kind, scaled.height, scaled.width) == ("image/png", *(8 * n for n in processor.grid(image)[1:]))
    assert processor.scaled(scaled) is scaled


def test_an_image_that_servers_would_scale_once_more_is_named(model: Path) -> None:
    processor, narrow = ImageProcessor(model), image_of((2000, 11))
    assert processor.pixels(narrow).num_placeholders
    with pytest.raises(ImageError, match=r"Image\(2000x11.* so narrow .* pad it"):
        processor.scaled(narrow)


def laid_out(processor: ImageProcessor, images: list[Image]) -> tuple[list[int], tuple[PlacedImage, ...]]:
    """Text, then an image, then text, and so on."""
    tokens, placed = [5, 6, 7], list[PlacedImage]()
    for image in images:
        count = processor.num_placeholders(image)
        placed.append(PlacedImage(image=image, start=len(tokens), stop=len(tokens) + count))
        tokens += [processor.image_token_id] * count + [8, 9]
    return tokens, tuple(placed)


def test_positions_are_those_of_the_model(model: Path) -> None:
    processor = ImageProcessor(model)
    tokens, placed = laid_out(processor, [image_of(size) for size in SIZES])
    theirs, _ = AutoModelForImageTextToText.from_pretrained(model).model.get_rope_index(
        torch.tensor([tokens]),
        mm_token_type_ids=(torch.tensor([tokens]) == processor.image_token_id).int(),
        image_grid_thw=torch.tensor([processor.grid(p.image) for p in placed]),
    )
    assert processor.positions(len(tokens), placed).tolist() == theirs[:, 0].tolist()


def test_a_processor_that_counts_otherwise_is_noticed(model: Path) -> None:
    processor = ImageProcessor(model)
    tokens, placed = laid_out(processor, [image_of(SIZES[1])])
    processor.check(tokens, placed)
    (own,) = placed
    longer = [*tokens[: own.stop], processor.image_token_id, *tokens[own.stop :]]
    for given, stop in ((tokens, own.stop - 1), (longer, own.stop + 1)):
        with pytest.raises(ImageError, match="another processor"):
            processor.check(given, (PlacedImage(image=own.image, start=own.start, stop=stop),))
    with pytest.raises(ImageError, match="no image was given"):
        processor.check(tokens, ())
    with pytest.raises(ImageError, match="other than the placeholder"):
        processor.check([5] * len(tokens), placed)


def test_a_processor_that_does_not_scale_as_qwens_is_named(model: Path, tmp_path: Path) -> None:
    shutil.copytree(model, tmp_path / "unscaled")
    file = tmp_path / "unscaled" / "preprocessor_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"do_resize": False}))
    processor = ImageProcessor(tmp_path / "unscaled")
    with pytest.raises(ImageError, match="arl needs do_resize"):
        processor.pixels(image_of((256, 160)))
    assert processor.pixels(image_of((32, 16))).num_placeholders == 2


def test_a_processor_remembers_the_newest_pixels_alone(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    processor, old, new = ImageProcessor(model), image_of((40, 25)), image_of((41, 25))
    seen = processor.pixels(old)
    assert processor.pixels(old) is seen
    monkeypatch.setattr("arl.data.image_processor._REMEMBERED_BYTES", seen.values.nbytes)
    assert processor.pixels(new) is processor.pixels(new)
    assert processor.pixels(old) is not seen


def test_an_image_of_an_impossible_shape_is_named(model: Path) -> None:
    with pytest.raises(ImageError, match="cannot see Image\\(600x2"):
        ImageProcessor(model).num_placeholders(image_of((600, 2)))


def test_a_model_of_texts_is_named(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="takes no images"):
        ImageProcessor(write_tiny_model(tmp_path / "model"))

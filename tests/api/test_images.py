"""Image files: read once, checked, and equal in every process."""

import base64
import gc
import io
import pickle
from pathlib import Path
from typing import Any

import pytest
from PIL import Image as Pictures

from arl.api.errors import ImageError, TrajectoryError
from arl.api.images import Image, PlacedImage, num_drawn
from arl.api.types import ModelRequest, Trajectory


def picture(mode: str = "RGB", size: tuple[int, int] = (5, 3)) -> Pictures.Image:
    made = Pictures.new("RGB", size, "red")
    made.putpixel((1, 2), (0, 0, 255))
    return made.convert(mode)


def file_of(picture: Pictures.Image, format: str = "PNG", **options: Any) -> bytes:
    written = io.BytesIO()
    picture.save(written, format, **options)
    return written.getvalue()


def test_a_path_a_data_url_bytes_and_a_datasets_cell_are_one_object(tmp_path: Path) -> None:
    data = file_of(picture())
    (tmp_path / "a.png").write_bytes(data)
    image = Image.of(data)
    url = "data:image/png;base64," + base64.b64encode(data).decode()
    sources = [tmp_path / "a.png", str(tmp_path / "a.png"), url, {"bytes": data, "path": None}, image]
    assert all(Image.of(source) is image for source in sources)
    assert Image.of({"bytes": None, "path": str(tmp_path / "a.png")}) is image
    assert (image.width, image.height, image.data_url) == (5, 3, url)


def test_a_file_is_converted_once_while_its_image_is_in_use(monkeypatch: pytest.MonkeyPatch) -> None:
    """Programs send a screenshot again with each call, and screenshots are often RGBA."""
    data = file_of(picture("RGBA"))
    image = Image.of(data)
    assert image.data != data
    monkeypatch.setattr("arl.api.images._opened", None)
    assert Image.of(data) is image


def test_a_picture_is_written_once_while_its_image_is_in_use(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each episode of a group brings its example's. They are told apart by their pixels, as programs draw on them."""
    drawn, turned = picture(), picture(size=(3, 5))
    image = Image.of(drawn)
    with monkeypatch.context() as patch:
        patch.setattr(Pictures.Image, "save", None)
        assert Image.of(picture()) is image
    drawn.putpixel((0, 0), (0, 0, 255))
    for other in (drawn, turned):
        assert Image.of(other) != image
        assert Image.of(other).picture().tobytes() == other.tobytes()


@pytest.mark.parametrize("format", ["PNG", "JPEG", "WEBP"])
def test_a_file_of_rgb_pixels_stays_as_it_is(format: str) -> None:
    data = file_of(picture(), format)
    assert Image.of(data).data == data
    assert Image.of(data).kind == f"image/{format.lower()}"


@pytest.mark.parametrize("mode", ["RGBA", "LA", "P"])
def test_transparent_parts_become_white(mode: str) -> None:
    made = Pictures.new("RGBA", (4, 4), (255, 0, 0, 0))
    made = made.quantize() if mode == "P" else made.convert(mode)
    for source in (made, file_of(made)):
        assert Image.of(source).picture().getpixel((0, 0)) == (255, 255, 255)
    red = file_of(Pictures.new("RGB", (4, 4), "red"), transparency=(255, 0, 0))
    assert Image.of(red).picture().getpixel((0, 0)) == (255, 255, 255)


@pytest.mark.parametrize("format", ["PNG", "WEBP", "GIF"])
def test_of_an_animation_everybody_sees_the_first_frame(format: str) -> None:
    first, *others = (Pictures.new("RGB", (4, 4), colour) for colour in ("red", "blue"))
    data = file_of(first, format, save_all=True, append_images=others, lossless=True)
    assert Image.of(data).data == Image.of(first).data


def test_the_orientation_that_a_camera_noted_is_applied() -> None:
    exif = Pictures.Exif()
    exif[0x0112] = 6  # turned by a quarter
    image = Image.of(file_of(picture(), "JPEG", exif=exif))
    assert (image.width, image.height) == (3, 5)


@pytest.mark.parametrize("format", ["PNG", "WEBP"])
def test_exif_data_that_are_damaged_are_left_out(format: str) -> None:
    image = Image.of(file_of(picture(), format, exif=b"Exif\0\0 no TIFF header", lossless=True))
    assert image.picture().tobytes() == picture().tobytes()
    assert not image.picture().getexif()


@pytest.mark.parametrize("mode", ["I;16", "F", "I"])
def test_a_mode_of_more_than_8_bits_is_refused(mode: str) -> None:
    with pytest.raises(ImageError, match="more than 8 bits"):
        Image.of(Pictures.new(mode, (2, 2)))


@pytest.mark.parametrize(
    ("source", "told"),
    [
        (b"", "empty"),
        (b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n%%EndComments\nshowpage\n", "not one of PNG, JPEG"),
        (file_of(picture(size=(64, 64)))[:-40], "cannot read the image"),
        ("nowhere/a.png", "nowhere/a.png: No such file or directory in /"),
        ("https://example.org/a.png", "download it first"),
        ("data:image/png,xyz", "base64"),
        ("data:image/png;base64,???", "no base64"),
        ({"bytes": None, "path": None}, "neither bytes nor a path"),
        (Pictures.new("RGB", (0, 5)), "0 x 5 pixels"),
        (3, "of type int"),
    ],
)
def test_what_cannot_be_read_is_named(source: Any, told: str) -> None:
    with pytest.raises(ImageError, match=told):
        Image.of(source)


@pytest.mark.parametrize("mode", ["RGB", "1"])
def test_a_small_file_of_very_many_pixels_is_refused_before_it_is_decoded(
    mode: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("arl.api.images.MAX_PIXELS", 63 * 64)
    pixels = file_of(picture(mode, (64, 64)))
    for data in (pixels, pixels[:60]):  # of which the second cannot be decoded
        with pytest.raises(ImageError, match=r"64 x 64 pixels, .* scale it down"):
            Image.of(data)


def test_a_large_file_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    data = file_of(picture())
    (tmp_path / "a.png").write_bytes(data)
    monkeypatch.setattr("arl.api.images.MAX_BYTES", len(data) - 1)
    for source in (data, tmp_path / "a.png", "data:image/png;base64," + base64.b64encode(data).decode()):
        with pytest.raises(ImageError, match=r"more than \d+ bytes; scale it down"):
            Image.of(source)


def test_equal_images_are_one_object_after_pickling_and_are_forgotten_when_unused() -> None:
    image = Image.of(picture())
    assert pickle.loads(pickle.dumps(image)) is image
    digest = image.digest
    del image
    gc.collect()
    from arl.api import images

    assert digest not in images._images


def placed(start: int, stop: int) -> PlacedImage:
    return PlacedImage(image=Image.of(picture()), start=start, stop=stop)


@pytest.mark.parametrize("places", [[(0, 5)], [(2, 2)], [(2, 3), (2, 4)], [(2, 4), (0, 1)]])
def test_images_lie_in_order_within_the_tokens(places: list[tuple[int, int]]) -> None:
    images = tuple(placed(*place) for place in places)
    with pytest.raises(ValueError, match="lie in order"):
        ModelRequest(input_ids=[1, 2, 3, 4], images=images)


def test_an_image_is_drawn_whole_and_counts_as_one() -> None:
    assert [num_drawn([placed(2, 5), placed(5, 7)], most) for most in (2, 3, 4, 5)] == [2, 5, 7, 8]


def test_no_token_within_an_image_is_trained() -> None:
    with pytest.raises(TrajectoryError, match="within image 0"):
        Trajectory(
            token_ids=[1, 2, 3],
            loss_mask=[0, 1, 1],
            behavior_logprobs=[0, -1, -1],
            versions=[-1, 0, 0],
            reward=1.0,
            images=(placed(1, 2),),
        )

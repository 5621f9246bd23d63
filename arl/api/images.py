"""Images: the files that a model sees, each kept once, and the places where they lie among tokens.

    token_ids   <|vision_start|> <|image_pad|> <|image_pad|> ... <|vision_end|> What is this?
    images                       [start ------------------ stop)                                 a PlacedImage

A model with a vision tower replaces the placeholders of an image by what its tower makes of the pixels, one vector for
each. How many placeholders an image needs depends on its size alone (arl/data/).
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import io
import sys
import threading
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, cast

from arl.api.errors import ImageError
from arl.api.version import install_command

if TYPE_CHECKING:
    from PIL.Image import Image as Picture

MAX_PIXELS = 50_000_000
"""The most pixels of an image. Processors scale larger ones down anyway, and a small file can hold very many."""
MAX_BYTES = 50_000_000
"""The most bytes of an image's file."""

_KEPT_FORMATS = ("PNG", "JPEG", "WEBP")
"""Files that every server reads. Others are written as PNG."""
_READ_FORMATS = (*_KEPT_FORMATS, "AVIF", "BMP", "DIB", "GIF", "ICO", "JPEG2000", "PPM", "TGA", "TIFF")
"""Those that hold pixels. Pillow would let Ghostscript run the program that an EPS file is."""
_DEEP = ("I", "F")
"""Beginnings of the modes with more than 8 bits a channel."""
_LEVEL = 1
"""zlib's, of PNGs. Smooth pictures take a third of the time of its default, and an eighth more bytes."""
_ORIENTATION = 0x0112
"""EXIF's tag for the way the camera was held."""


@dataclass(frozen=True, slots=True, eq=False, weakref_slot=True)
class Image:
    """An image file with RGB pixels. Make it with `Image.of`. Two are equal if their files are."""

    data: bytes
    """The file: PNG, JPEG or WebP."""
    digest: str
    """The SHA-256 of `data`, in hexadecimal."""
    width: int
    """In pixels."""
    height: int

    @classmethod
    def of(cls, source: Any) -> Image:
        """The image of a path, a data URL, a file's bytes, a PIL image, or a row of a dataset's image column.

        Equal images are one object. A file of RGB pixels stays as it is. Other files become PNG: transparent parts
        become white, an orientation that the camera noted is applied, damaged EXIF data are left out, and of an
        animation the first frame is taken.
        Raises ImageError for a file that is missing, damaged, too large, or has more than 8 bits a channel, and for
        web addresses.
        """
        if isinstance(source, Image):
            return source
        if "PIL.Image" in sys.modules and isinstance(source, sys.modules["PIL.Image"].Image):  # without loading PIL
            return _written(source, "the image")
        data, what = _file_of(source)
        digest = hashlib.sha256(data).hexdigest()
        if (known := _known(digest)) is not None:
            return known
        picture = _opened(data, what)
        if _is_plain(picture):
            return cls.kept(data, picture.width, picture.height)
        made = _written(picture, what)
        with _lock:
            _images[digest] = made  # programs send a screenshot again with each call
        return made

    @classmethod
    def kept(cls, data: bytes, width: int, height: int) -> Image:
        """The image of a file that `of` made, which is not read again."""
        digest = hashlib.sha256(data).hexdigest()
        with _lock:
            if (known := _images.get(digest)) is None:
                known = _images[digest] = cls(data, digest, width, height)
            return known

    def __eq__(self, other: object) -> bool:
        return self.digest == other.digest if isinstance(other, Image) else NotImplemented

    def __hash__(self) -> int:
        return hash(self.digest)

    def __reduce__(self) -> tuple[Any, ...]:
        """In another process, too, equal images are one object."""
        # No class method: Ray would pickle it by value, with the lock.
        return _kept, (self.data, self.width, self.height)

    def __repr__(self) -> str:
        return f"Image({self.width}x{self.height}, {self.digest[:12]})"

    @property
    def kind(self) -> str:
        """The file's media type, such as image/png."""
        return kind_of(self.data)

    @property
    def data_url(self) -> str:
        return f"data:{self.kind};base64,{base64.b64encode(self.data).decode()}"

    def picture(self) -> Picture:
        """As a PIL image in mode RGB."""
        return _opened(self.data, repr(self)).convert("RGB")


@dataclass(frozen=True, slots=True, kw_only=True)
class PlacedImage:
    """An image among tokens: those in [start, stop) are its placeholders."""

    image: Image
    start: int
    stop: int

    @property
    def size(self) -> tuple[int, int]:
        """Width and height of the image, in pixels."""
        return self.image.width, self.image.height


class ImagePlace(Protocol):
    """An image at the tokens [start, stop), which are its placeholders."""

    @property
    def start(self) -> int: ...
    @property
    def stop(self) -> int: ...
    @property
    def size(self) -> tuple[int, int]:
        """Width and height in pixels."""
        ...


def kind_of(data: bytes) -> str:
    """The media type of an image's file."""
    if data.startswith(b"\x89PNG"):
        return "image/png"
    return "image/webp" if data.startswith(b"RIFF") else "image/jpeg"


def placement_flaw(images: Sequence[ImagePlace], num_tokens: int) -> str | None:
    """Why these images cannot lie among so many tokens; None if they can: in order, apart, and within them."""
    end = 0
    for number, placed in enumerate(images):
        if not end <= placed.start < placed.stop <= num_tokens:
            return (
                f"image {number} has the placeholders [{placed.start}, {placed.stop}) of {num_tokens} tokens; images "
                f"lie in order, one after the other, and this one must begin at {end} or later"
            )
        end = placed.stop
    return None


_images: weakref.WeakValueDictionary[str, Image] = weakref.WeakValueDictionary()
"""By their digests, and by those of the files or pixels that they were made of."""
_lock = threading.Lock()


def _kept(data: bytes, width: int, height: int) -> Image:
    return Image.kept(data, width, height)


def _known(digest: str) -> Image | None:
    with _lock:
        return _images.get(digest)


def _file_of(source: Any) -> tuple[bytes, str]:
    """The bytes of an image's file, and how errors call it."""
    if isinstance(source, Mapping):
        row = cast("Mapping[str, Any]", source)
        source = row.get("path") if row.get("bytes") is None else row["bytes"]
        if source is None:
            raise ImageError("an image's row has neither bytes nor a path; give one of them")
    if isinstance(source, bytes):
        return _within_size(source, "the image"), "the image"
    if isinstance(source, str) and source.startswith("data:"):
        head, _, data = source.partition(",")
        if not head.endswith(";base64"):
            raise ImageError(f"the image's data URL begins with {head[:40]!r}; it must be data:image/...;base64,...")
        try:
            return _within_size(base64.b64decode(data, validate=True), "the image"), "the image"
        except (binascii.Error, ValueError) as error:
            raise ImageError(f"the image's data URL is no base64: {error}") from error
    if isinstance(source, str) and source.startswith(("http://", "https://")):
        raise ImageError(f"the image is at {source:.100}, and arl fetches nothing from the web; download it first")
    if isinstance(source, str | Path):
        path = str(source).removeprefix("file://")
        try:
            with open(path, "rb") as file:
                return _within_size(file.read(MAX_BYTES + 1), path), path
        except (OSError, ValueError) as error:
            reason = getattr(error, "strerror", None) or error
            where = f" in {Path.cwd()}" if isinstance(error, FileNotFoundError) and not Path(path).is_absolute() else ""
            raise ImageError(f"cannot read the image {path:.200}: {reason}{where}") from error
    raise ImageError(
        f"an image is of type {type(cast('object', source)).__name__}; give a path, a data URL, the bytes of a file, "
        "or a PIL image (of an array, PIL.Image.fromarray makes one)"
    )


def _within_size(data: bytes, what: str) -> bytes:
    if len(data) > MAX_BYTES:
        raise ImageError(f"{what} has more than {MAX_BYTES:,} bytes; scale it down")
    return data


def _opened(data: bytes, what: str) -> Picture:
    """Decoded to the last pixel."""
    try:
        from PIL import Image as Pictures
    except ImportError as error:
        raise ImageError(f"images need Pillow; run: {install_command('vision')}") from error
    try:
        Pictures.init()
        formats = [name for name in _READ_FORMATS if name in Pictures.OPEN]
        picture = Pictures.open(io.BytesIO(data), formats=formats)
        _check_pixels(picture, what)
        picture.load()
    except ImageError:
        raise
    except Exception as error:  # Pillow's readers of damaged files raise almost anything
        unknown = f"it is damaged, or not one of {', '.join(_READ_FORMATS)}"
        reason = "it is empty" if not data else unknown if "BytesIO" in str(error) else error
        raise ImageError(f"cannot read {what}: {reason}") from error
    return picture


def _check_pixels(picture: Picture, what: str) -> None:
    if not picture.width * picture.height:
        raise ImageError(f"{what} has {picture.width} x {picture.height} pixels: there is nothing to see")
    if picture.width * picture.height > MAX_PIXELS:
        raise ImageError(
            f"{what} has {picture.width} x {picture.height} pixels, and at most {MAX_PIXELS:,} are read; scale it down"
        )


def _is_plain(picture: Picture) -> bool:
    """Whether every reader of the file sees the same RGB pixels."""
    return (
        picture.mode == "RGB"
        and picture.format in _KEPT_FORMATS
        and not getattr(picture, "is_animated", False)
        and "transparency" not in picture.info
        and _orientation(picture) == 1
    )


def _orientation(picture: Picture) -> int | None:
    """EXIF's number for the way the camera was held, 1 for upright; None if the EXIF data are damaged."""
    try:
        return picture.getexif().get(_ORIENTATION, 1)
    except Exception:  # noqa: BLE001 - Pillow's reader of damaged data raises almost anything
        return None


def _written(picture: Picture, what: str) -> Image:
    """As a PNG of RGB pixels, which is written once while an image with these pixels is in use."""
    picture = _rgb(picture, what)
    pixels = hashlib.sha256(b"%d RGB pixels a row: " % picture.width + picture.tobytes()).hexdigest()
    if (known := _known(pixels)) is not None:
        return known
    written = io.BytesIO()
    picture.save(written, "PNG", compress_level=_LEVEL)
    made = Image.kept(written.getvalue(), picture.width, picture.height)
    with _lock:
        _images[pixels] = made  # each episode of a group brings the picture of its example
    return made


def _rgb(picture: Picture, what: str) -> Picture:
    from PIL import Image as Pictures
    from PIL import ImageOps

    _check_pixels(picture, what)
    if picture.mode.startswith(_DEEP):
        raise ImageError(
            f"{what} is of mode {picture.mode}, with more than 8 bits a channel, which models do not take; scale its "
            'values to 0..255, and convert("RGB")'
        )
    try:
        if _orientation(picture) is not None:
            picture = ImageOps.exif_transpose(picture)
        if picture.has_transparency_data:
            picture = picture.convert("RGBA")
            white = Pictures.new("RGBA", picture.size, "white")
            picture = Pictures.alpha_composite(white, picture)
        picture = picture.convert("RGB")
    except Exception as error:  # a PIL image may read its file only now
        raise ImageError(f"cannot convert {what}, of mode {picture.mode}, to RGB: {error}") from error
    picture.info.clear()
    return picture


# Images among tokens, as people are shown them: an image is one mark, however many its placeholders


def mark_of(place: ImagePlace) -> str:
    """What stands for an image in a text."""
    (width, height), count = place.size, place.stop - place.start
    return f"[image {width}x{height}, {count} token{'s' * (count != 1)}]"


def text_with_marks(
    token_ids: Sequence[int], images: Sequence[ImagePlace], decode: Callable[[Sequence[int]], str]
) -> str:
    """The text of tokens, with a mark for each image in the place of its placeholders. images: in order."""
    parts, end = list[str](), 0
    for place in images:
        parts += [decode(token_ids[end : place.start]), mark_of(place)]
        end = place.stop
    return "".join([*parts, decode(token_ids[end:])])


def num_drawn(images: Sequence[ImagePlace], most: int) -> int:
    """How many of the first tokens are drawn if `most` marks may be: an image is one, and is drawn whole."""
    for place in images:
        if place.start < most:
            most += place.stop - place.start - 1
    return most

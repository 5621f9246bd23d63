"""The images of a run as files, each once: what the run writes refers to them by digest.

run_dir/images/ab/abcdef....png    named by the SHA-256 of the file; .jpg and .webp, too

A file is on the disk before anything refers to it. It is never changed, and stays as long as the run.
"""

from __future__ import annotations

import hashlib
import os
import re
import threading
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

from arl.api.errors import ImageError
from arl.api.images import Image

DIRECTORY = "images"

_SUFFIXES = {"image/png": ".png", "image/jpeg": ".jpg", "image/webp": ".webp"}
_DIGEST = re.compile(r"[0-9a-f]{64}")
_ASIDE = ".writing-"


class ImageStore:
    """The images that a run keeps. Several objects, threads and processes may keep the same ones."""

    def __init__(self, run_dir: Path) -> None:
        self.directory = run_dir / DIRECTORY
        self._kept: set[str] = set()
        """Digests of images that this object knows to be on the disk."""

    def keep(self, images: Iterable[Image]) -> None:
        """Write those that are not there. When it returns, all would survive a power cut. Raises OSError."""
        paths = {image: self._named(image.digest, _SUFFIXES[image.kind]) for image in images}
        new = {image: path for image, path in paths.items() if image.digest not in self._kept or not path.exists()}
        if not new:
            return
        for image, path in new.items():
            with suppress(FileNotFoundError):
                if path.read_bytes() == image.data:
                    _force_to_disk(path)  # somebody else may only just have written it
                    continue
            path.parent.mkdir(parents=True, exist_ok=True)
            aside = self.directory / f"{_ASIDE}{image.digest}-{os.getpid()}-{threading.get_ident()}"
            try:
                with aside.open("wb") as file:
                    file.write(image.data)
                    file.flush()
                    os.fsync(file.fileno())
                aside.replace(path)
            except OSError:
                with suppress(OSError):
                    aside.unlink()
                raise
        for directory in {*(path.parent for path in new.values()), self.directory, self.directory.parent}:
            _force_to_disk(directory)
        self._kept |= {image.digest for image in new}

    def image(self, digest: str, width: int, height: int) -> Image:
        """Read an image. Raises ImageError if its file is missing, damaged or cannot be read."""
        return Image.kept(self.data(digest), width, height)

    def data(self, digest: str) -> bytes:
        """The bytes of an image's file. Raises as `image` does."""
        path = self.path(digest)
        if path is None:
            raise ImageError(f"the image {digest:.64} is missing from {self.directory}; put its file back")
        try:
            data = path.read_bytes()
        except OSError as error:
            raise ImageError(f"the image {path} cannot be read: {error.strerror or error}") from error
        if (found := hashlib.sha256(data).hexdigest()) != digest:
            raise ImageError(f"the image {path} is damaged: its SHA-256 is {found}; put the right file back")
        return data

    def path(self, digest: str) -> Path | None:
        """The file of an image; None if there is none, and for anything that is no digest."""
        if not _DIGEST.fullmatch(digest):
            return None
        paths = (self._named(digest, suffix) for suffix in _SUFFIXES.values())
        return next((path for path in paths if path.is_file()), None)

    def remove_unfinished(self) -> None:
        """Remove what a kill left half-written. Only the process that trains in the directory may call it."""
        for path in self.directory.glob(f"{_ASIDE}*"):
            with suppress(OSError):
                path.unlink()

    def _named(self, digest: str, suffix: str) -> Path:
        return self.directory / digest[:2] / f"{digest}{suffix}"


def _force_to_disk(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)

"""What a Dockerfile asks for, as far as a sandbox without images can give it: files, variables, a working directory."""

from __future__ import annotations

import json
import posixpath
import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from arl.api.errors import DatasetError

PLAIN_IMAGES = ("ubuntu", "debian", "python", "buildpack-deps", "bash")
"""Images that stand for an ordinary Linux, so that this machine's programs will do."""
_IGNORED = ("CMD", "ENTRYPOINT", "LABEL", "EXPOSE", "MAINTAINER", "SHELL", "STOPSIGNAL", "HEALTHCHECK")
"""Instructions about how a container starts: a terminal's commands do not depend on them."""
_CONTINUED = re.compile(r"\\[ \t]*\n")


@dataclass(slots=True, kw_only=True)
class PlainImage:
    """A Dockerfile's result, without the image that it begins with."""

    workdir: str = "/"
    env: dict[str, str] = field(default_factory=dict[str, str])
    sources: dict[str, Path] = field(default_factory=dict[str, Path])
    """Absolute path in the image -> the file that lies there."""
    needs: list[str] = field(default_factory=list[str])
    """What only an image can give: the instructions that were left out."""


def plain_image(dockerfile: Path) -> PlainImage:
    """Read a Dockerfile. What cannot be done without an image goes to `needs`. Raises DatasetError."""
    image = PlainImage()
    for word, arguments in _instructions(dockerfile):
        try:
            _apply(image, word, arguments, dockerfile)
        except ValueError as error:
            raise DatasetError(f"{dockerfile}: cannot read `{word} {arguments}`: {error}") from error
    return image


def _instructions(dockerfile: Path) -> Iterator[tuple[str, str]]:
    text = "\n".join(line for line in dockerfile.read_text().splitlines() if not line.lstrip().startswith("#"))
    for line in _CONTINUED.sub(" ", text).splitlines():
        word, _, arguments = line.strip().partition(" ")
        if word:
            yield word.upper(), arguments.strip()


def _apply(image: PlainImage, word: str, arguments: str, dockerfile: Path) -> None:
    match word:
        case "WORKDIR" if "$" not in arguments:
            image.workdir = posixpath.normpath(posixpath.join(image.workdir, arguments.strip("\"'")))
        case "ENV" if "$" not in arguments:
            image.env |= _variables(arguments)
        case "COPY" | "ADD" if _is_plain(word, arguments):
            image.sources |= _copied(arguments, image.workdir, dockerfile.parent)
        case "FROM" if arguments.split(":")[0] in PLAIN_IMAGES and " " not in arguments:
            pass
        case _ if word not in _IGNORED:
            image.needs.append(f"{word} {arguments}")


def _variables(arguments: str) -> dict[str, str]:
    """`ENV name=value name=value`, or the old form `ENV name value`."""
    if "=" not in arguments.split()[0]:
        name, _, value = arguments.partition(" ")
        return {name: value.strip()}
    return dict(part.split("=", 1) for part in shlex.split(arguments))


def _is_plain(word: str, arguments: str) -> bool:
    """Whether it copies files as they are. Owners and modes make no difference: everything is the agent's."""
    flags = [part for part in arguments.split() if part.startswith("--")]
    is_fetched = word == "ADD" and re.search(r"://|\.tar|\.tgz|\.zip", arguments)
    others = [flag for flag in flags if not flag.startswith(("--chown", "--chmod", "--link"))]
    return not is_fetched and not others and "$" not in arguments and "<<" not in arguments


def _copied(arguments: str, workdir: str, context: Path) -> dict[str, Path]:
    """The files that a COPY puts into the image. Raises ValueError if there are none."""
    words = json.loads(arguments) if arguments.startswith("[") else shlex.split(arguments)
    *patterns, target = (word for word in words if not word.startswith("--"))
    sources = [source for pattern in patterns for source in _matches(context, pattern)]
    place = posixpath.normpath(posixpath.join(workdir, target))
    is_directory = target.endswith(("/", ".")) or len(sources) > 1
    files: dict[str, Path] = {}
    for source in sources:
        if source.is_dir():
            below = (file for file in sorted(source.rglob("*")) if file.is_file())
            files |= {posixpath.join(place, file.relative_to(source).as_posix()): file for file in below}
        else:
            files[posixpath.join(place, source.name) if is_directory else place] = source
    return files


def _matches(context: Path, pattern: str) -> list[Path]:
    relative = posixpath.normpath(pattern.lstrip("/"))
    found = [context] if relative == "." else sorted(context.glob(relative))
    if not found or relative.startswith(".."):
        raise ValueError(f"there is no {pattern} in {context}")
    return found

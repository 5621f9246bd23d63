"""Whether machines see a directory of this one: a real file is written there, looked for, and removed again."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from arl.api.placed import Finding


def seen_from(
    directory: Path, kinds: Mapping[str, str], ask: Callable[[str, Mapping[str, tuple[Any, ...]]], Mapping[str, Any]]
) -> dict[str, str]:
    """How each node sees the directory: yes, no, read only, or why it did not answer.

    kinds: node id -> read or write. Leaves no file and no directory behind. Raises OSError if this process cannot write
    there.
    """
    with written(directory) as token:
        marks = {node_id: token.with_name(f"{token.name}-{number}") for number, node_id in enumerate(kinds)}
        asked = {node_id: (str(token), str(marks[node_id]), kind) for node_id, kind in kinds.items()}
        try:
            answers = ask("looks_for", asked)
        finally:
            answered = {node_id: mark.exists() for node_id, mark in marks.items()}
            for mark in marks.values():
                with suppress(OSError):
                    mark.unlink(missing_ok=True)
    said = {node_id: str(answer) for node_id, answer in answers.items()}
    # A node that writes into a directory of its own, at the same path, is not seen here.
    unseen = [i for i, answer in said.items() if answer == "yes" and kinds[i] == "write" and not answered[i]]
    return said | dict.fromkeys(unseen, "no")


@contextmanager
def written(directory: Path) -> Iterator[Path]:
    """A new file in the directory, which is made if it is not there; both are removed again. Raises OSError."""
    made = _make(directory)
    try:
        token = directory / f".seen-{secrets.token_hex(6)}"
        token.touch()
        try:
            yield token
        finally:
            with suppress(OSError):
                token.unlink(missing_ok=True)
    finally:
        for path in made:
            with suppress(OSError):  # something came in meanwhile
                path.rmdir()


def _make(directory: Path) -> list[Path]:
    """Returns the directories that were made, the innermost first."""
    missing = [path for path in (directory, *directory.parents) if not path.exists()]
    directory.mkdir(parents=True, exist_ok=True)
    return missing


def local_finding(name: str, path: Path, error: OSError) -> Finding:
    reason = "it is a file" if isinstance(error, FileExistsError | NotADirectoryError) else error.strerror or str(error)
    return Finding(text=f"{name} is {path}, where this machine cannot write: {reason}; set it to another directory")

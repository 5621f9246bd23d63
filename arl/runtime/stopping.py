"""How a script is asked to end: the signal that it got, what would continue it, and what is done before a hard end."""

from __future__ import annotations

import re
import shlex
import sys
from collections.abc import Callable
from contextvars import ContextVar
from dataclasses import dataclass, field


@dataclass(slots=True, kw_only=True, eq=False)
class ScriptEnd:
    """What a run knows of the script around it. `run_until_stopped` makes one, and its tasks find it in SCRIPT_END."""

    again: str
    """The subject of a sentence that says how the run continues, such as `the same command`."""
    is_told: bool = False
    """Whether the console said how the run ended, and what continues it."""
    signal: int | None = None
    """The first signal that asked the script to end."""
    last_words: list[Callable[[str], object]] = field(default_factory=list[Callable[[str], object]])
    """Each is called with the reason before the process ends without leaving its blocks."""

    def speak(self, reason: str) -> None:
        """Call the last words; they return soon, whatever hangs."""
        for say in tuple(self.last_words):
            say(reason)


SCRIPT_END: ContextVar[ScriptEnd | None] = ContextVar("SCRIPT_END", default=None)
"""Of the script that runs here; None where nothing handles signals, as in a notebook."""

_SECRET = re.compile(r"(key|token|secret|password)$", re.IGNORECASE)


def command_line() -> str:
    """This process's command line. The values of keys and passwords are left out."""
    words, is_secret = list[str](), False
    for word in sys.orig_argv:
        name, equals, _ = word.partition("=")
        is_flag = word.startswith("-")
        shown = "..." if is_secret and not is_flag else word
        is_secret = is_flag and bool(_SECRET.search(name))
        words.append(f"{name}=..." if is_secret and equals else shown)
        is_secret = is_secret and not equals
    return shlex.join(words)

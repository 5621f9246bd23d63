"""A rank without torch, which starts in a second, for what does not depend on what ranks compute."""

import os
import signal
import threading
from pathlib import Path
from typing import Any

from arl.api.errors import ModelError
from arl.runtime.processes.rpc import Messages, reported


class LightRank:
    def __init__(self, rank: int, world_size: int) -> None:
        self._rank = rank
        self.messages = Messages()

    @reported
    def call(self, name: str, *args: Any) -> Any:
        return getattr(self, name)(*args)

    def open_store(self, address: str) -> int:
        return 1

    def build(self, store: tuple[str, int], model: str, *_: object) -> None:
        if not Path(model).is_dir():
            raise ModelError(f"no model in {model}")

    def whereabouts(self) -> tuple[int, str]:
        return 0, "light_rank.py"

    def close(self) -> None:
        pass

    def fail(self, rank: int, sends: signal.Signals | None = None) -> None:
        """Raise on one rank, or send it a signal; the others wait, as in a collective."""
        if self._rank != rank:
            threading.Event().wait()
        if sends is not None:
            os.kill(os.getpid(), sends)
        raise ValueError("the work is lost")

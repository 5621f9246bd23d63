"""An object of the user's script on its way to another process, where the script's own module can be imported."""

from __future__ import annotations

import multiprocessing.process
import multiprocessing.spawn
import pickle
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from arl.api.errors import ConfigError


def check_is_no_import(process: str = "the trainer's process or a worker") -> None:
    """Raise ConfigError where a run would start in a process that imports the run's script. process: which may be."""
    if getattr(multiprocessing.process.current_process(), "_inheriting", False):
        raise ConfigError(
            f"a process that imports this script, such as {process}, would start a run of its own; put the code that "
            'starts the run under `if __name__ == "__main__":`'
        )


class SentObject(NamedTuple):
    """It pickles by itself, whatever module the object is from."""

    main: Mapping[str, Any]
    """How a fresh process makes the script's own module __main__, for what the object uses of it."""
    pickled: bytes

    @classmethod
    def of(cls, thing: object, called: str, where: str, advice: str, instead: str = "") -> SentObject:
        """called: the object, in errors. where: the processes that get it. advice: what makes an object travel.
        instead: what to do otherwise.

        Raises ConfigError if it cannot travel.
        """
        check_is_no_import(where)
        data = multiprocessing.spawn.get_preparation_data(where)
        main = {name: value for name, value in data.items() if name != "authkey"}
        try:
            sent = cls(main, pickle.dumps(thing, protocol=5))
        except Exception as error:
            raise ConfigError(
                f"{called} cannot be sent to {where} ({type(error).__name__}: {error}). {advice}{instead}"
            ) from error
        path = main.get("init_main_from_path")
        is_script = "init_main_from_name" in main or (path is not None and Path(path).is_file())
        if b"__main__" in sent.pickled and not is_script:
            raise ConfigError(
                f"{called} uses what a notebook or an interactive session defines, and {where} cannot import that; "
                f"define it in a module{instead}"
            )
        return sent

    def received(self) -> Any:
        """In the other process. Raises what importing the script, or unpickling, raises."""
        process: Any = multiprocessing.process.current_process()
        process._inheriting = (
            True  # a script without `if __name__ == "__main__"` would start a run here: arl refuses it
        )
        try:
            multiprocessing.spawn.prepare(dict(self.main))
            return pickle.loads(self.pickled)
        finally:
            del process._inheriting

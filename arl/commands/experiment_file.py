"""A script's `experiment`, found without running the script."""

from __future__ import annotations

import importlib.util
import sys
import traceback
from pathlib import Path
from types import ModuleType
from typing import Any

from arl.api.errors import ConfigError
from arl.experiment import Experiment

NAME = "experiment"


def load_experiment(file: Path) -> Experiment[Any]:
    """Import `file` as a module of its own name, beside its siblings, and return what it calls `experiment`.

    Its directory comes first on sys.path, as when it is run, so that it finds its siblings, and worker processes find
    its functions. Raises ConfigError: for what is no Python file, one that cannot be imported (whatever it raised is
    the cause) and one without an experiment.
    """
    if not file.is_file() or file.suffix != ".py":
        what = "there is no file" if not file.exists() else "no Python file is"
        raise ConfigError(f"{what} {file}; name the script of an experiment first, then options and its settings")
    module = _imported(file.resolve())
    experiment = getattr(module, NAME, None)
    if not isinstance(experiment, Experiment):
        has = "has no" if experiment is None else f"has a {type(experiment).__name__} for its"
        raise ConfigError(
            f"{file} {has} `{NAME}`; write at the top level of it: {NAME} = Experiment(config=..., prepare=...), which "
            "arl.experiment explains"
        )
    return experiment


def users_traceback(error: BaseException) -> str:
    """The traceback of an error, from where arl or the import system called the user's code on."""
    frames = error.__traceback__
    while frames is not None and _is_ours(frames.tb_frame.f_code.co_filename):
        frames = frames.tb_next
    if frames is None and not isinstance(error, SyntaxError):  # which says itself where it is
        frames = error.__traceback__
    return "".join(traceback.format_exception(type(error), error, frames))


def _is_ours(filename: str) -> bool:
    return filename.startswith("<frozen importlib") or Path(__file__).parents[1] in Path(filename).parents


def _imported(file: Path) -> ModuleType:
    loaded = sys.modules.get(file.stem)
    if loaded is not None:
        if getattr(loaded, "__file__", None) == str(file):
            return loaded
        raise ConfigError(f"{file} has the name of a module that is in use, {file.stem}; rename it")
    if str(file.parent) not in sys.path:
        sys.path.insert(0, str(file.parent))
    spec = importlib.util.spec_from_file_location(file.stem, file)
    assert spec is not None
    assert spec.loader is not None
    module = sys.modules[file.stem] = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
    except (Exception, SystemExit) as error:
        del sys.modules[file.stem]
        advice = "; what it does when it is run belongs under `if __name__ == '__main__':`"
        raise ConfigError(
            f"{file} cannot be imported: {type(error).__name__}: {error}{advice * isinstance(error, SystemExit)}"
        ) from error
    return module

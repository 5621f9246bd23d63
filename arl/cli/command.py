"""The frame of commands on a script: find its experiment, read options and settings, run, end with an exit code.

`arl serve` is the simplest of them: it trains the experiment with programs that arl does not start.
"""

from __future__ import annotations

import argparse
import importlib.util
import inspect
import io
import sys
import traceback
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

from arl.api.errors import ArlError, ConfigError, says_all
from arl.api.settings.endpoint import ENDPOINT_KEY
from arl.api.settings.run import Config
from arl.run.experiment import IS_LOADED_FOR_ITS_EXPERIMENT, Experiment, Setup
from arl.run.script import CONTINUES, HELP, HELP_ALL, exit_with, load_config, run_script
from arl.runtime.console import is_json, tell

NAME = "experiment"
"""The name of the experiment at the top level of a script."""


def load_experiment(file: Path) -> Experiment[Any]:
    """Import `file` as a module, with its directory first on sys.path as when it runs; return its `experiment`.

    Raises ConfigError if it is no Python file, cannot be imported (its own error is the cause), or has no experiment.
    """
    if not file.is_file() or file.suffix != ".py":
        what = "there is no file" if not file.exists() else "this is not a Python file:"
        raise ConfigError(f"{what} {file}; name the script of an experiment first, then options and its settings")
    module = import_script(file.resolve())
    experiment = getattr(module, NAME, None)
    if not isinstance(experiment, Experiment):
        has = "has no" if experiment is None else f"has a {type(experiment).__name__} for its"
        raise ConfigError(
            f"{file} {has} `{NAME}`; write at the top level of it: {NAME} = Experiment(config=..., prepare=...), see "
            "docs/running.md"
        )
    return experiment


def users_traceback(error: BaseException) -> str:
    """The traceback of an error, without the frames of arl and the import system above the user's code; the message
    alone of an error of arl's to which no code of the user's led."""
    if says_all(error):
        return f"{type(error).__name__}: {error}"
    frames = error.__traceback__
    while frames is not None and (
        (file := frames.tb_frame.f_code.co_filename).startswith("<frozen importlib")
        or Path(__file__).parents[1] in Path(file).parents
    ):
        frames = frames.tb_next
    if frames is None and not isinstance(error, SyntaxError):  # which says itself where it is
        frames = error.__traceback__
    return "".join(traceback.format_exception(type(error), error, frames))


def import_script(file: Path) -> ModuleType:
    loaded = sys.modules.get(file.stem)
    if loaded is not None:
        if getattr(loaded, "__file__", None) == str(file):
            return loaded
        raise ConfigError(f"{file} has the name of a loaded module, {file.stem}; rename it")
    if str(file.parent) not in sys.path:
        sys.path.insert(0, str(file.parent))
    spec = importlib.util.spec_from_file_location(file.stem, file)
    assert spec is not None
    assert spec.loader is not None
    module = sys.modules[file.stem] = importlib.util.module_from_spec(spec)
    token = IS_LOADED_FOR_ITS_EXPERIMENT.set(True)
    try:
        spec.loader.exec_module(module)
    except (Exception, SystemExit) as error:
        del sys.modules[file.stem]
        advice = "; put the code that runs the script under `if __name__ == '__main__':`"
        raise ConfigError(
            f"{file} cannot be imported: {type(error).__name__}: {error}{advice * isinstance(error, SystemExit)}"
        ) from error
    finally:
        IS_LOADED_FOR_ITS_EXPERIMENT.reset(token)
    return module


OTHER_FLAGS = (
    "Other flags are FILE's own settings (--model, --config, ...); `%(prog)s FILE --help` lists those that people set, "
    "--help-all all of them. "
)
EPILOG = (
    f"{OTHER_FLAGS}A setting with the name of an option above goes into FILE's --config file. The command trains "
    "nothing, and disturbs no run that trains in the same run_dir. Exit code: 0; 1 if every episode failed; 2 for a "
    "wrong setting."
)

Main = Callable[[Experiment[Any], Config], Awaitable[None]]


def parser_of(name: str, description: str, epilog: str = EPILOG) -> argparse.ArgumentParser:
    return argparse.ArgumentParser(
        prog=f"arl {name}",
        usage="%(prog)s FILE [options] [FILE's settings]",
        description=description,
        epilog=epilog,
        allow_abbrev=False,
        add_help=False,
    )


def parse(parser: argparse.ArgumentParser, argv: Sequence[str]) -> tuple[argparse.Namespace, list[str]]:
    """The command's options, and the remaining flags, which are the script's. `--help` prints both and exits."""
    asked = {*HELP, HELP_ALL}
    if not asked & {*argv}:
        return parser.parse_known_args(argv)
    parser.print_help()
    if rest := [argument for argument in argv if argument not in asked]:
        sys.stdout.write("\n")
        options, _ = parser.parse_known_args(rest)
        if options.file is not None:
            load_config(_loaded(options).config, [HELP_ALL if HELP_ALL in argv else HELP[1]])
    raise SystemExit(0)


def run_command(main: Main, options: argparse.Namespace, settings: Sequence[str], *, if_stopped: str) -> None:
    """Load the script's experiment and settings, and run `main` on them; ends as `arl.run_script` does."""
    if isinstance(sys.stdout, io.TextIOWrapper):  # a character that the terminal cannot show must not stop the command
        sys.stdout.reconfigure(errors="backslashreplace")
    experiment = _loaded(options)
    run_script(lambda config: main(experiment, config), experiment.config, settings, if_stopped=if_stopped)


def _loaded(options: argparse.Namespace) -> Experiment[Any]:
    try:
        return load_experiment(options.file)
    except ConfigError as error:
        cause = f"{users_traceback(error.__cause__)}" if error.__cause__ else ""
        exit_with(2, f"{cause}error: {error}")


@contextmanager
def errors_told(if_stopped: str) -> Iterator[None]:
    """End the process with a message, and with code 2 for a ConfigError, 1 for other errors of arl, 130 after
    Ctrl-C."""
    try:
        yield
    except ConfigError as error:
        exit_with(2, f"error: {error}")
    except ArlError as error:
        exit_with(1, f"error: {error}")
    except KeyboardInterrupt:
        exit_with(130, if_stopped)


def positive(text: str) -> int:
    """An option's whole number above 0."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number above 0")
    return int(text)


def finite(text: str, least: float = -sys.float_info.max, what: str = "a finite number") -> float:
    """An option's finite number."""
    with suppress(ValueError):
        if least <= (number := float(text)) < float("inf"):
            return number
    raise argparse.ArgumentTypeError(f"{text!r} is not {what}")


def amount(text: str) -> float:
    return finite(text, 0, "a number of at least 0")


def counted(number: int, noun: str) -> str:
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


# arl serve

SERVE_ABOUT = (
    "Train the experiment in FILE, as its script does, with programs that run elsewhere in place of its workflow. They "
    "open episodes over HTTP, call the model, and post their rewards. The workflow's sampling and reward stay, if it "
    "is one of arl's that has them."
)
SERVE_EPILOG = (
    f"{OTHER_FLAGS}--endpoint.host, --endpoint.port and the certificate say where programs find it; ${ENDPOINT_KEY} "
    "holds the key that they need. docs/serving.md explains the requests. Exit codes are those of the script."
)


def serve(argv: Sequence[str]) -> None:
    """argv: the arguments after `arl serve`."""
    parser = parser_of("serve", SERVE_ABOUT, SERVE_EPILOG)
    parser.add_argument("file", type=Path, metavar="FILE", help="a script with an `experiment`")
    options, settings = parse(parser, argv)
    run_command(_serve, options, settings, if_stopped=CONTINUES)


async def _serve(experiment: Experiment[Any], config: Config) -> None:
    config.endpoint.operator_key  # noqa: B018 - it raises now, and not after a preparation of minutes
    if config.rollout.num_workers:
        raise ConfigError(
            f"rollout.num_workers is {config.rollout.num_workers}, but programs elsewhere play the episodes, and they "
            "need one endpoint; set it to 0"
        )
    await replace(experiment, prepare=_prepared_by(experiment.prepare)).train(config)


def _prepared_by(prepare: Callable[[Any], Setup | Awaitable[Setup]]) -> Callable[[Any], Setup | Awaitable[Setup]]:
    """The same preparation, with a workflow whose episodes are played by programs elsewhere."""

    from arl.run.servers import played_elsewhere

    def served(setup: Setup) -> Setup:
        if setup.workflow is None:
            raise ConfigError(
                "arl serve puts programs elsewhere in the place of one workflow, and this script has several tasks; "
                "give its experiment one workflow and dataset, or train it as a script"
            )
        return replace(setup, workflow=played_elsewhere(setup.workflow, setup.model, _say_where))

    async def served_later(setup: Awaitable[Setup]) -> Setup:
        return served(await setup)

    def prepare_served(config: Any) -> Setup | Awaitable[Setup]:
        made = prepare(config)
        return served_later(made) if inspect.isawaitable(made) else served(made)

    return prepare_served


def _say_where(url: str) -> None:
    said = f"programs open episodes by POST {url}, with the key of ${ENDPOINT_KEY}"
    if is_json():
        tell("endpoint", said, url=url)
    else:
        sys.stderr.write(said + "\n")
        sys.stderr.flush()

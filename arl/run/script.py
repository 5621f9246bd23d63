"""The command line: flags over a YAML file over defaults, and exits that say what happened."""

from __future__ import annotations

import argparse
import asyncio
import difflib
import inspect
import json
import os
import re
import signal
import sys
import threading
import traceback
from collections.abc import Awaitable, Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn, TypeVar, cast

import yaml
from pydantic import BaseModel, ValidationError
from pydantic_settings import (
    BaseSettings,
    CliSettingsSource,
    InitSettingsSource,
    PydanticBaseSettingsSource,
    SettingsConfigDict,
)
from pydantic_settings.exceptions import SettingsError

from arl.api.errors import ArlError, ConfigError, FailureBudgetError, HookError, says_all
from arl.api.settings.run import Config
from arl.api.settings.sections import PEERS_NAMES, REQUIRED, Setting, config_error, settings_of, whole_section
from arl.runtime.console import is_json, json_console, tell
from arl.runtime.stopping import SCRIPT_END, ScriptEnd, command_line, is_in_cell, kernel_shell, run_in_cell

if TYPE_CHECKING:
    from arl.api.settings.finetuning import FinetuneConfig

ConfigT = TypeVar("ConfigT", bound="Config | FinetuneConfig")
T = TypeVar("T")

HELP, HELP_ALL = ("-h", "--help"), "--help-all"
COMMON = (
    *("model", "run_dir", "steps", "seed", "algorithm.preset"),
    *("engine.kind", "engine.num_servers", "engine.addresses", "engine.device", "engine.dtype"),
    *("rollout.batch_size", "rollout.group_size", "rollout.max_staleness", "rollout.max_concurrent_episodes"),
    *("rollout.episode_timeout_s", "train.device", "train.dtype", "train.num_ranks", "train.max_tokens_per_microbatch"),
    *("train.optimizer.lr", "train.lora.rank", "weights.transport", "evaluation.every", "checkpoint.every"),
    "log.trackers",
)
"""The settings of Config that `--help` shows: those that people set."""

CONTINUES = "the same command continues from its newest checkpoint, if there is one"
"""The default message of an interrupted script."""


def load_config(config_class: type[ConfigT], argv: Sequence[str] | None = None) -> ConfigT:
    """Build `config_class` from flags (`--section.field value`) over an optional `--config FILE.yaml`.

    argv: without the program's name; sys.argv[1:] when None, but in a notebook nothing. Raises ConfigError, which names
    each wrong field and the allowed values. `--help` prints the class's own settings and those of COMMON, `--help-all`
    every setting, and exits.
    """
    path, flags = _one_of("--config", _flags(argv))
    file = Path(path) if path else None
    from_file = _read_yaml(file) if file else {}
    given = from_file.get("algorithm")
    section: dict[str, Any] = given if isinstance(given, dict) else {}
    preset, others = _one_of("--algorithm.preset", flags)[0], sorted(section.keys() - {"preset"})
    if others and preset not in (None, of_file := section.get("preset", "the default")):
        raise ConfigError(
            f"--algorithm.preset is {preset}, but {file} sets algorithm.{', algorithm.'.join(others)} for {of_file}; "
            "change the preset there, or leave these out"
        )
    try:
        settings = _settings_class(config_class, flags, from_file)()
        return config_class.model_validate(settings.model_dump(exclude_unset=True))
    except ValidationError as error:
        raise config_error(config_class, error) from None
    except SettingsError as error:
        raise ConfigError(str(error)) from None


def _flags(argv: Sequence[str] | None) -> list[str]:
    """argv, or this script's flags if it is None; those that a notebook's kernel was started with are not its."""
    if argv is not None:
        return [*argv]
    flags = sys.argv[1:]
    is_kernels = kernel_shell() is not None and flags == sys.orig_argv[len(sys.orig_argv) - len(flags) :]
    return [] if is_kernels else flags


def _one_of(name: str, flags: Sequence[str]) -> tuple[str | None, list[str]]:
    """The value of one flag, if it is given, and the other flags. Raises ConfigError for a flag without its value."""
    parser = _Parser(add_help=False, allow_abbrev=False)
    parser.add_argument(name, dest="value")
    found, others = parser.parse_known_args(flags)
    return found.value, others


def run_script(
    main: Callable[[ConfigT], Awaitable[T]],
    config_class: type[ConfigT],
    argv: Sequence[str] | None = None,
    *,
    if_stopped: str = CONTINUES,
) -> T | None:
    """Load the configuration and run `main` on it: the last line of a script.

    argv: as for load_config. if_stopped: what to say after a signal. An ArlError becomes one message on stderr and exit
    code 1 (2 for a wrong setting), after a traceback if the user's own code failed. Ctrl-C, SIGTERM and SIGUSR1 cancel
    main; its `async with` blocks save and clean up, and the process ends with 130, 143 or 138. With --dry-run main
    does not run: a table says what would run where, and the exit code is 1 if there are mistakes in it.

    In a notebook's cell it raises errors, an interrupt as KeyboardInterrupt, and returns the result of `main`; in a
    script, None.
    """
    flags = _flags(argv)
    if is_in_cell():
        return _run_in_cell(main, config_class, flags)
    is_dry, is_asked_for_json = DRY_RUN in flags and issubclass(config_class, Config), False
    try:
        config = load_config(config_class, [flag for flag in flags if not (is_dry and flag == DRY_RUN)])
    except ConfigError as error:
        with suppress(ConfigError):  # which is the error, perhaps
            is_asked_for_json = _one_of("--log.format", flags)[0] == "json"
        with json_console(is_asked_for_json):
            exit_with(2, f"error: {error}")
    begin: Callable[[ConfigT], Awaitable[object]] = main
    if is_dry:
        from arl.run.dry_run import print_dry_run

        begin = cast("Callable[[ConfigT], Awaitable[object]]", print_dry_run)
    threads = _UsersThreads()
    with json_console(config.log.format == "json"), asyncio.Runner() as runner:
        runner.get_loop().set_default_executor(threads)
        code, message, users_error = 0, "", None
        try:
            again = command_again() if argv is None else "the same command"
            end = run_until_stopped(runner, _end_of(begin(config)), config.checkpoint.notice_s, again=again)
            if end is not None:
                code, message = (end, "") if isinstance(end, int) else (1, str(end))
        except Stopped as stop:
            code, message = 128 + stop.number, stop.said(if_stopped)
        except ArlError as error:
            cause = error.__cause__ if isinstance(error, FailureBudgetError | HookError) else None
            users_error = None if cause is None or says_all(cause) else cause
            code, message = 1, f"error: {error}"
        except Exception as error:  # Python prints it, but not before the threads have ended
            threads.leave_hung_ones(1, error)
            raise
        if message:
            _say(message, users_error)
        threads.leave_hung_ones(code)
    if code:
        raise SystemExit(code)
    return None


def _run_in_cell(
    main: Callable[[ConfigT], Awaitable[T]], config_class: type[ConfigT], flags: Sequence[str]
) -> T | None:
    is_dry = DRY_RUN in flags and issubclass(config_class, Config)
    config = load_config(config_class, [flag for flag in flags if not (is_dry and flag == DRY_RUN)])

    async def begin() -> T | None:
        if not is_dry:
            return await main(config)
        from arl.run.dry_run import print_dry_run

        with suppress(SystemExit):  # the table itself counts the mistakes
            await print_dry_run(cast("Config", config))
        return None

    return run_in_cell(begin(), again="running the cell again")


async def _end_of(main: Awaitable[object]) -> object:
    """The value that `main` passes to sys.exit(), which would leave the event loop and wait for hung threads; else
    None."""
    try:
        await main
    except SystemExit as end:
        return end.code
    return None


DRY_RUN = "--dry-run"
NOTICES = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)
"""Signals that ask a run to end: Ctrl-C, and those that Kubernetes and Slurm send before they kill it."""
_PATIENCE_S = 10.0
"""How long a run that has ended waits for threads that users' code started."""


class Stopped(BaseException):
    """A run was cancelled by a signal, and has saved and cleaned up."""

    def __init__(self, number: int, *, is_told: bool = False) -> None:
        """is_told: whether the console has said what continues the run."""
        super().__init__(f"stopped by {signal.Signals(number).name}")
        self.number, self.is_told = number, is_told

    def said(self, what_next: str) -> str:
        return str(self) if self.is_told else f"{self}; {what_next}"


def run_until_stopped(
    runner: asyncio.Runner, main: Awaitable[T], notice_s: float | None = None, *, again: str = "the same call"
) -> T:
    """Returns the result of `main`. The first of NOTICES cancels it; a later Ctrl-C ends the process at once.

    Other later notices change nothing: Slurm sends SIGTERM after SIGUSR1, and a wrapper may repeat what its process
    group got. notice_s: the process ends this long after the first, saved or not. again: what continues the run, as
    the subject of a sentence. Raises Stopped. Main thread only.
    """
    ending = ScriptEnd(again=again)
    timers: list[threading.Timer] = []

    async def cancellable() -> T:
        loop, task = asyncio.get_running_loop(), asyncio.current_task()
        SCRIPT_END.set(ending)

        def stop(number: int) -> None:
            if ending.signal is not None and number == signal.SIGINT:
                _say("a second Ctrl-C: ended before it had saved")
                ending.speak("Ctrl-C ended it before it had saved")
                os._exit(128 + number)
            if ending.signal is not None:
                return
            ending.signal = number
            if notice_s is not None:
                timers.append(threading.Timer(notice_s, give_up, [128 + number]))
                timers[0].daemon = True
                timers[0].start()
            if task is not None:
                task.cancel()

        for number in NOTICES:
            loop.add_signal_handler(number, stop, number)
        return await main

    def give_up(code: int) -> None:
        _say(f"what was not saved within checkpoint.notice_s={notice_s:g} is lost")
        ending.speak(f"it could not save within checkpoint.notice_s={notice_s:g} of a signal")
        os._exit(code)

    try:
        return runner.run(cancellable())
    except (asyncio.CancelledError, KeyboardInterrupt):
        raise Stopped(signal.SIGINT if ending.signal is None else ending.signal, is_told=ending.is_told) from None
    finally:
        for timer in timers:
            timer.cancel()


def command_again() -> str:
    """This process's command line and its directory, as the subject of a sentence."""
    command = command_line()
    if len(command) > _LONGEST_COMMAND:
        return "the same command"
    try:
        return f"`{command}` in {Path.cwd()}"
    except OSError:  # the directory is gone
        return f"`{command}`"


_LONGEST_COMMAND = 1000


class _UsersThreads(ThreadPoolExecutor):
    """The event loop's default executor: threads for users' code (asyncio.to_thread), which may hang."""

    def __init__(self) -> None:
        super().__init__(thread_name_prefix="asyncio")
        self._calls: set[Future[Any]] = set()

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        call = super().submit(fn, *args, **kwargs)
        self._calls.add(call)
        call.add_done_callback(self._calls.discard)
        return call

    def leave_hung_ones(self, code: int, error: Exception | None = None) -> None:
        """End the process if calls do not return soon: Python would wait for ever. error: not printed yet."""
        if hung := wait({*self._calls}, timeout=_PATIENCE_S).not_done:
            said = f"{len(hung)} calls in threads (asyncio.to_thread) did not return: the process ends without them"
            _say(said, error)
            with suppress(OSError, ValueError):  # nobody reads it any more
                sys.stdout.flush()  # a pipe or a file may not have everything yet
            os._exit(code)


def exit_with(code: int, message: str) -> NoReturn:
    """End the process with a message on stderr."""
    _say(message)
    raise SystemExit(code)


def _say(message: str, users_error: BaseException | None = None) -> None:
    """Write to stderr, after the traceback of an error in the user's own code."""
    if is_json():
        shown = {"traceback": "".join(traceback.format_exception(users_error))} if users_error else {}
        tell("error", message, level="error", **shown)
        return
    if users_error is not None:
        traceback.print_exception(users_error)
    sys.stderr.write(message + "\n")
    sys.stderr.flush()


def _settings_class(
    config_class: type[BaseModel], flags: Sequence[str], from_file: dict[str, Any]
) -> type[BaseSettings]:
    class Settings(BaseSettings, config_class):  # pyright: ignore[reportIncompatibleVariableOverride]
        model_config = SettingsConfigDict(frozen=True, extra="forbid")

        @classmethod
        def settings_customise_sources(
            cls, settings_cls: type[BaseSettings], *_: PydanticBaseSettingsSource, **__: PydanticBaseSettingsSource
        ) -> tuple[PydanticBaseSettingsSource, ...]:
            return _flag_source(settings_cls, config_class, flags), InitSettingsSource(settings_cls, from_file)

    return Settings


def _read_yaml(path: Path) -> dict[str, Any]:
    try:
        content = yaml.safe_load(path.read_text())
    except OSError as error:
        raise ConfigError(f"--config {path} cannot be read: {error.strerror}") from None
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ConfigError(f"--config {path} is not YAML: {error}") from None
    if not isinstance(content, dict):
        raise ConfigError(f"--config {path} holds {type(content).__name__}; it must hold a mapping of settings")
    return content


class _Parser(argparse.ArgumentParser):
    """Raises ConfigError instead of ending the process."""

    def error(self, message: str) -> NoReturn:
        if switch := re.match(r"argument --(\S+)/--no-\S+: ignored explicit argument", message):
            raise ConfigError(f"--{switch[1]} is a switch; give it without a value, or as --no-{switch[1]}")
        raise ConfigError(message.removeprefix("argument "))


def _flag_source(
    settings_class: type[BaseSettings], config_class: type[BaseModel], flags: Sequence[str]
) -> CliSettingsSource[_Parser]:
    settings = {setting.name: setting for setting in settings_of(config_class)}
    names = [name for name, setting in settings.items() if not setting.is_section]
    texts = _help_texts(config_class) if {*HELP, HELP_ALL} & set(flags) else {}
    is_short = HELP_ALL not in flags
    hidden = {setting.name for setting in settings_of(Config)} - {*COMMON} if is_short else set[str]()

    def read_section(section: Setting, text: str) -> str:
        try:
            is_section = isinstance(json.loads(text), dict | None)
        except ValueError:
            is_section = False
        if not is_section:
            raise argparse.ArgumentTypeError(whole_section(section.name, section.field, text))
        return text

    def add_argument(parser: Any, *names: str, **options: Any) -> None:
        setting = settings.get(options["dest"])
        if setting is not None:
            is_hidden = setting.name in hidden or (is_short and setting.is_section)
            options["help"] = argparse.SUPPRESS if is_hidden else texts.get(setting.name, "").replace("%", "%%")
            if setting.is_section:
                options["type"] = partial(read_section, setting)
        parser.add_argument(*names, **options)

    def parse(parser: _Parser, args: Sequence[str]) -> argparse.Namespace:
        namespace, unknown = parser.parse_known_args(args)
        if unknown:
            raise ConfigError(_unknown_flag(unknown[0], names))
        return namespace

    parser = _Parser(
        prog=getattr(config_class, "program", Path(sys.argv[0]).name),
        usage="%(prog)s [--config FILE.yaml] [--SETTING VALUE] [--SECTION.SETTING VALUE] ...",
        description=inspect.getdoc(config_class),
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument(HELP_ALL, action="help", help=f"Show all {len(names)} settings, and exit.")
    parser.add_argument("--config", metavar="FILE.yaml", help="Settings from a file; flags override them.")
    if texts and issubclass(config_class, Config):
        parser.add_argument(DRY_RUN, action="store_true", help="Show what would run where, and start nothing.")
    return CliSettingsSource(
        settings_class,
        root_parser=parser,
        parse_args_method=parse,
        add_argument_method=add_argument,
        add_argument_group_method=lambda parser, **options: (
            parser if is_short else parser.add_argument_group(**options)
        ),
        cli_parse_args=list(flags),
        cli_implicit_flags=True,
        cli_use_class_docs_for_groups=True,
    )


def _unknown_flag(flag: str, names: Sequence[str]) -> str:
    if not flag.startswith("-"):
        return f"{flag} belongs to no setting; each value has its flag, and a switch is --NAME or --no-NAME alone"
    dashes = "--no-" if flag.startswith("--no-") else "--"
    wanted = flag.lstrip("-").removeprefix("no-").partition("=")[0].replace("-", "_")
    if lists := [name for name in names if wanted.startswith((f"{name}.", f"{name}["))]:
        such = f", such as --{lists[0]} '{_A_LIST}'" if lists[0] in _LISTS else ""
        return f"{flag} is not a setting; --{lists[0]} takes all of its value at once, as JSON{such}"
    wanted_here = PEERS_NAMES.get(last := wanted.rpartition(".")[2], last)
    close = [name for name in names if name.endswith(f".{wanted}") or f".{name}".endswith(f".{wanted_here}")]
    close = close or difflib.get_close_matches(wanted, names, n=3, cutoff=0.5)
    advice = "did you mean " + " or ".join(dashes + name for name in close) if close else "--help-all lists all of them"
    return f"{flag} is not a setting; {advice}"


_LISTS = ("algorithm.weights", "algorithm.rejections")
_A_LIST = '[{"level": "token", "upper": 2}]'


def _help_texts(config_class: type[BaseModel]) -> dict[str, str]:
    """The help of each setting by its name: its text and default; where a section's variants differ, that of each."""

    def as_json(value: object) -> object:
        """A section in a list as its own settings, and what JSON does not know as text."""
        return value.model_dump(mode="json", exclude_unset=True) if isinstance(value, BaseModel) else str(value)

    try:
        defaults = config_class.model_validate({})
    except ValidationError:
        defaults = config_class.model_construct()
    texts: dict[str, dict[str, list[str]]] = {}
    variants: dict[str, set[str]] = {}
    sections: dict[str, str] = {}
    for setting in settings_of(config_class, defaults):
        default, sections[setting.name] = setting.default, setting.section
        if default is REQUIRED:
            told = "(required)"
        elif setting.is_section and default is not None:
            told = "All of it, as JSON."
        else:
            shown = default if isinstance(default, str | Path) else json.dumps(default, default=as_json)
            told = f"(default: {shown})"
        texts.setdefault(setting.name, {}).setdefault(f"{setting.about} {told}", []).append(setting.variant)
        if setting.variant:
            variants.setdefault(setting.section, set()).add(setting.variant)
    return {
        name: " ".join(
            text if set(of) in ({""}, variants.get(sections[name], set())) else f"[{', '.join(of)}] {text}"
            for text, of in by_text.items()
        )
        for name, by_text in texts.items()
    }

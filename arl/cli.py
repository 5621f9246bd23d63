"""The command line: settings from flags and YAML, and a way to run an async main that ends well.

    python my_agent.py --model DIR --rollout.max_staleness 4 --config run.yaml

Flags override the YAML file, which overrides the defaults.
"""

from __future__ import annotations

import argparse
import asyncio
import difflib
import os
import re
import signal
import sys
import traceback
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any, NoReturn, TypeVar

import yaml
from pydantic import BaseModel, ValidationError, model_validator
from pydantic_settings import BaseSettings, CliSettingsSource, PydanticBaseSettingsSource, SettingsConfigDict
from pydantic_settings.exceptions import SettingsError

from arl.api.config import Config
from arl.api.errors import ArlError, ConfigError, FailureBudgetError

ConfigT = TypeVar("ConfigT", bound=Config)


def load_config(config_class: type[ConfigT], argv: Sequence[str] | None = None) -> ConfigT:
    """Build `config_class` from flags (`--section.field value`) and an optional `--config FILE.yaml` below them.

    argv: without the program's name; sys.argv[1:] when None. Raises ConfigError naming each wrong field and what is
    allowed; `--help` prints every setting and exits.
    """
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--config", type=Path)
    own, flags = parser.parse_known_args(sys.argv[1:] if argv is None else argv)
    from_file = _read_yaml(own.config) if own.config else {}
    _check_presets(flags, from_file, own.config)
    try:
        settings = _settings_class(config_class, flags, from_file)()
        return config_class.model_validate(settings.model_dump(exclude_unset=True))
    except ValidationError as error:
        raise ConfigError("\n".join(_sentence(config_class, detail) for detail in error.errors())) from None
    except SettingsError as error:
        raise ConfigError(_flag_sentence(config_class, str(error))) from None


def _check_presets(flags: Sequence[str], from_file: dict[str, Any], path: Path | None) -> None:
    """A flag's preset over a file's settings for another would be an algorithm that nobody has named."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--algorithm.preset", dest="preset")
    flag, section = parser.parse_known_args(flags)[0].preset, from_file.get("algorithm")
    if flag is None or not isinstance(section, dict):
        return
    others, preset = sorted(section.keys() - {"preset"}), section.get("preset", "the default")
    if others and preset != flag:
        raise ConfigError(
            f"--algorithm.preset is {flag}, but {path} sets algorithm.{', algorithm.'.join(others)} for {preset}; "
            "change the preset there, or leave these out"
        )


def _over_defaults(config_class: type[Config], given: dict[str, Any]) -> dict[str, Any]:
    """`given` with its sections laid over the defaults that `config_class` gives them.

    A section given in part would otherwise lose what a subclass set in its default.
    """
    defaults = {name: field.default for name, field in config_class.model_fields.items()}
    return {name: _over(defaults.get(name), value) for name, value in given.items()}


def _over(default: object, given: Any) -> Any:
    """A section over its default; one of another kind or preset than the default's stands alone, as does what is no
    section."""
    if not isinstance(default, BaseModel) or not isinstance(given, dict):
        return given
    tags = {tag: getattr(default, tag) for tag in ("kind", "transport", "preset") if hasattr(default, tag)}
    if any(given.get(tag, value) != value for tag, value in tags.items()):
        return given
    said = {name: getattr(default, name) for name in default.model_fields_set}
    return {**tags, **said, **{name: _over(getattr(default, name, None), value) for name, value in given.items()}}


def run(main: Callable[[ConfigT], Awaitable[object]], config_class: type[ConfigT]) -> None:
    """Load the configuration and run `main` on it: the last line of a script.

    An ArlError becomes one message on stderr and exit code 1 (2 for a wrong setting), with a traceback only where the
    user's own code failed. Ctrl-C and SIGTERM cancel main, whose `async with` blocks save and clean up, and end the
    process with 130 or 143.
    """
    try:
        config = load_config(config_class)
    except ConfigError as error:
        _exit(2, f"error: {error}")
    interrupted: list[int] = []
    try:
        asyncio.run(_cancelled_by_signals(main(config), interrupted))
    except (asyncio.CancelledError, KeyboardInterrupt):
        number = interrupted[0] if interrupted else signal.SIGINT
        _exit(128 + number, f"stopped by {signal.Signals(number).name}; run the same command again to continue")
    except FailureBudgetError as error:
        _exit(1, f"error: {error}", users_error=error.__cause__)
    except ArlError as error:
        _exit(1, f"error: {error}")


async def _cancelled_by_signals(main: Awaitable[object], interrupted: list[int]) -> None:
    """Await `main`, cancelling it at the first SIGINT or SIGTERM; a second one ends the process at once."""
    loop, task = asyncio.get_running_loop(), asyncio.current_task()

    def stop(number: int) -> None:
        if interrupted:
            os._exit(128 + number)
        interrupted.append(number)
        if task is not None:
            task.cancel()

    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, stop, number)
    await main


def _exit(code: int, message: str, users_error: BaseException | None = None) -> NoReturn:
    if users_error is not None:
        traceback.print_exception(users_error)
    sys.stderr.write(message + "\n")
    raise SystemExit(code)


def _settings_class(config_class: type[Config], flags: Sequence[str], from_file: dict[str, Any]) -> type[BaseSettings]:
    """A BaseSettings twin of `config_class` whose sources are the flags, then the file."""

    class FileSource(PydanticBaseSettingsSource):
        def get_field_value(self, field: Any, field_name: str) -> tuple[Any, str, bool]:
            return from_file.get(field_name), field_name, False

        def __call__(self) -> dict[str, Any]:
            return from_file

    class Settings(BaseSettings, config_class):  # pyright: ignore[reportIncompatibleVariableOverride]
        model_config = SettingsConfigDict(frozen=True, extra="forbid")

        @model_validator(mode="before")
        @classmethod
        def _complete_sections(cls, given: dict[str, Any]) -> dict[str, Any]:
            return _over_defaults(config_class, given)

        @classmethod
        def settings_customise_sources(
            cls,
            settings_cls: type[BaseSettings],
            init_settings: PydanticBaseSettingsSource,
            env_settings: PydanticBaseSettingsSource,
            dotenv_settings: PydanticBaseSettingsSource,
            file_secret_settings: PydanticBaseSettingsSource,
        ) -> tuple[PydanticBaseSettingsSource, ...]:
            flag_source = CliSettingsSource(
                settings_cls,
                cli_parse_args=list(flags),
                cli_implicit_flags=True,
                cli_exit_on_error=False,
                cli_use_class_docs_for_groups=True,
                cli_prog_name=Path(sys.argv[0]).name + " [--config FILE.yaml]",
            )
            return flag_source, FileSource(settings_cls)

    Settings.__doc__ = config_class.__doc__
    return Settings


def _read_yaml(path: Path) -> dict[str, Any]:
    try:
        content = yaml.safe_load(path.read_text())
    except OSError as error:
        raise ConfigError(f"--config {path} cannot be read: {error.strerror}") from None
    except yaml.YAMLError as error:
        raise ConfigError(f"--config {path} is not YAML: {error}") from None
    if not isinstance(content, dict):
        raise ConfigError(f"--config {path} holds {type(content).__name__}; it must hold a mapping of settings")
    return content


def _setting_names(model: type[BaseModel], prefix: str = "") -> list[str]:
    """The dotted name of every setting of `model`, of all variants of its sections."""
    names: list[str] = []
    for name, field in model.model_fields.items():
        sections = _sections(field.annotation)
        names += [inner for section in sections for inner in _setting_names(section, f"{prefix}{name}.")]
        if not sections:
            names.append(prefix + name)
    return list(dict.fromkeys(names))


def _sections(annotation: Any) -> list[type[BaseModel]]:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return [annotation]
    return [section for part in getattr(annotation, "__args__", ()) for section in _sections(part)]


def _sentence(config_class: type[Config], detail: Any) -> str:
    """`detail`: one entry of ValidationError.errors(). Says which field, what it held, and what is allowed."""
    path, model, variant = [], config_class, ""
    for part in map(str, detail["loc"]):
        options = _sections(model.model_fields[path[-1]].annotation) if path and path[-1] in model.model_fields else []
        if options:
            model = next((option for option in options if _kind(option) == part), options[0])
        if options and _kind(model) == part:
            variant = f" with {path[-1]}.{_tag(model)}={part}"
            continue
        path.append(part)
    name, message = ".".join(path), detail["msg"].removeprefix("Value error, ")
    if detail["type"] == "extra_forbidden":
        allowed = ", ".join(sorted(model.model_fields))
        return f"{name} is not a setting{variant}; allowed there: {allowed}"
    if detail["type"] == "union_tag_invalid":
        tag, allowed = detail["ctx"]["discriminator"].strip("'"), detail["ctx"]["expected_tags"].replace("'", "")
        return f"{name}.{tag} is {detail['ctx']['tag']!r}; allowed there: {allowed}"
    if detail["type"] == "missing":
        return f"{name} is missing; give it as --{name} VALUE or in the --config file"
    if detail["type"] == "value_error":
        return f"{name}: {message}" if name else message
    return f"{name} is {detail['input']!r}{variant}: {message}"


def _tag(section: type[BaseModel]) -> str:
    """The name of the field that tells variants of a section apart."""
    return "transport" if "transport" in section.model_fields else "kind"


def _kind(section: type[BaseModel]) -> str | None:
    field = section.model_fields.get(_tag(section))
    return field.default if field else None


def _flag_sentence(config_class: type[Config], message: str) -> str:
    unknown = re.search(r"unrecognized arguments: (\S+)", message)
    if unknown is None:
        return message.replace("error parsing CLI: ", "")
    flag, names = unknown[1], _setting_names(config_class)
    close = difflib.get_close_matches(flag.lstrip("-"), names, n=3, cutoff=0.5)
    advice = "did you mean " + " or ".join(f"--{name}" for name in close) if close else "see --help for all of them"
    return f"{flag} is not a setting; {advice}"

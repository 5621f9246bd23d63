"""Sections of settings with dotted names, how they override each other, and errors that name a wrong setting.

A section is a class of settings. Some come in variants, a class for each, told apart by a tag such as engine.kind.
"""

from __future__ import annotations

import inspect
import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, cast, get_args, get_origin

from pydantic import BaseModel, ConfigDict, ValidationError
from pydantic.fields import FieldInfo
from pydantic_core import ErrorDetails, PydanticUndefined

from arl.api.errors import ConfigError

TAGS = ("preset", "kind", "transport")
"""The fields that tell the variants of a section apart."""

PEERS_NAMES = {
    "n": "group_size", "num_generations": "group_size", "learning_rate": "lr", "output_dir": "run_dir",
    "max_steps": "steps", "preset": "algorithm", "max_completion_length": "max_new_tokens", "reward_funcs": "reward",
    "train_dataset": "dataset", "args": "config", "report_to": "trackers",
}  # fmt: skip
"""Other libraries' name of a setting -> its name in arl, for errors."""

REQUIRED = PydanticUndefined
"""The default of a setting that has none."""


class Section(BaseModel):
    """A part of the configuration: frozen, with known names and finite numbers only."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True, allow_inf_nan=False)

    def _changed(self, *names: str) -> list[str]:
        fields = type(self).model_fields
        return [name for name in names if getattr(self, name) != fields[name].get_default(call_default_factory=True)]


def laid_over(default: object, given: object) -> Any:
    """`given` over `default`, section by section; a section of another kind or preset than its default's stands alone.

    default: a mapping of settings, or a section, of which only the set fields count and dicts are values.
    """
    if not isinstance(default, BaseModel | Mapping) or not isinstance(given, Mapping):
        return given
    known, above = dict(cast("Mapping[str, Any]", default)), dict(cast("Mapping[str, Any]", given))
    if any(above.get(tag, known.get(tag)) != known.get(tag) for tag in TAGS):
        return above
    said, sections = known, known
    if isinstance(default, BaseModel):
        said = {name: value for name, value in known.items() if name in {*TAGS, *default.model_fields_set}}
        sections = {name: value for name, value in known.items() if isinstance(value, BaseModel)}
    return {**said, **{name: laid_over(sections.get(name), value) for name, value in above.items()}}


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """One setting, as --help shows it."""

    name: str
    """Dotted, as on the command line."""
    about: str
    """Its docstring."""
    default: object
    """The configuration's, else the field's own."""
    variant: str
    """The variant of the section that has it; empty if the section has one variant, and for the tag itself."""
    field: FieldInfo

    @property
    def section(self) -> str:
        """The name of the section that it is in."""
        return self.name.rpartition(".")[0]

    @property
    def is_section(self) -> bool:
        return bool(sections(self.field.annotation)) and not has_many(self.field)


def settings_of(
    section: type[BaseModel], default: object = None, prefix: str = "", variant: str = ""
) -> Iterator[Setting]:
    """Every setting of `section`; after a setting that is a section itself, the settings of all its variants.

    default: an instance of `section`, whose values are the defaults.
    """
    for name, field in section.model_fields.items():
        path, value = prefix + name, getattr(default, name, field.get_default(call_default_factory=True))
        variants = [] if has_many(field) else sections(field.annotation)
        if variant and name == _tag(section):
            continue
        about = field.description or (_summary(variants[0]) if len(variants) == 1 else "")
        yield Setting(name=path, about=about, default=value, variant=variant, field=field)
        if len(variants) > 1:
            tag = _tag(variants[0])
            kinds = " ".join(f"{', '.join(_kinds(one))}: {_summary(one)}" for one in variants)
            of_tag, chosen = variants[0].model_fields[tag], getattr(value, tag, REQUIRED)
            yield Setting(name=f"{path}.{tag}", about=kinds, default=chosen, variant="", field=of_tag)
        for inner in variants:
            kind = ", ".join(_kinds(inner)) if len(variants) > 1 else ""
            yield from settings_of(inner, value if type(value) is inner else None, f"{path}.", kind)


def sections(annotation: Any) -> list[type[BaseModel]]:
    """The variants of the section that a field with this annotation holds; none if it holds a value."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return [annotation]
    return [section for part in get_args(annotation) for section in sections(part)]


def has_many(field: FieldInfo) -> bool:
    """Whether the field holds a list of values, or values by name; they may be sections."""
    return get_origin(field.annotation) in (tuple, list, dict)


def whole_section(name: str, field: FieldInfo, given: object) -> str:
    """The message about one value that was given for a whole section, or for one of a list's."""
    if name.endswith("]"):
        return f"{given!r} was given for a part of a list; each part is a mapping, such as {_example_of_part(field)}"
    first = sections(field.annotation)[0]
    choice = next((tag for tag in TAGS if tag in first.model_fields), None)
    if isinstance(given, str) and choice is not None:
        return f"{given!r} was given for a whole section; write --{name}.{choice} {given}"
    example = next(inner for inner, field in first.model_fields.items() if not sections(field.annotation))
    alone = f", or --{name} alone for its defaults" if type(None) in get_args(field.annotation) else ""
    return f"{given!r} was given for a whole section; set its fields, such as --{name}.{example} VALUE{alone}"


def _example_of_list(field: FieldInfo | None) -> str:
    has_parts = field is not None and sections(field.annotation)
    return f" with all parts, such as [{_example_of_part(field)}]" if field and has_parts else ""


def _example_of_part(field: FieldInfo) -> str:
    first, inner = next(iter(sections(field.annotation)[0].model_fields.items()))
    return json.dumps({first: next(iter(get_args(inner.annotation)), "...")})


_MISSING = "give it as --{name} VALUE or in the --config file"


def config_error(config: type[BaseModel], error: ValidationError, missing: str = _MISSING) -> ConfigError:
    """The same error, for users: a sentence for each wrong setting of `config`.

    missing: what to do about a missing setting, called {name} there.
    """
    return ConfigError("\n".join(_sentence(config, detail, missing) for detail in error.errors()))


def _sentence(config: type[BaseModel], detail: ErrorDetails, missing: str) -> str:
    path, model, variant = list[str](), config, ""
    field: FieldInfo | None = None
    for place in detail["loc"]:
        if isinstance(place, int) and path:
            path[-1] += f"[{place}]"
            continue
        part = str(place)
        options = sections(field.annotation) if field is not None else []
        if options:
            model = next((option for option in options if part in _kinds(option)), options[0])
        if len(options) > 1 and part in _kinds(model):
            variant, field = f" with {path[-1]}.{_tag(model)}={part}", None
        elif "[" not in part:  # what pydantic calls a member of a union, such as tuple[str, ...]
            path.append(part)
            field = model.model_fields.get(part)
    name, given, message = ".".join(path), detail["input"], detail["msg"].removeprefix("Value error, ")
    context = detail.get("ctx", {})
    match detail["type"]:
        case "extra_forbidden":
            return f"{name} is not a setting{variant}; allowed there: {', '.join(sorted(model.model_fields))}"
        case "union_tag_invalid":
            tag, allowed = context["discriminator"].strip("'"), context["expected_tags"].replace("'", "")
            return f"{name}.{tag} is {context['tag']!r}; allowed there: {allowed}"
        case "missing":
            return f"{name} is missing" + ("" if "]" in name else f"; {missing.format(name=name)}")
        case "model_type" | "model_attributes_type" if field is not None:
            return f"{name}: {whole_section(name, field, given)}"
        case "tuple_type":
            return f"{name} is {given!r}; it must be a list{_example_of_list(field)}"
        case "value_error":
            return f"{name}: {message}" if name else message
        case _:
            return f"{name} is {given!r}{variant}: {message}"


_KEY = re.compile(
    r"^token$|(^|_)(api_?key|(access|secret|private)_key|secret|password|(api|access|auth|bearer|hf)_token)$", re.I
)
_USER = re.compile(r"(?<=://)[^/@\s]+(?=@)")
_MASK = "**********"
"""As pydantic writes a SecretStr, which users' own settings may have."""


def settings_without_keys(config: BaseModel) -> dict[str, Any]:
    """All settings as JSON values, for logs. Masked are SecretStr, texts whose names say that they are a key or a
    password, and users and passwords in URLs.
    """
    return _without_keys(config.model_dump(mode="json", fallback=str))


def settings_without_masked(config: BaseModel) -> dict[str, Any]:
    """The same, without the values that would be masked, so that a configuration can be made from it."""
    return _without_masks(settings_without_keys(config))


def _without_masks(value: Any) -> Any:
    if isinstance(value, dict):
        parts = cast("dict[str, Any]", value)
        return {name: _without_masks(inner) for name, inner in parts.items() if inner != _MASK}
    if isinstance(value, list):
        return [_without_masks(inner) for inner in cast("list[Any]", value) if inner != _MASK]
    return value


def _without_keys(value: Any, name: str = "") -> Any:
    if isinstance(value, dict):
        parts = cast("dict[str, Any]", value)
        return {part: _without_keys(inner, part) for part, inner in parts.items()}
    if isinstance(value, list):
        return [_without_keys(inner, name) for inner in cast("list[Any]", value)]
    if isinstance(value, str) and value:
        return _MASK if _KEY.search(name) else _USER.sub(_MASK, value)
    return value


def _tag(section: type[BaseModel]) -> str:
    return "transport" if "transport" in section.model_fields else "kind"


def _kinds(section: type[BaseModel]) -> tuple[str, ...]:
    field = section.model_fields.get(_tag(section))
    return get_args(field.annotation) if field else ()


def _summary(section: type[BaseModel]) -> str:
    first = inspect.cleandoc(section.__doc__ or "").partition("\n\n")[0].replace("\n", " ").partition(". ")[0]
    return first.rstrip(".") + "." if first else ""

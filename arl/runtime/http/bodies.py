"""JSON bodies of requests as pydantic models. A faulty body is one sentence: "top_k is 0; it must be at least 1"."""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Mapping, Sequence
from itertools import chain
from typing import Annotated, Any, ClassVar, NoReturn, TypedDict, TypeVar, Unpack

from pydantic import BaseModel, ConfigDict, Field, PlainValidator, ValidationError, model_validator
from pydantic_core import PydanticCustomError

_MAX_SHOWN = 80
_MAX_DEPTH = 100
"""How deep lists and objects may nest. Recursive code reads a body and quotes it."""
_MAX_NAME = 1024
_MAX_STRINGS = 256
_EXPECTED = {
    "bool_type": "true or false",
    "dict_type": "a JSON object",
    "finite_number": "a finite number",
    "float_type": "a number",
    "int_from_float": "an integer",
    "int_type": "an integer",
    "list_type": "a list",
    "mapping_type": "a JSON object",
    "model_type": "a JSON object",
    "string_type": "a string",
    "string_too_short": "a string that is not empty",
    "too_short": "a list that is not empty",
}
_BOUNDS = {
    "greater_than": "above {gt}",
    "greater_than_equal": "at least {ge}",
    "less_than": "below {lt}",
    "less_than_equal": "at most {le}",
    "literal_error": "{expected}",
    "string_too_long": "a string of at most {max_length} characters",
    "too_long": "of length {max_length} at most",
}

_ENCODER = json.JSONEncoder(ensure_ascii=False, default=repr)

B = TypeVar("B", bound=BaseModel)


class RequestError(Exception):
    """The server cannot answer a request: an HTTP status, and a sentence for the sender."""

    def __init__(self, message: str, status: int = 400) -> None:
        super().__init__(message)
        self.message = message
        self.status = status


class BodyError(RequestError):
    """A body is not JSON, or a field is missing, wrong, unknown or cannot be honoured.

    param: the field, as in messages[0].role; None for the body as a whole.
    code: invalid_value, unsupported_value or unsupported_parameter.
    can_be_dropped: the request without the field asks for the same thing, but less of it.
    """

    def __init__(
        self, message: str, *, param: str | None = None, code: str = "invalid_value", can_be_dropped: bool = False
    ) -> None:
        super().__init__(message)
        self.param = param
        self.code = code
        self.can_be_dropped = can_be_dropped


class FieldRules(TypedDict, total=False):
    """Decide on fields that a RequestBody does not have."""

    ignored: Collection[str]
    """Fields without effect, whatever their value."""
    only: Mapping[str, Sequence[Any]]
    """Field -> its allowed values, which have no effect."""
    refused: Mapping[str, str]
    """Field -> why it, or another value than those in `only`, cannot be honoured."""
    vital: Collection[str]
    """Of the refused fields, those without which a request would mean something else."""
    takes_empty: bool
    """An unknown field may be false or empty, because it then asks for nothing."""
    takes_others: bool
    """Unknown fields are dropped."""


class RequestBody(BaseModel):
    """A JSON object that a client sends. A null field counts as absent; every other field must be known.

    A subclass's class statement takes FieldRules. Those that it does not give are its base's.
    """

    model_config = ConfigDict(frozen=True, strict=True, extra="forbid", allow_inf_nan=False)

    _rules: ClassVar[FieldRules] = {}

    def __init_subclass__(cls, **rules: Unpack[FieldRules]) -> None:
        super().__init_subclass__()
        cls._rules = {**cls._rules, **rules}

    @model_validator(mode="before")
    @classmethod
    def _check_names(cls, values: Any) -> Any:
        if not isinstance(values, dict):
            return values
        own = {field.alias or name for name, field in cls.model_fields.items()}
        for name, value in values.items():
            if name not in own and value is not None:
                cls._check_unknown(name, value)
        return {name: value for name, value in values.items() if value is not None and name in own}

    @classmethod
    def _check_unknown(cls, name: str, value: Any) -> None:
        is_empty = value is False or value in ("", [], {})
        rules, kind = cls._rules, "unsupported_parameter"
        is_taken = is_empty and rules.get("takes_empty")
        if is_taken or rules.get("takes_others") or name in rules.get("ignored", ()):
            return
        why = rules.get("refused", {}).get(name)
        reason = f": {why}; leave it out" if why else f" (here {shown(value)}): it is not known here; leave it out"
        if (allowed := rules.get("only", {}).get(name)) is not None:
            if value in allowed:
                return
            kind, because = "unsupported_value", f": {why}" if why else ""
            values = " or ".join(map(shown, allowed))
            reason = f" is {shown(value)}, which cannot be honoured here{because}; leave it out, or set it to {values}"
        context = {"reason": reason, "field": name, "is_vital": name in rules.get("vital", ())}
        raise PydanticCustomError(kind, "{reason}", context)


def parse(model: type[B], raw: bytes) -> B:
    """The model in a body; an empty body counts as an empty object. Raises BodyError."""
    return validated(model, loaded(raw))


def loaded(raw: bytes) -> Any:
    """The JSON in a body. Raises BodyError."""
    try:
        content = json.loads(raw.decode(), parse_constant=_refuse_constant) if raw else {}
        if raw.count(b"[") + raw.count(b"{") > _MAX_DEPTH:
            check_depth(content)
        if b"\\u" in raw:  # half of a surrogate pair is valid JSON, but not text: no tokenizer takes it
            json.dumps(content, ensure_ascii=False).encode()
    except (ValueError, RecursionError) as error:
        raise BodyError(f"the request body is not JSON: {error}") from error
    return content


def check_depth(content: Any, most: int = _MAX_DEPTH) -> None:
    """Raise RecursionError if lists and objects nest deeper."""
    level = [content]
    for _ in range(most):
        inner = [one.values() if isinstance(one, dict) else one for one in level if isinstance(one, dict | list)]
        if not inner:
            return
        level = list(chain.from_iterable(inner))
    raise RecursionError(f"it nests more than {most} lists and objects")


def validated(model: type[B], content: Any, where: str = "") -> B:
    """The model of parsed JSON. where: the field that holds it. Raises BodyError."""
    try:
        return model.model_validate(content)
    except ValidationError as error:
        raise body_error(error, where) from None


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not a JSON number")


def body_error(error: ValidationError, where: str = "") -> BodyError:
    """The first fault of a ValidationError, as a sentence that names its field."""
    fault = error.errors(include_url=False)[0]
    kind, context = fault["type"], fault.get("ctx", {})
    names = (*fault["loc"], context["field"]) if "field" in context else fault["loc"]
    path = "".join(f"[{name}]" if isinstance(name, int) else f".{name}" for name in names)
    param = f"{where}{path}" if where else path.lstrip(".")
    is_unsupported = kind.startswith("unsupported")
    return BodyError(
        f"{param or 'the request body'}{_fault(kind, context, fault['input'])}",
        param=param or None,
        code=kind if is_unsupported else "invalid_value",
        can_be_dropped=is_unsupported and not context["is_vital"],
    )


def _fault(kind: str, context: Mapping[str, Any], value: Any) -> str:
    match kind:
        case "missing":
            return " is missing"
        case "unsupported_value" | "unsupported_parameter":
            return context["reason"]
        case "value_error":
            return f" is {shown(value)}: {context['error']}"
    expected = context.get("described") or _EXPECTED.get(kind) or _BOUNDS.get(kind, kind).format(**context)
    return f" is {shown(value)}; it must be {expected}"


_STEP = re.compile(r"\.?([^.\[\]]+)|\[(\d+)\]")


def dropped(content: Any, param: str) -> bool:
    """Take a field out of parsed JSON. param: its place, as in tools[0].strict. False if there is no such field."""
    steps = [found[1] if found[1] is not None else int(found[2]) for found in _STEP.finditer(param)]
    inner = content
    try:
        for step in steps[:-1]:
            inner = inner[step]
        if not isinstance(inner, dict):
            return False
        del inner[steps[-1]]
    except (KeyError, IndexError, TypeError):
        return False
    return True


def wrong(where: str, value: Any, described: str) -> BodyError:
    return BodyError(f"{where} is {shown(value)}; it must be {described}", param=where)


def refused(where: str, reason: str, *, can_be_dropped: bool = False) -> BodyError:
    """The error for a known field or value that the server cannot honour."""
    return BodyError(f"{where} {reason}", param=where, code="unsupported_value", can_be_dropped=can_be_dropped)


def must_be(described: str) -> PydanticCustomError:
    """The error of a validator: "FIELD is VALUE; it must be ..."."""
    return PydanticCustomError("wrong", "it must be {described}", {"described": described})


def shown(value: Any) -> str:
    """A value as messages quote it: short JSON."""
    text = ""
    for piece in _ENCODER.iterencode(value):  # so that a long value is not written to its end
        text += piece
        if len(text) > _MAX_SHOWN:
            break
    return text if len(text) <= _MAX_SHOWN else f"{text[: _MAX_SHOWN - 3]}..."


def _strings(value: Any) -> list[str]:
    values = [value] if isinstance(value, str) else value
    if not isinstance(values, list) or not all(isinstance(one, str) and one for one in values):
        raise must_be("a string or a list of strings, none of them empty")
    if len(values) > _MAX_STRINGS or max(map(len, values), default=0) > _MAX_NAME:
        raise must_be(f"{_MAX_STRINGS} strings at most, each of at most {_MAX_NAME} characters")
    return values


def _integers(value: Any) -> list[int]:
    if not isinstance(value, list) or not set(map(type, value)) <= {int}:
        raise must_be("a list of integers")
    return value


Name = Annotated[str, Field(max_length=_MAX_NAME)]
"""A string that the server keeps: an id, a label, a path."""
Strings = Annotated[Sequence[str], PlainValidator(_strings)]
Integers = Annotated[Sequence[int], PlainValidator(_integers)]
"""A list of integers, such as token ids. Long lists are checked once, and not copied."""

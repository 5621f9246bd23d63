"""Request bodies, read field by field, and what is said of those that cannot be answered.

A field that this server does not know, or knows and cannot honour, is an error unless its value asks for nothing
(null, false, empty, or the field's own default), so that no request is silently answered as if it had said less.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from typing import Any


class ApiError(Exception):
    """A request that cannot be answered: an HTTP status, and a sentence for its sender."""

    def __init__(self, message: str, status: int = 400) -> None:
        super().__init__(message)
        self.message = message
        self.status = status


class MalformedError(ApiError):
    """A body that is not JSON, lacks a field, or has one of the wrong type."""


class MalformedSamplingError(ApiError):
    """A field within sampling_params that is unknown, or of the wrong type."""


class Body:
    """A JSON object that is read field by field; what was never asked for is refused by `finish`.

    malformed: what a field raises that is missing or of the wrong type; unsupported: one that `finish` refuses.
    """

    malformed: type[ApiError] = MalformedError
    unsupported: type[ApiError] = ApiError

    def __init__(self, fields: Any, where: str = "the request body") -> None:
        if not isinstance(fields, dict):
            raise MalformedError(f"{where} is {shown(fields)}; it must be a JSON object")
        self._fields: dict[str, Any] = fields
        self._known: set[str] = set()

    @classmethod
    def parse(cls, raw: bytes) -> Body:
        """The object that `raw` holds; an empty body is an empty object."""
        try:
            return cls(json.loads(raw) if raw else {})
        except ValueError as error:
            raise MalformedError(f"the request body is not JSON: {error}") from None

    def __contains__(self, name: str) -> bool:
        return name in self._fields

    def value(self, name: str) -> Any:
        """The field as it came; None where it is missing."""
        self._known.add(name)
        return self._fields.get(name)

    def _typed(self, name: str, default: Any, kinds: tuple[type, ...], expected: str) -> Any:
        value = self.value(name)
        if value is None:
            if default is ...:
                raise self.malformed(f"{name} is missing; it must be {expected}")
            return default
        if not isinstance(value, kinds) or (isinstance(value, bool) and bool not in kinds):
            raise self.malformed(f"{name} is {shown(value)}; it must be {expected}")
        return value

    def text(self, name: str, default: Any = ...) -> Any:
        return self._typed(name, default, (str,), "a string")

    def flag(self, name: str, default: bool = False) -> bool:
        return self._typed(name, default, (bool,), "true or false")

    def integer(self, name: str, default: Any = ...) -> Any:
        return self._typed(name, default, (int,), "an integer")

    def number(self, name: str, default: float) -> float:
        value = self._typed(name, default, (int, float), "a number")
        if not math.isfinite(value):
            raise self.malformed(f"{name} is {value}; it must be a finite number")
        return float(value)

    def strings(self, name: str) -> tuple[str, ...]:
        """A string or a list of strings; missing is none."""
        value = self.value(name)
        values = [value] if isinstance(value, str) else value or []
        if not isinstance(values, list) or not all(isinstance(item, str) and item for item in values):
            raise self.malformed(
                f"{name} is {shown(value)}; it must be a string or a list of strings, none of them empty"
            )
        return tuple(values)

    def token_ids(self, name: str) -> tuple[int, ...]:
        value = self.value(name) or []
        if not isinstance(value, list) or not all(type(item) is int for item in value):
            raise self.malformed(f"{name} is {shown(value)}; it must be a list of token ids")
        return tuple(value)

    def finish(self, harmless: frozenset[str] = frozenset(), neutral: Mapping[str, Any] | None = None) -> None:
        """Refuse every other field that asks for something."""
        neutral = neutral or {}
        for name in self._fields.keys() - self._known - harmless:
            value = self._fields[name]
            if value is None or value is False or value in ("", [], {}) or value == neutral.get(name):
                continue
            known = ", ".join(sorted(self._known))
            raise self.unsupported(f"{name} (here {shown(value)}) is not supported by this server; it knows {known}")


class SamplingBody(Body):
    """A sampling_params object."""

    malformed = MalformedSamplingError
    unsupported = MalformedSamplingError


def shown(value: Any) -> str:
    """A value as an error message quotes it: JSON, and short."""
    text = json.dumps(value, default=repr)
    return text if len(text) <= 80 else f"{text[:77]}..."

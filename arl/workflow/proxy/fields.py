"""Reading a request's JSON: each field typed, none left unread, and whatever is wrong answered by its name."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Set
from typing import Any, NoReturn

from arl.workflow.proxy.calls import RefusedCallError

_MAX_SHOWN = 80


def shown(value: Any) -> str:
    """A value, short enough for a message."""
    text = json.dumps(value, ensure_ascii=False, default=repr)
    return text if len(text) <= _MAX_SHOWN else f"{text[:_MAX_SHOWN]}..."


def parse_json(raw: bytes) -> dict[str, Any]:
    """The object that a body holds. Raises RefusedCallError for anything else."""
    try:
        body = json.loads(raw, parse_constant=_refuse_constant)
        if b"\\u" in raw:  # half of a surrogate pair is JSON, but no text: no tokenizer takes it
            json.dumps(body, ensure_ascii=False).encode()
    except (ValueError, RecursionError) as error:
        raise RefusedCallError(f"the body is not JSON that can be read: {error}") from error
    if not isinstance(body, dict):
        raise RefusedCallError(f"the body is {shown(body)}; it must be a JSON object")
    return body


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is no JSON number")


class Fields:
    """The fields of a JSON object; null is the same as absent. `finish` refuses those that nobody asked for."""

    def __init__(self, values: Mapping[str, Any]) -> None:
        self._values = values
        self._read: set[str] = set()

    def value(self, name: str, default: Any = None) -> Any:
        self._read.add(name)
        value = self._values.get(name)
        return default if value is None else value

    def text(self, name: str, default: str = "") -> str:
        return self._typed(name, default, str, "a string")

    def flag(self, name: str, default: bool = False) -> bool:
        return self._typed(name, default, bool, "true or false")

    def integer(self, name: str, *, at_least: int | None = None, at_most: int | None = None) -> int | None:
        value = self.value(name)
        if value is None:
            return None
        if isinstance(value, bool) or not isinstance(value, int):
            raise wrong(name, value, "an integer")
        if (at_least is not None and value < at_least) or (at_most is not None and value > at_most):
            bounds = [f"at least {at_least}"] if at_least is not None else []
            bounds += [f"at most {at_most}"] if at_most is not None else []
            raise wrong(name, value, " and ".join(bounds))
        return value

    def number(self, name: str) -> float | None:
        value = self.value(name)
        if value is None:
            return None
        if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
            raise wrong(name, value, "a number")
        return value

    def strings(self, name: str) -> tuple[str, ...]:
        """A string, or a list of them."""
        value = self.value(name, [])
        values = [value] if isinstance(value, str) else value
        if not isinstance(values, list) or not all(isinstance(one, str) for one in values):
            raise wrong(name, value, "a string or a list of strings")
        return tuple(values)

    def integers(self, name: str) -> tuple[int, ...]:
        values = self.items(name)
        if any(isinstance(value, bool) or not isinstance(value, int) for value in values):
            raise wrong(name, values, "a list of integers")
        return tuple(values)

    def mapping(self, name: str) -> Mapping[str, Any]:
        return self._typed(name, {}, dict, "an object")

    def items(self, name: str) -> list[Any]:
        return self._typed(name, [], list, "a list")

    def _typed(self, name: str, default: Any, kind: type, described: str) -> Any:
        value = self.value(name, default)
        if not isinstance(value, kind):
            raise wrong(name, value, described)
        return value

    def finish(
        self, harmless: Set[str], neutral: Mapping[str, tuple[Any, ...]], refused: Mapping[str, str] | None = None
    ) -> None:
        """Refuse what was not read.

        harmless: fields that change nothing here. neutral: fields that may only have values that change nothing.
        refused: why others cannot be honoured.
        """
        for name, value in self._values.items():
            if value is None or name in self._read or name in harmless:
                continue
            if name in neutral:
                if value in neutral[name]:
                    continue
                allowed = " or ".join(map(shown, neutral[name]))
                raise RefusedCallError(
                    f"{name} is {shown(value)}, which cannot be honoured here; leave it out, or set it to {allowed}",
                    param=name,
                    code="unsupported_value",
                )
            reason = (refused or {}).get(name, "it is not known here")
            raise RefusedCallError(f"{name}: {reason}; leave it out", param=name, code="unsupported_parameter")


def wrong(name: str, value: Any, described: str) -> RefusedCallError:
    return RefusedCallError(f"{name} is {shown(value)}; it must be {described}", param=name, code="invalid_value")

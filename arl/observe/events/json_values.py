"""Values that JSON can hold, in place of those that it cannot."""

from __future__ import annotations

from typing import Any


def encodable(value: Any) -> Any:
    """What msgspec's JSON can hold of plain values: half a character becomes a question mark, a huge integer None."""
    match value:
        case str():
            return value.encode(errors="replace").decode()
        case dict():
            return {encodable(name): encodable(inner) for name, inner in value.items()}
        case list():
            return [encodable(inner) for inner in value]
        case tuple():
            return tuple(map(encodable, value))
        case int() if value.bit_length() > 63:
            return None
        case _:
            return value

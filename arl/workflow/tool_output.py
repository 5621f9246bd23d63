"""What a tool returned, as text for the model: whatever it is, of bounded length, and fit to be tokenized."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from pydantic import BaseModel
from pydantic_core import PydanticSerializationError, to_json


def text_of(result: object) -> str:
    """JSON for what JSON has (objects, lists, pydantic models, dataclasses), else as `str` has it.

    Raises what the result's own `__str__` raises.
    """
    match result:
        case str():
            return result
        case bytes() | bytearray() | memoryview():
            return _text_of_bytes(bytes(result))
        case Mapping() | list() | tuple() | set() | frozenset() | BaseModel():
            return _json(result)
    is_record = dataclasses.is_dataclass(result) and not isinstance(result, type)
    return _json(result) if is_record else str(result)


def cut(text: str, max_chars: int) -> str:
    """At most max_chars characters of the text, and a note of how many more there were; no lone surrogates."""
    kept = text[:max_chars].encode("utf-8", "replace").decode("utf-8")
    missing = len(text) - max_chars
    return f"{kept}\n[cut here: {missing} more characters]" if missing > 0 else kept


def _text_of_bytes(data: bytes) -> str:
    try:
        return data.decode()
    except UnicodeDecodeError:
        return f"[{len(data)} bytes that are no text]"


def _json(result: Any) -> str:
    try:
        return to_json(result, inf_nan_mode="constants", serialize_unknown=True, bytes_mode="base64").decode()
    except (PydanticSerializationError, ValueError, RecursionError):  # circular, or with lone surrogates
        return str(result)

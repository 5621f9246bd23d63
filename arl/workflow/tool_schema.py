"""Makes the JSON schema of a typed function's arguments, with the descriptions in its docstring."""

from __future__ import annotations

import functools
import inspect
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, is_dataclass
from typing import Any
from weakref import WeakKeyDictionary

from pydantic import BaseModel, TypeAdapter, ValidationError, validate_call
from pydantic.errors import PydanticUserError
from pydantic.json_schema import GenerateJsonSchema

from arl.api.errors import ToolError

Arguments = tuple[tuple[Any, ...], dict[str, Any]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Signature:
    """parameters: a JSON schema of all arguments. accept: validates and converts them; raises ValidationError."""

    name: str
    description: str
    parameters: Mapping[str, Any]
    accept: Callable[..., Arguments]


def signature_of(function: Callable[..., Any]) -> Signature:
    """The signature of a function, or of an object that can be called: its class's name, and the docstring of __call__
    or else of the class. Raises ToolError if it has no docstring, or an argument that cannot be named.
    """
    method = getattr(function, "__func__", None)
    if method is None:
        return _signature(function)
    if method not in _METHODS:  # the methods of each episode's own object are described once
        _METHODS[method] = _signature(function)
    return _METHODS[method]


_METHODS: WeakKeyDictionary[Callable[..., Any], Signature] = WeakKeyDictionary()


def without_partial(function: Callable[..., Any]) -> Callable[..., Any]:
    """What a functools.partial calls in the end."""
    while isinstance(function, functools.partial):
        function = function.func
    return function


def code_of(function: Callable[..., Any]) -> Callable[..., Any]:
    """The function that a call runs: of a partial, a method, or the __call__ of an object."""
    inner = without_partial(function)
    called = inner if inspect.isroutine(inner) or isinstance(inner, type) else type(inner).__call__
    return getattr(called, "__func__", called)


def first_complaint(error: ValidationError) -> str:
    """The first error in the arguments, for the model to read."""
    first = error.errors(include_url=False, include_input=False)[0]
    return f"argument {'.'.join(str(part) for part in first['loc'])}: {first['msg']}"


def _signature(function: Callable[..., Any]) -> Signature:
    inner = without_partial(function)
    name = getattr(inner, "__name__", type(inner).__name__)
    if isinstance(inner, type) and not (is_dataclass(inner) or issubclass(inner, BaseModel)):
        raise ToolError(f"{name} is a class, whose call only makes an object; give an object, or its methods")
    called = inner if hasattr(inner, "__wrapped__") else code_of(inner)
    docstring = inspect.cleandoc(called.__doc__ or "") or inspect.getdoc(inner)
    if not docstring:
        raise ToolError(f"the function {name} has no docstring; the model needs one to know what the tool does")
    description, of_arguments = _read(docstring)
    for parameter in inspect.signature(function).parameters.values():
        if parameter.kind not in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY):
            raise ToolError(f"argument {parameter} of {name} cannot be given by name; a tool's arguments are all named")
        if parameter.annotation is parameter.empty:
            advice = "give the method of an object" if parameter.name == "self" else "annotate it"
            raise ToolError(f"argument {parameter.name!r} of {name} has no type; {advice}")
    accept = _acceptor(function, inner, name)
    try:
        schema, validated = _validated(accept)
    except (PydanticUserError, NameError) as error:
        raise ToolError(
            f"the arguments of {name} have no JSON schema: {str(error).splitlines()[0]}; use types that pydantic "
            "knows, defined at the top level of a module"
        ) from error
    properties = {
        argument: {"description": of_arguments[argument], **of_type} if argument in of_arguments else of_type
        for argument, of_type in schema["properties"].items()
    }
    definitions = {"$defs": schema["$defs"]} if "$defs" in schema else {}
    parameters = {"type": "object", "properties": properties, "required": schema.get("required", []), **definitions}
    return Signature(name=name, description=description, parameters=parameters, accept=validated)


def _acceptor(function: Callable[..., Any], inner: Callable[..., Any], name: str) -> Callable[..., Arguments]:
    """A function that takes the same arguments and returns them. It does not keep `function` alive."""

    def accept(*args: Any, **kwargs: Any) -> Arguments:
        return args, kwargs

    of_types = inner if hasattr(inner, "__annotations__") else type(inner).__call__
    accept.__name__ = accept.__qualname__ = name
    accept.__module__ = of_types.__module__
    accept.__annotations__ = {k: v for k, v in of_types.__annotations__.items() if k != "return"}
    vars(accept)["__signature__"] = inspect.signature(function)
    return accept


def _validated(accept: Callable[..., Arguments]) -> tuple[dict[str, Any], Callable[..., Arguments]]:
    """A separate function, since pydantic keeps the local variables of its caller."""
    adapter: TypeAdapter[Any] = TypeAdapter[Any](accept)  # pyright: ignore[reportArgumentType]  (it takes functions)
    return adapter.json_schema(schema_generator=_WithoutTitles), validate_call(accept)


class _WithoutTitles(GenerateJsonSchema):
    """A title repeats the name, and costs tokens in every prompt."""

    def field_title_should_be_set(self, schema: Any) -> bool:
        return False


_SECTION = re.compile(r"^(?:Args|Arguments|Parameters|Params):[ \t]*\n(?P<body>(?:[ \t]+.*(?:\n|\Z)|[ \t]*\n)*)", re.M)
_ARGUMENT = re.compile(r"^(?P<name>\w+)\s*(?:\([^)\n]*\))?:[ \t]*(?P<text>.*(?:\n[ \t]+.*)*)", re.M)
_FIELD = re.compile(r"^:param\s+(?:[^:\n]*\s)?(?P<name>\w+):[ \t]*(?P<text>.*(?:\n[ \t]+.*)*)\n?", re.M)


def _read(docstring: str) -> tuple[str, dict[str, str]]:
    """The tool's description, and name -> description of each argument (Google's `Args:`, Sphinx's `:param name:`)."""
    found = {field["name"]: _one_line(field["text"]) for field in _FIELD.finditer(docstring)}
    rest = _FIELD.sub("", docstring)
    if section := _SECTION.search(rest):
        body = inspect.cleandoc(section["body"])
        found |= {argument["name"]: _one_line(argument["text"]) for argument in _ARGUMENT.finditer(body)}
        rest = rest[: section.start()] + rest[section.end() :]
    return rest.strip() or docstring, found


def _one_line(text: str) -> str:
    return " ".join(text.split())

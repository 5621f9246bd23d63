"""Names without content: SGLang imports torchvision for image models, and serving a text model calls none of it."""

from __future__ import annotations

import sys
import types
from typing import ClassVar

__version__ = "0.0.0"

_MODULES = (
    "io", "models", "ops", "utils", "transforms", "transforms.functional", "transforms.v2", "transforms.v2.functional",
)  # fmt: skip


class _Anything(type):
    """A class whose attributes all exist; annotations and defaults read them at import."""

    def __getattr__(cls, name: str) -> str:
        if name.startswith("__"):
            raise AttributeError(name)
        return f"{cls.__name__}.{name}"


class _Module(types.ModuleType):
    __path__: ClassVar[list[str]] = []

    def __getattr__(self, name: str) -> type:
        if name.startswith("__"):
            raise AttributeError(name)
        return _Anything(name, (), {})


for _name in _MODULES:
    _module = _Module(f"{__name__}.{_name}")
    _parent, _, _leaf = _module.__name__.rpartition(".")
    sys.modules[_module.__name__] = _module
    setattr(sys.modules[_parent], _leaf, _module)

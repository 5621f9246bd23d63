"""What every part of the configuration is."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict


class Section(BaseModel):
    """A part of the configuration: frozen, and strict about names."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)

    def _changed(self, *names: str) -> list[str]:
        """Those of the fields that are not at their defaults."""
        return [name for name in names if getattr(self, name) != type(self).model_fields[name].default]

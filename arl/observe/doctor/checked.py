"""Results of checks: one Checked for each check, and all of them in a Diagnosis."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

from arl.observe.doctor.causes import Cause

Outcome = Literal["ok", "fault", "skipped"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Checked:
    """The result of one check of one server."""

    check: str
    outcome: Outcome
    server: str = ""
    measured: str = ""
    """What was measured; if the check was skipped, why."""
    threshold: str = ""
    """The limit, and its reason."""
    cause: Cause | None = None
    """Set for a fault."""
    detail: str = ""
    """Details of this fault: which layer, which temperature."""

    def row(self) -> dict[str, Any]:
        """As JSON values."""
        found = {"check": self.check, "server": self.server, "outcome": self.outcome}
        found |= {"measured": self.measured, "threshold": self.threshold}
        if self.cause is not None:
            found |= {"cause": self.cause.name, "means": self.cause.means, "detail": self.detail}
            found |= {"mend": self.cause.mend}
        return found


@dataclass(frozen=True, slots=True, kw_only=True)
class Diagnosis:
    """The results of all checks, in their order."""

    checked: Sequence[Checked]

    @property
    def faults(self) -> list[Checked]:
        return [one for one in self.checked if one.outcome == "fault"]

    @property
    def is_healthy(self) -> bool:
        return not self.faults

    @property
    def verdict(self) -> str:
        """One or two sentences. The first fault counts, because later ones may follow from it."""
        done = sum(one.outcome == "ok" for one in self.checked)
        skipped = sum(one.outcome == "skipped" for one in self.checked)
        if self.is_healthy:
            return f"sampler and trainer agree: {done} checks passed, {skipped} were skipped"
        first = self.faults[0]
        assert first.cause is not None
        others = list(dict.fromkeys(one.cause.name for one in self.faults[1:] if one.cause not in (None, first.cause)))
        also = f" Then: {', '.join(others)}." if others else ""
        detail = f" {first.detail.rstrip('.')}." if first.detail else ""
        return f"cause: {first.cause.name}. {first.cause.means}{detail} To mend it: {first.cause.mend}{also}"

    def json_object(self) -> dict[str, Any]:
        cause = self.faults[0].cause if self.faults else None
        return {
            "healthy": self.is_healthy,
            "cause": cause and cause.name,
            "verdict": self.verdict,
            "checks": [one.row() for one in self.checked],
        }

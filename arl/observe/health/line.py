"""HealthLine: the remark in which the line of a step may end."""

from __future__ import annotations

from collections.abc import Iterable

from arl.observe.health.digest import Digest, Row
from arl.observe.health.rules import remarks

_SURE = 3
"""Steps before the first remark: one batch may be an odd one."""
_AGAIN = 50
"""Steps until a remark that still holds is repeated: twice in a run of the default length."""
_EACH, _SELDOM = 200, 10
"""After so many steps, only each tenth is looked at, since that takes the longer the longer the run is."""


class HealthLine:
    """Reads a run's steps as they end, and says what has begun to look wrong: one remark at a time, each one rarely.

    What looks wrong are the findings that `arl view` shows, if a few words can tell them.
    """

    def __init__(self, settings: object = None) -> None:
        """settings: the run's, section by section."""
        self._digest = Digest(settings)
        self._told: dict[str, int] = {}
        """Kind of finding -> the step in which it was told last."""
        self._newest = 0

    def resume(self, steps: Iterable[Row], evaluations: Iterable[Row]) -> None:
        """Read what a continued run has trained, without a word."""
        for row in steps:
            self._add(row)
        self._digest.evaluations.extend(evaluations)

    def evaluated(self, evaluation: Row) -> None:
        self._digest.evaluations.append(evaluation)

    def remark(self, metrics: Row) -> str:
        """Of the step with these metrics; empty if there is nothing to say. A step counts once."""
        if not self._add(metrics):
            return ""
        step = self._digest.num_steps
        if step < _SURE or (step > _EACH and step % _SELDOM):
            return ""
        for one in remarks(self._digest):
            if one.remark and step - self._told.get(one.kind, -_AGAIN) >= _AGAIN:
                self._told[one.kind] = step
                return one.remark
        return ""

    def _add(self, metrics: Row) -> bool:
        version = metrics.get("version")
        if not isinstance(version, int) or version <= self._newest:
            return False
        self._newest = version
        self._digest.add(metrics)
        return True

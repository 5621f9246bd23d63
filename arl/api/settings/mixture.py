"""How a run of several tasks chooses whose example is next: fixed weights, a temperature, or success."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Literal

from pydantic import Field, PositiveFloat, PositiveInt

from arl.api.settings.sections import Section

if TYPE_CHECKING:
    pass


# The mixture: from weights to shares.


class FixedMixture(Section):
    """Shares are proportional to the tasks' weights."""

    kind: Literal["fixed"] = "fixed"


class TemperatureMixture(Section):
    """Shares are proportional to weight x num_examples^(1 / temperature), as for languages (1907.05019, sec. 4.2)."""

    kind: Literal["temperature"] = "temperature"
    temperature: PositiveFloat = 5.0
    """1: in proportion to the sizes of the datasets. The higher it is, the more equal the shares."""


class SuccessMixture(Section):
    """Shares are proportional to weight x (floor + 4 p (1 - p)): most goes to tasks solved half of the time
    (learnability, 2408.15099). p: the share of a task's recent episodes that succeeded; 1/2 before there are any. A
    group of which no episode finished counts as one without success."""

    kind: Literal["success"] = "success"
    success_reward: float = 1.0
    """An episode with this reward or more has succeeded."""
    window: PositiveInt = 64
    """How many of a task's last groups count."""
    floor: float = Field(default=0.1, gt=0)
    """What a task gets that is always or never solved, where one that is solved half of the time gets 1 more."""


MixtureConfig = Annotated[FixedMixture | TemperatureMixture | SuccessMixture, Field(discriminator="kind")]
"""How the groups of a run are shared among its tasks."""

"""LengthWatch: whether trained episodes differ in length from those that were asked for.

Cuts, failures and filters choose among episodes. If they remove the long ones, the model is trained on short ones. The
test uses ranks: each episode's score is the share of shorter episodes minus the share of longer ones, and without a
bias trained episodes have the same mean score as all. Episodes of a group are alike, and share their fate, so the
variance is that of the groups' sums (Liang and Zeger 1986).

An episode that was cut or failed is at least as long as it was by then. The test assumes the length that speaks against
its finding: "shorter" must hold if cut episodes needed no further token, and "longer" must hold if they needed any
number of tokens.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Mapping
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    import numpy as np

_MOST_GROUPS = 1000
"""The test looks at this many of the last groups."""
_FEWEST_GROUPS = 30
"""With fewer groups, their sum is not close enough to a normal distribution."""
SIGNIFICANT = 3.3
"""Standard errors; exceeded by chance in one run of a thousand."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LengthBias:
    """How trained episodes compare with all that ran, trained or not."""

    trained: float
    """Mean length of trained episodes, in tokens."""
    asked: float
    """Mean length of all episodes; a lower bound if some were cut."""
    low: float
    """In standard errors, above 0 if trained episodes are longer, assuming that cut episodes needed no further
    token."""
    high: float
    """The same, assuming that they needed any number of tokens."""

    @property
    def direction(self) -> Literal["shorter", "longer"] | None:
        """How trained episodes differ, whatever cut ones would have become; None if it may be chance."""
        if self.low < -SIGNIFICANT:
            return "shorter"
        return "longer" if self.high > SIGNIFICANT else None

    def remark(self) -> str | None:
        if self.direction is None:
            return None
        return (
            f"what is trained is {self.direction} than what was asked for: {self.trained:.0f} tokens an episode, "
            f"against {self.asked:.0f} of all that ran, cut ones counted to their cut. Look in summary.json which "
            "tokens are not trained, and why (docs/running.md)"
        )


class LengthWatch:
    """Keeps the lengths of the episodes of the last groups."""

    def __init__(self) -> None:
        self._groups: deque[list[tuple[int, bool, bool]]] = deque(maxlen=_MOST_GROUPS)
        """For each episode: its length, whether it ended by itself, whether it is trained."""

    def note(self, lengths: Mapping[int, tuple[int, bool]], kept: Collection[int]) -> None:
        """Add a group whose episodes have all ended. lengths: index -> tokens, and whether it ended by itself."""
        if lengths:
            self._groups.append([(tokens, whole, index in kept) for index, (tokens, whole) in lengths.items()])

    def bias(self) -> LengthBias | None:
        """None if there are too few groups, or if all or no episodes are trained: then there is nothing to compare."""
        import numpy as np

        rows = [(number, *row) for number, group in enumerate(self._groups) for row in group]
        if len(self._groups) < _FEWEST_GROUPS:
            return None
        group, length, is_whole, is_trained = (np.array(column) for column in zip(*rows, strict=True))
        if is_trained.all() or not is_trained.any():
            return None
        endless = np.where(is_whole, length, length.max() + 1)
        return LengthBias(
            trained=float(length[is_trained].mean()),
            asked=float(length.mean()),
            low=_deviation(length, is_trained, group),
            high=_deviation(endless, is_trained, group),
        )

    def summary(self) -> dict[str, float]:
        """For summary.json."""
        found = self.bias()
        return {f"length_bias/{name}": value for name, value in asdict(found).items()} if found else {}


def _deviation(lengths: np.ndarray, is_trained: np.ndarray, group: np.ndarray) -> float:
    """The deviation of the trained episodes' scores from the mean, in standard errors."""
    import numpy as np

    ordered = np.sort(lengths)
    shorter = np.searchsorted(ordered, lengths, side="left")
    longer = len(lengths) - np.searchsorted(ordered, lengths, side="right")
    scores = (shorter - longer) / len(lengths)
    sums = np.bincount(group, weights=(is_trained - is_trained.mean()) * scores)
    spread = float(np.sqrt((sums**2).sum()))
    return float(sums.sum()) / spread if spread else 0.0

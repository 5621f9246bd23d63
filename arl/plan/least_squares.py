"""Least squares with coefficients of at least 0, and as few of them as explain the measurements."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import combinations

import numpy as np

_ROUNDS = 4
_TOLERANCE = 0.005
"""A column more has to make the residual smaller by this share of what it was."""
_WORST = 0.5
"""Relative residuals above this count as this much in the mean that is reported."""
_MAD = 1.4826
"""Times the median absolute deviation: the standard deviation of a normal distribution."""
_HUBER = 1.5
"""Residuals of more standard deviations count by their size alone, not by its square."""


def robust(
    columns: np.ndarray,
    wanted: np.ndarray,
    preferred: Sequence[int] = (),
    importance: np.ndarray | None = None,
    num_needed: int = 0,
) -> tuple[np.ndarray, float]:
    """Coefficients [K] >= 0 with columns[N, K] @ coefficients near wanted[N] > 0, and the mean relative residual.

    Relative residuals are minimised (Huber's loss, by reweighting), so short and long measurements count alike. Columns
    are used only where they explain something that fewer columns do not. preferred: columns by importance; of sets that
    explain as much, the one with the first of these is taken. importance: [N] of each measurement. num_needed: so many
    of the preferred columns are used in any case, unless that takes a coefficient below 0.
    """
    scaled = columns / wanted[:, None]
    given = np.ones(len(wanted)) if importance is None else np.sqrt(importance)
    found, weights = np.zeros(columns.shape[1]), given
    for _ in range(_ROUNDS):
        found = _simplest(scaled * weights[:, None], weights, preferred, num_needed)
        residuals = np.abs(scaled @ found - 1.0)
        scale = max(_MAD * float(np.median(residuals)), 1e-6)
        weights = given * np.sqrt(np.minimum(1.0, _HUBER * scale / np.maximum(residuals, 1e-12)))
    residuals = np.minimum(np.abs(scaled @ found - 1.0), _WORST)
    return found, float(np.average(residuals, weights=given**2))


def _simplest(columns: np.ndarray, wanted: np.ndarray, preferred: Sequence[int], num_needed: int) -> np.ndarray:
    """The coefficients of the smallest set of columns that explains nearly as much as any larger set does."""
    gram, right, total = columns.T @ columns, columns.T @ wanted, float(wanted @ wanted)
    order = {column: place for place, column in enumerate(preferred)}
    best, least = np.zeros(columns.shape[1]), total
    sets = [chosen for size in range(1, len(right) + 1) for chosen in combinations(range(len(right)), size)]
    solved = [(error, chosen, values) for chosen in sets for values, error in [_solved(gram, right, total, chosen)]]
    possible = [(error, chosen, values) for error, chosen, values in solved if values is not None]
    needed = set(preferred[:num_needed])
    most = max((len(needed & set(chosen)) for _, chosen, _ in possible), default=0)
    possible = [entry for entry in possible if len(needed & set(entry[1])) == most]
    for size in range(1, len(right) + 1):
        known = [entry for entry in possible if len(entry[1]) == size]
        if not known:
            continue
        lowest = min(error for error, _, _ in known)
        near = [entry for entry in known if entry[0] <= lowest + _TOLERANCE * max(lowest, 1e-12)]
        error, chosen, values = min(near, key=lambda entry: sorted(order.get(i, len(order)) for i in entry[1]))
        if error < (1.0 - _TOLERANCE) * least:
            best, least = np.zeros(len(right)), error
            best[list(chosen)] = values
    return best


def _solved(
    gram: np.ndarray, right: np.ndarray, total: float, chosen: Sequence[int]
) -> tuple[np.ndarray | None, float]:
    """The coefficients of these columns, all above 0, and the squared error; None if they have no such solution."""
    rows = list(chosen)
    own, wanted = gram[np.ix_(rows, rows)], right[rows]
    scales = np.sqrt(np.diag(own))
    if not (scales > 0).all():
        return None, np.inf
    try:
        scaled = np.linalg.solve(own / np.outer(scales, scales) + 1e-10 * np.eye(len(rows)), wanted / scales)
    except np.linalg.LinAlgError:
        return None, np.inf
    values = scaled / scales
    if (values <= 0).any():
        return None, np.inf
    return values, float(max(total - 2 * values @ wanted + values @ own @ values, 0.0))

"""Least squares with coefficients of at least 0, and as few of them as explain the measurements."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import combinations

import numpy as np

_ROUNDS = 4
_TOLERANCE = 0.005
"""Another column must reduce the residual by at least this share."""
_WORST = 0.5
"""In the reported mean, larger relative residuals count as this much."""
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
    possible = [entry for size in range(1, len(right) + 1) for entry in _solved(gram, right, total, size)]
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
    gram: np.ndarray, right: np.ndarray, total: float, size: int
) -> Iterator[tuple[float, tuple[int, ...], np.ndarray]]:
    """Of each set of `size` columns whose coefficients are all above 0: the squared error, the set, and these."""
    sets = np.array(list(combinations(np.flatnonzero(gram.diagonal() > 0), size)), int).reshape(-1, size)
    own, wanted, scales = gram[sets[:, :, None], sets[:, None, :]], right[sets], np.sqrt(gram.diagonal())[sets]
    # The addend keeps matrices of columns that are alike from being singular.
    matrices = own / (scales[:, :, None] * scales[:, None, :]) + 1e-10 * np.eye(size)
    values = np.linalg.solve(matrices, (wanted / scales)[:, :, None])[:, :, 0] / scales
    squares = np.einsum("si,sij,sj->s", values, own, values)
    errors = np.maximum(total - 2 * (values * wanted).sum(axis=1) + squares, 0.0)
    for i in np.flatnonzero(~(values <= 0).any(axis=1)):
        yield float(errors[i]), tuple(sets[i].tolist()), values[i]

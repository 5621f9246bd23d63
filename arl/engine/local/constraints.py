"""Constraints: where each constrained sequence stands in its grammar, and the tokens that a step may sample.

Constraint.fill --> Allowed (one mask for the rows of a step) --> sampler --> Allowed.note, Constraint.accept
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from arl.api.kept_ids import SetTable


class Constraint:
    """One sequence's place in its grammar."""

    def __init__(self, compiled: Any, *, has_end: bool) -> None:
        """has_end: the model has a token that ends a response; without one, the grammar's end is the response's."""
        import xgrammar

        self._matcher = xgrammar.GrammarMatcher(compiled, terminate_without_stop_token=not has_end)

    @property
    def has_ended(self) -> bool:
        """Nothing can follow."""
        return self._matcher.is_terminated()

    def fill(self, bitmask: np.ndarray, row: int) -> bool:
        """Write which tokens may come next; False if all may."""
        return self._matcher.fill_next_token_bitmask(bitmask, row)

    def accept(self, token: int) -> bool:
        """Go on behind a token; False if the grammar does not allow it there."""
        return self._matcher.accept_token(token)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Allowed:
    """The ids that the constrained rows of a step may sample."""

    rows: Sequence[int]
    """Their places among the step's rows."""
    bits: np.ndarray
    """uint8[rows, bytes]: a bit for each token, the lowest first."""
    mask: torch.Tensor
    """bool[rows, V], where the logits are."""
    is_whole: Sequence[bool]
    """Whether all tokens are allowed."""
    is_alive: Sequence[bool]
    """Whether any token is."""

    @classmethod
    def of(cls, constraints: Sequence[Constraint | None], size: int, device: Any) -> Allowed:
        """For rows of which at least one has a constraint. size: the model's vocabulary."""
        rows = [row for row, constraint in enumerate(constraints) if constraint is not None]
        bitmask = np.full((len(rows), -(-size // 32)), -1, np.int32)
        is_whole = [not c.fill(bitmask, i) for i, c in enumerate(c for c in constraints if c is not None)]
        bits = bitmask.view(np.uint8)
        mask = np.unpackbits(bits, axis=1, count=size, bitorder="little").view(np.bool_)
        is_alive = [bool(of_row.any()) for of_row in mask]
        return cls(rows=rows, bits=bits, mask=torch.from_numpy(mask).to(device), is_whole=is_whole, is_alive=is_alive)

    def only(self, logits: torch.Tensor) -> torch.Tensor:
        """Logits [B, V] with minus infinity for what is not allowed. A row in which nothing is keeps its logits."""
        excluded = torch.zeros_like(logits, dtype=torch.bool)
        excluded[self.rows] = ~self.mask & self.mask.any(1, keepdim=True)
        return logits.masked_fill(excluded, -torch.inf)

    def note(self, place: int, sets: SetTable) -> None:
        """Add what the row at this place may sample to its sequence's table."""
        key = self.bits[place].tobytes()
        if self.is_whole[place]:
            sets.add_free()
        elif sets.knows(key):
            sets.add(key)
        else:
            sets.add(key, self.mask[place].nonzero()[:, 0].int().cpu().numpy())

"""A step with images: what its placeholders stand for, and where each of its tokens is turned to."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import torch

from arl.engine.local.runner import StepInput
from arl.engine.local.sequences import StepPlan
from arl.engine.local.tower import Tower, shown_of


def seen_by(plan: StepPlan, tower: Tower) -> StepInput:
    """The plan's input, with the images of its rows. Computes those that the tower does not know yet."""
    if not any(row.view for row in plan.rows):
        return plan.input
    ids = list(plan.input.token_ids)
    rotary = np.tile(np.array(plan.input.positions, np.int64), (3, 1))
    parts: list[tuple[int, torch.Tensor]] = []
    start = 0
    for row, length in zip(plan.rows, plan.lengths, strict=True):
        if (view := row.view) is not None:
            known, tokens = row.num_computed, slice(start, start + length)
            if known >= view.end:
                rotary[:, tokens] += view.shift
            else:
                rotary[:, tokens] = view.positions(known, known + length)
            for image, index, first, last in view.parts(known, known + length):
                place = start + index - known
                ids[place : place + last - first] = [view.placeholder] * (last - first)
                parts.append((place, tower.vectors(image, row.adapter)[:, first:last]))
        start += length
    return replace(plan.input, token_ids=ids, rotary=rotary if parts else rotary[0], shown=shown_of(parts))

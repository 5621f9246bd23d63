"""The CPU threads of the model: each computes some rows of a step, or all of them share each operation.

Threads that share an operation wait for each other at its end, a hundred times in a step, and spin meanwhile: beside
other programs that takes many times as long. Threads that have rows of their own meet once in a step.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor, wait

import numpy as np
import torch

TOKENS_FOR_A_THREAD = 24
"""With fewer tokens for each, another thread costs more than it gains."""


class ModelThreads:
    """Belongs to the model thread, which is one of them."""

    def __init__(self, num_threads: int) -> None:
        self._num_threads = num_threads
        self._others: ThreadPoolExecutor | None = None
        if num_threads > 1:
            self._others = ThreadPoolExecutor(num_threads - 1, "arl-rows", lambda: torch.set_num_threads(1))

    def close(self) -> None:
        if self._others is not None:
            self._others.shutdown()

    def cuts(self, lengths: Sequence[int]) -> list[int]:
        """Where to cut rows of so many tokens each, so that each thread has about as many; empty if that cannot be."""
        total = sum(lengths)
        num_parts = min(self._num_threads, total // TOKENS_FOR_A_THREAD)
        if num_parts < 2:
            return []
        ends = np.cumsum(lengths)
        cuts = (np.searchsorted(ends, total * np.arange(1, num_parts) / num_parts) + 1).tolist()
        shares = np.diff([0, *ends[np.array(cuts) - 1], total])
        return cuts if shares.min() > 0 and shares.max() <= 1.5 * total / num_parts else []

    def share_operations(self, is_worth_it: bool) -> None:
        """Let all threads share each of the next operations, or leave them to this one."""
        _set_threads(self._num_threads if is_worth_it else 1)

    def run(self, parts: Sequence[Callable[[], torch.Tensor]]) -> list[torch.Tensor]:
        """Compute each part on a thread of its own. Raises a part's error once all have ended."""
        if len(parts) == 1 or self._others is None:
            return [part() for part in parts]
        _set_threads(1)
        others = [self._others.submit(torch.inference_mode()(part)) for part in parts[1:]]
        try:
            first = parts[0]()
        finally:
            wait(others)
        return [first, *(other.result() for other in others)]


def _set_threads(num_threads: int) -> None:
    if num_threads != torch.get_num_threads():
        torch.set_num_threads(num_threads)

"""GeneratedTokens: how many tokens servers say that they have generated, whether an answer brought them or not."""

from __future__ import annotations

from arl.api.events import ServerWorked


class GeneratedTokens:
    """Sums what embedded servers tell whenever they are paused. Others tell nothing."""

    def __init__(self) -> None:
        self._total = 0
        self._told: dict[str, int] = {}
        """Address -> the tokens generated since that server's process began."""

    @property
    def total(self) -> int | None:
        """Since the first time that each server told; None before any did."""
        return self._total if self._told else None

    def note(self, worked: ServerWorked) -> None:
        """A server that tells less than before is a new process. What the old one did after its last pause is lost."""
        told = sum(int(sums.decoded + sums.begun) for sums in worked.iterations)
        before = self._told.get(worked.server, told)
        self._total += told - before if told >= before else told
        self._told[worked.server] = told

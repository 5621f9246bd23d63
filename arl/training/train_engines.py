"""The train engines of a run, by the roles of their models: what is done with all of them at once."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

from arl.api.engine import Saving, TrainEngine
from arl.api.errors import CheckpointError
from arl.api.weight_prints import TensorPrint

BESIDE = ("critic", "reward_model")
"""The roles of models that are trained beside the policy; each is a section of `algorithm`, too."""


class TrainEngines:
    """The policy's engine, and those of the models beside it. A checkpoint holds either the policy's own files, or a
    directory for each role."""

    def __init__(self, policy: TrainEngine, beside: Mapping[str, TrainEngine | None]) -> None:
        """beside: role -> its engine, None if the run has none."""
        self._beside = {role: engine for role, engine in beside.items() if engine is not None}
        self.by_role: Mapping[str, TrainEngine] = {"policy": policy, **self._beside}

    def offload(self) -> None:
        """Leave the device; see TrainEngine."""
        for engine in self.by_role.values():
            engine.offload()

    def onload(self) -> None:
        for engine in self.by_role.values():
            engine.onload()

    def fingerprint(self) -> dict[str, TensorPrint]:
        """The fingerprints of all trained tensors; those of models beside the policy are named `ROLE.NAME`."""
        prints = dict(self.by_role["policy"].fingerprint())
        for role, engine in self._beside.items():
            prints |= {f"{role}.{name}": one for name, one in engine.fingerprint().items()}
        return prints

    def save(self, directory: Path) -> Saving:
        if not self._beside:
            return self.by_role["policy"].save(directory)
        directory.mkdir(parents=True, exist_ok=True)
        return _Savings(tuple(engine.save(directory / role) for role, engine in self.by_role.items()))

    def load(self, directory: Path) -> None:
        """Raises CheckpointError, which names the mismatch."""
        for role in BESIDE:
            was_there = (directory / role).is_dir()
            if was_there != (role in self._beside):
                wrote, has = ("with", "none") if was_there else ("without", "one")
                raise CheckpointError(
                    f"{directory} was written {wrote} a {role.replace('_', ' ')}, and this run has {has}: set "
                    f"algorithm.{role} as it was, or use another run_dir"
                )
        for role, engine in self.by_role.items():
            engine.load(directory / role if self._beside else directory)

    def close(self) -> None:
        """Close all, whichever fails."""
        with ExitStack() as stack:
            for engine in reversed([*self.by_role.values()]):
                stack.callback(engine.close)


@dataclass(frozen=True, slots=True)
class _Savings:
    parts: tuple[Saving, ...]

    def wait(self) -> None:
        with ExitStack() as stack:
            for saving in reversed(self.parts):
                stack.callback(saving.wait)

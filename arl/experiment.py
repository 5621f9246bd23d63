"""Experiment: what a script trains, on what, and how; `arl try` and `arl eval` run the same agent without training.

    experiment = Experiment(config=MyConfig, prepare=prepare)

    if __name__ == "__main__":
        experiment.main()
"""

from __future__ import annotations

import inspect
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Generic, TypeVar

from arl.api.config import Config
from arl.api.workflow import RolloutWorkflow
from arl.rollout import Dataset

ConfigT = TypeVar("ConfigT", bound=Config)


@dataclass(frozen=True, slots=True, kw_only=True)
class Setup:
    """What one run of an experiment works with. model: a Hugging Face directory or name, in the place of config.model;
    the others are what `launch` takes."""

    model: str
    workflow: RolloutWorkflow
    dataset: Dataset
    eval_dataset: Dataset | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Experiment(Generic[ConfigT]):
    """config: the settings' class. prepare: makes everything from the settings; sync or async, and may take minutes
    (building and fine-tuning a tiny model, say)."""

    config: type[ConfigT]
    prepare: Callable[[ConfigT], Setup | Awaitable[Setup]]

    async def aprepare(self, config: ConfigT) -> tuple[ConfigT, Setup]:
        """The settings with the prepared model in them, and what was prepared."""
        setup = self.prepare(config)
        if inspect.isawaitable(setup):
            setup = await setup
        return config.model_copy(update={"model": setup.model}), setup

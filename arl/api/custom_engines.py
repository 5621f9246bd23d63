"""Engines of a user's own, for `launch`: a model of another kind, with its own sampler, training and transport."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Protocol

from arl.api.engine import InferenceEngine, WeightTransport
from arl.api.errors import ConfigError
from arl.api.settings.engines import TrainConfig
from arl.api.settings.run import Config
from arl.api.train_engine import Head, TrainEngine


class TrainEngineLoader(Protocol):
    """Loads a train engine; `arl.load_train_engine` is one."""

    def __call__(self, model: str, settings: TrainConfig, /, *, seed: int, head: Head) -> TrainEngine:
        """model, settings, seed: the run's. head: "value" for the critic that algorithm.critic asks for.

        An engine refuses, with an error, a setting or head that it cannot honour.
        """
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class OwnEngines:
    """Take the places of the engines that `engine`, `train` and `weights` name. The run closes all three at its end.

    docs/extending.md says what each must promise.
    """

    inference: InferenceEngine
    """What episodes sample from."""
    train: TrainEngineLoader
    """Called in the trainer's process, again after each loss of it: so it must pickle, as a class or function of a
    module, or of the script, does."""
    transport: WeightTransport
    """Brings weights to `inference`. Its snapshots come from the trainer's process: `write` alone works there."""

    def check(self, config: Config) -> None:
        """Raise ConfigError for settings of the engines that these replace."""
        for wrong in self._unused(config):
            raise ConfigError(f"{wrong}, but the engines are launch's `engines`; leave it out")

    def _unused(self, config: Config) -> Iterator[str]:
        fields = type(config).model_fields
        for name in ("engine", "weights"):
            if getattr(config, name) != fields[name].get_default(call_default_factory=True):
                yield f"{name} is set"
        if config.train.is_over_ray:
            yield f"train.num_ranks is {config.train.num_ranks}, which arl's own train engine alone has"
        if config.record:
            yield "record is set, and `arl replay` could not load the train engine"

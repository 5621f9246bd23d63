"""The contracts of a model of another kind, and what helps to keep them. docs/extending.md is the guide.

`OwnEngines` brings a sampler, a train engine and a weight transport of your own to `arl.launch`. Loads each module only
when it is needed.
"""

from typing import TYPE_CHECKING

from arl.runtime import lazy_names

if TYPE_CHECKING:
    from arl.algorithm.losses.reinforcement import PolicyLoss
    from arl.algorithm.trained_tokens import LossReport, packed_tokens, unpacked
    from arl.api.engine import InferenceEngine, UpdateStats, WeightServer, WeightTransport, WeightUpdate
    from arl.api.errors import CheckpointError, ConfigError, EngineClosedError, ModelError, TransportError
    from arl.api.settings.run import OwnEngines, TrainEngineLoader
    from arl.api.train_engine import (
        Head,
        ModelLimits,
        Output,
        PackedTokens,
        Saving,
        Snapshot,
        TensorPrint,
        TokenLoss,
        TokenLosses,
        TokenOutputs,
        TrainEngine,
        TrainSequence,
        WeightSource,
    )
    from arl.api.types import Group, ModelResponse
    from arl.training.learner import Learner

_HOMES = {
    "arl.algorithm.losses.reinforcement": "PolicyLoss",
    "arl.algorithm.trained_tokens": "LossReport packed_tokens unpacked",
    "arl.api.engine": "InferenceEngine UpdateStats WeightServer WeightTransport WeightUpdate",
    "arl.api.errors": "CheckpointError ConfigError EngineClosedError ModelError TransportError",
    "arl.api.settings.run": "OwnEngines TrainEngineLoader",
    "arl.api.types": "Group ModelResponse",
    "arl.api.train_engine": "Head ModelLimits Output PackedTokens Saving Snapshot TensorPrint TokenLoss TokenLosses "
    "TokenOutputs TrainEngine TrainSequence WeightSource",
    "arl.training.learner": "Learner",
}

__getattr__, __dir__ = lazy_names(__name__, _HOMES)
__all__ = sorted(" ".join(_HOMES.values()).split())  # pyright: ignore[reportUnsupportedDunderAll]

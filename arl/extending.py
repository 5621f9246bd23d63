"""The contracts of a model of another kind, and what helps to keep them. docs/extending.md is the guide.

`OwnEngines` brings a sampler, a train engine and a weight transport of your own to `arl.launch`. Loads each module only
when it is needed.
"""

from typing import TYPE_CHECKING

from arl.lazy import lazy_names

if TYPE_CHECKING:
    from arl.algorithm.losses.reinforcement import PolicyLoss
    from arl.algorithm.trained_tokens import LossReport, packed_tokens, unpacked
    from arl.api.engine import (
        Head,
        InferenceEngine,
        ModelLimits,
        Output,
        PackedTokens,
        Saving,
        Snapshot,
        TokenLoss,
        TokenLosses,
        TokenOutputs,
        TrainEngine,
        UpdateStats,
        WeightServer,
        WeightSource,
        WeightTransport,
        WeightUpdate,
    )
    from arl.api.errors import CheckpointError, ConfigError, EngineClosedError, ModelError, TransportError
    from arl.api.own_engines import OwnEngines, TrainEngineLoader
    from arl.api.train_sequence import TrainSequence
    from arl.api.types import Group, ModelResponse
    from arl.api.weight_prints import TensorPrint
    from arl.training.learner import Learner

_HOMES = {
    "arl.algorithm.losses.reinforcement": "PolicyLoss",
    "arl.algorithm.trained_tokens": "LossReport packed_tokens unpacked",
    "arl.api.engine": "Head InferenceEngine ModelLimits Output PackedTokens Saving Snapshot TokenLoss TokenLosses "
    "TokenOutputs TrainEngine UpdateStats WeightServer WeightSource WeightTransport WeightUpdate",
    "arl.api.errors": "CheckpointError ConfigError EngineClosedError ModelError TransportError",
    "arl.api.own_engines": "OwnEngines TrainEngineLoader",
    "arl.api.train_sequence": "TrainSequence",
    "arl.api.types": "Group ModelResponse",
    "arl.api.weight_prints": "TensorPrint",
    "arl.training.learner": "Learner",
}

__getattr__, __dir__ = lazy_names(__name__, _HOMES)
__all__ = sorted(" ".join(_HOMES.values()).split())  # pyright: ignore[reportUnsupportedDunderAll]

"""arl's contracts: records, protocols, configuration and errors. Imports nothing heavy, and nothing else of arl."""

from arl.api.config import Config
from arl.api.engine import (
    DiskWeights,
    InferenceEngine,
    PackedTokens,
    PublishStats,
    TokenLoss,
    TokenLosses,
    TrainEngine,
    UpdateStats,
    WeightTransport,
    WeightUpdate,
)
from arl.api.errors import ArlError
from arl.api.scripted import ScriptedEngine, ScriptedTrainEngine
from arl.api.types import (
    NOT_SAMPLED,
    Example,
    Group,
    ModelRequest,
    ModelResponse,
    SamplingParams,
    StepStats,
    TrainSequence,
    Trajectory,
    new_id,
)
from arl.api.workflow import RolloutWorkflow

__all__ = [
    "NOT_SAMPLED",
    "ArlError",
    "Config",
    "DiskWeights",
    "Example",
    "Group",
    "InferenceEngine",
    "ModelRequest",
    "ModelResponse",
    "PackedTokens",
    "PublishStats",
    "RolloutWorkflow",
    "SamplingParams",
    "ScriptedEngine",
    "ScriptedTrainEngine",
    "StepStats",
    "TokenLoss",
    "TokenLosses",
    "TrainEngine",
    "TrainSequence",
    "Trajectory",
    "UpdateStats",
    "WeightTransport",
    "WeightUpdate",
    "new_id",
]

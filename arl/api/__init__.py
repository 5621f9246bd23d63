"""arl's contracts: records, protocols, configuration and errors. Imports nothing heavy, and nothing else of arl."""

from arl.api.config import Config
from arl.api.engine import (
    DiskWeights,
    InferenceEngine,
    PackedTokens,
    PublishStats,
    Saving,
    Snapshot,
    TensorSpec,
    TokenLoss,
    TokenLosses,
    TrainEngine,
    UpdateStats,
    WeightGroup,
    WeightServer,
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
    "Saving",
    "ScriptedEngine",
    "ScriptedTrainEngine",
    "Snapshot",
    "StepStats",
    "TensorSpec",
    "TokenLoss",
    "TokenLosses",
    "TrainEngine",
    "TrainSequence",
    "Trajectory",
    "UpdateStats",
    "WeightGroup",
    "WeightServer",
    "WeightTransport",
    "WeightUpdate",
    "new_id",
]

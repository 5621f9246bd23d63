"""Contracts: records, protocols, settings and errors, and the scripted engines that tests use.

Everything else in arl imports from here; this imports nothing of arl, and no torch. A change here is one for all wings.
"""

from arl.api.algorithm import AlgorithmConfig, preset
from arl.api.config import Config
from arl.api.engine import (
    DiskWeights,
    Head,
    InferenceEngine,
    ModelLimits,
    Output,
    PackedTokens,
    PublishStats,
    Sampler,
    Saving,
    Snapshot,
    TensorSpec,
    TokenLoss,
    TokenLosses,
    TokenOutputs,
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
    TurnSpan,
    new_id,
)
from arl.api.workflow import Curriculum, ExampleRecord, RolloutWorkflow

__all__ = [
    "NOT_SAMPLED",
    "AlgorithmConfig",
    "ArlError",
    "Config",
    "Curriculum",
    "DiskWeights",
    "Example",
    "ExampleRecord",
    "Group",
    "Head",
    "InferenceEngine",
    "ModelLimits",
    "ModelRequest",
    "ModelResponse",
    "Output",
    "PackedTokens",
    "PublishStats",
    "RolloutWorkflow",
    "Sampler",
    "SamplingParams",
    "Saving",
    "ScriptedEngine",
    "ScriptedTrainEngine",
    "Snapshot",
    "StepStats",
    "TensorSpec",
    "TokenLoss",
    "TokenLosses",
    "TokenOutputs",
    "TrainEngine",
    "TrainSequence",
    "Trajectory",
    "TurnSpan",
    "UpdateStats",
    "WeightGroup",
    "WeightServer",
    "WeightTransport",
    "WeightUpdate",
    "new_id",
    "preset",
]

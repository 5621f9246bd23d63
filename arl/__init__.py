"""arl trains language-model agents by fully asynchronous reinforcement learning."""

from arl.api import AlgorithmConfig, Config, RolloutWorkflow, SamplingParams, ScriptedEngine, Trajectory, preset

__all__ = [
    "AlgorithmConfig",
    "Config",
    "RolloutWorkflow",
    "SamplingParams",
    "ScriptedEngine",
    "Trajectory",
    "preset",
]

"""arl trains language-model agents by fully asynchronous reinforcement learning."""

from arl.api import Config, RolloutWorkflow, SamplingParams, ScriptedEngine, Trajectory

__all__ = ["Config", "RolloutWorkflow", "SamplingParams", "ScriptedEngine", "Trajectory"]

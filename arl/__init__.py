"""arl trains language-model agents by fully asynchronous reinforcement learning.

This is all that users import, with `arl.rewards` and `arl.sandbox`; docs/api.md has a line for each name. A name loads
its module when it is first used, so `import arl` is quick and loads no torch.
"""

from typing import TYPE_CHECKING

from arl.runtime import lazy_names

if TYPE_CHECKING:
    from arl import extending, rewards, sandbox
    from arl.api.engine import Sampler
    from arl.api.errors import ArlError, DatasetError, ImageError, PromptTooLongError, ToolError
    from arl.api.fakes import ScriptedEngine
    from arl.api.grammar import Grammar
    from arl.api.images import Image
    from arl.api.settings.algorithm import preset
    from arl.api.settings.engines import OptimizerConfig, TrainConfig
    from arl.api.settings.run import Config
    from arl.api.tracking import TrackedRun, TrackedTrajectory, Tracker
    from arl.api.types import Evaluation, Example, ModelRequest, SamplingParams, StepStats, Trajectory
    from arl.api.version import __version__
    from arl.api.workflow import ExampleRecord, RolloutWorkflow, Shared, Task, TaskRecord
    from arl.data.loading import load_dataset, load_splits
    from arl.endpoint.proxy import OpenAIProxy
    from arl.endpoint.sdk_workflow import Command, SDKWorkflow
    from arl.endpoint.served_workflow import ServedWorkflow
    from arl.endpoint.verifiers_workflow import VerifiersWorkflow
    from arl.engine.model_files import load_tokenizer
    from arl.engine.tiny import TinyShape, TinyVision, tiny_tokenizer, write_tiny_model, write_tiny_vision_model
    from arl.observe.events.run_record import read_run
    from arl.observe.view.showing import show
    from arl.run import finetuning
    from arl.run.dry_run import dry_run
    from arl.run.experiment import Experiment, ExperimentConfig, Setup
    from arl.run.launch import launch
    from arl.run.learner import load_train_engine
    from arl.run.replay import replay
    from arl.run.script import load_config, run_script
    from arl.run.servers import serve
    from arl.run.train import atrain, train
    from arl.training.display import progress
    from arl.training.run_result import how_it_ended
    from arl.workflow.agent import AgentWorkflow, MultiTurnWorkflow, SingleTurnWorkflow
    from arl.workflow.call_formats import parse_tool_calls
    from arl.workflow.compacting import CompactingConversation, Compaction
    from arl.workflow.conversation import Conversation
    from arl.workflow.harbor_task import harbor_tasks
    from arl.workflow.harbor_workflow import HarborWorkflow
    from arl.workflow.mcp_tools import MCPTools
    from arl.workflow.openenv_workflow import OpenEnvWorkflow
    from arl.workflow.teachers import DistillationWorkflow, RewardModelClient, TeacherClient
    from arl.workflow.team import Member, Team, TeamSettings
    from arl.workflow.tool_agent import SubAgent, SubAgents, ToolAgentWorkflow
    from arl.workflow.tools import Tool, ToolLimits, acall_tools

_HOMES = {
    "arl.api.settings.algorithm": "preset",
    "arl.api.settings.run": "Config",
    "arl.api.engine": "Sampler",
    "arl.api.settings.engines": "OptimizerConfig TrainConfig",
    "arl.api.errors": "ArlError DatasetError ImageError PromptTooLongError ToolError",
    "arl.api.grammar": "Grammar",
    "arl.api.images": "Image",
    "arl.api.version": "__version__",
    "arl.api.fakes": "ScriptedEngine",
    "arl.api.tracking": "TrackedRun TrackedTrajectory Tracker",
    "arl.api.types": "Evaluation Example ModelRequest SamplingParams StepStats Trajectory",
    "arl.api.workflow": "ExampleRecord RolloutWorkflow Shared Task TaskRecord",
    "arl.run.launch": "launch",
    "arl.run.script": "load_config run_script",
    "arl.data.loading": "load_dataset load_splits",
    "arl.engine.model_files": "load_tokenizer",
    "arl.engine.tiny": "TinyShape TinyVision tiny_tokenizer write_tiny_model write_tiny_vision_model",
    "arl.observe.events.run_record": "read_run",
    "arl.run.experiment": "Experiment ExperimentConfig Setup",
    "arl.extending": "",
    "arl.run.finetuning": "",
    "arl.run.dry_run": "dry_run",
    "arl.run.replay": "replay",
    "arl.rewards": "",
    "arl.sandbox": "",
    "arl.run.servers": "serve",
    "arl.run.train": "atrain train",
    "arl.training.display": "progress",
    "arl.run.learner": "load_train_engine",
    "arl.training.run_result": "how_it_ended",
    "arl.observe.view.showing": "show",
    "arl.workflow.agent": "AgentWorkflow MultiTurnWorkflow SingleTurnWorkflow",
    "arl.workflow.call_formats": "parse_tool_calls",
    "arl.workflow.compacting": "CompactingConversation Compaction",
    "arl.workflow.conversation": "Conversation",
    "arl.workflow.harbor_task": "harbor_tasks",
    "arl.workflow.harbor_workflow": "HarborWorkflow",
    "arl.workflow.mcp_tools": "MCPTools",
    "arl.workflow.openenv_workflow": "OpenEnvWorkflow",
    "arl.endpoint.proxy": "OpenAIProxy",
    "arl.endpoint.sdk_workflow": "Command SDKWorkflow",
    "arl.endpoint.served_workflow": "ServedWorkflow",
    "arl.workflow.teachers": "DistillationWorkflow RewardModelClient TeacherClient",
    "arl.workflow.team": "Member Team TeamSettings",
    "arl.workflow.tool_agent": "SubAgent SubAgents ToolAgentWorkflow",
    "arl.workflow.tools": "Tool ToolLimits acall_tools",
    "arl.endpoint.verifiers_workflow": "VerifiersWorkflow",
}
"""Where each name is loaded from when it is first used. The imports above say the same to editors; a test compares."""

__getattr__, __dir__ = lazy_names(__name__, _HOMES)
__all__ = sorted(name for name in __dir__() if not name.startswith("__"))  # pyright: ignore[reportUnsupportedDunderAll]

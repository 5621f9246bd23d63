"""Workflows: agents that run an episode and return what to train on.

| module | what lives there |
|---|---|
| agent | AgentWorkflow, SingleTurnWorkflow, MultiTurnWorkflow |
| tool_agent, tools, tool_schema, call_formats, mcp_tools | agents that call tools, and the tools |
| team | several agents in one episode |
| conversation, dialogue, chat_template | transcripts, exact to the token, and the trajectories made of them |
| openenv_workflow, harbor | environments of OpenEnv; tasks in Harbor's format |
| teachers | distillation, and clients of teachers and reward models |

Users import these names from `arl`. This package may import arl.api, arl.runtime, arl.data, arl.sandbox and
arl.rewards, but never arl.engine (a workflow sees the model only as a Sampler) nor arl.endpoint, which stands on it.
"""

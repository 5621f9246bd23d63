"""Workflows: agents that run an episode and return what to train on.

| module | what lives there |
|---|---|
| agent | AgentWorkflow, SingleTurnWorkflow, MultiTurnWorkflow; the loop of an agent with tools |
| tool_agent, tools, tool_schema, mcp_tools | agents that call tools and other agents, and the tools |
| call_formats, call_values | how models write calls |
| team | several agents in one episode |
| conversation, compacting, dialogue, chat_template, messages, images | transcripts, exact to the token |
| openenv_workflow, harbor_workflow, harbor_task | environments of OpenEnv; tasks in Harbor's format |
| teachers | distillation, and clients of teachers and reward models |

Users import these names from `arl`. A workflow sees the model only as a Sampler.
"""

"""Environments of OpenEnv: servers that are reset and stepped.

| module | holds |
|---|---|
| openenv_client | a session with a server, over its WebSocket |
| openenv_play | an episode: steps, their rewards, tools |
| openenv_workflow | episodes in these environments: by text, or by tools |
"""

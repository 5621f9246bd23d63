"""Harbor's tasks: directories with an instruction, an environment and tests, as agents in terminals get them.

| module | holds |
|---|---|
| harbor_task | reads a task's directory; a dataset of tasks |
| dockerfile | what a task's Dockerfile asks for, as far as a sandbox without images can give it |
| harbor_workflow | plays a task in a terminal and rewards it by its tests |
"""

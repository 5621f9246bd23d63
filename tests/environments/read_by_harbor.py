"""What Harbor itself reads of tasks: `read_by_harbor.py DIRECTORY...` prints a line of JSON for each, as arl's rows."""

import json
import sys

from harbor.models.task.task import Task

for directory in sys.argv[1:]:
    task = Task(directory)
    config = task.config
    said = {
        "instruction": task.instruction,
        "agent_timeout_s": config.agent.timeout_sec,
        "verifier_timeout_s": config.verifier.timeout_sec,
        "verifier_env": config.verifier.env,
        "memory_mb": config.environment.memory_mb,
        "storage_mb": config.environment.storage_mb,
        "docker_image": config.environment.docker_image,
        "workdir": config.environment.workdir,
        "allows_network": config.environment.network_mode.value == "public",
        "metadata": config.metadata,
    }
    print(json.dumps(said))  # noqa: T201

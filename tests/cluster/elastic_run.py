"""A training over the nodes of a cluster, for a test to take nodes from: python elastic_run.py CONFIG PACE

It says how many ranks trained each step. PACE/N appears when step N may begin.
"""

import asyncio
import sys
from pathlib import Path

from one_turn import OneTurn

from arl.api.settings.run import Config
from arl.run.launch import launch
from arl.run.script import run_script


async def main(config: Config) -> None:
    pace = Path(sys.argv[-1])
    workflow = OneTurn(lambda first: {"reward": float(first % 2)})
    async with launch(config, workflow=workflow, dataset=[{"number": n} for n in range(200)]) as trainer:
        async for step in trainer:
            sys.stdout.write(f"trained {step.version} on {trainer.learner.num_ranks} ranks\n")
            sys.stdout.flush()
            while not (pace / str(step.version + 1)).exists():  # noqa: ASYNC110 - another process makes it
                await asyncio.sleep(0.05)


if __name__ == "__main__":
    run_script(main, Config, ["--config", sys.argv[1]])

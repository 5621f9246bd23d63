"""A life on the real engines, for tests that kill it: a few examples, so that epochs pass."""

import sys

from agent_script import SayDigits

from arl.api.config import Config
from arl.assembly import launch
from arl.cli import run

NUM_EXAMPLES = 9


async def main(config: Config) -> None:
    async with launch(config, workflow=SayDigits(), dataset=[{"number": n} for n in range(NUM_EXAMPLES)]) as trainer:
        async for step in trainer:
            sys.stdout.write(f"trained {step.version}\n")
            sys.stdout.flush()


if __name__ == "__main__":
    run(main, Config)

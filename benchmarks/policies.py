"""One policy for two roles against a policy for each: what both roles learn of examples/agents/two_policies.py.

    python benchmarks/policies.py --seeds 0 1 2

Trains each arm with each seed, with runs in a temporary directory, and prints each role's mean held-out reward before
and after. All arms see the same prompts, rewards and numbers of groups and steps.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path

EXAMPLE = Path(__file__).parents[1] / "examples" / "agents" / "two_policies.py"
APART = ["--config", str(EXAMPLE.with_suffix(".yaml"))]
ADAPTERS = ["--weights.transport", "adapter", "--train.lora.rank", "8"]
ARMS = {
    "one policy": [],
    "own servers": APART,
    "adapters": [*APART, *ADAPTERS],
    "one policy, warm": ["--warm_start"],
    "own servers, warm": [*APART, "--warm_start"],
    "one adapter, warm": [*ADAPTERS, "--warm_start"],
    "adapters, warm": [*APART, *ADAPTERS, "--warm_start"],
}
"""Adapters share servers. Warm: from a model that has learned to say letters and digits, not from random weights."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--arms", nargs="+", choices=ARMS, default=["one policy", "own servers"])
    options = parser.parse_args()
    sys.stdout.write("| arm | seed | author | critic | training, s |\n|---|---|---|---|---|\n")
    with tempfile.TemporaryDirectory(prefix="arl-policies-") as scratch:
        for arm in options.arms:
            for seed in options.seeds:
                sys.stdout.write(measured(arm, seed, Path(scratch) / f"{arm} {seed}".replace(" ", "-")))
                sys.stdout.flush()


def measured(arm: str, seed: int, run_dir: Path) -> str:
    """A row of the table."""
    flags = ["--seed", str(seed), "--run_dir", str(run_dir), "--no-log.console"]
    subprocess.run([sys.executable, str(EXAMPLE), *ARMS[arm], *flags], check=True, stdout=subprocess.DEVNULL)
    summary = json.loads((run_dir / "summary.json").read_text())
    roles = [
        " -> ".join(f"{summary[f'{role}_reward_per_episode_{when}']:.2f}" for when in ("before", "after"))
        for role in ("author", "critic")
    ]
    return f"| {arm} | {seed} | {roles[0]} | {roles[1]} | {summary['wall_s']:.0f} |\n"


if __name__ == "__main__":
    main()

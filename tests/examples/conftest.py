"""The examples are scripts beside each other: found as Python finds them when one is run."""

import sys
from pathlib import Path

for directory in ("agents", "flow", "health"):
    sys.path.insert(0, str(Path(__file__).parents[2] / "examples" / directory))

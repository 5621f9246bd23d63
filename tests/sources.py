"""The sources of arl, for tests of the code itself: they share the syntax trees, which take seconds to make."""

import ast
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parents[1]
SOURCES = sorted((ROOT / "arl").rglob("*.py"))


@cache
def trees() -> dict[Path, ast.Module]:
    return {source: ast.parse(source.read_text()) for source in SOURCES}

"""`arl algorithms`: the presets, each with its paper and what it is for."""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from rich.console import Console
from rich.table import Table

from arl.api.presets import PRESETS


def main(argv: Sequence[str]) -> None:
    """argv: what follows `arl algorithms`."""
    argparse.ArgumentParser(prog="arl algorithms", description="List the algorithms.").parse_args(argv)
    table = Table(box=None, header_style="bold")
    table.add_column("name", no_wrap=True)
    table.add_column("paper", no_wrap=True)
    table.add_column("what it is for")
    for name, about in PRESETS.items():
        table.add_row(name, about.paper, about.about)
    Console().print(table)

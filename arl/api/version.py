"""The version of arl, its name on package indexes, and how to install one of its extras."""

from __future__ import annotations

import json
import shlex
from importlib import metadata
from pathlib import Path
from typing import Any

__version__ = "0.1.0"
DISTRIBUTION = "arl-train"
"""The name on the package index, where the package called arl is another project."""


def install_command(extra: str) -> str:
    """The shell command that installs an extra beside this arl, from where this arl came."""
    checkout = Path(__file__).parents[2]
    if (checkout / "pyproject.toml").is_file():
        return f"pip install -e {shlex.quote(f'{checkout}[{extra}]')}"
    try:  # where the package was installed from, by PEP 610; nothing if it came from an index
        origin = json.loads(metadata.distribution(DISTRIBUTION).read_text("direct_url.json") or "{}")
    except metadata.PackageNotFoundError:
        origin = dict[str, Any]()
    named, url, vcs = f"{DISTRIBUTION}[{extra}]", origin.get("url", ""), origin.get("vcs_info")
    inside = f"#subdirectory={origin['subdirectory']}" if "subdirectory" in origin else ""
    if vcs:
        named = f"{named} @ {vcs['vcs']}+{url}@{vcs['commit_id']}{inside}"
    elif url and not url.startswith("file:"):  # pip finds the installed package of a wheel on this machine
        named = f"{named} @ {url}{inside}"
    return f"pip install {shlex.quote(named)}"

"""The interpreter that runs programs in a sandbox, and which of the host's directories it needs."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from arl.api.errors import SandboxError

_ASK = """
import json, site, sys
print(json.dumps([sys.prefix, sys.base_prefix, sys.exec_prefix, *site.getsitepackages()]))
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Interpreter:
    """path: of its executable. prefixes: directories that hold it, its library and its packages, outside of /usr.
    packages: directories of installed packages, kept from programs unless the interpreter was asked for."""

    path: str
    prefixes: tuple[str, ...]
    packages: tuple[str, ...]


async def interpreter_at(path: str | None) -> Interpreter:
    """The interpreter at `path`, with its packages; or else this one's, without any. Raises SandboxError."""
    return await asyncio.to_thread(_interpreter_at, path)


def _interpreter_at(path: str | None) -> Interpreter:
    # No symlink is resolved: the interpreter of a virtual environment is one.
    chosen = os.path.abspath(path or Path(sys.base_exec_prefix, "bin", "python{}.{}".format(*sys.version_info)))
    try:
        asking = subprocess.run([chosen, "-I", "-c", _ASK], capture_output=True, env={}, timeout=60, check=True)
        places: list[str] = json.loads(asking.stdout)
    except (OSError, ValueError, subprocess.SubprocessError) as error:
        raise SandboxError(f"the sandbox's Python, {chosen}, does not run: {error}") from error
    prefixes = sorted({os.path.realpath(prefix) for prefix in places[:3]})
    home = Path(os.path.expanduser("~"))  # as it is where nobody says which
    for prefix in prefixes:
        if home.is_relative_to(prefix):
            raise SandboxError(
                f"the sandbox's Python, {chosen}, is installed into {prefix}, which holds your home directory, and "
                f"programs would see all of it; pass python= one that has a directory of its own, or /usr/bin/python3"
            )
    return Interpreter(
        path=chosen,
        prefixes=tuple(prefix for prefix in prefixes if not Path(prefix).is_relative_to("/usr")),
        packages=() if path else tuple(filter(os.path.isdir, places[3:])),
    )

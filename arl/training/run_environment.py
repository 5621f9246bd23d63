"""How a run was started: config.yaml has its settings, environment.json a record of each start."""

from __future__ import annotations

import json
import logging
import os
import platform
import socket
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml

from arl.api.settings.run import Config
from arl.api.settings.sections import settings_without_masked
from arl.api.version import __version__
from arl.runtime.stopping import command_line
from arl.training.metrics_log import write_atomically

if TYPE_CHECKING:
    from arl.api.settings.finetuning import FinetuneConfig


from collections.abc import Callable, Iterator
from typing import cast

log = logging.getLogger(__name__)

SETTINGS, ENVIRONMENT = "config.yaml", "environment.json"
_PACKAGES = ("torch", "transformers", "tokenizers", "numpy", "peft", "ray", "sglang", "vllm")
_GIT_S = 5.0
"""Longest wait for git, which looks at every file of a repository."""
_BESIDE_YOURS = "config.resolved.yaml"
"""If you keep a config.yaml of your own in run_dir."""
_HEADER = """\
# The settings of this run, defaults included: give the file to --config. Keys and passwords are left out.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Start:
    """One start of a run, resumes included."""

    began: str
    """ISO 8601 in UTC."""
    command: str
    """The process's command line, without the values of keys and passwords."""
    directory: str
    """The working directory."""
    host: str
    platform: str
    python: str
    versions: Mapping[str, str]
    """Package -> version, of those that are installed here."""
    script: str | None
    """The main script; None in a notebook or a session."""
    commit: str | None
    """The commit of the git repository that contains the script, or else the working directory; None without one."""
    has_changes: bool | None
    """Whether tracked files of the repository differ from the commit."""
    model: str
    steps: int


@dataclass(frozen=True, slots=True, kw_only=True)
class _Commit:
    commit: str | None = None
    has_changes: bool | None = None


def record_start(config: Config | FinetuneConfig, steps: int) -> None:
    """Write the settings, and add this start, of a run of so many steps, to the record. Without room for them the log
    says so, and the run goes on."""
    run_dir = config.run_dir
    settings = yaml.safe_dump(settings_without_masked(config), sort_keys=False, allow_unicode=True, width=120)
    starts = [*starts_of(run_dir), asdict(_this_start(config.model, steps))]
    try:
        write_atomically(run_dir / (SETTINGS if _is_ours(run_dir / SETTINGS) else _BESIDE_YOURS), _HEADER + settings)
        write_atomically(run_dir / ENVIRONMENT, json.dumps(starts, indent=2) + "\n")
    except OSError as error:
        log.warning(
            "%s and %s, which say how the run was started, cannot be written to %s: %s",
            SETTINGS,
            ENVIRONMENT,
            run_dir,
            error.strerror or error,
        )


def _is_ours(path: Path) -> bool:
    return not path.exists() or path.read_text(errors="replace").startswith(_HEADER)


def starts_of(run_dir: Path) -> list[dict[str, Any]]:
    """The records of a run's starts, the last one last; none if there are none to read."""
    path = run_dir / ENVIRONMENT
    try:
        found = json.loads(path.read_text())
        return [dict(start) for start in found]
    except FileNotFoundError:
        return []
    except (OSError, ValueError, TypeError) as error:
        log.warning("%s is unreadable, so earlier starts are forgotten: %s", path, error)
        return []


def last_directory(run_dir: Path) -> str:
    """The working directory of the last start; this process's if nothing tells."""
    starts = starts_of(run_dir)
    return str(starts[-1].get("directory") or "") if starts else ""


def _this_start(model: str, steps: int) -> Start:
    main = getattr(sys.modules.get("__main__"), "__file__", None)
    script = None if main is None else Path(os.path.abspath(main))
    commit = _commit_of(Path.cwd() if script is None else script.parent)
    return Start(
        began=datetime.now(UTC).isoformat(timespec="seconds"),
        command=command_line(),
        directory=str(Path.cwd()),
        host=socket.gethostname(),
        platform=platform.platform(),
        python=platform.python_version(),
        versions={"arl": __version__, **_versions()},
        script=None if script is None else str(script),
        commit=commit.commit,
        has_changes=commit.has_changes,
        model=model,
        steps=steps,
    )


def _versions() -> dict[str, str]:
    found = dict[str, str]()
    for package in _PACKAGES:
        try:
            found[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            continue
    return found


def _commit_of(directory: Path) -> _Commit:
    """Empty without git, a repository, or an answer in time."""
    ask = ["git", "-C", str(directory), "status", "--porcelain=v2", "--branch", "--untracked-files=no"]
    quiet = {**os.environ, "GIT_OPTIONAL_LOCKS": "0"}  # somebody may work in that repository
    try:
        run = subprocess.run(ask, capture_output=True, text=True, check=True, timeout=_GIT_S, env=quiet)
    except (OSError, subprocess.SubprocessError, UnicodeDecodeError):
        return _Commit()
    lines = run.stdout.splitlines()
    commit = next((line.split()[2] for line in lines if line.startswith("# branch.oid ")), None)
    if commit == "(initial)":
        return _Commit()
    return _Commit(commit=commit, has_changes=any(not line.startswith("#") for line in lines))


_HARMLESS = frozenset(
    (
        "model",  # another name of the same model: another model is an error
        "run_dir", "steps", "log", "checkpoint", "stall_timeout_s", "evaluation", "engine", "weights", "endpoint",
        "rollout.num_workers", "rollout.max_concurrent_episodes", "rollout.max_failure_rate",
        "train.device", "train.num_threads", "train.num_ranks", "train.min_ranks", "train.ray_address",
        "train.max_recoveries", "train.tensor_parallel", "train.activation_checkpointing", "train.cpu_offload",
        "train.compile", "train.max_tokens_per_microbatch", "train.share_prefixes",
    )
)  # fmt: skip
"""Settings and sections that change where, how fast and how far a run trains, but not what (except for rounding)."""
_MATTER = frozenset(
    (
        "engine.dtype", "engine.context_length", "engine.arguments", "engine.pause_mode",
        "engine.replay_truncation", "engine.replay_routing",
    )
)  # fmt: skip
"""Within a harmless section, what changes the tokens that are sampled, or how they are trained."""
_NAMED_BY_USERS = frozenset(("reward_weights",))
"""Mappings whose names are no settings."""
_LONGEST = 60


def say_changes(before: object, after: Mapping[str, Any], version: int, say: Callable[[str], None]) -> None:
    """Tell what differs: the log warns of settings that change what is trained, and `say` gets the others.

    before: the settings in the checkpoint of `version`; without any, nothing is told.
    """
    if not isinstance(before, Mapping):
        return
    known = cast("Mapping[str, Any]", before)
    found = [(name, f"{name} {_shown(was)} -> {_shown(now)}") for name, was, now in _changes(known, after)]
    matter = [text for name, text in found if not _is_harmless(name)]
    if matter:
        log.warning(
            "from version %d on, other settings than before change what is trained: %s", version, "; ".join(matter)
        )
    if others := [text for name, text in found if _is_harmless(name)]:
        say(f"other settings than before, which do not change what is trained: {'; '.join(others)}")


def _changes(before: Mapping[str, Any], after: Mapping[str, Any], path: str = "") -> Iterator[tuple[str, Any, Any]]:
    """(name, value before, value after). What only one of two versions of the settings knows is left out."""
    for name in (name for name in after if name in before):
        was, now = before[name], after[name]
        if isinstance(was, Mapping) and isinstance(now, Mapping) and name not in _NAMED_BY_USERS:
            yield from _changes(cast("Mapping[str, Any]", was), cast("Mapping[str, Any]", now), f"{path}{name}.")
        elif was != now:
            yield f"{path}{name}", was, now


def _is_harmless(name: str) -> bool:
    parts = name.split(".")
    return name not in _MATTER and any(".".join(parts[: i + 1]) in _HARMLESS for i in range(len(parts)))


def _shown(value: Any) -> str:
    text = json.dumps(value)
    return text if len(text) <= _LONGEST else text[:_LONGEST] + "..."

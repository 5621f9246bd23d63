"""The directory of a run: no other run trains in it, and it says how the run was started.

run_dir/run.lock            held while a run trains there; names its process
        checkpoints/        see checkpoints.py
        config.yaml         the settings
        environment.json    a record of each start
"""

from __future__ import annotations

import fcntl
import json
import logging
import os
import platform
import re
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, cast
from weakref import WeakSet

import yaml

from arl.api.errors import ConfigError, RunFileError
from arl.api.settings.run import Config
from arl.api.settings.sections import settings_without_masked
from arl.api.version import __version__
from arl.runtime.stopping import command_line

if TYPE_CHECKING:
    from arl.api.settings.finetuning import FinetuneConfig

log = logging.getLogger(__name__)

LOCK, THIS_ONE = "run.lock", ", which is this one"
BEST = "best"
"""A link to the directory of a version, which is replaced in one step."""
_TRIES, _TRY_AGAIN_S = 3, 0.02


def make_run_dir(run_dir: Path) -> None:
    """Create the directory if needed. Raises ConfigError if it is not writable."""
    try:
        run_dir.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=run_dir):
            pass
    except OSError as error:
        reason = "it is a file" if isinstance(error, FileExistsError) else error.strerror or str(error)
        raise ConfigError(
            f"run_dir is {run_dir}, where a run cannot write its files: {reason}; set run_dir to a directory that can "
            "be made or written to"
        ) from error


def newest_checkpoint(run_dir: Path) -> Path | None:
    """The directory of the newest checkpoint, if there is one."""
    directory = run_dir / "checkpoints"
    version = max(saved_versions(directory), default=None)
    return None if version is None else checkpoint_of(directory, version)


def checkpoint_of(directory: Path, version: int) -> Path:
    """Where the checkpoint of a version lies in the directory of all checkpoints."""
    return directory / f"version-{version:08d}"


def saved_versions(directory: Path) -> list[int]:
    """The versions of the checkpoints in the directory, in no order."""
    if not directory.is_dir():
        return []
    matches = (re.fullmatch(r"version-(\d{8})", path.name) for path in directory.iterdir())
    return [int(match[1]) for match in matches if match]


class RunLock:
    """Keeps a second run out of run_dir: a lock on run_dir/run.lock, whose text names the process that holds it.

    The kernel releases the lock when the process ends, however it ends: processes that it started or forked do not keep
    it. On NFS the server keeps it while the machine of the process answers. On a file system without locks arl logs a
    warning, and the run goes on.
    """

    def __init__(self, run_dir: Path) -> None:
        self._path = run_dir / LOCK
        self._file: IO[bytes] | None = None
        _LOCKS.add(self)

    def take(self) -> None:
        """Create run_dir if needed, and lock it. Raises ConfigError (run_dir), RunFileError if a run holds the lock."""
        make_run_dir(self._path.parent)
        with usable(self._path):
            file = self._file = self._path.open("a+b", buffering=0)  # NFS locks only files that are open for writing
            file.seek(0)
            holder = _holder(file.read())
        try:
            _lock(file)
        except (BlockingIOError, PermissionError):
            self.close()
            raise RunFileError(
                f"another run trains in {self._path.parent}: {holder or 'an unknown process'}. Two runs would delete "
                "each other's checkpoints: wait for its end, stop it, or set another run_dir"
            ) from None
        except OSError as error:
            log.warning(
                "%s cannot be locked: %s. Nothing keeps a second run out of this directory%s",
                self._path,
                error.strerror or error,
                f"; {holder} has not reported its end: if it still runs, stop one of the two" if holder else "",
            )
        else:
            if holder and f" on {socket.gethostname()}," not in holder:
                log.warning("%s did not end properly in %s; if it still runs, stop it", holder, self._path.parent)
        since = datetime.now(UTC).strftime("%Y-%m-%d %H:%M:%S UTC")
        with usable(self._path):
            file.truncate(0)
            file.write(json.dumps({"host": socket.gethostname(), "pid": os.getpid(), "since": since}).encode())

    def release(self) -> None:
        """Record that the run has ended, and release the lock. Does nothing if it was not taken."""
        if self._file:
            with suppress(OSError):
                self._file.truncate(0)
        self.close()

    def close(self) -> None:
        if self._file:
            self._file.close()
            self._file = None


def _lock(file: IO[bytes]) -> None:
    """Raises as flock does. It tries for a moment, because `is_locked` may hold a lock of its own."""
    for _ in range(_TRIES):
        with suppress(BlockingIOError):
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return
        time.sleep(_TRY_AGAIN_S)
    fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)


def is_locked(path: Path) -> bool:
    """Whether a run holds this lock now, as far as this machine can see. It disturbs no run."""
    try:
        with path.open("rb") as file:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:  # no file, or a file system without locks
        return False
    return False


def holder_of(path: Path) -> str:
    """Who holds or held this lock without a release; empty if nobody."""
    try:
        return _holder(path.read_bytes())
    except OSError:
        return ""


_LOCKS: WeakSet[RunLock] = WeakSet()


def _forget_locks() -> None:
    """In a forked process: close the inherited files, or it would keep the locks after the run is dead."""
    for lock in list(_LOCKS):
        lock.close()


os.register_at_fork(after_in_child=_forget_locks)


def _holder(record: bytes) -> str:
    """Who wrote this record; empty if there is none."""
    try:
        known = json.loads(record)
        is_this_one = (known["host"], known["pid"]) == (socket.gethostname(), os.getpid())
        said = f"process {known['pid']} on {known['host']}, since {known['since']}"
    except (ValueError, TypeError, KeyError):
        return ""
    return said + (THIS_ONE if is_this_one else "")


@contextmanager
def usable(path: Path) -> Iterator[None]:
    """Raises RunFileError for an error of the system within the block. path: what it reads or writes."""
    try:
        yield
    except OSError as error:
        raise RunFileError(
            f"{path} cannot be written or read: {error.strerror or error}; the same command continues from the last "
            "checkpoint once it can be"
        ) from error


def write_atomically(path: Path, text: str) -> None:
    """Replace the file's text in one step: a reader, or a rerun after a kill, finds the whole old or new file."""
    aside = path.with_name(path.name + ".tmp")
    aside.write_text(text)
    aside.replace(path)


SETTINGS, ENVIRONMENT = "config.yaml", "environment.json"
_PACKAGES = ("torch", "transformers", "tokenizers", "numpy", "peft", "ray", "sglang", "vllm")
_GIT_S = 5.0
"""Longest wait for git, which looks at every file of a repository."""
_BESIDE_YOURS = "config.resolved.yaml"
"""If you keep a config.yaml of your own in run_dir."""
_HEADER = """\
# The settings of this run, defaults included: give the file to --config. Keys and passwords are left out.
"""


def record_start(config: Config | FinetuneConfig, steps: int) -> None:
    """Write the settings, and add this start, of a run of so many steps, to the record. Without room for them the log
    says so, and the run goes on."""
    run_dir = config.run_dir
    settings = yaml.safe_dump(settings_without_masked(config), sort_keys=False, allow_unicode=True, width=120)
    starts = [*starts_of(run_dir), _this_start(config.model, steps)]
    path = run_dir / SETTINGS
    is_ours = not path.exists() or path.read_text(errors="replace").startswith(_HEADER)
    try:
        write_atomically(path if is_ours else run_dir / _BESIDE_YOURS, _HEADER + settings)
        write_atomically(run_dir / ENVIRONMENT, json.dumps(starts, indent=2) + "\n")
    except OSError as error:
        log.warning(
            "%s and %s, which say how the run was started, cannot be written to %s: %s",
            SETTINGS,
            ENVIRONMENT,
            run_dir,
            error.strerror or error,
        )


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


def _this_start(model: str, steps: int) -> dict[str, Any]:
    main = getattr(sys.modules.get("__main__"), "__file__", None)  # None in a notebook or a session
    script = None if main is None else Path(os.path.abspath(main))
    commit, has_changes = _commit_of(Path.cwd() if script is None else script.parent)
    versions = {"arl": __version__}
    for package in _PACKAGES:
        with suppress(metadata.PackageNotFoundError):
            versions[package] = metadata.version(package)
    return {
        "began": datetime.now(UTC).isoformat(timespec="seconds"),
        "command": command_line(),  # without the values of keys and passwords
        "directory": str(Path.cwd()),
        "host": socket.gethostname(),
        "platform": platform.platform(),
        "python": platform.python_version(),
        "versions": versions,
        "script": None if script is None else str(script),
        "commit": commit,
        "has_changes": has_changes,
        "model": model,
        "steps": steps,
    }


def _commit_of(directory: Path) -> tuple[str | None, bool | None]:
    """The commit of a directory's git repository, and whether tracked files differ from it. (None, None) without git, a
    repository, or an answer in time."""
    ask = ["git", "-C", str(directory), "status", "--porcelain=v2", "--branch", "--untracked-files=no"]
    quiet = {**os.environ, "GIT_OPTIONAL_LOCKS": "0"}  # somebody may work in that repository
    try:
        run = subprocess.run(ask, capture_output=True, text=True, check=True, timeout=_GIT_S, env=quiet)
    except (OSError, subprocess.SubprocessError, UnicodeDecodeError):
        return None, None
    lines = run.stdout.splitlines()
    commit = next((line.split()[2] for line in lines if line.startswith("# branch.oid ")), "(initial)")
    return (None, None) if commit == "(initial)" else (commit, any(not line.startswith("#") for line in lines))


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
    return name not in _MATTER and any(f"{name}.".startswith(f"{harmless}.") for harmless in _HARMLESS)


def _shown(value: Any) -> str:
    text = json.dumps(value)
    return text if len(text) <= _LONGEST else text[:_LONGEST] + "..."

"""Harbor's tasks on disk: task.toml, instruction.md, environment/ and tests/, and the dataset that they make.

The format is Harbor's own, https://www.harborframework.com/docs/tasks: versions 1.0 to 1.4 of its schema.
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any

from arl.api.errors import DatasetError
from arl.api.types import Example
from arl.workflow.harbor.dockerfile import PlainImage, plain_image

CONFIG, INSTRUCTION, TESTS, ENVIRONMENT = "task.toml", "instruction.md", "tests", "environment"
_CANARY = re.compile(r"^(<!--|#).*canary.*$", re.IGNORECASE)
_SIZES = {"K": 1 / 1024, "M": 1, "G": 1024}


@dataclass(frozen=True, slots=True, kw_only=True)
class HarborTask:
    """One task, read and checked."""

    directory: Path
    instruction: str
    """What the agent is told, without canary lines."""
    agent_timeout_s: float | None
    """Seconds that the agent has; None: no limit."""
    verifier_timeout_s: float
    """Seconds that the tests have."""
    verifier_env: Mapping[str, str]
    env: Mapping[str, str]
    """Variables of the agent and of the tests."""
    docker_image: str | None
    """A ready-made image. None: the one that environment/Dockerfile makes."""
    workdir: str | None
    """None: as the image says."""
    cpus: float | None
    memory_mb: int | None
    storage_mb: int | None
    allows_network: bool
    metadata: Mapping[str, Any] = field(default_factory=dict[str, Any])

    @property
    def name(self) -> str:
        return self.directory.name

    @property
    def dockerfile(self) -> Path:
        return self.directory / ENVIRONMENT / "Dockerfile"

    @property
    def tests(self) -> dict[str, Path]:
        """The files of the tests, by the paths where they run."""
        root = self.directory / TESTS
        files = (file for file in sorted(root.rglob("*")) if file.is_file() and "__pycache__" not in file.parts)
        return {f"/tests/{file.relative_to(root).as_posix()}": file for file in files}

    def plain_image(self) -> PlainImage:
        """Its environment without an image. Raises DatasetError if only an image will do."""
        needs = [f"the image {self.docker_image}"] if self.docker_image else []
        image = plain_image(self.dockerfile) if self.dockerfile.exists() else PlainImage()
        image.workdir = self.workdir or image.workdir
        needs += [f"`{line}`" for line in image.needs]
        if needs:
            raise DatasetError(
                f"the task {self.directory} needs {', '.join(needs)}, which takes Docker; pass sandbox='docker' on a "
                "machine with a Docker engine, or leave the task out"
            )
        return image

    @classmethod
    def read(cls, directory: str | Path) -> HarborTask:
        """Read a task's directory. Raises DatasetError if it is no task, or asks for what arl does not do."""
        path = Path(directory).expanduser().absolute()
        try:
            config = tomllib.loads((path / CONFIG).read_text(encoding="utf-8"))
            instruction = (path / INSTRUCTION).read_text(encoding="utf-8")
        except (OSError, tomllib.TOMLDecodeError) as error:
            raise DatasetError(f"{path} is not a task of Harbor's that arl can read: {error}") from error
        try:
            _refuse(path, config)
            return _task(path, config, instruction)
        except (TypeError, ValueError, AttributeError) as error:
            if isinstance(error, DatasetError):
                raise
            raise DatasetError(f"{path / CONFIG} has a value of the wrong type: {error}") from error


def harbor_tasks(directory: str | Path) -> list[Example]:
    """A dataset of the tasks below a directory, in the order of their paths: a row for each.

    A row has the task's `task` (its directory's name), `path`, `instruction`, `agent_timeout_s`, `verifier_timeout_s`
    and `metadata`. Raises DatasetError for a directory without tasks, and for a task that arl cannot play.
    """
    root = Path(directory).expanduser().absolute()
    rows = [_row(HarborTask.read(config.parent)) for config in sorted(root.rglob(CONFIG))]
    if not rows:
        raise DatasetError(f"there is no task below {root}: no directory with a {CONFIG}")
    return rows


@lru_cache(maxsize=4096)
def task_at(path: str) -> HarborTask:
    """The task of a row, read once."""
    return HarborTask.read(path)


def _row(task: HarborTask) -> Example:
    return {
        "task": task.name,
        "path": str(task.directory),
        "instruction": task.instruction,
        "agent_timeout_s": task.agent_timeout_s,
        "verifier_timeout_s": task.verifier_timeout_s,
        "metadata": dict(task.metadata),
    }


def _task(path: Path, config: Mapping[str, Any], instruction: str) -> HarborTask:
    environment, verifier = config.get("environment", {}), config.get("verifier", {})
    agent_timeout = config.get("agent", {}).get("timeout_sec")
    return HarborTask(
        directory=path,
        instruction=_without_canary(instruction),
        agent_timeout_s=None if agent_timeout is None else float(agent_timeout),
        verifier_timeout_s=float(verifier.get("timeout_sec", 600.0)),
        verifier_env=_literal(path, verifier.get("env", {})),
        env=_literal(path, environment.get("env", {})),
        docker_image=environment.get("docker_image"),
        workdir=environment.get("workdir"),
        cpus=environment.get("cpus"),
        memory_mb=_megabytes(environment, "memory"),
        storage_mb=_megabytes(environment, "storage"),
        allows_network=_allows_network(environment),
        metadata=config.get("metadata", {}),
    )


def _refuse(path: Path, config: Mapping[str, Any]) -> None:
    """Raise DatasetError, naming all that the task asks for and arl does not do."""
    environment, verifier, agent = (config.get(name, {}) for name in ("environment", "verifier", "agent"))
    is_separate = verifier.get("environment_mode") == "separate" or "environment" in verifier
    refused = {
        "several steps": config.get("steps"),
        "Windows": str(environment.get("os", "linux")).lower() != "linux",
        "GPUs or TPUs": environment.get("gpus") or environment.get("tpu"),
        "MCP servers": environment.get("mcp_servers"),
        "a health check": environment.get("healthcheck"),
        "some hosts of the network": any(part.get("network_mode") == "allowlist" for part in (environment, agent)),
        "users of the image": agent.get("user") is not None or verifier.get("user") is not None,
        "tests in an environment of their own": is_separate,
        "several containers": [*(path / ENVIRONMENT).glob("docker-compose.y*ml")],
        "an earlier trajectory": (path / "trajectory.json").exists(),
    }
    if wanted := [name for name, is_wanted in refused.items() if is_wanted]:
        raise DatasetError(f"the task {path} needs {' and '.join(wanted)}, which arl does not do; leave it out")
    if not (path / TESTS / "test.sh").exists():
        raise DatasetError(f"the task {path} has no {TESTS}/test.sh, so it cannot be rewarded")


def _without_canary(text: str) -> str:
    """The text without the lines at its top that mark it as a benchmark's, which Harbor does not show either."""
    lines = text.split("\n")
    first = next((i for i, line in enumerate(lines) if not _CANARY.match(line.strip())), len(lines))
    return "\n".join(lines[first:]).strip("\n")


def _literal(path: Path, env: Mapping[str, Any]) -> dict[str, str]:
    """The variables. One that Harbor would take from the host is refused: it may be a secret."""
    for name, value in env.items():
        if "${" in str(value):
            raise DatasetError(f"{path / CONFIG} takes {name} from this machine's environment; write its value there")
    return {name: str(value) for name, value in env.items()}


def _megabytes(environment: Mapping[str, Any], name: str) -> int | None:
    """`memory_mb = 2048`, or the older `memory = "2G"`."""
    if (size := environment.get(f"{name}_mb")) is not None:
        return int(size)
    if (text := environment.get(name)) is None:
        return None
    return int(float(text.strip()[:-1]) * _SIZES[text.strip()[-1].upper()])


def _allows_network(environment: Mapping[str, Any]) -> bool:
    mode = environment.get("network_mode", "public" if environment.get("allow_internet", True) else "no-network")
    return mode == "public"

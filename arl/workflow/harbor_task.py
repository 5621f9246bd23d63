"""Harbor's tasks on disk: task.toml, instruction.md, environment/ and tests/, and the dataset that they make.

The format is Harbor's own, https://www.harborframework.com/docs/tasks: versions 1.0 to 1.4 of its schema. Of a task's
Dockerfile, a sandbox without images can give files, variables and a working directory.
"""

from __future__ import annotations

import json
import posixpath
import re
import shlex
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any

from arl.api.errors import DatasetError
from arl.api.types import Example

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
    tasks = [HarborTask.read(config.parent) for config in sorted(root.rglob(CONFIG))]
    rows: list[Example] = [
        {
            "task": task.name,
            "path": str(task.directory),
            "instruction": task.instruction,
            "agent_timeout_s": task.agent_timeout_s,
            "verifier_timeout_s": task.verifier_timeout_s,
            "metadata": dict(task.metadata),
        }
        for task in tasks
    ]
    if not rows:
        raise DatasetError(f"there is no task below {root}: no directory with a {CONFIG}")
    return rows


@lru_cache(maxsize=4096)
def task_at(path: str) -> HarborTask:
    """The task of a row, read once."""
    return HarborTask.read(path)


def _task(path: Path, config: Mapping[str, Any], instruction: str) -> HarborTask:
    environment, verifier = config.get("environment", {}), config.get("verifier", {})
    agent_timeout = config.get("agent", {}).get("timeout_sec")
    network = environment.get("network_mode", "public" if environment.get("allow_internet", True) else "no-network")
    lines = instruction.split("\n")  # without those at the top that mark a benchmark, which Harbor does not show either
    first = next((i for i, line in enumerate(lines) if not _CANARY.match(line.strip())), len(lines))
    return HarborTask(
        directory=path,
        instruction="\n".join(lines[first:]).strip("\n"),
        agent_timeout_s=None if agent_timeout is None else float(agent_timeout),
        verifier_timeout_s=float(verifier.get("timeout_sec", 600.0)),
        verifier_env=_literal(path, verifier.get("env", {})),
        env=_literal(path, environment.get("env", {})),
        docker_image=environment.get("docker_image"),
        workdir=environment.get("workdir"),
        cpus=environment.get("cpus"),
        memory_mb=_megabytes(environment, "memory"),
        storage_mb=_megabytes(environment, "storage"),
        allows_network=network == "public",
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


# What a Dockerfile asks for.

PLAIN_IMAGES = ("ubuntu", "debian", "python", "buildpack-deps", "bash")
"""Images that stand for an ordinary Linux, so that this machine's programs will do."""
_IGNORED = ("CMD", "ENTRYPOINT", "LABEL", "EXPOSE", "MAINTAINER", "SHELL", "STOPSIGNAL", "HEALTHCHECK")
"""Instructions about how a container starts: a terminal's commands do not depend on them."""
_CONTINUED = re.compile(r"\\[ \t]*\n")


@dataclass(slots=True, kw_only=True)
class PlainImage:
    """A Dockerfile's result, without the image that it begins with."""

    workdir: str = "/"
    env: dict[str, str] = field(default_factory=dict[str, str])
    sources: dict[str, Path] = field(default_factory=dict[str, Path])
    """Absolute path in the image -> the file that lies there."""
    needs: list[str] = field(default_factory=list[str])
    """What only an image can give: the instructions that were left out."""


def plain_image(dockerfile: Path) -> PlainImage:
    """Read a Dockerfile. What cannot be done without an image goes to `needs`. Raises DatasetError."""
    image = PlainImage()
    text = "\n".join(line for line in dockerfile.read_text().splitlines() if not line.lstrip().startswith("#"))
    for line in filter(str.strip, _CONTINUED.sub(" ", text).splitlines()):
        word, _, arguments = line.strip().partition(" ")
        word, arguments = word.upper(), arguments.strip()
        try:
            _apply(image, word, arguments, dockerfile)
        except ValueError as error:
            raise DatasetError(f"{dockerfile}: cannot read `{word} {arguments}`: {error}") from error
    return image


def _apply(image: PlainImage, word: str, arguments: str, dockerfile: Path) -> None:
    match word:
        case "WORKDIR" if "$" not in arguments:
            image.workdir = posixpath.normpath(posixpath.join(image.workdir, arguments.strip("\"'")))
        case "ENV" if "$" not in arguments and "=" not in arguments.split()[0]:  # the old form, `ENV name value`
            name, _, value = arguments.partition(" ")
            image.env[name] = value.strip()
        case "ENV" if "$" not in arguments:
            image.env |= dict(part.split("=", 1) for part in shlex.split(arguments))
        case "COPY" | "ADD" if _is_plain(word, arguments):
            image.sources |= _copied(arguments, image.workdir, dockerfile.parent)
        case "FROM" if arguments.split(":")[0] in PLAIN_IMAGES and " " not in arguments:
            pass
        case _ if word not in _IGNORED:
            image.needs.append(f"{word} {arguments}")


def _is_plain(word: str, arguments: str) -> bool:
    """Whether it copies files as they are. Owners and modes make no difference: everything is the agent's."""
    flags = [part for part in arguments.split() if part.startswith("--")]
    is_fetched = word == "ADD" and re.search(r"://|\.tar|\.tgz|\.zip", arguments)
    others = [flag for flag in flags if not flag.startswith(("--chown", "--chmod", "--link"))]
    return not is_fetched and not others and "$" not in arguments and "<<" not in arguments


def _copied(arguments: str, workdir: str, context: Path) -> dict[str, Path]:
    """The files that a COPY puts into the image. Raises ValueError if there are none."""
    words = json.loads(arguments) if arguments.startswith("[") else shlex.split(arguments)
    *patterns, target = (word for word in words if not word.startswith("--"))
    sources: list[Path] = []
    for pattern in patterns:
        relative = posixpath.normpath(pattern.lstrip("/"))
        found = [context] if relative == "." else sorted(context.glob(relative))
        if not found or relative.startswith(".."):
            raise ValueError(f"there is no {pattern} in {context}")
        sources += found
    place = posixpath.normpath(posixpath.join(workdir, target))
    is_directory = target.endswith(("/", ".")) or len(sources) > 1
    files: dict[str, Path] = {}
    for source in sources:
        if source.is_dir():
            below = (file for file in sorted(source.rglob("*")) if file.is_file())
            files |= {posixpath.join(place, file.relative_to(source).as_posix()): file for file in below}
        else:
            files[posixpath.join(place, source.name) if is_directory else place] = source
    return files

"""The description of a run on many machines: what `arl launch` reads, as YAML."""

from __future__ import annotations

import re
import shlex
from pathlib import Path, PurePosixPath
from typing import Literal, Self, get_args

import yaml
from pydantic import Field, NonNegativeInt, PositiveInt, TypeAdapter, ValidationError, field_validator, model_validator

from arl.api.errors import ConfigError
from arl.api.settings import Section, config_error

SET_BY_LAUNCH = (
    "--model",
    "--run_dir",
    "--engine.kind",
    "--engine.addresses",
    "--engine.api_key",
    "--weights.transport",
    "--weights.directory",
    "--weights.mirrors",
    "--weights.api_key",
    "--train.num_ranks",
    "--train.ray_address",
    "--checkpoint.notice_s",
)
"""Flags that follow from the description."""
_KEYS = ("--api-key", "--admin-api-key", "--config")
_OF_A_SERVER = {
    "sglang": (*_KEYS, "--model-path", "--model", "--host", "--port", "--tp-size", "--tp", "--tensor-parallel-size"),
    "embedded": (*_KEYS, "--api-key-file", "--model", "--host", "--port", "--parent-pid"),
}


class TrainerNodes(Section):
    """The machines that train. The first also runs the script: episodes, buffer, and the calls to servers."""

    nodes: PositiveInt = 1
    """How many. More than one: Ray runs on them."""
    gpus_per_node: NonNegativeInt = 0
    """GPUs of each. 0: the CPU trains."""
    ranks_per_node: PositiveInt | None = None
    """Processes that train on each. Unset: one for each GPU, or one."""
    cpus_per_node: PositiveInt | None = None
    """CPU cores of each. Unset: what the machine has, on Slurm what options ask for. Kubernetes needs it."""
    memory_gb: PositiveInt | None = None
    """Memory of each in GB (10^9 bytes), which Slurm is asked for; Kubernetes needs it."""

    @property
    def num_ranks(self) -> int:
        return self.nodes * (self.ranks_per_node or max(self.gpus_per_node, 1))

    @model_validator(mode="after")
    def _have_gpus_for_ranks(self) -> Self:
        if 0 < self.gpus_per_node < (self.ranks_per_node or 0):
            raise ValueError(
                f"ranks_per_node is {self.ranks_per_node} and gpus_per_node {self.gpus_per_node}; a rank needs a GPU"
            )
        return self


class ServerNodes(Section):
    """The inference servers, on machines of their own."""

    kind: Literal["sglang", "embedded"] = "sglang"
    """sglang: stock SGLang on GPUs. embedded: arl's own server, on CPUs or one GPU."""
    nodes: PositiveInt = 1
    """How many machines. On Kubernetes each server is a pod, and there are nodes * per_node of them."""
    per_node: PositiveInt = 1
    """How many servers on each machine."""
    gpus_per_server: NonNegativeInt = 0
    """GPUs of each server: SGLang's tensor-parallel size. 0: servers on the CPU."""
    cpus_per_server: PositiveInt | None = None
    """CPU cores of each server, which Slurm is asked for; Kubernetes needs it."""
    memory_gb: PositiveInt | None = None
    """Memory of each server in GB (10^9 bytes), which Slurm is asked for; Kubernetes needs it."""
    python: str | None = None
    """The Python that has sglang, if it is not the trainer's."""
    image: str | None = None
    """On Kubernetes: the container image of the servers, if it is not the trainer's."""
    arguments: tuple[str, ...] = ()
    """More arguments of each server, such as --mem-fraction-static 0.8."""
    restarts: NonNegativeInt = 5
    """How often in a row a server that ends is started again; ten minutes of service reset the count. Kubernetes has
    its own rule: always, after a growing pause."""
    startup_s: PositiveInt = 1800
    """Longest time until all servers answer, in seconds."""

    @property
    def gpus_per_node(self) -> int:
        return self.per_node * self.gpus_per_server

    @model_validator(mode="after")
    def _can_be_started(self) -> Self:
        for argument in self.arguments:
            if (name := argument.partition("=")[0]) in _OF_A_SERVER[self.kind]:
                raise ValueError(f"arguments has {name}, which arl launch sets itself; leave it out")
        if self.kind == "sglang" and self.gpus_per_server == 0 and "--device" not in self.arguments:
            raise ValueError(
                "gpus_per_server is 0: give each server GPUs, or the arguments [--device, cpu], or use kind: embedded"
            )
        if self.kind == "embedded" and self.gpus_per_server > 1:
            raise ValueError(
                f"gpus_per_server is {self.gpus_per_server}; an embedded server computes on one GPU at most"
            )
        if self.kind == "embedded" and self.python is not None:
            raise ValueError("python is set, but embedded servers run in the trainer's own; leave it out")
        return self


class Description(Section):
    """The fields that all kinds of clusters share."""

    name: str
    """The run's name: lower-case letters, digits and dashes, at most 30 characters."""
    command: str
    """The training script and its flags, or --config FILE. What the rest of this file says is added to it."""
    workdir: str
    """The directory in which the command runs, the same on every machine."""
    run_dir: str
    """The run's directory, which all machines see under this path."""
    model: str
    """The model's directory, which all machines see under this path; with SGLang also a name on the hub."""
    trainer: TrainerNodes = TrainerNodes()
    servers: ServerNodes
    transport: Literal["disk", "delta", "distributed", "adapter"] = "disk"
    """How weights reach the servers. disk: through run_dir. delta: through a mirror on each machine of servers."""
    notice_s: PositiveInt = 110
    """Longest time to write a checkpoint after the notice of a preemption, in seconds."""
    environment: dict[str, str] = Field(default_factory=dict)
    """More environment variables, on every machine. For no keys: this file is not secret."""
    key_files: dict[str, str] = Field(default_factory=dict)
    """Environment variable of the training script -> file whose content it gets, such as WANDB_API_KEY. On Kubernetes:
    the file's content becomes part of the run's Secret when the run is submitted."""

    @property
    def words(self) -> list[str]:
        """The command, word by word."""
        return shlex.split(self.command)

    @property
    def has_mirrors(self) -> bool:
        return self.transport == "delta"

    @field_validator("name")
    @classmethod
    def _is_a_name(cls, name: str) -> str:
        if not re.fullmatch(r"[a-z]([-a-z0-9]{0,28}[a-z0-9])?", name):
            raise ValueError(
                f"{name!r} is not a name for a run; use up to 30 lower-case letters, digits and dashes, first a letter"
            )
        return name

    @field_validator("workdir", "run_dir")
    @classmethod
    def _is_absolute(cls, path: str) -> str:
        if not PurePosixPath(path).is_absolute():
            raise ValueError(f"{path!r} is not absolute; every machine has to find it under the same path")
        return path.rstrip("/") or "/"

    @field_validator("environment", "key_files")
    @classmethod
    def _has_names(cls, variables: dict[str, str]) -> dict[str, str]:
        for name in variables:
            if not re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*", name):
                raise ValueError(f"{name!r} is not the name of an environment variable")
        return variables

    @model_validator(mode="after")
    def _can_be_run(self) -> Self:
        try:
            words = self.words
        except ValueError as error:
            raise ValueError(f"command cannot be split into words: {error}") from None
        if not words:
            raise ValueError("command is empty; name the training script, such as python train.py")
        if "=" in words[0]:
            raise ValueError(f"command begins with {words[0]!r}, which is not a program; set variables in environment")
        for word in words:
            if (name := word.partition("=")[0]) in SET_BY_LAUNCH:
                raise ValueError(f"command has {name}, which follows from this description; leave it out")
            if name == "--engine.colocated":
                raise ValueError(
                    f"command has {name}, but arl launch puts servers on machines of their own, where they share no "
                    "GPU with the trainer; leave it out"
                )
        if self.servers.kind == "embedded" and not PurePosixPath(self.model).is_absolute():
            raise ValueError(f"model is {self.model!r}; embedded servers need the absolute path of a directory")
        return self


class OnHosts(Description):
    """Machines with a shared file system and no containers: what Slurm and ssh share."""

    python: str
    """The Python interpreter that has arl, under this path on every machine."""
    interface: str | None = None
    """The network interface, such as ib0, at whose address the machines reach each other. Unset: at their names."""

    @field_validator("python")
    @classmethod
    def _is_a_path(cls, path: str) -> str:
        if not PurePosixPath(path).is_absolute():
            raise ValueError(f"{path!r} is not absolute; every machine has to find it under the same path")
        return path


class SlurmDescription(OnHosts):
    """A job of Slurm: nodes of one kind, the first for the trainer and the others for servers."""

    kind: Literal["slurm"]
    time: str = "24:00:00"
    """The job's time limit, as sbatch takes it. The run continues in the next job."""
    options: tuple[str, ...] = ()
    """More options of sbatch, a line each, such as --partition=gpu."""
    srun_options: tuple[str, ...] = ()
    """More options of each srun, such as --container-image=IMAGE."""

    @field_validator("time", mode="before")
    @classmethod
    def _is_in_quotes(cls, time: object) -> object:
        if isinstance(time, int):
            raise ValueError(f'YAML reads it as the number {time}; put it in quotes, as in time: "24:00:00"')
        return time

    @field_validator("options", "srun_options")
    @classmethod
    def _are_options(cls, options: tuple[str, ...]) -> tuple[str, ...]:
        for option in options:
            if not option.startswith("-") or "\n" in option:
                raise ValueError(f"{option!r} is not an option; write it as --NAME=VALUE")
        return options


class SshDescription(OnHosts):
    """Machines that are reached by ssh without a password."""

    kind: Literal["ssh"]
    hosts: tuple[str, ...]
    """Their names or addresses, by which they also reach each other: the trainer's first, then those of servers."""
    ssh_options: tuple[str, ...] = ()
    """More options of each ssh, such as -l USER or -i FILE, each word an item."""

    @model_validator(mode="after")
    def _has_hosts(self) -> Self:
        needed = self.trainer.nodes + self.servers.nodes
        if len(self.hosts) != needed:
            raise ValueError(
                f"hosts has {len(self.hosts)} names; trainer.nodes={self.trainer.nodes} and "
                f"servers.nodes={self.servers.nodes} need {needed}"
            )
        if twice := {host for host in self.hosts if self.hosts.count(host) > 1}:
            raise ValueError(f"hosts names {min(twice)} twice")
        if odd := [host for host in self.hosts if not re.fullmatch(r"[A-Za-z0-9_][A-Za-z0-9_.:-]*", host)]:
            raise ValueError(f"hosts has {odd[0]!r}, which is not a host; put the user into ssh_options, as -l USER")
        return self


class Volume(Section):
    """The file system that all pods share."""

    claim: str
    """The name of a PersistentVolumeClaim that many pods may write to (ReadWriteMany)."""
    path: str
    """Where pods see it; run_dir lies below."""
    size: str | None = None
    """Its size, such as 500Gi: arl launch then makes the claim. Unset: the claim is there already."""
    storage_class: str | None = None
    """The storage class of a claim that arl launch makes. Unset: the cluster's default."""


class KubernetesDescription(Description):
    """Pods: a Job that trains, or a RayJob of KubeRay if it has several nodes; servers in a StatefulSet."""

    kind: Literal["kubernetes"]
    image: str
    """The container image, with arl, and bash, flock and kill. For a trainer of several nodes also ray[default] and
    wget."""
    volume: Volume
    """The shared file system."""
    namespace: str = "default"
    """The namespace of everything."""
    ray_version: str | None = None
    """The version of Ray in the image, 2.52.0 or newer. A trainer of several nodes needs it."""
    priority_class: str | None = None
    """The priority class of the pods. Unset: the cluster's default."""
    node_selector: dict[str, str] = Field(default_factory=dict)
    """Labels that the pods' nodes have."""
    restarts: NonNegativeInt = 10
    """How often the trainer is started again. Preemptions of a trainer of one node do not count."""

    @model_validator(mode="after")
    def _pods_can_be_made(self) -> Self:
        if not PurePosixPath(self.run_dir).is_relative_to(self.volume.path):
            raise ValueError(f"run_dir is {self.run_dir}; it must lie below volume.path, {self.volume.path}")
        for part, one, fields in (
            ("trainer", self.trainer, ("cpus_per_node", "memory_gb")),
            ("servers", self.servers, ("cpus_per_server", "memory_gb")),
        ):
            if missing := [field for field in fields if getattr(one, field) is None]:
                raise ValueError(f"{part}.{missing[0]} is missing; Kubernetes places pods by what they ask for")
        if self.servers.python is not None:
            raise ValueError("servers.python is set; on Kubernetes servers.image names the image that has sglang")
        if self.trainer.nodes > 1 and self.ray_version is None:
            raise ValueError(f"ray_version is missing; trainer.nodes is {self.trainer.nodes}, which needs KubeRay")
        if self.ray_version is not None and not _is_at_least(self.ray_version, (2, 52)):
            raise ValueError(f"ray_version is {self.ray_version}; 2.52.0 and newer can ask for a token")
        return self


def _is_at_least(version: str, least: tuple[int, int]) -> bool:
    found = re.match(r"(\d+)\.(\d+)\.", version)
    return found is not None and (int(found[1]), int(found[2])) >= least


AnyDescription = SlurmDescription | KubernetesDescription | SshDescription
_KINDS: dict[str, type[AnyDescription]] = {
    get_args(kind.model_fields["kind"].annotation)[0]: kind for kind in get_args(AnyDescription)
}


def read_description(path: Path) -> AnyDescription:
    """Read a description. Raises ConfigError, which names each wrong field and what is allowed."""
    try:
        content = yaml.safe_load(path.read_text())
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror}") from None
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} is not YAML: {error}") from None
    if not isinstance(content, dict):
        raise ConfigError(f"{path} holds {type(content).__name__}; it must hold a mapping, the description of a run")
    kind = content.get("kind")
    if kind not in _KINDS:
        said = "kind is missing" if kind is None else f"kind is {kind!r}"
        raise ConfigError(f"{path}: {said}; it must be one of {', '.join(_KINDS)}")
    try:
        return TypeAdapter(_KINDS[kind]).validate_python(content)
    except ValidationError as error:
        raise ConfigError(f"{path}: {config_error(_KINDS[kind], error, missing='add it to this file')}") from None

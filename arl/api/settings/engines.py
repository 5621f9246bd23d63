"""Settings of both engines: the inference servers, how weights reach them, the trainer, and several policies."""

from __future__ import annotations

import os
import re
import sys
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, ClassVar, Literal, Self, TypeVar

from pydantic import Field, NonNegativeInt, PositiveFloat, PositiveInt, field_validator, model_validator

from arl.api.errors import ConfigError, RoleError
from arl.api.settings.sections import Section

PauseMode = Literal["in_place", "retract", "abort"]
Protocol = Literal["sglang", "vllm"]
"""The HTTP protocol of inference servers; embedded ones speak SGLang's."""

DEFAULT_CONTEXT_LENGTH = 4096
"""The most tokens of prompt plus response that the embedded server takes unless it is told otherwise."""
RELEASED = "released"
"""The label of a server's weights while their memory is released. The next weights have to be loaded whole."""
SERVER_KEY, MIRROR_KEY = "ARL_SERVER_API_KEY", "ARL_MIRROR_API_KEY"
"""Environment variables with API keys, for clients and servers. Keys are no settings, so that no file has them."""

# Inference servers.


class ClientConfig(Section):
    """Settings that all kinds of inference servers share."""

    protocol: ClassVar[Protocol] = "sglang"

    request_timeout_s: PositiveFloat = 600.0
    """Longest time one agenerate may take, pauses and retries included."""
    pause_mode: PauseMode = "in_place"
    """How a weight update treats running requests: in_place keeps their KV cache, retract recomputes it under the
    new weights, abort returns partial outputs that the client continues. With colocated: retract, if unset."""
    colocated: bool = False
    """Servers and trainer share GPUs and take turns: the servers let go of their memory while a batch is trained, and
    the trainer's weights and optimizer state are in the CPU's memory while they generate."""
    update_timeout_s: PositiveFloat = 120.0
    """Longest time one server may take to load new weights before it is fenced off."""
    update_order: Literal["all", "rolling"] = "all"
    """all: a weight update reaches every server at once. rolling: one after another, while the others generate."""
    replay_truncation: bool = True
    """Under top_p, top_k or min_p, servers return the ids from which each token was sampled, and training computes
    logprobs over these. False: logprobs are of the whole distribution, which the samples do not follow."""
    replay_routing: bool = True
    """For a mixture of experts: train each token with the experts that sampled it. Servers return them (SGLang and vLLM
    with --enable-return-routed-experts). False: train with those that the trainer's routers choose."""
    min_servers: PositiveInt = 1
    """The run ends, with a checkpoint, when fewer servers than this have served for update_timeout_s (plus
    startup_timeout_s, if arl starts the servers)."""

    @property
    def absence_timeout_s(self) -> float:
        """How long arl waits for servers to come back while fewer than min_servers serve."""
        return self.update_timeout_s

    @model_validator(mode="after")
    def _can_take_turns(self) -> Self:
        if not self.colocated:
            return self
        if "pause_mode" not in self.model_fields_set:
            object.__setattr__(self, "pause_mode", "retract")  # the section is frozen
        if self.pause_mode == "in_place":
            raise ValueError(
                "pause_mode is in_place, which keeps the KV cache of running requests, but with colocated servers let "
                "go of it; leave pause_mode out, or set it to retract or abort"
            )
        if self.update_order == "rolling":
            raise ValueError(
                "update_order is rolling, but with colocated all servers let go of their memory together, and none "
                "generates meanwhile; leave it at all"
            )
        return self


ClientConfigT = TypeVar("ClientConfigT", bound=ClientConfig)


def _reachable(config: ClientConfigT, num_servers: int, what: str) -> ClientConfigT:
    if config.min_servers > num_servers:
        raise ValueError(f"min_servers is {config.min_servers}, but {what} is {num_servers}; lower it")
    return config


class StartedServersConfig(ClientConfig):
    """Servers that arl starts and stops."""

    num_servers: PositiveInt = 1
    """How many servers to start, each as its own process on a free port."""
    startup_timeout_s: PositiveFloat = 600.0
    """Longest time a server may take until it answers /health."""
    on_ray: bool = False
    """Start the servers on the nodes of the Ray cluster at train.ray_address, where Ray reserves GPUs and CPUs for each
    as it does for ranks. False: on this machine."""

    @property
    def absence_timeout_s(self) -> float:
        return self.startup_timeout_s + self.update_timeout_s

    @property
    def bundle(self) -> dict[str, float]:
        """What Ray reserves for each server (on_ray): resource -> amount."""
        raise NotImplementedError

    @model_validator(mode="after")
    def _an_order_needs_several(self) -> Self:
        if self.update_order == "rolling" and self.num_servers == 1:
            raise ValueError(
                "update_order is rolling, but num_servers is 1, so no server generates during an update; start more"
            )
        return _reachable(self, self.num_servers, "num_servers")

    @model_validator(mode="after")
    def _can_be_on_ray(self) -> Self:
        if not self.on_ray:
            return self
        if self.protocol == "vllm":
            raise ValueError(
                "on_ray is set, but vLLM asks for no key when its weights are changed, so its servers listen on this "
                "machine alone; use SGLang"
            )
        if self.colocated:
            raise ValueError("on_ray is set, but with colocated servers share this machine's GPUs; choose one of them")
        if getattr(self, "first_gpu", 0) or ":" in getattr(self, "device", ""):
            raise ValueError("on_ray is set, so Ray chooses GPUs: leave first_gpu out, and set device to cuda or cpu")
        return self


class LocalEngineConfig(StartedServersConfig):
    """The embedded server, in processes that arl starts and stops."""

    kind: Literal["local"] = "local"
    num_threads: PositiveInt = 1
    """CPU threads of each server's model."""
    device: str = "cpu"
    """The torch device that the servers compute on: cpu, cuda, cuda:0, ..."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """The dtype of the servers' weights, and of their computation."""
    max_running_requests: PositiveInt = 128
    """How many requests one server decodes at once; more wait in its queue."""
    context_length: PositiveInt | None = None
    """Longest prompt plus response, in tokens. Unset: the model's own limit, at most 4096."""

    @property
    def bundle(self) -> dict[str, float]:
        return {"CPU": float(self.num_threads)} | ({"GPU": 1.0} if self.device.startswith("cuda") else {})


class StockServersConfig(ClientConfig):
    """Servers that others wrote."""

    check_weights: bool = True
    """Compare each server's logprobs of a few tokens with the trainer's after its first load of new weights, and again
    1, 2, 4, 8, ... versions later. A server that computes with other weights than it was given ends the run."""


class RunningServersConfig(StockServersConfig):
    """Servers that already run."""

    addresses: tuple[str, ...] = ()
    """Base URLs, such as http://127.0.0.1:30000; all must serve the same model."""
    servers_file: Path | None = None
    """A file that another program keeps, with a server's base URL on each line: servers join and leave the run as it
    changes. If it names servers, `addresses` is ignored. Unset: run_dir/servers.txt, which `arl servers` edits."""

    @property
    def key(self) -> str | None:
        """What servers get as a bearer token."""
        return os.environ.get(SERVER_KEY) or None

    @model_validator(mode="after")
    def _has_addresses(self) -> Self:
        if self.servers_file is not None:
            return self
        if not self.addresses:
            raise ValueError("addresses is empty; name at least one server, such as http://127.0.0.1:30000")
        return _reachable(self, len(self.addresses), "the number of addresses")


class SGLangEngineConfig(RunningServersConfig):
    """SGLang servers that already run. If they ask for a key, it is in $ARL_SERVER_API_KEY."""

    kind: Literal["sglang"] = "sglang"


class VLLMEngineConfig(RunningServersConfig):
    """vLLM servers that already run, started as docs/vllm_protocol.md says; a key is in $ARL_SERVER_API_KEY."""

    protocol: ClassVar[Protocol] = "vllm"

    kind: Literal["vllm"] = "vllm"


class ServerProcessesConfig(StockServersConfig, StartedServersConfig):
    """Stock servers that arl starts on this machine and stops."""

    python: Path = Path(sys.executable)
    """The Python interpreter that has the servers' program; it may belong to another environment than arl's."""
    gpus_per_server: NonNegativeInt = 1
    """GPUs of this machine for each server, in order: its tensor-parallel size. 0: servers on the CPU."""
    first_gpu: NonNegativeInt = 0
    """The GPUs before this one are left to the trainer."""
    arguments: tuple[str, ...] = ()
    """More arguments for each server's command, such as --mem-fraction-static 0.8 (SGLang) or
    --gpu-memory-utilization 0.8 (vLLM)."""

    @property
    def bundle(self) -> dict[str, float]:
        return {"CPU": 1.0} | ({"GPU": float(self.gpus_per_server)} if self.gpus_per_server else {})

    @model_validator(mode="after")
    def _shows_no_key(self) -> Self:
        if any(argument.partition("=")[0] in ("--api-key", "--admin-api-key") for argument in self.arguments):
            raise ValueError(
                "arguments has an API key, which other users of the machine could read in the list of processes; these "
                "servers listen on 127.0.0.1 alone, and arl asks them without a key"
            )
        return self


class SGLangProcessesConfig(ServerProcessesConfig):
    """SGLang servers that arl starts on this machine and stops (`python -m sglang.launch_server`)."""

    kind: Literal["sglang_processes"] = "sglang_processes"


class VLLMProcessesConfig(ServerProcessesConfig):
    """vLLM servers that arl starts on this machine and stops (`python -m vllm.entrypoints.openai.api_server`)."""

    protocol: ClassVar[Protocol] = "vllm"

    kind: Literal["vllm_processes"] = "vllm_processes"


EngineConfig = Annotated[
    LocalEngineConfig | SGLangEngineConfig | SGLangProcessesConfig | VLLMEngineConfig | VLLMProcessesConfig,
    Field(discriminator="kind"),
]

# Weights on their way to the servers.


class WeightFilesConfig(Section):
    """Weights that are written as files."""

    directory: Path | None = None
    """Where the files are written; every server that loads them must see it. Unset: a RAM-backed directory of this
    machine if all servers, by their addresses, and rank 0 are on it, and it has room; else run_dir/weights, which must
    then be on storage that they share."""


class DiskWeightsConfig(WeightFilesConfig):
    """Servers load a model directory."""

    transport: Literal["disk"] = "disk"


class DistributedWeightsConfig(Section):
    """Servers receive tensors through a process group that they share with the trainer: NCCL from a GPU, gloo from a
    CPU. No file is written."""

    transport: Literal["distributed"] = "distributed"
    address: str | None = None
    """Where servers on other machines reach the trainer. Unset: the address that its network reports."""


class DeltaWeightsConfig(WeightFilesConfig):
    """Servers on other machines get the changes since the version they hold. That is exact to the bit, and small at
    the learning rates of RL. A mirror beside each server patches its copy of the model, which the server then loads."""

    transport: Literal["delta"] = "delta"
    mirrors: dict[str, str] = Field(default_factory=dict)
    """Server address -> address of the mirror on its machine, started by `python -m arl.engine.weights.mirror`. A
    servers file can name more. A server without a mirror must see this machine's directory, as with disk. A key that
    mirrors ask for is in $ARL_MIRROR_API_KEY."""

    @property
    def key(self) -> str | None:
        """What mirrors get as a bearer token."""
        return os.environ.get(MIRROR_KEY) or None


class AdapterWeightsConfig(WeightFilesConfig):
    """For train.lora: servers keep the model and load each version's adapter beside it. Nothing is paused, and a
    request keeps the adapter that it began with."""

    transport: Literal["adapter"] = "adapter"


WeightsConfig = Annotated[
    DiskWeightsConfig | DistributedWeightsConfig | DeltaWeightsConfig | AdapterWeightsConfig,
    Field(discriminator="transport"),
]
"""How weights reach the servers."""


def check_fused(targets: set[str]) -> None:
    """Raise ValueError if SGLang could not load an adapter of these layers, because it fuses one with another."""
    for layers, needed in (({"q_proj", "k_proj", "v_proj"}, {"q_proj", "v_proj"}), ({"up_proj"}, {"gate_proj"})):
        if targets & layers and (missing := needed - targets):
            raise ValueError(
                f"train.lora.target_modules lacks {' and '.join(sorted(missing))}: SGLang fuses it with "
                f"{' and '.join(sorted(targets & layers))}, and needs adapters for both or neither. Name it too, or "
                "use weights.transport=disk"
            )


# The trainer.


Decay = Annotated[float, Field(ge=0, lt=1)]


class OptimizerConfig(Section):
    """AdamW and its learning-rate schedule."""

    lr: PositiveFloat = 1e-5
    """Peak learning rate."""
    betas: tuple[Decay, Decay] = (0.9, 0.95)
    """Decay of the first and second moments."""
    eps: PositiveFloat = 1e-8
    """Added to the root of the second moment."""
    weight_decay: float = Field(default=0.0, ge=0)
    """Decoupled weight decay, on matrices alone (not on norms and biases)."""
    max_grad_norm: PositiveFloat = 1.0
    """Gradients are scaled down to this global L2 norm."""
    schedule: Literal["constant", "linear", "cosine"] = "constant"
    """After the warm-up: stay constant, or decay to min_lr_ratio * lr at total_steps."""
    warmup_steps: NonNegativeInt = 0
    """Optimizer steps of linear warm-up from 0."""
    total_steps: PositiveInt | None = None
    """Optimizer steps until a decaying schedule ends. linear and cosine need it."""
    min_lr_ratio: float = Field(default=0.0, ge=0, le=1)
    """Share of lr that a decaying schedule ends at."""

    @model_validator(mode="after")
    def _decay_has_an_end(self) -> Self:
        if self.schedule != "constant" and self.total_steps is None:
            raise ValueError(f"schedule is {self.schedule}; it needs total_steps, the optimizer steps until it ends")
        if self.schedule == "constant" and (of_decay := self._changed("total_steps", "min_lr_ratio")):
            raise ValueError(f"{of_decay[0]} is set, but schedule is constant; it needs a decaying schedule")
        return self


class LoRAConfig(Section):
    """Low-rank adapters (LoRA, Hu et al. 2021): the model is frozen, and each linear layer's W x gets a trained update
    alpha / rank * B A x. Adapters learn at about ten times the learning rate of the whole model."""

    rank: PositiveInt = 32
    """Rows of A and columns of B: the largest rank that an update of W can have."""
    alpha: PositiveInt = 32
    """The update is scaled by alpha / rank."""
    target_modules: Literal["all-linear"] | tuple[str, ...] = "all-linear"
    """The modules that get adapters, by the end of their names, such as [q_proj, v_proj]. all-linear: every linear
    layer except the head, experts that are fused into one tensor, and their routers. A vision tower gets none: servers
    load adapters of the language model alone."""

    @model_validator(mode="after")
    def _names_modules(self) -> Self:
        if not self.target_modules or "" in tuple(self.target_modules):
            raise ValueError("target_modules has no names; name modules, such as q_proj, or leave it at all-linear")
        return self


class TrainConfig(Section):
    """The train engine: FSDP2 over a Hugging Face model."""

    optimizer: OptimizerConfig = OptimizerConfig()
    max_tokens_per_microbatch: PositiveInt = 8192
    """Sequences are packed into microbatches of at most this many tokens, or of the longest sequence's if it has more.
    Tokens that sequences share count once with share_prefixes. An image counts as its placeholders, which bound the
    patches in the vision tower, too: Qwen's models have four for each."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """The dtype of matmuls. Master weights, gradient reduction and the optimizer stay float32."""
    device: str = "cpu"
    """The device to train on: cpu, cuda, or one GPU of several as cuda:1."""
    num_threads: PositiveInt = 1
    """CPU threads of the trainer's torch."""
    share_prefixes: bool = True
    """Forward a prefix that sequences of a microbatch share (a prompt, earlier turns) once."""
    num_ranks: PositiveInt = 1
    """Processes to train with. More than 1: Ray actors, each with num_threads CPUs, and a GPU on cuda."""
    ray_address: str | None = None
    """With several ranks, or engine.on_ray: the Ray cluster to use, such as auto. Unset: one on this machine, for this
    run only."""
    min_ranks: PositiveInt | None = None
    """If the cluster has no room for num_ranks within a minute, train with the most ranks that have room, at least so
    many, which share rollout.batch_size evenly; and with all once there is room, after the next checkpoint. Unset: wait
    for room for num_ranks."""
    max_recoveries: NonNegativeInt = 3
    """How often in a row, without a newly trained batch, a trainer's process or rank that died, hangs or fails is
    replaced. What it held is trained again. 0: the first loss ends the run."""
    tensor_parallel: PositiveInt = 1
    """Split each layer of a Qwen or Llama over this many ranks. Divides num_ranks; the rest is data-parallel."""
    activation_checkpointing: bool = False
    """Keep only each layer's input and compute the rest again in the backward pass: less memory, a third slower."""
    cpu_offload: bool = False
    """Keep weights, gradients and optimizer state in the CPU's memory between uses (device cuda)."""
    compile: bool = False
    """torch.compile each layer: faster after minutes of compiling. Not with tensor_parallel."""
    lora: LoRAConfig | None = None
    """Freeze the model and train adapters. Unset: train the whole model. Not with tensor_parallel."""
    freeze_vision_tower: bool = False
    """Of a model that sees, train the language model alone. The vision tower stays as it is, with the mergers that
    project what it sees to the language model's size. With lora it always does."""

    @property
    def is_over_ray(self) -> bool:
        """Whether ranks are Ray's actors; if fewer than num_ranks train, a single one is, too."""
        return self.num_ranks > 1 or self.min_ranks is not None

    def rank_counts(self, batch_size: int) -> list[int]:
        """How many ranks may train batches of so many groups: num_ranks first, then fewer, which share them evenly."""
        least, parts = self.min_ranks or self.num_ranks, self.tensor_parallel
        fewer = range(self.num_ranks - parts, least - 1, -parts)
        return [self.num_ranks, *(count for count in fewer if batch_size % (count // parts) == 0)]

    @field_validator("device")
    @classmethod
    def _is_a_device(cls, device: str) -> str:
        if not re.fullmatch(r"cpu|cuda(:\d+)?", device):
            raise ValueError(f"{device!r} is not a device to train on; use cpu, cuda, or one GPU of several as cuda:1")
        return device

    @model_validator(mode="after")
    def _ranks_fit(self) -> Self:
        if self.num_ranks % self.tensor_parallel:
            raise ValueError(f"tensor_parallel is {self.tensor_parallel}; it must divide num_ranks={self.num_ranks}")
        if self.num_ranks == 1 and self.min_ranks is not None:
            raise ValueError("min_ranks is set, but num_ranks is 1, which trains without Ray")
        if self.min_ranks is not None and self.min_ranks > self.num_ranks:
            raise ValueError(f"min_ranks is {self.min_ranks}, but num_ranks is {self.num_ranks}; lower it")
        if self.min_ranks is not None and self.max_recoveries == 0:
            raise ValueError(
                f"min_ranks is {self.min_ranks}, but max_recoveries is 0, so a run that trains with fewer ranks "
                "never takes more again; raise max_recoveries"
            )
        if self.ray_address is not None and self.ray_address.startswith("ray://"):
            raise ValueError(
                "ray_address is a Ray client's address, but the trainer runs on a node of the cluster: use auto, or "
                "host:port"
            )
        return self

    @model_validator(mode="after")
    def _layers_can_be_prepared(self) -> Self:
        if self.compile and self.tensor_parallel > 1:
            raise ValueError(
                f"compile is set and tensor_parallel is {self.tensor_parallel}: torch cannot compile split layers for "
                "rows of varying length. Choose one of them"
            )
        if self.lora is not None and self.tensor_parallel > 1:
            raise ValueError(
                f"lora is set and tensor_parallel is {self.tensor_parallel}, but adapters cannot be split. Train them "
                "over data-parallel ranks, with tensor_parallel=1"
            )
        if self.cpu_offload and self.device == "cpu":
            raise ValueError("cpu_offload is for train.device=cuda; on a CPU the weights are in its memory already")
        return self


# Several policies in one run: the settings of each, and the roles that it plays. A run without policies has one, which
# plays all roles.

_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_-]*")


class PolicyConfig(Section):
    """One of several policies: the weights that play some roles, with a trainer of their own."""

    roles: tuple[str, ...] = Field(min_length=1)
    """The roles that it plays. Each role of the workflow belongs to one policy."""
    model: str | None = None
    """The model that it begins from. Unset: the run's `model`. With weights.transport=adapter all share that one."""
    lr: PositiveFloat | None = None
    """Its peak learning rate. Unset: train.optimizer.lr."""
    device: str | None = None
    """The device of its trainer and of its embedded servers. Unset: train.device and engine.device. With
    weights.transport=adapter, which has policies share servers, of its trainer alone."""
    addresses: tuple[str, ...] = ()
    """The servers that it has to itself, where servers run already. Unset: engine.addresses."""

    @field_validator("roles", mode="before")
    @classmethod
    def _one_role(cls, given: object) -> object:
        return (given,) if isinstance(given, str) else given


@dataclass(frozen=True, slots=True)
class PolicyRoles:
    """Which policy plays each role."""

    by_role: Mapping[str, str]
    """Role -> the name of its policy."""

    @classmethod
    def of(cls, policies: Mapping[str, PolicyConfig]) -> PolicyRoles:
        return cls({role: name for name, policy in policies.items() for role in policy.roles})

    def policy_of(self, role: str) -> str:
        """Raises RoleError for a role that no policy plays."""
        if role not in self.by_role:
            known = ", ".join(f"{role} ({policy})" for role, policy in self.by_role.items())
            raise RoleError(
                f"no policy plays the role {role!r:.80}; the roles and their policies are: {known}. Add it to one of "
                "policies.NAME.roles, or give the agent one of these roles"
            )
        return self.by_role[role]

    def check(self, declared: Iterable[str]) -> None:
        """Raise ConfigError unless each of a workflow's roles has a policy, and each policy plays one of them."""
        roles = frozenset(declared)
        for role in sorted(roles):
            self.policy_of(role)
        for name in dict.fromkeys(self.by_role.values()):
            own = [role for role, policy in self.by_role.items() if policy == name]
            if not roles & set(own):
                raise ConfigError(
                    f"the policy {name} would never be asked: it plays {', '.join(own)}, and the roles of the workflow "
                    f"are {', '.join(sorted(roles)) or 'none'}; change policies.{name}.roles, or remove this policy"
                )


def policies_flaw(
    policies: Mapping[str, PolicyConfig], engine: EngineConfig, weights: WeightsConfig, refused: Mapping[str, bool]
) -> str | None:
    """Why these policies cannot be trained in one run with these settings; None if they can.

    refused: settings that are for runs of one policy -> whether they are set.
    """
    for name in policies:
        if not _NAME.fullmatch(name):
            return f"a policy is named {name!r:.80}; a name has letters, digits, - and _, as it names a directory"
    role, number = Counter(role for policy in policies.values() for role in policy.roles).most_common(1)[0]
    if number > 1:
        names = [name for name, policy in policies.items() if role in policy.roles]
        return f"the role {role!r:.80} is claimed {number} times, by policies {', '.join(names)}; leave it to one"
    if not isinstance(weights, DiskWeightsConfig | AdapterWeightsConfig):
        return (
            f"weights.transport is {weights.transport}, which brings the weights of one policy; with several "
            "use disk (each has its own servers) or adapter (they share servers)"
        )
    setting = next((setting for setting, is_set in refused.items() if is_set), None)
    if setting is not None:
        return f"{setting} is for runs of one policy, and this one has {len(policies)}; leave it out"
    return _servers_flaw(policies, engine, isinstance(weights, AdapterWeightsConfig))


def _servers_flaw(policies: Mapping[str, PolicyConfig], engine: EngineConfig, shared: bool) -> str | None:
    """shared: all policies are adapters on the same servers."""
    running = isinstance(engine, RunningServersConfig)
    for name, policy in policies.items():
        if policy.model is not None and shared:
            return (
                f"policies.{name}.model is set, but with weights.transport=adapter all policies are adapters of "
                "`model`; leave it out, or use weights.transport=disk"
            )
        if policy.addresses and (shared or not running):
            why = "policies share servers" if shared else f"arl starts the servers of engine.kind={engine.kind}"
            return f"policies.{name}.addresses is set, but {why}; leave it out"
    if shared or not isinstance(engine, RunningServersConfig):
        return None
    if engine.servers_file is not None:
        return "engine.servers_file names servers of one policy; name each policy's in policies.NAME.addresses"
    taken = Counter(address.rstrip("/") for p in policies.values() for address in p.addresses or engine.addresses)
    address, number = taken.most_common(1)[0]
    if number > 1:
        return f"{address} would serve {number} policies, and holds one's weights; give each policy its own addresses"
    for name, policy in policies.items():
        if engine.min_servers > (number := len(policy.addresses or engine.addresses)):
            return f"engine.min_servers is {engine.min_servers}, but policies.{name} has {number} of them; lower it"
    return None

"""Every knob, on one page. Frozen; unknown fields and contradictions are errors that name the field.

Each component is given only its own section. Times are in seconds (`_s`). A variant is a type, chosen by `kind`.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated, Any, Literal, cast

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    ValidationInfo,
    field_validator,
    model_validator,
)

PauseMode = Literal["in_place", "retract", "abort"]


class Section(BaseModel):
    """A part of the configuration: frozen, and strict about names."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)


class ClientConfig(Section):
    """What every inference engine's client side shares."""

    request_timeout_s: PositiveFloat = 600.0
    """Longest time one agenerate may take, pauses and retries included."""
    max_retries: NonNegativeInt = 3
    """How often a request is sent again after its server failed, each time keeping the tokens it already has."""
    pause_mode: PauseMode = "in_place"
    """What a weight update does to running requests: in_place keeps their KV cache, retract recomputes it under the
    new weights, abort returns partial outputs that the client continues."""
    update_timeout_s: PositiveFloat = 120.0
    """Longest time one server may take to load new weights before it is fenced off."""
    update_order: Literal["all", "rolling"] = "all"
    """all: a weight update reaches every server at once. rolling: one after another, while the others generate."""

    @property
    def absence_timeout_s(self) -> float:
        """Longest time that a weight update waits for a server to come back where none is left."""
        return self.update_timeout_s


class LocalEngineConfig(ClientConfig):
    """The embedded server: arl starts it, as processes of its own, and stops it."""

    kind: Literal["local"] = "local"
    num_servers: PositiveInt = 1
    """How many server processes to start."""
    num_threads: PositiveInt = 1
    """CPU threads for each server's model."""
    device: str = "cpu"
    """The torch device that the servers compute on: cpu, cuda, cuda:0, ..."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """What the servers hold weights in and compute in."""
    max_running_requests: PositiveInt = 128
    """How many requests one server decodes at once; more wait in its queue."""
    context_length: PositiveInt | None = None
    """Longest prompt plus response in tokens; the model's own limit (at most 4096) when unset."""
    max_restarts: NonNegativeInt = 3
    """How often a server that died is started again. Its requests go to the others meanwhile."""
    startup_timeout_s: PositiveFloat = 120.0
    """Longest time a server may take until it answers /health."""

    @property
    def absence_timeout_s(self) -> float:
        return self.startup_timeout_s + self.update_timeout_s


class SGLangEngineConfig(ClientConfig):
    """SGLang servers, already running."""

    kind: Literal["sglang"] = "sglang"
    addresses: tuple[str, ...] = ()
    """Base URLs, such as http://127.0.0.1:30000; all must serve the same model."""
    router: str | None = None
    """Base URL of an sglang-router in front of exactly these addresses: requests go to it, weights to each address."""
    api_key: str | None = None
    """Sent as a bearer token, if the servers ask for one."""

    @model_validator(mode="after")
    def _has_addresses(self) -> SGLangEngineConfig:
        if not self.addresses:
            raise ValueError("addresses is empty; name at least one server, such as http://127.0.0.1:30000")
        return self


class SGLangProcessesConfig(ClientConfig):
    """SGLang servers that arl starts on this machine, as processes of its own, and stops."""

    kind: Literal["sglang_processes"] = "sglang_processes"
    python: Path = Path(sys.executable)
    """The Python interpreter that has sglang; its environment may be another than arl's."""
    num_servers: PositiveInt = 1
    """How many servers to start, each on a free port."""
    gpus_per_server: NonNegativeInt = 1
    """GPUs of this machine for each server, in order: its tensor-parallel size. 0: servers on the CPU."""
    first_gpu: NonNegativeInt = 0
    """The GPUs before this one are left alone, for the trainer."""
    arguments: tuple[str, ...] = ()
    """More arguments for each `python -m sglang.launch_server`, such as --mem-fraction-static 0.8."""
    max_restarts: NonNegativeInt = 3
    """How often a server that died is started again. Its requests go to the others meanwhile."""
    startup_timeout_s: PositiveFloat = 600.0
    """Longest time a server may take until it answers /health."""

    @property
    def absence_timeout_s(self) -> float:
        return self.startup_timeout_s + self.update_timeout_s


EngineConfig = Annotated[LocalEngineConfig | SGLangEngineConfig | SGLangProcessesConfig, Field(discriminator="kind")]


class RolloutConfig(Section):
    """How episodes are run, and what happens when they do not go well."""

    batch_size: PositiveInt = 32
    """Groups in a batch (B): what the trainer takes at a time."""
    group_size: PositiveInt = 8
    """Episodes of each example."""
    max_staleness: NonNegativeInt = 2
    """eta: how many versions older than the trainer's a trained token may be. 0 is synchronous RL."""
    max_concurrent_episodes: PositiveInt = 1024
    """Cap on episodes running at once, whatever the buffer would admit."""
    episode_timeout_s: PositiveFloat = 600.0
    """Longest time one episode may take."""
    episode_retries: NonNegativeInt = 1
    """How often an episode that failed is run again."""
    min_group_size: PositiveInt = 2
    """Fewest finished episodes a group may be trained with; a smaller one is dropped. At most group_size."""
    max_failure_rate: float = Field(default=0.5, gt=0, le=1)
    """Share of failed episodes, among the last failure_window, past which the run stops with the first traceback."""
    failure_window: PositiveInt = 64
    """Over how many finished episodes max_failure_rate is measured; before that many, the run goes on."""
    drop_stragglers_after_s: PositiveFloat | None = None
    """Time a running group may keep the trainer waiting before it is aborted and dropped. Unset: wait."""
    drop_equal_rewards: bool = False
    """Reject groups whose episodes all have the same reward: they carry no gradient, and their place is refilled."""
    shuffle: bool = True
    """Shuffle the dataset anew each epoch (by seed); otherwise its order is kept."""

    @model_validator(mode="after")
    def _group_sizes_fit(self) -> RolloutConfig:
        if "min_group_size" in self.model_fields_set and self.min_group_size > self.group_size:
            raise ValueError(
                f"min_group_size is {self.min_group_size}; it must be at most group_size {self.group_size}"
            )
        return self


class OptimizerConfig(Section):
    """AdamW and its learning-rate schedule."""

    lr: PositiveFloat = 1e-5
    """Peak learning rate."""
    betas: tuple[float, float] = (0.9, 0.95)
    """Decay of the first and second moments."""
    eps: PositiveFloat = 1e-8
    """Added to the root of the second moment."""
    weight_decay: float = Field(default=0.0, ge=0)
    """Decoupled weight decay, on matrices alone (not on norms and biases)."""
    max_grad_norm: PositiveFloat = 1.0
    """Gradients are scaled down to this global L2 norm."""
    schedule: Literal["constant", "linear", "cosine"] = "constant"
    """After the warm-up: stay, or decay to min_lr_ratio * lr at total_steps."""
    warmup_steps: NonNegativeInt = 0
    """Optimizer steps of linear warm-up from 0."""
    total_steps: PositiveInt | None = None
    """Optimizer steps until a decaying schedule ends. linear and cosine need it."""
    min_lr_ratio: float = Field(default=0.0, ge=0, le=1)
    """Share of lr that a decaying schedule ends at."""

    @model_validator(mode="after")
    def _decay_has_an_end(self) -> OptimizerConfig:
        if self.schedule != "constant" and self.total_steps is None:
            raise ValueError(f"schedule is {self.schedule}; it needs total_steps, the optimizer steps until it ends")
        if self.schedule == "constant" and self.model_fields_set & {"total_steps", "min_lr_ratio"}:
            raise ValueError("total_steps and min_lr_ratio are for a decaying schedule; schedule is constant")
        return self


class TrainConfig(Section):
    """The train engine: FSDP2 over a Hugging Face model."""

    optimizer: OptimizerConfig = OptimizerConfig()
    max_tokens_per_microbatch: PositiveInt = 8192
    """Sequences are packed into microbatches of at most this many tokens (one longer sequence goes alone). Those that
    sequences share count once with share_prefixes."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """What matmuls compute in. Master weights, gradients' reduction and the optimizer stay float32."""
    device: str = "cpu"
    """The torch device to train on: cpu or cuda."""
    num_threads: PositiveInt = 1
    """CPU threads of the trainer's torch."""
    logprob_chunk_size: PositiveInt = 1024
    """Tokens whose [tokens, vocabulary] logits are held at once."""
    share_prefixes: bool = True
    """Forward the tokens with which sequences of a microbatch begin alike (a prompt, earlier turns) once."""
    num_ranks: PositiveInt = 1
    """Processes to train with. 1: this process. More: Ray actors, each with num_threads CPUs, and a GPU on cuda."""
    ray_address: str | None = None
    """With several ranks: the Ray cluster to use, such as auto. Unset: one of this machine, for this run alone."""
    startup_timeout_s: PositiveFloat = 300.0
    """With several ranks: longest time until all of them have a place on the cluster; then, for each of them, as those
    of a machine load one after another, until it holds the model."""
    tensor_parallel: PositiveInt = 1
    """Split each layer of a Qwen or Llama over so many ranks; divides num_ranks, which are data-parallel otherwise."""
    context_parallel: PositiveInt = 1
    """Not supported above 1: torch's ring attention has no packed sequences. Longer ones need activation_checkpointing,
    cpu_offload or tensor_parallel."""
    activation_checkpointing: bool = False
    """Keep each layer's input alone and compute the rest again in the backward pass: less memory, a third slower."""
    cpu_offload: bool = False
    """Keep weights, gradients and optimizer state in the CPU's memory between uses (device cuda)."""
    compile: bool = False
    """torch.compile each layer: faster after minutes of compiling. Not with tensor_parallel."""

    @model_validator(mode="after")
    def _ranks_fit(self) -> TrainConfig:
        if self.context_parallel > 1:
            raise ValueError(
                "context_parallel is above 1, which arl does not support: torch's ring attention knows no packed "
                "sequences. Use activation_checkpointing, cpu_offload or tensor_parallel for long ones"
            )
        if self.num_ranks % self.tensor_parallel:
            raise ValueError(
                f"tensor_parallel is {self.tensor_parallel}; it must divide num_ranks, which is {self.num_ranks}"
            )
        if self.compile and self.tensor_parallel > 1:
            raise ValueError(
                "compile is set and tensor_parallel is above 1: torch cannot compile split layers for rows of varying "
                "length. Choose one of them"
            )
        if self.cpu_offload and self.device.startswith("cpu"):
            raise ValueError("cpu_offload is for train.device=cuda; on a CPU the weights are in its memory already")
        if self.num_ranks == 1 and (of_ray := self.model_fields_set & {"ray_address", "startup_timeout_s"}):
            raise ValueError(f"{min(of_ray)} is set, but num_ranks is 1, which trains in this process and without Ray")
        if self.ray_address is not None and self.ray_address.startswith("ray://"):
            raise ValueError(
                "ray_address is a Ray client's; the trainer has to run on a node of the cluster: say auto, or host:port"
            )
        return self


class PPOConfig(Section):
    """Decoupled PPO with GRPO advantages. Letters: c current, p proximal, b behavior logprobs, A advantage."""

    clip_low: float = Field(default=0.2, ge=0, lt=1)
    """The ratio exp(c - p) is clipped to at least 1 - clip_low."""
    clip_high: float = Field(default=0.2, ge=0)
    """The ratio exp(c - p) is clipped to at most 1 + clip_high."""
    proximal: Literal["recomputed", "bypassed"] = "recomputed"
    """recomputed: p by a forward pass when the batch is taken (with one minibatch by the same one that trains, as
    p = c there). bypassed: p = b, so ratio = exp(c - b)."""
    behavior_weight_cap: PositiveFloat | None = 5.0
    """The weight exp(p - b) is truncated to at most this (TIS); unset leaves it as it is."""
    scale_by_std: bool = True
    """GRPO divides R - mean by the group's standard deviation; Dr.GRPO does not."""
    aggregation: Literal["token_mean", "sequence_mean"] = "token_mean"
    """token_mean: every trained token of the minibatch weighs the same. sequence_mean: every trajectory does."""
    minibatches: PositiveInt = 1
    """Optimizer steps per batch: the batch's groups are split into this many minibatches."""

    @model_validator(mode="after")
    def _cap_has_a_weight(self) -> PPOConfig:
        if self.proximal == "bypassed" and "behavior_weight_cap" in self.model_fields_set:
            raise ValueError("behavior_weight_cap is set, but with proximal=bypassed there is no weight to cap")
        return self


class DiskWeightsConfig(Section):
    """Servers load a model directory."""

    transport: Literal["disk"] = "disk"
    directory: Path | None = None
    """Where model directories are written; must be visible to every server. Unset: a RAM-backed directory of this
    machine, or the run directory where there is none."""


class DistributedWeightsConfig(Section):
    """Servers receive tensors through a process group that they share with the trainer: no file is written."""

    transport: Literal["distributed"] = "distributed"
    backend: Literal["auto", "gloo", "nccl"] = "auto"
    """auto: nccl where the trainer is on CUDA, gloo where it is on a CPU. All servers have to support it."""
    address: str | None = None
    """Where servers on other machines reach the trainer. Unset: the trainer's own address as its network says it."""
    bucket_bytes: PositiveInt = 256 << 20
    """Tensors are sent in buckets of at most this size; a larger tensor is one of its own."""


class DeltaWeightsConfig(Section):
    """Servers on other machines get what changed since the version they hold, exact to the bit, and small at the
    learning rates of RL. A mirror beside each server patches its copy of the model, which the server then loads."""

    transport: Literal["delta"] = "delta"
    mirrors: dict[str, str] = {}
    """Server address -> address of the mirror on its machine, started there by `python -m arl.engine.mirror`. A server
    without one has to see this machine's directory, as with disk."""
    api_key: str | None = None
    """Sent to the mirrors as a bearer token, if they ask for one."""
    directory: Path | None = None
    """Where model directories are written on this machine, as with disk."""

    @model_validator(mode="after")
    def _has_mirrors(self) -> DeltaWeightsConfig:
        if not self.mirrors:
            raise ValueError(
                "mirrors is empty; without a mirror there is nobody to send a delta to. Servers of this machine load "
                "whole directories from memory: use transport=disk"
            )
        return self


WeightsConfig = Annotated[
    DiskWeightsConfig | DistributedWeightsConfig | DeltaWeightsConfig, Field(discriminator="transport")
]
"""How weights reach the servers."""


class EvaluationConfig(Section):
    every: PositiveInt | None = None
    """Evaluate beside training each time so many versions were trained. Unset: only when asked."""
    max_concurrent_episodes: PositiveInt = 64
    """Held-out episodes running at once."""


class CheckpointConfig(Section):
    every: PositiveInt | None = None
    """Save a checkpoint each time so many versions were trained. Unset: only when the run ends or is interrupted."""
    keep: PositiveInt = 2
    """How many of the newest checkpoints to keep."""


class LogConfig(Section):
    console: bool = True
    """Print a live table."""
    trajectories: NonNegativeInt = 8
    """How many trajectories of each step to write to trajectories.jsonl."""


class Config(Section):
    """A run. Rerunning with the same run_dir continues from its newest checkpoint."""

    model: str
    """A Hugging Face model directory, or a model's name on the hub."""
    run_dir: Path = Path("runs/run")
    """Where metrics, trajectories, checkpoints and server logs go."""
    steps: PositiveInt = 100
    """Batches to train."""
    seed: int = 0
    engine: EngineConfig = LocalEngineConfig()
    rollout: RolloutConfig = RolloutConfig()
    train: TrainConfig = TrainConfig()
    ppo: PPOConfig = PPOConfig()
    weights: WeightsConfig = DiskWeightsConfig()
    evaluation: EvaluationConfig = EvaluationConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()
    log: LogConfig = LogConfig()

    @field_validator("engine", "weights", mode="before")
    @classmethod
    def _kind_of_the_default(cls, section: Any, info: ValidationInfo) -> object:
        """A section that names no kind speaks of the default one."""
        if not isinstance(section, dict) or info.field_name is None:
            return cast("object", section)
        tag = {"engine": "kind", "weights": "transport"}[info.field_name]
        default = cls.model_fields[info.field_name].default
        return {tag: getattr(default, tag), **cast("dict[str, Any]", section)}

    @model_validator(mode="after")
    def _mirrors_have_servers(self) -> Config:
        if not isinstance(self.weights, DeltaWeightsConfig):
            return self
        if not isinstance(self.engine, SGLangEngineConfig):
            raise ValueError(
                "weights.transport is delta, which is for servers on other machines, and "
                f"engine.kind={self.engine.kind} starts them on this one; use weights.transport=disk"
            )
        addresses = {address.rstrip("/") for address in self.engine.addresses}
        if unknown := [server for server in self.weights.mirrors if server.rstrip("/") not in addresses]:
            raise ValueError(
                f"weights.mirrors has a mirror for {unknown[0]}, which is not among engine.addresses: "
                f"{', '.join(self.engine.addresses)}"
            )
        return self

    @model_validator(mode="after")
    def _minibatches_fit(self) -> Config:
        if self.rollout.batch_size % self.ppo.minibatches:
            raise ValueError(
                f"ppo.minibatches is {self.ppo.minibatches}; it must divide "
                f"rollout.batch_size={self.rollout.batch_size}"
            )
        return self

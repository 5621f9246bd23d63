"""The train engine, as settings."""

from __future__ import annotations

import re
from typing import Literal, Self

from pydantic import Field, NonNegativeInt, PositiveFloat, PositiveInt, field_validator, model_validator

from arl.api.settings import Section


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
    def _decay_has_an_end(self) -> Self:
        if self.schedule != "constant" and self.total_steps is None:
            raise ValueError(f"schedule is {self.schedule}; it needs total_steps, the optimizer steps until it ends")
        if self.schedule == "constant" and (of_decay := self._changed("total_steps", "min_lr_ratio")):
            raise ValueError(f"{of_decay[0]} is set, which is for a decaying schedule; schedule is constant")
        return self


class LoRAConfig(Section):
    """Low-rank adapters (LoRA, Hu et al. 2021): the model is frozen, and beside its linear layers' W x an update
    alpha / rank * B A x is trained. They learn at some ten times the learning rate of the whole model."""

    rank: PositiveInt = 32
    """Rows of A and columns of B: the rank that an update of W can have."""
    alpha: PositiveInt = 32
    """What the update is scaled by, together with 1 / rank."""
    target_modules: Literal["all-linear"] | tuple[str, ...] = "all-linear"
    """Which modules get adapters, by the end of their names, such as [q_proj, v_proj]. all-linear: every linear layer
    but the head; experts that are fused into one tensor are none."""
    dropout: float = 0.0
    """Not supported above 0: the trainer's log-probabilities would be random, and not the servers'."""

    @model_validator(mode="after")
    def _can_be_honoured(self) -> Self:
        if self.dropout:
            raise ValueError(
                f"dropout is {self.dropout}; it must be 0, as dropout would make the trainer's log-probabilities "
                "random, and ratios to the servers' with them"
            )
        if not self.target_modules or "" in tuple(self.target_modules):
            raise ValueError("target_modules has no names; name modules, such as q_proj, or leave it at all-linear")
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
    """What to train on: cpu, cuda, or one GPU of several as cuda:1."""
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
    lora: LoRAConfig | None = None
    """Freeze the model and train adapters. Unset: train the whole model. Not with tensor_parallel."""

    @field_validator("device")
    @classmethod
    def _is_a_device(cls, device: str) -> str:
        if not re.fullmatch(r"cpu|cuda(:\d+)?", device):
            raise ValueError(f"{device!r} is nothing to train on; say cpu, cuda, or one GPU of several as cuda:1")
        return device

    @model_validator(mode="after")
    def _ranks_fit(self) -> Self:
        if self.context_parallel > 1:
            raise ValueError(
                "context_parallel is above 1, which arl does not support: torch's ring attention knows no packed "
                "sequences. Use activation_checkpointing, cpu_offload or tensor_parallel for long ones"
            )
        if self.num_ranks % self.tensor_parallel:
            raise ValueError(
                f"tensor_parallel is {self.tensor_parallel}; it must divide num_ranks, which is {self.num_ranks}"
            )
        if self.num_ranks == 1 and (of_ray := self._changed("ray_address", "startup_timeout_s")):
            raise ValueError(f"{of_ray[0]} is set, but num_ranks is 1, which trains in this process and without Ray")
        if self.ray_address is not None and self.ray_address.startswith("ray://"):
            raise ValueError(
                "ray_address is a Ray client's; the trainer has to run on a node of the cluster: say auto, or host:port"
            )
        return self

    @model_validator(mode="after")
    def _layers_can_be_prepared(self) -> Self:
        if self.compile and self.tensor_parallel > 1:
            raise ValueError(
                "compile is set and tensor_parallel is above 1: torch cannot compile split layers for rows of varying "
                "length. Choose one of them"
            )
        if self.lora is not None and self.tensor_parallel > 1:
            raise ValueError(
                "lora is set and tensor_parallel is above 1: there is no plan for splitting adapters. Train them over "
                "data-parallel ranks, with tensor_parallel=1: with the model frozen, memory is seldom what is short"
            )
        if self.cpu_offload and self.device == "cpu":
            raise ValueError("cpu_offload is for train.device=cuda; on a CPU the weights are in its memory already")
        return self

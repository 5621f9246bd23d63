"""The settings of `arl sft`, `arl dpo` and `arl rm`: fine-tuning on a dataset."""

from __future__ import annotations

from pathlib import Path
from typing import Any, ClassVar, Literal, Self, cast

from pydantic import Field, NonNegativeInt, PositiveFloat, PositiveInt, model_validator

from arl.api.config import CheckpointConfig, ConsoleConfig
from arl.api.engine_config import OptimizerConfig, TrainConfig
from arl.api.settings import Section, laid_over


class FinetuneOptimizerConfig(OptimizerConfig):
    """AdamW and its learning-rate schedule, which ends with the run."""

    schedule: Literal["constant", "linear", "cosine"] = "linear"
    """After the warm-up: stay constant, or decay to min_lr_ratio * lr at total_steps."""
    total_steps: PositiveInt | None = None
    """Optimizer steps until a decaying schedule ends. Unset: the run's."""

    @model_validator(mode="after")
    def _decay_has_an_end(self) -> Self:
        if self.schedule == "constant" and (of_decay := self._changed("total_steps", "min_lr_ratio")):
            raise ValueError(f"{of_decay[0]} is set, but schedule is constant; it needs a decaying schedule")
        return self


class FinetuneTrainConfig(TrainConfig):
    """The train engine: FSDP2 over a Hugging Face model."""

    optimizer: FinetuneOptimizerConfig = FinetuneOptimizerConfig()  # pyright: ignore[reportIncompatibleVariableOverride]

    @model_validator(mode="after")
    def _replaces_no_ranks(self) -> Self:
        if set_ones := self._changed("min_ranks", "max_recoveries"):
            raise ValueError(
                f"{set_ones[0]} is set, but fine-tuning replaces no lost ranks: run the same command again, and it "
                "continues from its newest checkpoint"
            )
        return self


class FinetuneEvaluationConfig(Section):
    """Losses on held-out rows."""

    every: PositiveInt | None = None
    """Evaluate each time this many steps were trained. Unset: before the first step and after the last one."""


class FinetuneConfig(Section):
    """Fine-tuning on a dataset. Run it again with the same run_dir, and it continues from the newest checkpoint."""

    program: ClassVar[str]
    """The command that takes these settings."""
    model: str
    """A Hugging Face model directory, or a model's name on the hub."""
    dataset: str
    """A file, a directory, or a dataset's name on the hub."""
    split: str = "train"
    """The split of `dataset` to train on, unless it is a file."""
    subset: str | None = None
    """The configuration of a dataset on the hub. Unset: its only one, or the one called main or default."""
    eval_dataset: str | None = None
    """Held-out rows: a file, a directory, or a name on the hub. Unset: num_held_out rows of `dataset`."""
    eval_split: str = "test"
    """The split of `eval_dataset`, unless it is a file."""
    num_held_out: NonNegativeInt = 0
    """Without eval_dataset: how many rows at the end of `dataset` are held out, and not trained."""
    columns: dict[str, str] = Field(default_factory=dict)
    """Columns that rows get by the names of others, as JSON: {"prompt": "question", "completion": "answer"}."""
    run_dir: Path
    """Where metrics, checkpoints and the trained model go."""
    epochs: PositiveInt = 1
    """How often each row is trained."""
    batch_size: PositiveInt = 16
    """Examples of an optimizer step."""
    max_tokens: PositiveInt | None = None
    """Most tokens of an example. Unset: the model's context."""
    too_long: Literal["error", "drop"] = "error"
    """What to do with a row of more than max_tokens: end with an error that names it, or leave it out and count it. No
    row is cut."""
    seed: int = 0
    """Seeds the order of the examples, and a new head."""
    train: FinetuneTrainConfig = FinetuneTrainConfig()
    evaluation: FinetuneEvaluationConfig = FinetuneEvaluationConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()
    log: ConsoleConfig = ConsoleConfig()

    @model_validator(mode="before")
    @classmethod
    def _over_the_defaults(cls, given: Any) -> object:
        """A section given in part keeps what the class set in its default."""
        if not isinstance(given, dict):
            return given
        sections = {n: field.default for n, field in cls.model_fields.items() if isinstance(field.default, Section)}
        return {name: laid_over(sections.get(name), value) for name, value in cast("dict[str, Any]", given).items()}

    @model_validator(mode="after")
    def _has_held_out_rows(self) -> Self:
        if self.eval_dataset is not None and self.num_held_out:
            raise ValueError(
                f"num_held_out is {self.num_held_out}, but eval_dataset names the held-out rows; leave one of them out"
            )
        if self.evaluation.every and self.eval_dataset is None and not self.num_held_out:
            raise ValueError(
                f"evaluation.every is {self.evaluation.every}, but there is nothing to evaluate on; set eval_dataset, "
                "or num_held_out"
            )
        return self


class SFTConfig(FinetuneConfig):
    """Supervised fine-tuning on rows with `messages`, with `prompt` and `completion`, or with `text`. Run it again with
    the same run_dir, and it continues from the newest checkpoint."""

    program: ClassVar[str] = "arl sft"
    run_dir: Path = Path("runs/sft")
    """Where metrics, checkpoints and the trained model go."""


_SMALL_STEPS = FinetuneTrainConfig(optimizer=FinetuneOptimizerConfig(lr=1e-6))


class DPOConfig(FinetuneConfig):
    """Preference learning (DPO, IPO) on rows with `prompt`, `chosen` and `rejected`. Run it again with the same
    run_dir, and it continues from the newest checkpoint."""

    program: ClassVar[str] = "arl dpo"
    run_dir: Path = Path("runs/dpo")
    """Where metrics, checkpoints and the trained model go."""
    kind: Literal["dpo", "ipo"] = "dpo"
    """The loss."""
    beta: PositiveFloat = 0.1
    """How strongly the model is held to the reference, which is `model`."""
    label_smoothing: float = Field(default=0.0, ge=0, lt=0.5)
    """With dpo: the share of labels assumed wrong."""
    mean_logprobs: bool = False
    """Use the mean over an answer's tokens instead of the sum, so that length does not count."""
    sft: float = Field(default=0.0, ge=0)
    """The weight of imitating the chosen answer beside preferring it, by its mean logprob (RPO, 1 in its paper)."""
    train: FinetuneTrainConfig = _SMALL_STEPS

    @model_validator(mode="after")
    def _smooths_what_it_can(self) -> Self:
        if self.kind == "ipo" and self.label_smoothing:
            raise ValueError(f"label_smoothing is {self.label_smoothing}, but kind is ipo, which has no labels")
        return self


class RMConfig(FinetuneConfig):
    """A reward model from rows with `prompt`, `chosen` and `rejected`. Run it again with the same run_dir, and it
    continues from the newest checkpoint."""

    program: ClassVar[str] = "arl rm"
    run_dir: Path = Path("runs/rm")
    """Where metrics, checkpoints and the trained model go."""
    center: float = Field(default=0.0, ge=0)
    """Keeps scores around 0: the weight of (s_chosen + s_rejected)^2, such as 0.01."""

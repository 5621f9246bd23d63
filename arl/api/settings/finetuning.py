"""The settings of `arl finetune`: fine-tuning on a dataset."""

from __future__ import annotations

from pathlib import Path
from typing import Any, ClassVar, Literal, Self, cast

from pydantic import Field, NonNegativeInt, PositiveFloat, PositiveInt, model_validator

from arl.api.settings.engines import OptimizerConfig, TrainConfig
from arl.api.settings.run import CheckpointConfig, ConsoleConfig
from arl.api.settings.sections import Section, laid_over


class FinetuneOptimizerConfig(OptimizerConfig):
    """AdamW and its learning-rate schedule, which ends with the run."""

    lr: PositiveFloat = 1e-5
    """The peak learning rate. Unset: 1e-5, and 1e-6 for dpo."""
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


_SMALL_STEPS = FinetuneTrainConfig(optimizer=FinetuneOptimizerConfig(lr=1e-6))


class FinetuneEvaluationConfig(Section):
    """Losses on held-out rows."""

    every: PositiveInt | None = None
    """Evaluate each time this many steps were trained. Unset: before the first step and after the last one."""


class PreferencesConfig(Section):
    """The loss of kind=dpo."""

    loss: Literal["dpo", "ipo"] = "dpo"
    """-log sigmoid(beta h), or (h - 1 / (2 beta))^2, of the difference h of the two answers' log-ratios."""
    beta: PositiveFloat = 0.1
    """How strongly the model is held to the reference, which is `model`."""
    label_smoothing: float = Field(default=0.0, ge=0, lt=0.5)
    """With loss dpo: the share of labels assumed wrong."""
    mean_logprobs: bool = False
    """Use the mean over an answer's tokens instead of the sum, so that length does not count."""
    sft: float = Field(default=0.0, ge=0)
    """The weight of imitating the chosen answer beside preferring it, by its mean logprob (RPO, 1 in its paper)."""

    @model_validator(mode="after")
    def _smooths_what_it_can(self) -> Self:
        if self.loss == "ipo" and self.label_smoothing:
            raise ValueError(f"label_smoothing is {self.label_smoothing}, but loss is ipo, which has no labels")
        return self


class ScoresConfig(Section):
    """The loss of kind=rm."""

    center: float = Field(default=0.0, ge=0)
    """Keeps scores around 0: the weight of (s_chosen + s_rejected)^2, such as 0.01."""


class FinetuneConfig(Section):
    """Fine-tuning on a dataset. Run it again with the same run_dir, and it continues from the newest checkpoint."""

    program: ClassVar[str] = "arl finetune"
    """The command that takes these settings."""
    kind: Literal["sft", "dpo", "rm"]
    """sft: supervised, on rows with `messages`, with `prompt` and `completion`, or with `text`. dpo: preferences (DPO,
    IPO), on rows with `prompt`, `chosen` and `rejected`. rm: a reward model, on the same rows."""
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
    run_dir: Path = Path("runs/KIND")
    """Where metrics, checkpoints and the trained model go. Unset: a directory named after the kind."""
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

    dpo: PreferencesConfig = PreferencesConfig()
    rm: ScoresConfig = ScoresConfig()

    @model_validator(mode="before")
    @classmethod
    def _defaults_of_the_kind(cls, given: Any) -> object:
        if not isinstance(given, dict):
            return given
        settings = cast("dict[str, Any]", given)
        known = {"run_dir": Path("runs") / str(settings.get("kind")), **settings}
        if known.get("kind") == "dpo":
            known["train"] = laid_over(_SMALL_STEPS, known.get("train", {}))
        return known

    @model_validator(mode="after")
    def _has_one_loss(self) -> Self:
        for kind in ("dpo", "rm"):
            if kind != self.kind and kind in self._changed("dpo", "rm"):
                raise ValueError(f"{kind} is set, but kind is {self.kind}; leave one of them out")
        return self

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

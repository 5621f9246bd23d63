"""Settings of evaluations on held-out examples."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal, Self

from pydantic import Field, PositiveInt, model_validator

from arl.api.settings.sections import Section


class SuiteConfig(Section):
    """What differs for one of several held-out datasets."""

    every: PositiveInt | None = None
    """Play it each time this many versions were trained, a multiple of evaluation.every. Its reward is then not in the
    evaluation's own, which compares the same examples each time. Unset: in every evaluation, and in its reward."""
    episodes_per_example: PositiveInt | None = None
    """Unset: evaluation.episodes_per_example."""


class EvaluationConfig(Section):
    """Episodes on held-out examples, beside training."""

    every: PositiveInt | None = None
    """Evaluate each time this many versions were trained. Unset: only when asked."""
    episodes_per_example: PositiveInt = 1
    """How often each held-out example is played. With several, evaluations also have the metrics pass@1, pass@2,
    pass@4, ...: the chance that at least one of so many episodes has a reward of 1 or more."""
    suites: dict[str, SuiteConfig] = Field(default_factory=dict)
    """What differs for held-out datasets, by the names that they have: {"aime": {"every": 50,
    "episodes_per_example": 32}}. A task's examples are named by the task, or TASK/NAME."""
    hold_weights: bool = False
    """Servers keep the evaluated version until the evaluation ends. Newer weights wait, and training waits once it is
    max_staleness ahead. Otherwise an evaluation runs on weights that change meanwhile."""
    keep_best: str | None = None
    """The metric by which run_dir/best has the best evaluated model: reward, pass@4, episode/NAME, or SUITE/reward and
    so on for one held-out dataset. Higher is better. Needs hold_weights."""

    @property
    def needs_examples(self) -> list[str]:
        """The settings that have an effect with held-out examples alone."""
        return self._changed("hold_weights", "keep_best", "suites")

    def repeats_of(self, suite: str) -> int:
        """The episodes of each example of a held-out dataset."""
        own = self.suites.get(suite)
        return (own and own.episodes_per_example) or self.episodes_per_example

    @model_validator(mode="after")
    def _intervals_are_multiples(self) -> Self:
        for name, suite in self.suites.items():
            if suite.every is None:
                continue
            if self.every is None:
                raise ValueError(
                    f"suites has every={suite.every} for {name!r}, but evaluation.every is unset; set that, too"
                )
            if suite.every % self.every:
                raise ValueError(
                    f"suites has every={suite.every} for {name!r}, which is not a multiple of evaluation.every="
                    f"{self.every}: a suite is played beside the others, in some of their evaluations"
                )
        return self

    @model_validator(mode="after")
    def _best_model_is_one_model(self) -> Self:
        if self.keep_best is not None and not self.hold_weights:
            raise ValueError(
                f"keep_best is {self.keep_best!r}, but servers change their weights during an evaluation, so its "
                "numbers are of no single model; set hold_weights=true"
            )
        return self


class TrackioConfig(Section):
    """trackio: its local database ($TRACKIO_DIR) and dashboard, or a Hugging Face Space."""

    kind: Literal["trackio"] = "trackio"
    project: str = "arl"
    name: str | None = None
    """The run's name; it gets a random ending. Unset: run_dir's."""
    group: str | None = None
    """Shown with the other runs of this group."""
    space_id: str | None = None
    """A Hugging Face Space that gets the run, instead of the database. Unset: $TRACKIO_SPACE_ID, if any."""


class WandbConfig(Section):
    """Weights & Biases."""

    kind: Literal["wandb"] = "wandb"
    project: str = "arl"
    entity: str | None = None
    """A user or a team. Unset: your own default."""
    name: str | None = None
    """The run's name. Unset: run_dir's."""
    group: str | None = None
    """Shown with the other runs of this group."""
    tags: tuple[str, ...] = ()
    mode: Literal["online", "offline"] | None = None
    """offline: write to run_dir/wandb alone, for `wandb sync`. Unset: $WANDB_MODE, or else online."""


class TensorBoardConfig(Section):
    """TensorBoard's event files."""

    kind: Literal["tensorboard"] = "tensorboard"
    directory: Path | None = None
    """The directory of the event files. Unset: run_dir/tensorboard."""


class MLflowConfig(Section):
    """MLflow: a local database, or a tracking server."""

    kind: Literal["mlflow"] = "mlflow"
    experiment: str = "arl"
    name: str | None = None
    """The run's name. Unset: run_dir's."""
    address: str | None = None
    """The tracking server, as MLflow's tracking URI. Unset: $MLFLOW_TRACKING_URI, or else a database in
    run_dir/mlflow."""


TrackerConfig = Annotated[
    TrackioConfig | WandbConfig | TensorBoardConfig | MLflowConfig,
    Field(discriminator="kind"),
]

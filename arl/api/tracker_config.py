"""Settings of the ready-made trackers, `log.trackers`. Each kind is a section of its own."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field

from arl.api.settings import Section


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

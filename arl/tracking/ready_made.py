"""The ready-made trackers by their kind, and the packages that they need."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path

from arl.api.errors import ConfigError
from arl.api.installing import install_command
from arl.api.tracker_config import MLflowConfig, TrackerConfig, TrackioConfig, WandbConfig
from arl.api.tracking import Tracker
from arl.tracking.mlflow_tracker import MLflowTracker
from arl.tracking.tensorboard_tracker import TensorBoardTracker
from arl.tracking.trackio_tracker import TrackioTracker, is_local
from arl.tracking.wandb_tracker import WandbTracker


def check_trackers(configs: Sequence[TrackerConfig], own: Sequence[object]) -> None:
    """Raise ConfigError if a package is missing, with what to install, or if one of `own` is no tracker."""
    for config in configs:
        if find_spec(config.kind) is None:
            raise ConfigError(
                f"log.trackers has {config.kind}, whose package is not installed; install it with: "
                f"{install_command(config.kind)}"
            )
    for one in own:
        if not isinstance(one, Tracker):
            raise ConfigError(
                f"trackers has {one!r:.80}; give objects of subclasses of arl.Tracker, and names of ready-made ones in "
                "log.trackers"
            )


def ready_made(config: TrackerConfig) -> Tracker:
    """The tracker of this kind. It imports its package when it opens."""
    if isinstance(config, TrackioConfig):
        return TrackioTracker(config)
    if isinstance(config, WandbConfig):
        return WandbTracker(config)
    if isinstance(config, MLflowConfig):
        return MLflowTracker(config)
    return TensorBoardTracker(config)


def environment(config: TrackerConfig, run_dir: Path, given: Mapping[str, str]) -> dict[str, str]:
    """Variables for the process in which the tracker runs. given: this process's."""
    if isinstance(config, MLflowConfig):
        return {"MLFLOW_DISABLE_TELEMETRY": "true"}
    if not isinstance(config, TrackioConfig):
        return {}
    directory = (config.directory or run_dir / "trackio").absolute()
    return {"TRACKIO_DIR": str(directory)} | ({"HF_HUB_OFFLINE": "1"} if is_local(config, given) else {})

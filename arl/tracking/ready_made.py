"""The ready-made trackers by their kind, and the packages that they need."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path

from arl.api.errors import ConfigError
from arl.api.tracker_config import MLflowConfig, TrackerConfig, TrackioConfig, WandbConfig
from arl.api.tracking import Tracker


def check_trackers(configs: Sequence[TrackerConfig], own: Sequence[object]) -> None:
    """Raise ConfigError if a package is missing, with what to install, or if one of `own` is no tracker."""
    for config in configs:
        if find_spec(config.kind) is None:
            raise ConfigError(
                f"log.trackers has {config.kind}, whose package is not installed; install it with: "
                f"pip install 'arl[{config.kind}]'"
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
        from arl.tracking.trackio_tracker import TrackioTracker

        return TrackioTracker(config)
    if isinstance(config, WandbConfig):
        from arl.tracking.wandb_tracker import WandbTracker

        return WandbTracker(config)
    if isinstance(config, MLflowConfig):
        from arl.tracking.mlflow_tracker import MLflowTracker

        return MLflowTracker(config)
    from arl.tracking.tensorboard_tracker import TensorBoardTracker

    return TensorBoardTracker(config)


def environment(config: TrackerConfig, run_dir: Path, given: Mapping[str, str]) -> dict[str, str]:
    """Variables for the process in which the tracker runs. given: this process's."""
    if isinstance(config, MLflowConfig):
        return {"MLFLOW_DISABLE_TELEMETRY": "true"}
    if not isinstance(config, TrackioConfig):
        return {}
    directory = (config.directory or run_dir / "trackio").absolute()
    is_local = not (config.space_id or given.get("TRACKIO_SPACE_ID") or given.get("TRACKIO_SERVER_URL"))
    return {"TRACKIO_DIR": str(directory)} | ({"HF_HUB_OFFLINE": "1"} if is_local else {})

"""Trains the recorded steps again, under the run's own settings: are the weights the same?

checkpoint, or model --> learner --step--> weights --compared with the recording--> ReplayedStep
                            ^    batch                                                   |
                            +------------------------------------------------------------+
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import partial

from arl.api.config import Config
from arl.api.errors import RecordingError
from arl.api.weight_prints import TensorPrint, digest_of
from arl.replaying.recorded_run import RecordedRun, ReplayRange
from arl.replaying.trained_steps import trained_steps
from arl.trainer_process import host_learner
from arl.training.kept_tokens import StepWeights
from arl.training.recording import Build, RecordedStep
from arl.training.remote_learner import RemoteLearner

TOLERANCE = 1e-3
"""The largest difference of a tensor, as a share of its norm, that rounding on other hardware may make."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplayedStep:
    """One step that was trained again."""

    version: int
    """The version on which it was trained."""
    digest: str
    """The digest of the weights after it."""
    recorded_digest: str
    """The same digest in the run; empty if it was lost with a process."""
    difference: float
    """The largest difference of a tensor, as a share of its norm, estimated by a projection; 0 if all are identical."""
    tensor: str
    """The tensor that differs most; empty if none differs."""
    loss: float
    recorded_loss: float
    build: tuple[str, ...]
    """How this build differs from the run's: versions of arl, Python, torch; the processor."""
    is_on_cpu: bool

    @property
    def must_be_identical(self) -> bool:
        """The same build computes the same numbers on a CPU. Elsewhere they are compared within a tolerance."""
        return self.is_on_cpu and not self.build

    def is_good(self, tolerance: float) -> bool:
        """Whether these are the run's numbers, as far as those are known."""
        if self.is_identical or not self.is_known:
            return True
        return not self.must_be_identical and self.difference <= tolerance

    @property
    def is_known(self) -> bool:
        """Whether the run's weights are known."""
        return bool(self.recorded_digest)

    @property
    def is_identical(self) -> bool:
        return self.digest == self.recorded_digest


def replay_again(run: RecordedRun, which: ReplayRange) -> Iterator[ReplayedStep]:
    """Train the steps, and those that lead to the first one. Raises RecordingError, ConfigError, a learner's errors."""
    here = Build()
    steps = trained_steps(
        run,
        which,
        start=_learner,
        save=lambda learner, directory: learner.save(directory).wait(),
        load=RemoteLearner.load,
    )
    for step, learner, config in steps:
        trained = learner.train(learner.prepare_flat(step.batch))
        assert trained.weights is not None
        if step.version == which.base:
            _check_beginning(run, which, step, trained.weights)
        yield _replayed(step, trained.weights, trained.metrics, here, config.train.device)


def _learner(config: Config) -> RemoteLearner:
    return RemoteLearner(partial(host_learner, config), config.run_dir / "trainer.log", config.train.num_threads)


def _check_beginning(run: RecordedRun, which: ReplayRange, step: RecordedStep, weights: StepWeights) -> None:
    if step.before and weights.before != step.before and which.checkpoint is not None:
        raise RecordingError(
            f"{which.checkpoint} holds other weights than step {which.base} of {run.run_dir} was trained on: "
            f"their digest is {weights.before}, not {step.before}"
        )


def _replayed(
    step: RecordedStep, weights: StepWeights, metrics: Mapping[str, float], here: Build, device: str
) -> ReplayedStep:
    differences = {name: _difference(weights.after.get(name), one) for name, one in step.after.items()}
    worst = max(differences, key=lambda name: differences[name], default="")
    return ReplayedStep(
        version=step.version,
        digest=digest_of(weights.after),
        recorded_digest=digest_of(step.after) if step.after else "",
        difference=differences.get(worst, 0.0),
        tensor=worst if differences.get(worst) else "",
        loss=metrics.get("loss", 0.0),
        recorded_loss=step.metrics.get("loss", 0.0),
        build=tuple(here.differences(step.build)),
        is_on_cpu=device.startswith("cpu"),
    )


def _difference(here: TensorPrint | None, there: TensorPrint) -> float:
    if here is None:
        return float("inf")
    if here.bits == there.bits:
        return 0.0
    return max(abs(here.projection - there.projection), abs(here.norm - there.norm)) / max(there.norm, 1e-30)

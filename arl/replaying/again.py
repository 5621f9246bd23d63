"""The recorded steps once more, under the run's own settings: are the weights the same?

checkpoint, or model --> learner --step--> weights --compared with the recording--> ReplayedStep
                            ^    batch                                                   |
                            +------------------------------------------------------------+
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from arl.api.config import Config
from arl.api.errors import RecordingError
from arl.api.weight_prints import TensorPrint, digest_of
from arl.replaying.recorded_run import RecordedRun, Stretch, fingerprint_of
from arl.trainer_process import host_learner
from arl.training.kept_tokens import StepWeights
from arl.training.recording import RecordedStep
from arl.training.remote_learner import RemoteLearner

TOLERANCE = 1e-3
"""The largest difference of a tensor, as a share of its norm, that rounding on other hardware may make."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplayedStep:
    """One step that was run again."""

    version: int
    """Of the weights that it was trained on."""
    digest: str
    """Of the weights after it."""
    recorded_digest: str
    """The same of the run; empty if it was lost with a process."""
    difference: float
    """The largest difference of a tensor, as a share of its norm: estimated by a projection, 0 for identical ones."""
    tensor: str
    """The one that differs most; empty if none does."""
    loss: float
    recorded_loss: float

    @property
    def is_known(self) -> bool:
        """Whether the run's weights are known."""
        return bool(self.recorded_digest)

    @property
    def is_identical(self) -> bool:
        return self.digest == self.recorded_digest


def replay_again(run: RecordedRun, stretch: Stretch) -> Iterator[ReplayedStep]:
    """Run the steps, also those that lead to the first one. Raises RecordingError, ConfigError and a learner's errors."""
    with ExitStack() as stack:
        scratch = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="arl-replay-")))
        learner, of_learner = None, ""
        for version in range(stretch.base, stretch.stop):
            step = run.step(version)
            config = run.settings_of(step, scratch)
            if learner is None or fingerprint_of(config) != of_learner:
                start = stretch.checkpoint and stretch.checkpoint / "engine"
                if learner is not None:  # the settings changed when the run continued
                    learner.save(scratch / f"engine-{version}").wait()
                    start = scratch / f"engine-{version}"
                learner = _next_learner(stack, learner, config, start)
                of_learner = fingerprint_of(config)
            trained = learner.train(learner.prepare_flat(step.batch))
            assert trained.weights is not None
            if version == stretch.base:
                _check_beginning(run, stretch, step, trained.weights)
            yield _replayed(step, trained.weights, trained.metrics)


def _next_learner(stack: ExitStack, last: RemoteLearner | None, config: Config, start: Path | None) -> RemoteLearner:
    if last is not None:
        last.close()
    log = config.run_dir / "trainer.log"
    learner = RemoteLearner(partial(host_learner, config), log, config.train.num_threads)
    stack.callback(learner.close)
    if start is not None:
        learner.load(start)
    return learner


def _check_beginning(run: RecordedRun, stretch: Stretch, step: RecordedStep, weights: StepWeights) -> None:
    if step.before and weights.before != step.before and stretch.checkpoint is not None:
        raise RecordingError(
            f"{stretch.checkpoint} holds other weights than step {stretch.base} of {run.run_dir} was trained on: "
            f"their digest is {weights.before}, not {step.before}"
        )


def _replayed(step: RecordedStep, weights: StepWeights, metrics: Mapping[str, float]) -> ReplayedStep:
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
    )


def _difference(here: TensorPrint | None, there: TensorPrint) -> float:
    if here is None:
        return float("inf")
    if here.bits == there.bits:
        return 0.0
    return max(abs(here.projection - there.projection), abs(here.norm - there.norm)) / max(there.norm, 1e-30)

"""Arrays beside the tokens: what records make of them, and how they reach a train engine."""

import pickle
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from records import grouped, trajectory

from arl.algorithm.batch import Batch
from arl.algorithm.flat_sequences import FlatSequences
from arl.api.errors import TrajectoryError
from arl.api.fakes import ScriptedTrainEngine
from arl.api.settings.algorithm import preset
from arl.api.types import ModelRequest, ModelResponse, Trajectory
from arl.training.learner import Learner


def step(number: int, **changes: Any) -> Trajectory:
    """Of a prompt and two tokens, with three rows of latents."""
    latents = np.full((3, 2), number, dtype=np.float32)
    return trajectory((0, 0), float(number), arrays={"latents": latents}, **changes)


def latents(sequences: Any) -> list[float]:
    return [float(sequence.arrays["latents"][0, 0]) for sequence in sequences]


def test_a_trajectory_keeps_a_read_only_copy() -> None:
    given = np.zeros((3, 2))
    kept = trajectory((0, 0), arrays={"latents": given}).arrays["latents"]
    given += 1
    assert (kept.sum(), kept.dtype, kept.flags.writeable) == (0, np.float64, False)
    assert trajectory((0, 0), arrays={"latents": kept}).arrays["latents"] is kept


def test_what_a_view_or_a_mapped_file_shows_later_does_not_change_a_trajectory(tmp_path: Path) -> None:
    memory = np.zeros((3, 2))
    view = memory.view()
    view.flags.writeable = False
    mapped = np.memmap(tmp_path / "x", dtype=np.float64, mode="w+", shape=(3, 2))
    read = np.memmap(tmp_path / "x", dtype=np.float64, mode="r", shape=(3, 2))
    kept = trajectory((0, 0), arrays={"view": view, "mapped": mapped, "read": read}).arrays
    memory += 1
    mapped += 1
    mapped.flush()
    assert {type(array) for array in kept.values()} == {np.ndarray}
    assert [array.sum() for array in kept.values()] == [0, 0, 0]


def test_a_trajectory_keeps_numbers_in_the_byte_order_that_torch_takes() -> None:
    given = {"x": np.arange(3, dtype=">f4"), "y": np.arange(6, dtype=">i8").reshape(2, 3).T}
    kept = trajectory((0, 0), arrays=given).arrays
    assert [torch.tensor(array).tolist() for array in kept.values()] == [array.tolist() for array in given.values()]
    assert [array.flags.c_contiguous for array in kept.values()] == [True, True]


@pytest.mark.parametrize(
    ("arrays", "flaw"),
    [
        ({"x": np.zeros(2)}, r"arrays\['x'\] has 2 rows for 3 token_ids"),
        ({"x": [0.0, 0.0, 0.0]}, r"arrays\['x'\] is a list; it must be a numpy array"),
        ({"x": np.array(["a", "b", "c"])}, r"arrays\['x'\] has dtype <U1"),
        ({1: np.zeros(3)}, r"a name in arrays is 1; it must be a str"),
    ],
)
def test_arrays_that_cannot_lie_beside_the_tokens_are_refused_by_name(arrays: Any, flaw: str) -> None:
    with pytest.raises(TrajectoryError, match=flaw):
        trajectory((0, 0), arrays=arrays)
    with pytest.raises(ValueError, match=flaw.replace("token_ids", "input_ids")):
        ModelRequest(input_ids=[1, 2, 3], arrays=arrays)
    with pytest.raises(ValueError, match=flaw.replace("token_ids", "output_ids")):
        ModelResponse(
            output_ids=(1, 2, 3),
            output_logprobs=(0.0,) * 3,
            output_versions=(0,) * 3,
            stop_reason="stop",
            arrays=arrays,
        )


def test_a_pickled_trajectory_is_equal_and_has_the_same_read_only_arrays() -> None:
    for protocol in (4, 5):
        again = pickle.loads(pickle.dumps(step(3), protocol))
        assert again == step(3) != replace(step(3), arrays=step(2).arrays)
        assert not again.arrays["latents"].flags.writeable


def test_only_with_arrays_a_logprob_may_be_above_0_as_a_density_may() -> None:
    dense = step(1, behavior_logprobs=(0.0, 2.5, -1.0))
    assert dense.behavior_logprobs.tolist() == [0.0, 2.5, -1.0]
    with pytest.raises(TrajectoryError, match="log-probabilities are at most 0"):
        replace(dense, arrays={})
    with pytest.raises(TrajectoryError, match="must be a finite number"):
        replace(dense, behavior_logprobs=(0.0, float("inf"), 0.0))


def test_sequences_bring_them_over_a_pickle_and_may_have_none() -> None:
    mixed = Batch.of([grouped(step(7), trajectory((0, 0)))]).sequences()
    for sequences in (mixed, FlatSequences.of(list(mixed)), pickle.loads(pickle.dumps(mixed))):
        assert [dict(sequence.arrays).keys() for sequence in sequences] == [{"latents"}, set()]
        assert latents(sequences[:1]) == [7]


def test_a_train_engine_gets_the_arrays_of_new_and_replayed_groups() -> None:
    learner = Learner(engine := ScriptedTrainEngine(), preset("decoupled_ppo", minibatches=2))
    new = [grouped(step(2 * n), step(2 * n + 1), number=n) for n in range(2)]
    learner.train(learner.prepare(new, [grouped(step(8), step(9), number=4)]))
    (batch,) = engine.batches
    assert [latents(minibatch) for minibatch in batch] == [[0, 1, 8, 9], [2, 3]]

"""Ranks as Ray actors train like one process with everything; and when one of them fails, all end and say why."""

import threading
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from ray_models import KillingLoss, RaisingLoss, write_uneven_model
from safetensors.torch import load_file
from train_models import load_twin
from train_sequences import LOSS, assert_same_metrics, assert_same_rows, assert_same_weights, random_sequences
from train_variants import LORA, OPTIMIZER, assert_same_tensors
from transformers import AutoConfig

from arl.api.engine import TokenLoss
from arl.api.engine_config import TrainConfig
from arl.api.errors import CheckpointError, ConfigError, EngineClosedError, TrainingError, TransportError
from arl.api.types import TrainSequence
from arl.engine.fsdp.model import model_limits
from arl.engine.fsdp.ray_cluster import RayLease
from arl.engine.fsdp.ray_engine import RayTrainEngine
from arl.engine.fsdp.train_engine import FSDPTrainEngine
from arl.engine.weights.disk import AdapterEngine
from arl.engine.weights.distributed import SendableSnapshot

pytestmark = pytest.mark.timeout(300)  # ranks take their time to start on a machine that has other things to do


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_uneven_model(tmp_path_factory.mktemp("model") / "model")


@pytest.fixture(scope="module", autouse=True)
def ray_of_this_module() -> Iterator[None]:
    """Started once, for one engine after the other."""
    with pytest.MonkeyPatch.context() as environment:
        environment.setenv("PYTHONPATH", str(Path(__file__).parent))  # where ranks find this directory's losses
        lease = RayLease(None, num_cpus=8, num_gpus=0)
    yield
    lease.release()


@dataclass(frozen=True, kw_only=True)
class Told:
    """What an engine did with the same two minibatches, before and after it was given a checkpoint."""

    metrics: dict[str, float]
    logprobs: list[torch.Tensor]
    exported: Path
    num_bytes: int
    checkpoint: Path
    resumed: dict[str, float]


def minibatches() -> list[list[TrainSequence]]:
    """The second has fewer sequences than there are ranks; the first has one that is not trained."""
    sequences = random_sequences(9, seed=1)
    sequences[4].loss_mask.zero_()
    return [sequences, random_sequences(1, seed=2)]


def config(num_ranks: int, **options: Any) -> TrainConfig:
    return TrainConfig(optimizer=OPTIMIZER, max_tokens_per_microbatch=30, num_ranks=num_ranks, **options)


def tell(engine: FSDPTrainEngine | RayTrainEngine, directory: Path) -> Told:
    metrics = engine.train_batch(minibatches(), LOSS)
    snapshot = engine.snapshot()
    engine.save(directory / "checkpoint").wait()
    resumed = engine.train_batch(minibatches(), LOSS)
    num_bytes = snapshot.write(directory / "exported")  # of the version before
    snapshot.release()
    engine.load(directory / "checkpoint")
    return Told(
        metrics=metrics,
        logprobs=engine.forward(minibatches()[0]),
        exported=directory / "exported",
        num_bytes=num_bytes,
        checkpoint=directory / "checkpoint",
        resumed=resumed,
    )


@pytest.fixture(scope="module")
def alone(model_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Told:
    engine = FSDPTrainEngine(model_dir, config(1))
    told = tell(engine, tmp_path_factory.mktemp("alone"))
    engine.close()
    return told


@pytest.fixture(scope="module", params=[3, pytest.param(4, marks=pytest.mark.slow)])
def num_ranks(request: pytest.FixtureRequest) -> int:
    return request.param


@pytest.fixture(scope="module")
def engine(num_ranks: int, model_dir: Path) -> Iterator[RayTrainEngine]:
    engine = RayTrainEngine(model_dir, config(num_ranks))
    yield engine
    engine.close()


@pytest.fixture(scope="module")
def told(engine: RayTrainEngine, tmp_path_factory: pytest.TempPathFactory) -> Told:
    return tell(engine, tmp_path_factory.mktemp("ranks"))


def test_metrics_do_not_depend_on_the_ranks(told: Told, alone: Told):
    # Ranks that have nothing to compute take part with an empty microbatch.
    assert told.metrics.keys() == alone.metrics.keys()
    assert_same_metrics(told.metrics, alone.metrics)
    assert_same_metrics(told.resumed, alone.resumed, 1e-4)


def test_weights_do_not_depend_on_the_ranks(told: Told, alone: Told):
    assert_same_weights(load_twin(told.exported), load_twin(alone.exported))
    assert told.num_bytes == alone.num_bytes


def test_logprobs_come_in_the_callers_order(told: Told, alone: Told):
    assert len(told.logprobs) == len(alone.logprobs) == 9
    assert not told.logprobs[4].any()
    assert_same_rows(told.logprobs, alone.logprobs)


def test_a_checkpoint_loads_on_another_number_of_ranks(
    engine: RayTrainEngine, told: Told, alone: Told, model_dir: Path
):
    engine.load(alone.checkpoint)
    assert engine.version == 1
    one = FSDPTrainEngine(model_dir, config(1))
    one.load(told.checkpoint)
    assert one.version == 1
    for loaded in (engine, one):
        assert_same_rows(loaded.forward(minibatches()[0]), alone.logprobs)
    one.close()


def test_a_failed_load_or_save_leaves_the_engine_usable(engine: RayTrainEngine, tmp_path: Path):
    with pytest.raises(CheckpointError, match="nowhere"):
        engine.load(tmp_path / "nowhere")
    (tmp_path / "file").write_text("")
    with pytest.raises(CheckpointError, match="file"):
        engine.save(tmp_path / "file" / "checkpoint").wait()
    assert len(engine.forward(minibatches()[1])) == 1


def test_its_limits_are_those_of_the_model(engine: RayTrainEngine, model_dir: Path):
    assert engine.limits == model_limits(AutoConfig.from_pretrained(model_dir))


def test_ranks_accept_an_empty_batch(engine: RayTrainEngine):
    version = engine.version
    assert engine.forward([]) == []
    assert engine.train_batch([[]], LOSS)["trained_tokens"] == 0
    assert engine.version == version + 1


def test_a_loss_that_does_not_pickle_is_refused_before_any_rank_has_it(engine: RayTrainEngine):
    lock = threading.Lock()
    with pytest.raises(TypeError, match="lock"):
        engine.train_batch(minibatches(), lambda *args: lock)
    assert len(engine.forward(minibatches()[1])) == 1


def test_the_snapshot_is_rank_0s(engine: RayTrainEngine, tmp_path: Path):
    snapshot = engine.snapshot()
    assert isinstance(snapshot, SendableSnapshot)
    assert snapshot.version == engine.version
    assert snapshot.backend == "gloo"
    assert {spec.name for spec in snapshot.specs} >= {"lm_head.weight", "model.norm.weight"}
    with pytest.raises(TransportError) as failed:
        snapshot.open_group("http://127.0.0.1:1", 1, "carrier pigeon")
    assert "on rank 0" in str(failed.value.__cause__)
    with pytest.raises(ConfigError, match=r"no adapters to publish.* set train\.lora"):
        engine.snapshot_adapter()
    snapshot.release()
    with pytest.raises(TransportError, match="released"):
        snapshot.write(tmp_path / "never")


def test_a_rank_that_fails_ends_all_and_is_named(engine: RayTrainEngine, num_ranks: int):
    """The last test with this engine: of 3 ranks one raises, of 4 one is killed, in the middle of a step."""
    last, snapshot = num_ranks - 1, engine.snapshot()
    if num_ranks == 3:
        loss, end = RaisingLoss(last), "rank 2 of 3 failed: ValueError: the loss is lost"
    else:
        loss, end = KillingLoss(last), "rank 3 of 4 died"
    assert_ends(engine, loss, end, "ray_models.py" if num_ranks == 3 else "worker process has died")
    with pytest.raises(EngineClosedError, match=end):
        snapshot.write(Path("never"))
    snapshot.leave("no group")  # there is nothing left to leave
    snapshot.release()


def test_a_rank_that_is_killed_ends_the_engine(model_dir: Path):
    engine = RayTrainEngine(model_dir, config(1))
    try:
        assert_ends(engine, KillingLoss(0), "rank 0 of 1 died", "worker process has died")
    finally:
        engine.close()


def assert_ends(engine: RayTrainEngine, loss: TokenLoss, end: str, cause: str) -> None:
    with pytest.raises(TrainingError, match=f"in train_batch, {end}") as error:
        engine.train_batch(minibatches(), loss)
    assert cause in str(error.value.__cause__)
    with pytest.raises(EngineClosedError, match=end):
        engine.forward(minibatches()[0])


@pytest.mark.slow
def test_rank_zero_writes_the_adapters(model_dir: Path, tmp_path: Path):
    engine = RayTrainEngine(model_dir, config(2, lora=LORA))
    try:
        assert isinstance(engine, AdapterEngine)
        engine.train_batch(minibatches(), LOSS)
        snapshot = engine.snapshot_adapter()
        assert snapshot.write(tmp_path / "ours") > 0
        snapshot.release()
        with pytest.raises(TransportError, match="was released"):
            snapshot.write(tmp_path / "never")
    finally:
        engine.close()
    one = FSDPTrainEngine(model_dir, config(1, lora=LORA))
    one.train_batch(minibatches(), LOSS)
    one.snapshot_adapter().write(tmp_path / "theirs")
    one.close()
    ours, theirs = (load_file(tmp_path / name / "adapter_model.safetensors") for name in ("ours", "theirs"))
    assert_same_tensors(ours, theirs)

"""Ranks as Ray actors train like one process with everything; and when one of them fails, all end and say why."""

import signal
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from light_rank import LightRank
from safetensors.torch import load_file
from train_models import write_model
from train_sequences import LOSS, FailingLoss, assert_same_metrics, assert_same_rows, random_sequences
from train_variants import OPTIMIZER, assert_same_tensors

from arl.api.errors import CheckpointError, ConfigError, ProcessLostError, TrainingError, TransportError
from arl.api.settings.engines import TrainConfig
from arl.api.train_engine import TrainSequence
from arl.engine.fsdp.ray_cluster import Placement, RayLease
from arl.engine.fsdp.ray_engine import RayTrainEngine
from arl.engine.fsdp.train_engine import FSDPTrainEngine
from arl.engine.weights.distributed import SendableSnapshot

# Ranks take their time to start on a machine that has other things to do.
pytestmark = [pytest.mark.runs, pytest.mark.timeout(300)]


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Tensors whose first dimension 4 ranks cannot share evenly (50), or not at all (2)."""
    sizes = {"intermediate_size": 50, "num_key_value_heads": 1, "head_dim": 2}
    return write_model(tmp_path_factory.mktemp("model") / "model", **sizes)


@pytest.fixture(scope="module", autouse=True)
def ray_of_this_module() -> Iterator[None]:
    """Started once, for one engine after the other."""
    with pytest.MonkeyPatch.context() as environment:
        environment.setenv("PYTHONPATH", str(Path(__file__).parent))  # where ranks find this directory's modules
        lease = RayLease(None, num_cpus=8, num_gpus=0)
    yield
    lease.release()


def minibatches() -> list[list[TrainSequence]]:
    """The second has fewer sequences than there are ranks; the first has one that is not trained."""
    sequences = random_sequences(9, seed=1)
    sequences[4].loss_mask.zero_()
    return [sequences, random_sequences(1, seed=2)]


def config(num_ranks: int, **options: Any) -> TrainConfig:
    return TrainConfig(optimizer=OPTIMIZER, max_tokens_per_microbatch=30, num_ranks=num_ranks, **options)


def tell(engine: FSDPTrainEngine | RayTrainEngine, directory: Path) -> dict[str, Any]:
    """Two steps; the weights between them, written after the second and loaded again, and what they say."""
    report: dict[str, Any] = {"metrics": engine.train_batch(minibatches(), LOSS)}
    snapshot = engine.snapshot()
    engine.save(directory / "checkpoint").wait()
    report["next"] = engine.train_batch(minibatches(), LOSS)
    report["num_bytes"] = snapshot.write(directory / "exported")
    snapshot.release()
    engine.load(directory / "checkpoint")
    return report | {"version": engine.version, "logprobs": engine.forward(minibatches()[0])}


@pytest.fixture(scope="module", params=[2, pytest.param(4, marks=pytest.mark.slow)])
def num_ranks(request: pytest.FixtureRequest) -> int:
    return request.param


@pytest.fixture(scope="module")
def engine(num_ranks: int, model_dir: Path) -> Iterator[RayTrainEngine]:
    engine = RayTrainEngine(model_dir, config(num_ranks))
    yield engine
    engine.close()


def test_ranks_train_write_and_continue_like_one(engine: RayTrainEngine, model_dir: Path, tmp_path: Path):
    # Ranks that have nothing to compute take part with an empty microbatch.
    ours, one = tell(engine, tmp_path / "ours"), FSDPTrainEngine(model_dir, config(1))
    theirs = tell(one, tmp_path / "theirs")
    for key in ("metrics", "next"):
        assert_same_metrics(ours[key], theirs[key], 1e-5 if key == "metrics" else 1e-4)
        assert ours[key]["forwarded_tokens"] == theirs[key]["forwarded_tokens"]
    assert (ours["num_bytes"], ours["version"]) == (theirs["num_bytes"], theirs["version"])
    assert engine.limits == one.limits
    exported = [load_file(tmp_path / name / "exported" / "model.safetensors") for name in ("ours", "theirs")]
    assert_same_tensors(*exported, rtol=1e-5)
    assert not ours["logprobs"][4].any()
    engine.load(tmp_path / "theirs" / "checkpoint")
    one.load(tmp_path / "ours" / "checkpoint")
    assert engine.version == one.version == 1
    for logprobs in (ours["logprobs"], *(loaded.forward(minibatches()[0]) for loaded in (engine, one))):
        assert_same_rows(logprobs, theirs["logprobs"])
    one.close()


def test_each_rank_says_where_it_is(engine: RayTrainEngine, num_ranks: int):
    places, gpus = zip(*engine.places(), strict=True)
    assert len({place.pid for place in places}) == num_ranks
    assert {(place.host, place.device) for place in places} == {(socket.gethostname(), "cpu")}
    assert set(gpus) == {""}


def test_a_call_that_is_refused_leaves_the_engine_usable(engine: RayTrainEngine, tmp_path: Path):
    with pytest.raises(CheckpointError, match="nowhere"):
        engine.load(tmp_path / "nowhere")
    (tmp_path / "file").write_text("")
    with pytest.raises(CheckpointError, match="file"):
        engine.save(tmp_path / "file" / "checkpoint").wait()
    lock = threading.Lock()
    with pytest.raises(TypeError, match="lock"):
        engine.train_batch(minibatches(), lambda *args: lock)
    assert len(engine.forward(minibatches()[1])) == 1


def test_a_batch_that_no_store_can_hold_is_refused_before_it_is_sent(
    engine: RayTrainEngine, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(RayLease, "room", lambda self: 1000)
    with pytest.raises(
        TrainingError, match=r"ranks are sent \d+ MiB at once, and Ray's object store has room for 0 MiB"
    ):
        engine.forward(minibatches()[0])
    monkeypatch.undo()
    assert len(engine.forward(minibatches()[1])) == 1


def test_ranks_accept_an_empty_batch(engine: RayTrainEngine):
    version = engine.version
    assert engine.forward([]) == []
    assert engine.train_batch([[]], LOSS)["trained_tokens"] == 0
    assert engine.version == version + 1


def test_the_snapshot_is_rank_0s(engine: RayTrainEngine, tmp_path: Path):
    snapshot = engine.snapshot()
    assert isinstance(snapshot, SendableSnapshot)
    assert snapshot.version == engine.version
    assert snapshot.backend == "gloo"
    snapshot.wait()
    assert {spec.name for spec in snapshot.specs} >= {"lm_head.weight", "model.norm.weight"}
    with pytest.raises(TransportError) as failed:
        snapshot.open_group("http://127.0.0.1:1", 1, "carrier pigeon")
    assert "on rank 0" in str(failed.value.__cause__)
    with pytest.raises(ConfigError, match=r"no adapters to publish.* set train\.lora"):
        engine.snapshot_adapter()
    snapshot.release()
    for use in (snapshot.wait, lambda: snapshot.write(tmp_path / "never")):
        with pytest.raises(TransportError, match="released"):
            use()


def test_a_rank_that_is_lost_ends_all_and_is_named(
    engine: RayTrainEngine, num_ranks: int, monkeypatch: pytest.MonkeyPatch
):
    """The last test with this engine: of 2 ranks one is stopped, of 4 one is killed, in the middle of a step."""
    monkeypatch.setattr(engine._ranks, "_timeout_s", 8.0)  # ranks that are not stopped move sooner on any machine
    last, snapshot = num_ranks - 1, engine.snapshot()
    where = r"rank 1 does not answer, as if it were stopped; rank 0 is at \w+\.py:\d+ .*train_engine\.py:\d+ _step"
    stopped = rf"train_batch has not moved for 8 s: {where}"
    number, end = (signal.SIGKILL, "in train_batch, rank 3 of 4 died") if num_ranks == 4 else (signal.SIGSTOP, stopped)
    with pytest.raises(ProcessLostError, match=end):
        engine.train_batch(minibatches(), FailingLoss(last, number))
    with pytest.raises(ProcessLostError, match=end):
        engine.forward(minibatches()[0])
    with pytest.raises(ProcessLostError, match=end):
        snapshot.write(Path("never"))
    snapshot.leave("no group")  # there is nothing left to leave
    snapshot.release()


@pytest.mark.parametrize(
    ("sends", "end", "cause"),
    [
        (None, "rank 1 of 2 failed: ValueError: the work is lost", "light_rank.py"),
        (signal.SIGKILL, "rank 1 of 2 died", "worker process has died"),
    ],
    ids=["raises", "is killed"],
)
def test_a_rank_that_fails_ends_the_others_which_wait_for_it(
    monkeypatch: pytest.MonkeyPatch, sends: signal.Signals | None, end: str, cause: str
):
    from arl.engine.fsdp import ranks  # imports ray, which other tests have to do first, in arl's environment

    monkeypatch.setattr(ranks, "RankActor", LightRank)
    monkeypatch.setattr(ranks, "_GRACE_S", 0.2)
    placement = Placement(2, num_cpus=1, num_gpus=0, deadline=time.monotonic() + 60)
    both = ranks.Ranks(2, placement, num_threads=1, num_gpus=0, timeout_s=60.0)
    try:
        with pytest.raises(ProcessLostError, match=f"in fail, {end}") as error:
            both.train_alike("fail", 1, sends)
        assert cause in str(error.value.__cause__)
        with pytest.raises(ProcessLostError, match=end):
            both.train_alike("fail", 1)
    finally:
        both.close()
        placement.release()


def test_a_call_beside_training_may_last_while_its_rank_answers(monkeypatch: pytest.MonkeyPatch):
    now = 0.0
    from arl.engine.fsdp import ranks  # imports ray, which other tests have to do first, in arl's environment

    monkeypatch.setattr(ranks.time, "monotonic", lambda: now)
    beside, training = (ranks._Watch(10, is_training=is_training) for is_training in (False, True))
    answers = {0: (7, "somewhere")}
    now = 9.0
    assert beside.verdict([0], answers) is None
    now = 18.0
    assert beside.verdict([0], answers) is None
    said = training.verdict([0], answers)
    assert said == "has not moved for 10 s: rank 0 is at somewhere"
    assert training.verdict([0], {0: (8, "somewhere")}) is None
    now = 28.0
    assert "rank 0 does not answer" in str(beside.verdict([0], {}))

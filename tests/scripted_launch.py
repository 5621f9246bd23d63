"""`launch` over the official fakes: what a document's code runs on in tests, instead of servers and a model."""

import pickle
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Self

import pytest

import arl.run.engines
import arl.run.learner
import arl.run.servers
import arl.training.learner  # with torch: processes that tests fork find it loaded
from arl.api.engine import ServedModel
from arl.api.fakes import ScriptedEngine, ScriptedTrainEngine
from arl.api.settings.run import Config
from arl.api.settings.sections import laid_over
from arl.api.types import Group
from arl.run.servers import OpenedServers
from arl.training.batch_codec import FlatBatch
from arl.training.learner import PreparedBatch
from arl.training.token_log import reported


class ScriptedServers:
    """Stands where RemoteInferenceEngine does: opens and closes the engine, or a new one for each launch."""

    def __init__(self, made: ScriptedEngine | Callable[[], ScriptedEngine]) -> None:
        self.made = made

    def __call__(self, *args: object, **kwargs: object) -> Self:
        return self

    async def __aenter__(self) -> ScriptedEngine:
        self.engine: Any = self.made if isinstance(self.made, ScriptedEngine) else self.made()
        self.engine.without_weights = ()
        return self.engine

    async def __aexit__(self, *exc: object) -> None:
        await self.engine.aclose()


def small(run_dir: Path, **settings: Any) -> Config:
    """Settings of two steps of two groups of two episodes each, which shows nothing, with `settings` laid over them."""
    few = {"steps": 2, "rollout": {"batch_size": 2, "group_size": 2}, "log": {"console": False}}
    return Config.model_validate({"model": "none", "run_dir": run_dir, **laid_over(few, settings)})


def _learner_here(host: Callable[[], Any], log: Path, num_threads: int) -> Any:
    """What a RemoteLearner has in another process. It reports to the event log as that does."""
    here = pickle.loads(pickle.dumps(host))()
    learner, new = here._learner, list[Sequence[Group]]()
    prepare, train = learner.prepare, learner.train

    def prepare_flat(batch: FlatBatch) -> PreparedBatch:
        groups, replayed = batch.groups()
        new[:] = [groups]
        return prepare(groups, replayed)

    learner.prepare_flat = prepare_flat
    learner.train = lambda batch: reported(train(batch), new[0], here._pack)
    learner.engine.unseen = lambda directory: None
    learner.num_ranks = 1
    learner.end = lambda reason: learner.close()
    learner.placed = here.placed
    learner.whereabouts = lambda: "the trainer is in this process"
    return learner


async def _no_addresses(*args: object) -> OpenedServers:
    return OpenedServers(addresses=[])


def use_fakes(
    monkeypatch: pytest.MonkeyPatch,
    engine: ScriptedEngine | Callable[[], ScriptedEngine],
    train_engine: ScriptedTrainEngine | None = None,
    load: Callable[..., Any] | None = None,
) -> None:
    """Let `launch` compose everything as it does, but for the two engines. load: loads the train engine instead."""
    use_scripted_servers(monkeypatch, engine)
    use_scripted_training(monkeypatch, load or (lambda *_, **__: train_engine or ScriptedTrainEngine()))


def use_scripted_servers(
    monkeypatch: pytest.MonkeyPatch, engine: ScriptedEngine | Callable[[], ScriptedEngine]
) -> None:
    """Let `launch` train as it does, and sample from `engine`."""
    monkeypatch.setattr(arl.run.servers, "RemoteInferenceEngine", ScriptedServers(engine))
    for module in (arl.run.servers, arl.run.engines):
        monkeypatch.setattr(module, "open_servers", _no_addresses)
    monkeypatch.setattr(arl.run.servers, "served_model", lambda name, **_: ServedModel(name=name))


def use_scripted_training(
    monkeypatch: pytest.MonkeyPatch, load: Callable[..., Any] = lambda *_, **__: ScriptedTrainEngine()
) -> None:
    """Let `launch` train in this process, with what `load` gives in the place of a train engine."""
    monkeypatch.setattr(arl.run.engines, "RemoteLearner", _learner_here)
    monkeypatch.setattr(arl.run.learner, "load_train_engine", load)

"""`launch` over the official fakes: what a document's code runs on in tests, instead of servers and a model."""

import pickle
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Self

import pytest

import arl.assembly
import arl.trainer_process
import arl.training.learner  # with torch: processes that tests fork find it loaded
from arl.api.config import Config
from arl.api.engine import ServedModel
from arl.api.scripted import ScriptedEngine, ScriptedTrainEngine
from arl.api.settings import laid_over
from arl.api.types import Group
from arl.training.kept_tokens import reported
from arl.training.learner import PreparedBatch


class ScriptedServers:
    """Stands where RemoteSGLangEngine does: opens and closes the engine, or a new one for each launch."""

    def __init__(self, made: ScriptedEngine | Callable[[], ScriptedEngine]) -> None:
        self.made = made

    def __call__(self, *args: object, **kwargs: object) -> Self:
        return self

    async def __aenter__(self) -> ScriptedEngine:
        self.engine = self.made if isinstance(self.made, ScriptedEngine) else self.made()
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

    def prepare_and_note(groups: Sequence[Group], replayed: Sequence[Group] = ()) -> PreparedBatch:
        new[:] = [groups]
        return prepare(groups, replayed)

    learner.prepare = prepare_and_note
    learner.train = lambda batch: reported(train(batch), new[0], here._pack)
    learner.whereabouts = lambda: "the trainer is in this process"
    return learner


async def _no_addresses(*args: object) -> tuple[list[str], None, None]:
    return [], None, None


def use_fakes(
    monkeypatch: pytest.MonkeyPatch,
    engine: ScriptedEngine | Callable[[], ScriptedEngine],
    train_engine: ScriptedTrainEngine | None = None,
    load: Callable[..., Any] | None = None,
) -> None:
    """Let `launch` compose everything as it does, but for the two engines. load: loads the train engine instead."""
    monkeypatch.setattr(arl.assembly, "RemoteSGLangEngine", ScriptedServers(engine))
    use_scripted_training(monkeypatch, load or (lambda *_, **__: train_engine or ScriptedTrainEngine()))
    monkeypatch.setattr(arl.assembly, "_addresses", _no_addresses)
    monkeypatch.setattr(arl.assembly, "served_model", lambda name: ServedModel(name=name))


def use_scripted_training(
    monkeypatch: pytest.MonkeyPatch, load: Callable[..., Any] = lambda *_, **__: ScriptedTrainEngine()
) -> None:
    """Let `launch` train in this process, with what `load` gives in the place of a train engine."""
    monkeypatch.setattr(arl.assembly, "RemoteLearner", _learner_here)
    monkeypatch.setattr(arl.trainer_process, "load_train_engine", load)

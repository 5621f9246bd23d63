"""A rank whose node is lost does not answer, and only the others' broken connections tell of it."""

from types import SimpleNamespace
from typing import Any

import pytest

from arl.api.errors import CheckpointError, ProcessLostError
from arl.engine.fsdp import ranks
from arl.engine.fsdp.ranks import Ranks
from arl.runtime.processes.rpc import CallOutcome

FAILED = CallOutcome(error=CheckpointError("cannot write the checkpoint: connection closed by peer"))
ALIVE = CallOutcome(value=(7, "train_engine.py"))


class Call:
    """Calls of an actor, by their names; and the reference of one, answered at once or never."""

    def __init__(self, answers: dict[str, CallOutcome | None], answer: CallOutcome | None = None) -> None:
        self.answers = answers
        self.answer = answer

    def options(self, **options: object) -> "Call":
        return self

    def remote(self, name: str, *arguments: object) -> "Call":
        return Call(self.answers, self.answers.get(name))


def wait(calls: list[Call], num_returns: int, timeout: float) -> tuple[list[Call], list[Call]]:
    return [call for call in calls if call.answer][:num_returns], []


def two_ranks(monkeypatch: pytest.MonkeyPatch, second: CallOutcome | None) -> tuple[Ranks, list[Any]]:
    """The first fails to write; the second never ends that, and answers `second` when it is asked where it is."""
    actors = [SimpleNamespace(call=Call({"ask": FAILED})), SimpleNamespace(call=Call({"whereabouts": second}))]
    made, killed = iter(actors), list[Any]()
    starter = SimpleNamespace(options=lambda **_: SimpleNamespace(remote=lambda *_: next(made)))
    ray = SimpleNamespace(
        remote=lambda **_: lambda _: starter, wait=wait, get=lambda call: call.answer, kill=killed.append
    )
    monkeypatch.setattr(ranks, "ray", ray)
    monkeypatch.setattr(ranks, "_GRACE_S", 0.0)
    placement: Any = SimpleNamespace(strategy=lambda rank: None)
    return Ranks(2, placement, num_threads=1, num_gpus=0, timeout_s=60.0), killed


def test_a_failure_beside_training_is_a_loss_if_a_rank_does_not_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    both, killed = two_ranks(monkeypatch, None)
    with pytest.raises(ProcessLostError, match=r"ask failed, and ranks \[1\] of 2 do not answer"):
        both.beside(range(2), "ask", "a key", "wait", ())
    assert len(killed) == 2


def test_a_failure_beside_training_passes_if_the_late_ranks_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    both, killed = two_ranks(monkeypatch, ALIVE)
    with pytest.raises(CheckpointError, match="connection closed"):
        both.beside(range(2), "ask", "a key", "wait", ())
    assert killed == []

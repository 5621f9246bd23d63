"""Several tasks in one run: each gets its share of the groups, and each of its examples ends once."""

import random
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from players import as_json

from arl.api.errors import CheckpointError, CurriculumError
from arl.api.workflow import TaskCurriculum, TaskRecord
from arl.rollout.ledger import ExampleLedger, GroupNumbers, GroupOutcome, Issue
from arl.rollout.tasks import TaskLedger, Turns


def tasks(
    weights: Mapping[str, float],
    sizes: Sequence[int] = (5, 7, 11),
    curriculum: TaskCurriculum | None = None,
    every: int = 1,
) -> TaskLedger:
    numbers = GroupNumbers()
    ledgers = {
        name: ExampleLedger(size, shuffle=True, seed=f"0-{name}", task=name, numbers=numbers)
        for name, size in zip(weights, sizes, strict=False)
    }
    return TaskLedger(ledgers, weights, numbers, curriculum=curriculum, every=every)


def issued(ledger: TaskLedger, n: int) -> list[Issue]:
    return [ledger.issue() for _ in range(n)]


shares_of = st.lists(st.floats(0.01, 1.0), min_size=1, max_size=12).map(lambda raw: [one / sum(raw) for one in raw])


@given(shares=shares_of)
@settings(max_examples=60, deadline=None)
def test_after_any_number_of_groups_each_task_has_had_its_share_to_within_one_group(shares: list[float]) -> None:
    turns, had = Turns(len(shares)), [0] * len(shares)
    for n in range(1, 300):
        chosen = turns.next(shares)
        turns.take(chosen, shares)
        had[chosen] += 1
        assert all(abs(count - n * share) < 1 for count, share in zip(had, shares, strict=True))


def test_each_task_goes_through_its_own_epochs_and_group_ids_are_the_runs() -> None:
    ledger = tasks({"sums": 3.0, "words": 1.0})
    given_out = issued(ledger, 40)
    assert [issue.group_id for issue in given_out] == list(range(40))
    assert Counter(issue.task for issue in given_out) == {"sums": 30, "words": 10}
    for name, size in (("sums", 5), ("words", 7)):
        own = [issue.example_id for issue in given_out if issue.task == name]
        assert [epoch for epoch, _ in own] == [n // size for n in range(len(own))]
        assert sorted(own[:size]) == [(0, index) for index in range(size)]


def test_success_is_that_of_the_last_groups_and_a_group_without_finished_episodes_had_none(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("arl.rollout.tasks._WINDOW", 2)
    ledger = tasks({"half": 1.0, "new": 1.0})
    for rewards in ([1.0, 1.5], [0.0, 1.0], [0.9, 1.0]):
        ledger.note_rewards((0, 0), rewards, "half")
    ledger.note_rewards((0, 0), [], "new")
    assert ledger.counters()["task/half/success"] == 0.5
    assert ledger.counters()["task/new/success"] == 0.0


def test_a_curriculum_over_tasks_is_told_how_each_fared_and_changes_the_weights() -> None:
    told: list[tuple[int, Sequence[TaskRecord]]] = []

    def later(num_groups: int, records: Sequence[TaskRecord]) -> Mapping[str, float]:
        told.append((num_groups, records))
        return {"a": 0.0, "b": 1.0} if num_groups >= 4 else {"b": 0.0}

    ledger = tasks({"a": 1.0, "b": 1.0}, curriculum=later, every=2)
    begun = issued(ledger, 2)
    ledger.note_rewards(begun[0].example_id, [1.0, 0.0], "a")
    ledger.settle(begun[0].example_id, GroupOutcome.REJECTED, "a")
    assert [issue.task for issue in begun + issued(ledger, 4)] == ["a"] * 4 + ["b"] * 2
    assert [num_groups for num_groups, _ in told] == [0, 2, 4]
    first, second = told[1][1]
    assert (first.name, first.num_groups, first.num_rejected, first.reward, first.success) == ("a", 2, 1, 0.5, 0.5)
    assert (second.name, second.weight, second.num_groups, second.reward) == ("b", 0.0, 0, None)


@pytest.mark.parametrize(
    ("weights", "message"),
    [
        ({"c": 1.0}, r"curriculum over tasks .*<lambda> named the task 'c'; the tasks are 'a', 'b'"),
        ({"a": 0.0, "b": 0.0}, r"wrong after 0 groups: the weights of all tasks \('a', 'b'\) are 0"),
        ({"a": -1.0}, r"the weight of task 'a' is -1.0; give a finite number"),
        ({"a": float("nan")}, r"the weight of task 'a' is nan"),
        (7, r"<lambda> raised TypeError after 0 groups"),
    ],
)
def test_a_curriculum_over_tasks_that_is_wrong_ends_the_run_by_its_name(weights: Any, message: str) -> None:
    ledger = tasks({"a": 1.0, "b": 1.0}, curriculum=lambda *_: weights)
    with pytest.raises(CurriculumError, match=message):
        ledger.issue()


def learnable(num_groups: int, records: Sequence[TaskRecord]) -> Mapping[str, float]:
    solved = {task.name: 0.5 if task.success is None else task.success for task in records}
    return {name: 0.1 + 4 * p * (1 - p) for name, p in solved.items()}


@pytest.mark.parametrize("curriculum", [None, learnable])
@pytest.mark.parametrize("resumed_at", [0, 1, 7, 30])
def test_a_resumed_run_hands_out_what_one_that_never_stopped_does(
    curriculum: TaskCurriculum | None, resumed_at: int
) -> None:
    """What was pending comes again, under its group id, and takes no turn."""
    weights = {"a": 0.7, "b": 0.2, "c": 1.0}
    rng = random.Random(4)
    whole, stopped = (tasks(weights, curriculum=curriculum) for _ in range(2))
    for _ in range(resumed_at):
        issue, same = whole.issue(), stopped.issue()
        assert issue == same
        rewards, ends = [rng.random() * 2, rng.random() * 2], rng.random() < 0.7
        for ledger in (whole, stopped) if ends else ():
            ledger.note_rewards(issue.example_id, rewards, issue.task)
            ledger.settle(issue.example_id, GroupOutcome.TRAINED, issue.task)
    pending = [issue for name in weights for issue in pending_of(stopped, name)]
    copy = tasks(weights, curriculum=curriculum)
    copy.load_state_dict(as_json(stopped.state_dict()))
    again = issued(copy, len(pending))
    assert sorted(again, key=lambda issue: issue.group_id) == again
    assert {issue.group_id for issue in again} == {issue.group_id for issue in pending}
    assert issued(copy, 20) == issued(whole, 20)


def pending_of(ledger: TaskLedger, name: str) -> list[Issue]:
    own = ledger.of(name)
    return [Issue(group_id=own._pending[known][0], example_id=known, task=name) for known in own.pending]


def test_a_task_may_be_added_at_the_end_of_a_run_that_goes_on() -> None:
    source = tasks({"a": 1.0, "b": 1.0})
    issued(source, 4)
    more = tasks({"a": 1.0, "b": 1.0, "c": 2.0})
    more.load_state_dict(as_json(source.state_dict()))
    assert [issue.group_id for issue in issued(more, 4)] == [0, 1, 2, 3]
    new = issued(more, 8)
    assert Counter(issue.task for issue in new) == {"a": 2, "b": 2, "c": 4}
    assert new[0].group_id == 4


@pytest.mark.parametrize("names", [("b", "a"), ("a",), ("a", "c"), ("c", "a", "b")])
def test_a_checkpoint_of_other_tasks_is_refused_by_their_names(names: Sequence[str]) -> None:
    source = tasks({"a": 1.0, "b": 1.0})
    with pytest.raises(CheckpointError, match=r"written with 'a', 'b', this run has '\w.*the same tasks in the same"):
        tasks(dict.fromkeys(names, 1.0)).load_state_dict(as_json(source.state_dict()))


def test_a_run_with_tasks_and_one_without_do_not_continue_each_other() -> None:
    alone = ExampleLedger(5, shuffle=True, seed=0)
    with pytest.raises(CheckpointError, match="written with the tasks 'a', this run has none"):
        alone.load_state_dict(as_json(tasks({"a": 1.0}).state_dict()))
    with pytest.raises(CheckpointError, match="written with no tasks, this run has 'a'"):
        tasks({"a": 1.0}).load_state_dict(as_json(alone.state_dict()))


def test_a_tasks_dataset_of_another_size_is_named() -> None:
    with pytest.raises(
        CheckpointError, match="task 'b': the checkpoint was written with num_examples 7, this run has 8"
    ):
        tasks({"a": 1.0, "b": 1.0}, (5, 8)).load_state_dict(as_json(tasks({"a": 1.0, "b": 1.0}).state_dict()))

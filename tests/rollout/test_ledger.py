"""Every example of every epoch ends exactly once, and a curriculum says which examples an epoch has."""

import json
from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from players import Scripted, as_json, controlled, train, trained
from records import trajectory
from virtual_time import run_in_virtual_time

from arl.api.errors import CheckpointError, CurriculumError
from arl.api.workflow import Curriculum, ExampleRecord
from arl.rollout import ledger as ledgers
from arl.rollout.ledger import ExampleLedger, GroupOutcome


def ledger(
    curriculum: Curriculum | None = None, num_examples: int = 5, *, shuffle: bool = True, seed: int = 0
) -> ExampleLedger:
    return ExampleLedger(num_examples, shuffle=shuffle, seed=seed, curriculum=curriculum)


def restored(
    source: ExampleLedger, curriculum: Curriculum | None = None, num_examples: int = 5, **settings: object
) -> ExampleLedger:
    copy = ledger(curriculum, num_examples, **settings)
    copy.load_state_dict(as_json(source.state_dict()))
    return copy


def issued(source: ExampleLedger, n: int) -> list[tuple[int, int]]:
    return [source.issue().example_id for _ in range(n)]


def test_the_order_is_the_datasets_or_if_shuffled_the_seeds_which_differs_between_epochs() -> None:
    assert issued(ledger(num_examples=3, shuffle=False), 4) == [(0, 0), (0, 1), (0, 2), (1, 0)]
    first, again, other = (issued(ledger(num_examples=50, seed=seed), 100) for seed in (1, 1, 2))
    assert first == again != other
    assert [i for _, i in first[:50]] != [i for _, i in first[50:]]


@pytest.mark.parametrize("resumed_at", [0, 3, 99, 100, 150])
def test_each_epoch_has_every_example_in_the_same_order_wherever_a_run_was_resumed(resumed_at: int) -> None:
    source, whole = ledger(num_examples=100, seed=7), issued(ledger(num_examples=100, seed=7), 300)
    issues = issued(source, resumed_at)
    for example_id in issues:
        source.settle(example_id, GroupOutcome.TRAINED)
    issues += issued(restored(source, num_examples=100, seed=7), 300 - resumed_at)
    assert issues == whole
    for epoch in range(3):
        assert sorted(index for e, index in issues if e == epoch) == list(range(100))


def test_a_checkpoint_with_another_order_of_the_same_examples_is_refused() -> None:
    source = ledger(num_examples=100)
    issued(source, 3)
    state = as_json(source.state_dict())
    state["order"].reverse()
    with pytest.raises(CheckpointError, match="another version of arl or numpy"):
        ledger(num_examples=100).load_state_dict(state)


async def test_a_large_datasets_epochs_are_made_ahead_of_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ledgers, "_LARGE", 5)
    source, whole = ledger(), issued(ledger(), 15)
    for example_id in whole:
        await source.ready()
        assert (source._coming is not None) == (example_id in whole[::5])
        assert source.issue().example_id == example_id


def test_a_long_past_of_many_examples_makes_a_small_checkpoint() -> None:
    source = ledger(num_examples=20_000)
    sizes: list[int] = []
    for epoch in range(4):
        for number in range(20_000):
            if number == 10_000:
                sizes.append(len(json.dumps(as_json(source.state_dict()))))
            source.settle(source.issue().example_id, GroupOutcome.REJECTED if number % 9 == 0 else GroupOutcome.TRAINED)
        assert source.epoch == epoch
    assert sizes[0] < 1000
    assert sizes[3] < 2000


def test_after_a_resume_an_example_that_runs_again_keeps_its_group_id_and_no_other_gets_one_of_before() -> None:
    source = ledger(num_examples=7)
    before = [source.issue() for _ in range(5)]
    for issue in (before[3], before[0]):
        source.settle(issue.example_id, GroupOutcome.TRAINED)
    copy = restored(source, num_examples=7)
    again = [copy.issue() for _ in range(5)]
    assert again[:3] == [before[1], before[2], before[4]]
    assert [issue.group_id for issue in again[3:]] == [5, 6]


@pytest.mark.parametrize(("name", "value"), [("num_examples", 6), ("shuffle", False), ("seed", 9)])
def test_another_runs_checkpoint_is_refused_by_name(name: str, value: int) -> None:
    with pytest.raises(CheckpointError, match=f"written with {name} .*, this run has {value}"):
        restored(ledger(), **{name: value})


# With a curriculum, its stages are the epochs -------------------------------------------------------------------------


class Stages:
    """Hands out these stages in turn, and keeps what it was told."""

    def __init__(self, *stages: Sequence[int]) -> None:
        self._stages = stages
        self.asked: list[int] = []
        self.told: list[Sequence[ExampleRecord]] = []

    def __call__(self, stage: int, records: Sequence[ExampleRecord]) -> Sequence[int]:
        self.asked.append(stage)
        self.told.append(records)
        return self._stages[stage]


def test_it_is_told_how_each_example_fared() -> None:
    curriculum = Stages([2, 0, 1], [2], [0])
    source = ledger(curriculum, 4)
    for example_id, outcome, reward in zip(
        issued(source, 3),
        (GroupOutcome.TRAINED, GroupOutcome.REJECTED, GroupOutcome.DROPPED),
        (0.5, 1.0, None),
        strict=True,
    ):
        if reward is not None:
            source.note_rewards(example_id, [reward])
        source.settle(example_id, outcome)
    (again,) = issued(source, 1)
    source.note_rewards(again, [1.0])
    source.settle(again, GroupOutcome.TRAINED)
    source.issue()
    assert curriculum.told[0] == [ExampleRecord(index=i) for i in range(4)]
    assert curriculum.told[2] == [
        ExampleRecord(index=0, num_rejected=1, last_reward=1.0, mean_reward=1.0),
        ExampleRecord(index=1, num_dropped=1),
        ExampleRecord(index=2, num_trained=2, last_reward=1.0, mean_reward=0.75),
        ExampleRecord(index=3),
    ]


def test_a_resume_goes_on_with_the_stage_without_asking_again() -> None:
    source = ledger(Stages([4, 2, 0, 1]))
    first, second, third = issued(source, 3)
    source.note_rewards(second, [0.25])
    source.settle(second, GroupOutcome.TRAINED)
    later = Stages([], [3])
    copy = restored(source, later)
    assert issued(copy, 4) == [first, third, (0, 1), (1, 3)]
    assert later.asked == [1]
    assert later.told[0][2] == ExampleRecord(index=2, num_trained=1, last_reward=0.25, mean_reward=0.25)


def test_a_curriculum_added_at_a_resume_knows_the_outcomes_and_a_removed_one_leaves_its_stage() -> None:
    source = ledger(None, 3)
    for example_id in issued(source, 3):
        source.settle(example_id, GroupOutcome.REJECTED)
    comes = Stages([], [1, 0])
    copy = restored(source, comes, 3)
    assert issued(copy, 1) == [(1, 1)]
    assert [record.num_rejected for record in comes.told[0]] == [1, 1, 1]
    assert issued(restored(copy, None, 3), 3)[:2] == [(1, 1), (1, 0)]


def test_a_stage_is_what_the_curriculum_says_in_its_order_in_numbers_of_any_kind() -> None:
    source = ledger(Stages([3, 0], np.array([4]), [1, 0, 2]))  # type: ignore[arg-type]
    assert issued(source, 6) == [(0, 3), (0, 0), (1, 4), (2, 1), (2, 0), (2, 2)]
    as_json(source.state_dict())


def broken(stage: int, records: Sequence[ExampleRecord]) -> Sequence[int]:
    raise KeyError("difficulty")


@pytest.mark.parametrize(
    ("curriculum", "message"),
    [
        (Stages([]), "the curriculum Stages returned no examples for stage 0"),
        (Stages([1, 0, 1]), "the curriculum Stages returned index 1 twice for stage 0"),
        (Stages([0, 5]), "the curriculum Stages returned index 5 for stage 0; the dataset's indices are 0 to 4"),
        (Stages([0, -1]), "returned index -1 for stage 0"),
        (Stages([0.5]), "the curriculum Stages raised TypeError for stage 0"),  # type: ignore[list-item]
        (broken, "the curriculum broken raised KeyError for stage 0: 'difficulty'"),
    ],
)
def test_a_wrong_stage_ends_the_run_and_names_the_curriculum(curriculum: Curriculum, message: str) -> None:
    async def main() -> None:
        controller, buffer, engine = controlled(Scripted(lambda _: trajectory((0,))), 5, curriculum=curriculum)
        await train(controller, buffer, engine, range(1))

    with pytest.raises(ExceptionGroup) as raised:
        run_in_virtual_time(main())
    (error,) = raised.value.exceptions
    assert isinstance(error, CurriculumError)
    assert message in str(error)


def unsolved(stage: int, records: Sequence[ExampleRecord]) -> Sequence[int]:
    return [record.index for record in records if record.last_reward != 1.0]


def test_examples_of_rejected_groups_are_known_by_their_rewards_too() -> None:
    """With dynamic sampling all that is solved is rejected: it has to be known as solved all the same."""
    answers = iter(range(10**9))

    def act(number: int) -> object:
        return trajectory((999,), reward=1.0 if number < 3 else float(next(answers) % 2))

    groups, _ = trained(Scripted(act), 3, 6, curriculum=unsolved, batch_size=2, drop_equal_rewards=True)
    assert {g.example_id[1] for g in groups if g.example_id[0] > 0} <= {3, 4, 5}
    assert {g.example_id[1] for g in groups} == {3, 4, 5}


@given(
    is_chosen=st.booleans(),
    stages=st.lists(st.permutations(range(7)).flatmap(lambda p: st.integers(1, 7).map(lambda n: p[:n])), min_size=9),
    events=st.lists(st.sampled_from(["issue", "issue", "settle", "restart"]), max_size=40),
    choices=st.randoms(),
)
@settings(max_examples=60, deadline=None)
def test_whatever_is_issued_settled_and_resumed_every_example_of_a_stage_ends_once(
    is_chosen: bool, stages: list[list[int]], events: list[str], choices: object
) -> None:
    """Of an epoch too: without a curriculum each is a stage of all examples."""
    curriculum = (lambda stage, _: stages[stage % len(stages)]) if is_chosen else None
    source, settled = ledger(curriculum, 7), []
    for event in events:
        if event == "issue":
            source.issue()
        elif event == "restart":
            source = restored(source, curriculum, 7)
        elif source.pending:
            settled.append(choices.choice(source.pending))
            source.settle(settled[-1], choices.choice(list(GroupOutcome)))
            with pytest.raises(ValueError, match="is not running; it cannot be dropped"):
                source.settle(settled[-1], GroupOutcome.DROPPED)
    assert len(settled) == len(set(settled))
    state = source.state_dict()
    pending = [(epoch, index) for epoch, index, *_ in state["pending"]]
    for epoch in range(len(state["epochs"])):
        ended = [i for indices in source.outcomes(epoch).values() for i in indices]
        assert sorted(ended) == sorted(i for e, i in settled if e == epoch)
        begun = sorted(ended + [i for e, i in pending if e == epoch])
        whole = stages[epoch % len(stages)] if is_chosen else range(7)
        if epoch < source.epoch:
            assert begun == sorted(whole)
        else:
            assert set(begun) <= set(whole)
            assert len(begun) == state["position"]

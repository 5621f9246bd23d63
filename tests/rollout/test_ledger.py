"""ExampleLedger: every example of every epoch ends exactly once."""

import json

import pytest

from arl.api.errors import CheckpointError
from arl.rollout.ledger import ExampleLedger, GroupOutcome


def ledger(num_examples: int = 5, *, shuffle: bool = True, seed: int = 0) -> ExampleLedger:
    return ExampleLedger(num_examples, shuffle=shuffle, seed=seed)


def issued(source: ExampleLedger, n: int) -> list[tuple[int, int]]:
    return [source.issue().example_id for _ in range(n)]


def restored(source: ExampleLedger, **settings: int) -> ExampleLedger:
    copy = ledger(**settings)
    copy.load_state_dict(json.loads(json.dumps(source.state_dict())))
    return copy


def test_an_epoch_hands_out_every_example_once() -> None:
    ids = issued(ledger(5), 10)
    assert sorted(ids[:5]) == [(0, i) for i in range(5)]
    assert sorted(ids[5:]) == [(1, i) for i in range(5)]


def test_unshuffled_examples_keep_the_datasets_order() -> None:
    assert issued(ledger(3, shuffle=False), 4) == [(0, 0), (0, 1), (0, 2), (1, 0)]


def test_the_order_is_the_seeds_and_differs_between_epochs() -> None:
    first, again, other = (issued(ledger(50, seed=seed), 100) for seed in (1, 1, 2))
    assert first == again != other
    assert [i for _, i in first[:50]] != [i for _, i in first[50:]]


def test_after_a_resume_an_example_that_runs_again_keeps_its_group_id_and_no_other_gets_one_of_before() -> None:
    source = ledger(7)
    before = [source.issue() for _ in range(5)]
    for issue in (before[3], before[0]):
        source.settle(issue.example_id, GroupOutcome.TRAINED)
    copy = restored(source, num_examples=7)
    again = [copy.issue() for _ in range(5)]
    assert again[:3] == [before[1], before[2], before[4]]
    assert [issue.group_id for issue in again[3:]] == [5, 6]


def test_a_pending_example_whose_group_was_kept_is_not_handed_out_again() -> None:
    source = ledger(4, shuffle=False)
    first, second, third = issued(source, 3)
    copy = ledger(4, shuffle=False)
    copy.load_state_dict(source.state_dict(), finished=[second])
    assert issued(copy, 3) == [first, third, (0, 3)]
    copy.settle(second, GroupOutcome.TRAINED)
    assert copy.outcomes(0)[GroupOutcome.TRAINED] == [1]


def test_an_example_cannot_end_twice() -> None:
    source = ledger()
    (example_id,) = issued(source, 1)
    source.settle(example_id, GroupOutcome.TRAINED)
    with pytest.raises(ValueError, match="cannot end as dropped: it is not running, or has ended before"):
        source.settle(example_id, GroupOutcome.DROPPED)


def test_a_resume_before_the_owed_examples_were_run_owes_them_still() -> None:
    source = ledger(4, shuffle=False)
    issued(source, 3)
    twice = restored(restored(source, num_examples=4, shuffle=False), num_examples=4, shuffle=False)
    assert issued(twice, 4) == [(0, 0), (0, 1), (0, 2), (0, 3)]


@pytest.mark.parametrize(("name", "value"), [("num_examples", 6), ("shuffle", False), ("seed", 9)])
def test_another_runs_checkpoint_is_refused_by_name(name: str, value: int) -> None:
    with pytest.raises(CheckpointError, match=f"written with {name} .*, this run has {value}"):
        restored(ledger(), **{name: value})

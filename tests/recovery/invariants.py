"""What holds of every run directory, whatever was killed and whenever."""

import json
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from arl.api.events import BatchTrained, RunBegan
from arl.observe.events.image_store import ImageStore
from arl.observe.events.records import GroupRecord
from arl.observe.events.run_record import RunRecord
from arl.rollout.ledger import ExampleLedger
from arl.training.batch_codec import read_groups
from arl.training.checkpoints import Checkpoints


def newest_checkpoint(run_dir: Path) -> tuple[int, Path]:
    """Its version, 0 without one."""
    version = Checkpoints(run_dir / "checkpoints", 2, {}).newest_version() or 0
    return version, run_dir / "checkpoints" / f"version-{version:08d}"


def trained_batches(run: RunRecord) -> list[list[GroupRecord]]:
    """The groups of each batch in the history of the newest weights, by the event log: no group and no example twice.

    A life that begins at a version forgets later ones.
    """
    assert run.problems == []
    named: dict[int, list[int]] = {}
    for _, record in run.system:
        match record:
            case RunBegan():
                named = {version: numbers for version, numbers in named.items() if version <= record.version}
            case BatchTrained():
                assert record.version not in named, f"version {record.version} was trained twice"
                named[record.version] = record.groups
            case _:
                pass
    assert list(named) == list(range(1, len(named) + 1)), f"the event log has the batches {list(named)}"
    numbers = [number for batch in named.values() for number in batch]
    assert len(set(numbers)) == len(numbers), "a group was trained twice"
    batches = [[group for group in run.groups if group.step == version] for version in named]
    assert [sorted(group.group for group in batch) for batch in batches] == [sorted(batch) for batch in named.values()]
    examples = [(group.task, group.epoch, group.row) for batch in batches for group in batch]
    assert len(set(examples)) == len(examples), "an example of an epoch was trained twice"
    assert not any(episode.is_undone for batch in batches for group in batch for episode in group.episodes)
    return batches


def check_ledger(checkpoint: Path, seen: Sequence[Sequence[int]], num_examples: int) -> dict[str, Any]:
    """Each example of an epoch ended once or is pending; those that ended as trained are what the weights have seen.

    seen: the examples of each batch that the weights were trained on. Returns the ledger's state, with its `outcomes`:
    for each epoch a letter for each example.
    """
    state = json.loads((checkpoint / "state.json").read_text())
    assert state["version"] == len(seen)
    ledger = with_outcomes(state["rollout"]["ledger"])
    with (checkpoint / "groups.npz").open("rb") as file:
        waiting = {group.example_id for group in read_groups(file, ImageStore(checkpoint.parents[1]).image)}
    pending = {(epoch, index) for epoch, index, *_ in ledger["pending"]}
    open_ones = {(epoch, i) for epoch, marks in enumerate(ledger["outcomes"]) for i, m in enumerate(marks) if m == "."}
    assert waiting <= pending <= open_ones
    assert all(epoch == ledger["epoch"] for epoch, _ in open_ones - pending), "an example of a past epoch is lost"
    assert num_examples - ledger["position"] == len(open_ones - pending), "an example of this epoch is lost"
    trained = Counter(i for marks in ledger["outcomes"] for i, mark in enumerate(marks) if mark == "t")
    assert trained == Counter(number for batch in seen for number in batch)
    return ledger


def with_outcomes(state: dict[str, Any]) -> dict[str, Any]:
    ledger = ExampleLedger(state["num_examples"], shuffle=state["shuffle"], seed=state["seed"])
    ledger.load_state_dict(state)
    outcomes: list[str] = []
    for epoch in range(len(state["epochs"])):
        letters = {index: outcome.value for outcome, indices in ledger.outcomes(epoch).items() for index in indices}
        outcomes.append("".join(letters.get(index, ".") for index in range(state["num_examples"])))
    return {**state, "outcomes": outcomes}

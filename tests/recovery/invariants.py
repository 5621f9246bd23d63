"""What holds of every run directory, whatever was killed and whenever."""

import json
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from arl.rollout.ledger import ExampleLedger
from arl.training.checkpoint import Checkpoints
from arl.training.flat_groups import read_groups


def newest_checkpoint(run_dir: Path) -> tuple[int, Path]:
    """Its version, 0 without one."""
    version = Checkpoints(run_dir / "checkpoints", 2, {}).newest_version() or 0
    return version, run_dir / "checkpoints" / f"version-{version:08d}"


def check_ledger(checkpoint: Path, seen: Sequence[Sequence[int]], num_examples: int) -> dict[str, Any]:
    """Each example of an epoch ended once or is pending; those that ended as trained are what the weights have seen.

    seen: the examples of each batch that the weights were trained on. Returns the ledger's state, with its `outcomes`:
    for each epoch a letter for each example.
    """
    state = json.loads((checkpoint / "state.json").read_text())
    assert state["version"] == len(seen)
    ledger = with_outcomes(state["rollout"]["ledger"])
    with (checkpoint / "groups.npz").open("rb") as file:
        waiting = {group.example_id for group in read_groups(file)}
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

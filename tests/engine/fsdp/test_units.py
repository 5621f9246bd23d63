"""A loss that compares sequences sees each unit whole, so a step does not depend on budgets, order or ranks."""

from pathlib import Path

import pytest
import torch
from train_models import MakeEngine, load_twin
from train_ranks import Ranks, Report
from train_sequences import family_sequences, share_of, twin_logprobs

from arl.algorithm.losses.supervised import PreferenceLoss, paired
from arl.api.config import OptimizerConfig, TrainConfig
from arl.api.engine import PackedTokens, TokenLosses, TokenOutputs
from arl.api.types import TrainSequence
from arl.engine.fsdp.train_engine import FSDPTrainEngine

LOSS = PreferenceLoss(beta=0.2)
OPTIMIZER = OptimizerConfig(lr=1e-2, eps=1e-3, weight_decay=0.1)
NAMES = ("loss", "grad_norm", "margin", "accuracy", "trained_tokens", "tokens")


def pairs() -> list[TrainSequence]:
    """Six pairs, mostly of one prompt; of the last, one sequence is not trained."""
    sequences = family_sequences(2) + family_sequences(3)
    sequences[11].loss_mask.zero_()
    return paired(list(zip(sequences[:12:2], sequences[1:12:2], strict=True)))


def step(engine: FSDPTrainEngine, sequences: list[TrainSequence]) -> dict[str, float]:
    metrics = engine.train_batch([sequences], LOSS)
    return {name: metrics[name] for name in NAMES}


def test_the_loss_is_the_mean_over_pairs(make_engine: MakeEngine, model_dir: Path):
    sequences, twin = pairs(), load_twin(model_dir)
    with torch.no_grad():
        sums = [float(twin_logprobs(twin, s)[0].sum()) for s in sequences]
    h = [chosen - rejected for chosen, rejected in zip(sums[::2], sums[1::2], strict=True)]
    expected = sum(torch.nn.functional.softplus(torch.tensor(-0.2 * x, dtype=torch.float64)).item() for x in h) / 6
    assert step(make_engine(model_dir, max_tokens_per_microbatch=1), sequences)["loss"] == pytest.approx(expected, 1e-5)


@pytest.mark.parametrize("share_prefixes", [True, False])
def test_a_step_on_pairs_does_not_depend_on_the_budget_or_the_order(make_engine: MakeEngine, share_prefixes: bool):
    expected = step(make_engine(), pairs())
    for budget in (1, 50, 120, 400):
        engine = make_engine(max_tokens_per_microbatch=budget, share_prefixes=share_prefixes)
        assert step(engine, pairs()[::-1]) == pytest.approx(expected, rel=1e-4, abs=1e-6), budget


def test_units_are_whole_in_every_microbatch(make_engine: MakeEngine):
    sizes: list[int] = []

    def count(outputs: TokenOutputs, tokens: PackedTokens) -> TokenLosses:
        units = range(int(tokens.unit_ids.max()) + 1)
        sizes.extend(len(tokens.sequence_ids[tokens.unit_ids == unit].unique()) for unit in units)
        return LOSS(outputs, tokens)

    metrics = make_engine(max_tokens_per_microbatch=60).train_batch([pairs()], count)
    assert metrics["microbatches"] > 1
    assert sorted(sizes) == [1, 2, 2, 2, 2, 2]


def run_rank(rank: int, directory: Path, model_dir: Path) -> Report:
    share = share_of(pairs(), rank, 2)
    engine = FSDPTrainEngine(model_dir, TrainConfig(optimizer=OPTIMIZER, max_tokens_per_microbatch=60))
    report: Report = step(engine, share)
    engine.close()
    return {"metrics": report, "units": sorted({s.unit for s in share})}


def test_two_ranks_step_on_pairs_like_one(make_engine: MakeEngine, model_dir: Path, tmp_path: Path):
    ranks = Ranks(run_rank, 2, tmp_path / "ranks", model_dir)
    expected = step(make_engine(model_dir, optimizer=OPTIMIZER), pairs())
    one, other = ranks.reports()
    assert sorted(one["units"] + other["units"]) == list(range(6))
    for report in (one, other):
        assert report["metrics"] == pytest.approx(expected, rel=1e-4, abs=1e-6)

"""The trainer computes tokens with the experts that it is told, and gradients still reach its routers."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import mixtures
import numpy as np
import pytest
import torch
from mixtures import FAMILIES, load_mixture, own_routes, random_routes, slowed, write_mixture
from train_models import MakeEngine, engines
from train_ranks import Ranks, Report
from train_sequences import (
    LOSS,
    assert_same_metrics,
    assert_same_rows,
    family_sequences,
    same,
    share_of,
    twin_logprobs,
)
from train_variants import OPTIMIZER

from arl.algorithm.prefix_tree import needed_tokens, prefix_order
from arl.api.errors import ModelError
from arl.api.routed_experts import Routes
from arl.api.settings.engines import TrainConfig
from arl.api.train_engine import TokenLosses, TrainSequence
from arl.engine.fsdp.train_engine import FSDPTrainEngine


@pytest.fixture(scope="module")
def directories(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return {name: write_mixture(tmp_path_factory.mktemp(name), name) for name in FAMILIES}


@pytest.fixture
def make_mixture(directories: dict[str, Path]) -> Iterator[MakeEngine]:
    with engines(directories["qwen3_moe"]) as make:
        yield make


def routed(sequences: list[TrainSequence], family: str = "qwen3_moe") -> list[TrainSequence]:
    return [replace(s, routes=random_routes(len(s), i, family)) for i, s in enumerate(sequences)]


def slow_rows(directory: Path, sequences: list[TrainSequence]) -> list[torch.Tensor]:
    """Logprobs of the trained tokens, each sequence by itself, each token by its experts in a loop."""
    rows: list[torch.Tensor] = []
    for sequence in sequences:
        model = load_mixture(directory)
        if sequence.routes is not None:
            slowed(model, sequence.routes)
        with torch.no_grad():
            rows.append(twin_logprobs(model, sequence)[0])
    return rows


def trained(rows: list[torch.Tensor], sequences: list[TrainSequence]) -> list[torch.Tensor]:
    return [row[s.loss_mask] for row, s in zip(rows, sequences, strict=True)]


def sum_of_logprobs(outputs: Any, tokens: Any) -> TokenLosses:
    return TokenLosses(loss=outputs.logprobs)


@pytest.mark.parametrize("family", FAMILIES)
def test_logprobs_and_gradients_are_those_of_a_loop_over_the_given_experts(
    family: str, directories: dict[str, Path]
) -> None:
    sequences = [replace(s, loss_weights=s.loss_mask.float()) for s in routed(family_sequences()[:4], family)]
    twin = load_mixture(directories[family])
    own = [forward.forward for _, forward in mixtures.mixtures_of(twin)]
    with engines(directories[family]) as make:
        engine = make(max_tokens_per_microbatch=60)
        ours = trained(engine.forward(sequences), sequences)
        gradients: dict[str, torch.Tensor] = {}
        engine._update = lambda *_: gradients.update(
            {name.removeprefix("model."): p.grad.clone() for name, p in engine._trained.items()}
        )
        engine.train_batch([sequences], sum_of_logprobs)
        without = trained(engine.forward([replace(s, routes=None) for s in sequences]), sequences)
    total = torch.zeros(())
    theirs: list[torch.Tensor] = []
    for sequence in sequences:
        assert sequence.routes is not None
        for (_, block), forward in zip(mixtures.mixtures_of(twin), own, strict=True):
            block.forward = forward
        logprobs, _ = twin_logprobs(slowed(twin, sequence.routes), sequence)
        theirs.append(logprobs.detach())
        total = total + logprobs.sum()
    total.backward()
    assert_same_rows(ours, theirs)
    assert max((a - b).abs().max().item() for a, b in zip(without, theirs, strict=True)) > 0.1
    wanted = {name: p.grad for name, p in twin.named_parameters() if p.grad is not None}
    assert wanted.keys() == gradients.keys()
    assert all(wanted[name].any() for name in wanted if "gate.weight" in name)
    for name, gradient in wanted.items():
        torch.testing.assert_close(gradients[name], gradient, rtol=1e-3, atol=1e-4, msg=name)


def test_a_trainer_whose_router_would_choose_otherwise_agrees_with_the_sampler(
    make_mixture: MakeEngine, directories: dict[str, Path]
) -> None:
    """Rounding of a bfloat16 sampler turns close choices. Here the sampler's routers differ by as little."""
    sampler, sequences = load_mixture(directories["qwen3_moe"]), family_sequences()[:6]
    trainer = load_mixture(directories["qwen3_moe"])
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for _, block in mixtures.mixtures_of(sampler):
            block.gate.weight += 0.003 * torch.randn(block.gate.weight.shape, generator=generator)
    sampled = [own_routes(sampler, s.token_ids) for s in sequences]
    turned = [
        (a.experts != own_routes(trainer, s.token_ids).experts).any() for a, s in zip(sampled, sequences, strict=True)
    ]
    assert any(turned)
    with torch.no_grad():
        behavior = [twin_logprobs(sampler, s)[0] for s in sequences]
    engine = make_mixture()
    gaps: list[float] = []
    for routes in (sampled, [None] * 6):
        given = [replace(s, routes=r) for s, r in zip(sequences, routes, strict=True)]
        rows = trained(engine.forward(given), given)
        gaps.append(torch.cat([a - b for a, b in zip(rows, behavior, strict=True)]).abs().max().item())
    assert gaps[0] < 0.2 * gaps[1], gaps


def test_the_routers_own_choice_as_routes_changes_nothing(
    make_mixture: MakeEngine, directories: dict[str, Path]
) -> None:
    model, sequences = load_mixture(directories["qwen3_moe"]), family_sequences()
    engine = make_mixture()
    given = [replace(s, routes=own_routes(model, s.token_ids)) for s in sequences]
    assert_same_rows(engine.forward(given), engine.forward(sequences), 1e-6)


def test_tokens_without_routes_use_the_routers_own_choice_beside_others(
    make_mixture: MakeEngine, directories: dict[str, Path]
) -> None:
    sequences = [
        s if i % 3 == 0 else replace(s, routes=random_routes(len(s), i)) for i, s in enumerate(family_sequences())
    ]
    rows = trained(make_mixture(max_tokens_per_microbatch=100).forward(sequences), sequences)
    assert_same_rows(rows, slow_rows(directories["qwen3_moe"], sequences))
    half = random_routes(30, 1)
    token_ids = torch.arange(40)
    sequence = TrainSequence(
        token_ids=token_ids,
        loss_mask=token_ids > 0,
        routes=Routes.joined([10, half]),
    )
    own = own_routes(load_mixture(directories["qwen3_moe"]), token_ids)
    whole = replace(sequence, routes=Routes.of(np.concatenate([own.experts[:10], half.experts])))
    assert_same_rows(
        trained(make_mixture().forward([sequence]), [sequence]), slow_rows(directories["qwen3_moe"], [whole])
    )


def test_a_prefix_is_shared_as_far_as_its_routes_agree() -> None:
    routes = random_routes(30, 0)
    changed = Routes.of(routes.experts.copy())
    changed.experts[12, 1] = changed.experts[12, 1, ::-1]
    sequence = TrainSequence(token_ids=torch.arange(30), loss_mask=torch.arange(30) == 29, routes=routes)
    unknown = Routes.joined([20, Routes.of(routes.experts[20:])])
    for other, shared in ((routes, 29), (changed, 12), (None, 0), (unknown, 0)):
        order = prefix_order([sequence, replace(sequence, routes=other)])
        assert sorted(order.shared.tolist()) == [0, shared], other
    without = replace(sequence, routes=None)
    assert [row.tolist() for row in needed_tokens([without])] == [list(range(29))]


@pytest.mark.parametrize(
    "options",
    [
        {"max_tokens_per_microbatch": 64},
        {"share_prefixes": False},
        {"activation_checkpointing": True},
        {"activation_checkpointing": True, "max_tokens_per_microbatch": 64},
    ],
    ids=str,
)
def test_steps_are_the_same_however_they_are_computed(options: dict[str, Any], make_mixture: MakeEngine) -> None:
    stem = random_routes(20, 7).experts
    sequences = [
        replace(s, routes=Routes.of(np.concatenate([stem, random_routes(len(s), i).experts])[: len(s)]))
        for i, s in enumerate(family_sequences())
    ]
    results: list[Any] = []
    for given in ({"max_tokens_per_microbatch": 4096}, options):
        engine = make_mixture(**given)
        metrics = [engine.train_batch([sequences], LOSS) for _ in range(2)]
        results.append((metrics, engine.forward(sequences)))
    for ours, theirs in zip(results[1][0], results[0][0], strict=True):
        assert_same_metrics(ours, theirs, rel=1e-4)
    assert_same_rows(results[1][1], results[0][1], 1e-4)


def test_bfloat16_compute_over_a_sharded_model_replays_the_same_experts(make_mixture: MakeEngine) -> None:
    sequences = routed(family_sequences())
    exact = make_mixture().forward(sequences)
    rounded = make_mixture(dtype="bfloat16", activation_checkpointing=True)
    assert_same_rows(rounded.forward(sequences), exact, 0.2)
    assert rounded.train_batch([sequences], LOSS)["grad_norm"] > 0


def tell(rank: int, directory: Path, sequences: list[TrainSequence]) -> Report:
    engine = FSDPTrainEngine(directory, TrainConfig(optimizer=OPTIMIZER))
    metrics = engine.train_batch([share_of(sequences, rank, 2)], LOSS)
    report: Report = {"metrics": metrics, "rows": engine.forward(sequences)}
    engine.close()
    return report


def test_two_ranks_replay_as_one_does(make_mixture: MakeEngine, directories: dict[str, Path], pair: Ranks) -> None:
    sequences = routed(family_sequences())
    engine = make_mixture(optimizer=OPTIMIZER)
    metrics = engine.train_batch([sequences], LOSS)
    for report in pair.run(tell, directories["qwen3_moe"], sequences):
        assert_same_metrics(report["metrics"], metrics, rel=1e-4)
        assert_same_rows(report["rows"], engine.forward(sequences), 1e-4)


def test_adapters_train_beside_replayed_experts(make_mixture: MakeEngine) -> None:
    sequences = routed(family_sequences())
    engine = make_mixture(lora={"rank": 4})
    before = engine.forward(sequences)
    assert_same_rows(before, make_mixture().forward(sequences))
    engine.train_batch([sequences], LOSS)
    assert not same(before, engine.forward(sequences))


def test_the_reference_policy_uses_its_own_experts(make_mixture: MakeEngine) -> None:
    """It is a fixed function of the text, whoever sampled it."""
    sequences = family_sequences()
    engine = make_mixture()
    engine.update_reference()
    assert same(
        engine.forward(routed(sequences), "reference_logprobs"), engine.forward(sequences, "reference_logprobs")
    )


def test_routes_for_a_model_without_experts_are_an_error(make_engine: MakeEngine) -> None:
    with pytest.raises(ModelError, match=r"sequences have routes, but .* is no mixture of experts"):
        make_engine().forward(routed(family_sequences()))

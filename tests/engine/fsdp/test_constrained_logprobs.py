"""Tokens that were sampled among some ids alone: logprobs, entropies and gradients are of a softmax over these."""

import pytest
import torch
from train_models import MakeEngine, load_twin
from train_sequences import constrained_sequences, random_kept_ids, same, twin_logprobs

from arl.api.sampling_mask import KeptIds
from arl.engine.fsdp.policy import token_logprobs

M, H, V = 37, 8, 50


@pytest.fixture
def inputs() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return {
        "hidden": 3 * torch.randn(M, H, generator=generator),
        "weight": torch.randn(V, H, generator=generator),
        "targets": torch.randint(0, V, (M,), generator=generator),
        "temperatures": 0.3 + torch.rand(M, generator=generator),
    }


def sets_for(inputs: dict[str, torch.Tensor]) -> KeptIds:
    return random_kept_ids(inputs["targets"], torch.Generator().manual_seed(1), V)


def slow(
    kept_ids: KeptIds, hidden: torch.Tensor, weight: torch.Tensor, targets: torch.Tensor, temperatures: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """One row after another, over the logits of its kept ids and no others, in float64."""
    logprobs: list[torch.Tensor] = []
    entropies: list[torch.Tensor] = []
    for row, kept in enumerate(torch.from_numpy(kept_ids.mask(V))):
        ids = kept.nonzero()[:, 0]
        logp = torch.log_softmax(weight.double()[ids] @ hidden.double()[row] / temperatures.double()[row], dim=0)
        logprobs.append(logp[ids == targets[row]].sum())
        entropies.append(-(logp.exp() * logp).sum())
    return torch.stack(logprobs), torch.stack(entropies)


@pytest.mark.parametrize("chunk_size", [1, 10, M, 1000])
@pytest.mark.parametrize("upstream", [(1.0, 0.0), (0.0, 1.0), (1.0, 0.7)])
def test_values_and_gradients_are_those_of_a_softmax_over_the_kept_ids(
    inputs: dict[str, torch.Tensor], chunk_size: int, upstream: tuple[float, float]
) -> None:
    kept_ids, results = sets_for(inputs), list[tuple[torch.Tensor, ...]]()
    for of in (
        lambda **x: token_logprobs(**x, chunk_size=chunk_size, kept_ids=kept_ids),
        lambda **x: slow(kept_ids, **x),
    ):
        given = inputs | {name: inputs[name].clone().requires_grad_() for name in ("hidden", "weight")}
        outputs = of(**given)
        loss = sum((x * y * torch.linspace(-1, y, M)).sum() for x, y in zip(outputs, upstream, strict=True))
        loss.backward()
        results.append((*outputs, given["hidden"].grad, given["weight"].grad))
    for ours, theirs in zip(*results, strict=True):
        torch.testing.assert_close(ours.double(), theirs.double(), rtol=1e-4, atol=2e-5)


def test_an_excluded_id_gets_no_gradient_and_extreme_logits_stay_finite(inputs: dict[str, torch.Tensor]) -> None:
    given = inputs | {"weight": (inputs["weight"] * 1e4).requires_grad_(), "targets": torch.zeros(M, dtype=torch.int64)}
    logprobs, entropies = token_logprobs(**given, chunk_size=10, kept_ids=KeptIds.of([[0, 7]] * M))
    (logprobs + entropies).sum().backward()
    gradient = given["weight"].grad
    assert gradient is not None
    assert gradient.isfinite().all()
    assert logprobs.isfinite().all()
    assert entropies.isfinite().all()
    assert set(gradient.any(1).nonzero()[:, 0].tolist()) <= {0, 7}


def test_a_single_kept_id_is_certain(inputs: dict[str, torch.Tensor]) -> None:
    kept_ids = KeptIds.of([[int(target)] for target in inputs["targets"]])
    logprobs, entropies = token_logprobs(**inputs, chunk_size=10, kept_ids=kept_ids)
    assert not logprobs.any()
    assert not entropies.any()


def test_rows_without_a_set_have_the_same_bits_beside_rows_with_one(inputs: dict[str, torch.Tensor]) -> None:
    kept_ids = sets_for(inputs)
    is_free = torch.from_numpy(kept_ids.index < 0)
    assert 0 < is_free.sum() < M
    with_sets = token_logprobs(**inputs, chunk_size=10, kept_ids=kept_ids)
    without = token_logprobs(**inputs, chunk_size=10)
    assert same([x[is_free] for x in with_sets], [x[is_free] for x in without])


def test_a_set_with_an_id_beyond_the_vocabulary_is_an_error(inputs: dict[str, torch.Tensor]) -> None:
    with pytest.raises(ValueError, match=f"kept_ids names token id {V}, but the model has {V} tokens"):
        token_logprobs(**inputs, chunk_size=10, kept_ids=KeptIds.of([[0, V]] * M))


def test_sequences_that_share_a_token_have_sets_of_their_own_for_it(make_engine: MakeEngine, model_dir) -> None:
    sequences, twin = constrained_sequences(4), load_twin(model_dir)
    engine = make_engine(model_dir, max_tokens_per_microbatch=100)
    engine.update_reference()
    for output in ("logprobs", "reference_logprobs"):
        for sequence, row in zip(sequences, engine.forward(sequences, output), strict=True):
            with torch.no_grad():
                theirs, _ = twin_logprobs(twin, sequence)
            torch.testing.assert_close(row[sequence.loss_mask], theirs, rtol=1e-5, atol=1e-5)

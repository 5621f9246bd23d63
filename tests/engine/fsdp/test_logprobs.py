"""Chunked log-probabilities equal a full log-softmax, in value and gradient, in the memory of a chunk of logits."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from train_models import write_model
from train_sequences import random_sequences

from arl.engine.fsdp.minibatch import build_microbatch
from arl.engine.fsdp.model import load_model
from arl.engine.fsdp.policy import Policy, token_logprobs

M, H, V = 37, 8, 50
FLOAT = 4


# Numbers


@pytest.fixture
def inputs() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return {
        "hidden": torch.randn(M, H, generator=generator, requires_grad=True),
        "weight": torch.randn(V, H, generator=generator, requires_grad=True),
        "targets": torch.randint(0, V, (M,), generator=generator),
        "temperatures": 0.3 + torch.rand(M, generator=generator),
    }


def full(hidden, weight, targets, temperatures) -> tuple[torch.Tensor, torch.Tensor]:
    logp = torch.log_softmax(hidden.double() @ weight.double().T / temperatures.double()[:, None], dim=-1)
    return logp.gather(-1, targets[:, None])[:, 0], -(logp.exp() * logp).sum(-1)


@pytest.mark.parametrize("chunk_size", [1, 10, M, 1000])
@pytest.mark.parametrize("upstream", [(1.0, None), (None, 1.0), (1.0, 0.7)])
def test_values_and_gradients_equal_those_of_a_full_log_softmax(
    inputs: dict[str, torch.Tensor], chunk_size: int, upstream: tuple[float | None, float | None]
):
    """Also if the loss looks at one output alone."""
    gradients: list[tuple[torch.Tensor, ...]] = []
    ours, theirs = token_logprobs(**inputs, chunk_size=chunk_size), full(**inputs)
    for outputs in (ours, theirs):
        weighed = [(x * y * torch.linspace(-1, y, M)).sum() for x, y in zip(outputs, upstream, strict=True) if y]
        gradients.append(torch.autograd.grad(sum(weighed, torch.zeros(())), (inputs["hidden"], inputs["weight"])))
    for mine, twin in zip(ours, theirs, strict=True):
        torch.testing.assert_close(mine.double(), twin, rtol=1e-5, atol=1e-5)
    for mine, twin in zip(*gradients, strict=True):
        torch.testing.assert_close(mine, twin, rtol=1e-4, atol=1e-5)


def test_no_tokens_give_no_logprobs_and_zero_gradients(inputs):
    nothing = {name: value[:0] if name != "weight" else value for name, value in inputs.items()}
    logprob, _ = token_logprobs(**nothing, chunk_size=10)
    (gradient,) = torch.autograd.grad(logprob.sum(), inputs["weight"])
    assert logprob.shape == (0,)
    assert not gradient.any()


def test_extreme_logits_stay_finite(inputs):
    hidden = (inputs["hidden"].detach() * 1e4).requires_grad_()
    logprob, entropy = token_logprobs(**(inputs | {"hidden": hidden}), chunk_size=10)
    (gradient,) = torch.autograd.grad((logprob + entropy).sum(), hidden)
    assert all(values.isfinite().all() for values in (logprob, entropy, gradient))


# Memory


class Memory(TorchDispatchMode):
    """Bytes of the tensors that operations allocate: the most that lived at once between two of them, and the largest.

    Storages are watched through weak references, so that what autograd keeps for the backward pass counts too.
    """

    def __init__(self) -> None:
        super().__init__()
        self.peak = 0
        self.largest = 0
        self._known: dict[int, tuple[StorageWeakRef, int]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        before = {x.untyped_storage()._cdata for x in tree_leaves((args, kwargs)) if isinstance(x, torch.Tensor)}
        result = func(*args, **(kwargs or {}))
        for x in tree_leaves(result):
            if isinstance(x, torch.Tensor) and x.untyped_storage()._cdata not in before:
                storage = x.untyped_storage()
                self._known[storage._cdata] = (StorageWeakRef(storage), storage.nbytes())
                self.largest = max(self.largest, storage.nbytes())
        self._known = {key: known for key, known in self._known.items() if not known[0].expired()}
        self.peak = max(self.peak, sum(size for _, size in self._known.values()))
        return result


def memory_of(num_tokens: int, vocabulary: int, chunk_size: int) -> Memory:
    """Of one forward and backward pass; weights and hidden states were there before."""
    hidden = torch.randn(num_tokens, H, requires_grad=True)
    weight = torch.randn(vocabulary, H, requires_grad=True)
    targets, temperatures = torch.zeros(num_tokens, dtype=torch.int64), torch.ones(num_tokens)
    with Memory() as memory:
        values, entropies = token_logprobs(hidden, weight, targets, temperatures, chunk_size)
        (values.sum() + entropies.sum()).backward()
    return memory


def test_more_tokens_take_no_more_logits():
    few, many = (memory_of(n, vocabulary=4096, chunk_size=32) for n in (64, 1024))
    per_token = 16 * H * FLOAT  # a few rows like its hidden state, and a few numbers
    assert many.peak - few.peak < (1024 - 64) * per_token
    assert many.largest == few.largest == 32 * 4096 * FLOAT


def test_memory_is_that_of_a_few_chunks_of_logits_and_the_weights_gradient():
    for vocabulary, chunk_size in ((1024, 32), (8192, 32), (8192, 128)):
        memory = memory_of(512, vocabulary, chunk_size)
        logits, gradient, rest = (size * FLOAT for size in (chunk_size * vocabulary, vocabulary * H, 512 * H))
        assert logits <= memory.peak < 6 * logits + 4 * gradient + 16 * rest


def test_a_training_pass_holds_no_logits_for_all_tokens(tmp_path: Path):
    policy = Policy(load_model(write_model(tmp_path, tied=True)).model, logprob_chunk_size=4)
    batch = build_microbatch(random_sequences(40), torch.device("cpu"))
    num_logits = len(batch.targets) * policy.model.config.vocab_size
    with Memory() as memory:
        outputs = policy(batch)
        (outputs.logprobs.sum() + outputs.entropy.sum()).backward()
    assert memory.largest < num_logits * FLOAT / 2

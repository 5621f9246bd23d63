"""Log-probabilities take memory for a chunk of logits, not for [tokens, vocabulary], forward and backward."""

from collections.abc import Callable
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

HIDDEN = 8
FLOAT = 4


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


Logprobs = Callable[..., tuple[torch.Tensor, torch.Tensor]]


def memory_of(logprobs: Logprobs, num_tokens: int, vocabulary: int, chunk_size: int) -> Memory:
    """Of one forward and backward pass; weights and hidden states were there before."""
    hidden = torch.randn(num_tokens, HIDDEN, requires_grad=True)
    weight = torch.randn(vocabulary, HIDDEN, requires_grad=True)
    targets, temperatures = torch.zeros(num_tokens, dtype=torch.int64), torch.ones(num_tokens)
    with Memory() as memory:
        values, entropies = logprobs(hidden, weight, targets, temperatures, chunk_size)
        (values.sum() + entropies.sum()).backward()
    return memory


def plain_logprobs(hidden: torch.Tensor, weight: torch.Tensor, targets: torch.Tensor, *_: object):
    """What is to be avoided."""
    logp = torch.log_softmax(hidden @ weight.T, dim=-1)
    return logp.gather(-1, targets[:, None])[:, 0], -(logp.exp() * logp).sum(-1)


def chunked_logprobs(hidden: torch.Tensor, weight: torch.Tensor, targets: torch.Tensor, _: object, chunk_size: int):
    """What is not enough: no tensor is large, but autograd keeps all of them."""
    chunks = zip(hidden.split(chunk_size), targets.split(chunk_size), strict=True)
    values, entropies = zip(*(plain_logprobs(h, weight, t) for h, t in chunks), strict=True)
    return torch.cat(values), torch.cat(entropies)


def test_more_tokens_take_no_more_logits():
    few, many = (memory_of(token_logprobs, n, vocabulary=4096, chunk_size=32) for n in (64, 1024))
    per_token = 16 * HIDDEN * FLOAT  # a few rows like its hidden state, and a few numbers
    assert many.peak - few.peak < (1024 - 64) * per_token
    assert many.largest == few.largest == 32 * 4096 * FLOAT


def test_memory_is_that_of_a_few_chunks_of_logits_and_the_weights_gradient():
    for vocabulary, chunk_size in ((1024, 32), (8192, 32), (8192, 128)):
        memory = memory_of(token_logprobs, 512, vocabulary, chunk_size)
        logits, gradient, rest = (size * FLOAT for size in (chunk_size * vocabulary, vocabulary * HIDDEN, 512 * HIDDEN))
        assert logits <= memory.peak < 6 * logits + 4 * gradient + 16 * rest


@pytest.mark.parametrize("logprobs", [plain_logprobs, chunked_logprobs])
def test_the_measurement_sees_logits_that_are_kept(logprobs: Logprobs):
    few, many = (memory_of(logprobs, n, vocabulary=4096, chunk_size=32) for n in (64, 1024))
    assert many.peak - few.peak > (1024 - 64) * 4096 * FLOAT


def test_a_training_pass_holds_no_logits_for_all_tokens(tmp_path: Path):
    policy = Policy(load_model(write_model(tmp_path, tied=True)).model, logprob_chunk_size=4)
    batch = build_microbatch(random_sequences(40), torch.device("cpu"))
    num_logits = len(batch.targets) * policy.model.config.vocab_size
    with Memory() as memory:
        outputs = policy(batch)
        (outputs.logprobs.sum() + outputs.entropy.sum()).backward()
    assert memory.largest < num_logits * FLOAT / 2

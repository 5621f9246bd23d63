"""Training sequences at random, and a plain twin of the engine's maths: one sequence at a time, float32, unsharded."""

from collections.abc import Sequence
from dataclasses import replace

import torch
from transformers import PreTrainedModel

from arl.algorithm.batch import weigh_tokens
from arl.api.algorithm import Aggregation
from arl.api.engine import PackedTokens, TokenLoss, TokenOutputs
from arl.api.types import TOKEN_FIELDS, TrainSequence

VOCABULARY = 256


def random_sequences(count: int, seed: int = 0, aggregation: Aggregation = "token_mean") -> list[TrainSequence]:
    """Sequences of 2 to 24 tokens with random masks, advantages, logprobs and temperatures, weighed as a minibatch."""
    generator = torch.Generator().manual_seed(seed)
    return weigh_tokens([[_random_sequence(generator) for _ in range(count)]], aggregation)


def family_sequences(seed: int = 0) -> list[TrainSequence]:
    """Two groups of 20 prompt tokens each, some of whose answers branch after another 18, one twice: 11 sequences.

    Masks are random, so tokens that sequences share are trained in some of them.
    """
    generator = torch.Generator().manual_seed(seed)
    sequences: list[TrainSequence] = []
    for _ in range(2):
        prompt, turn = (torch.randint(0, VOCABULARY, (count,), generator=generator).tolist() for count in (20, 18))
        sequences += [_random_sequence(generator, stem) for stem in [prompt] * 3 + [prompt + turn] * 2]
    again = replace(sequences[0], advantages=-2 * sequences[0].advantages, temperature=0.9)
    return weigh_tokens([[*sequences, again]], "token_mean")


def _random_sequence(generator: torch.Generator, stem: Sequence[int] = ()) -> TrainSequence:
    """A sequence that goes on after `stem`."""
    length = int(torch.randint(2, 25, (1,), generator=generator)) + len(stem)
    loss_mask = torch.rand(length, generator=generator) < 0.6
    loss_mask[0], loss_mask[-1] = False, True
    behavior = -6 + torch.randn(length, generator=generator)
    token_ids = torch.randint(0, VOCABULARY, (length,), generator=generator)
    token_ids[: len(stem)] = torch.tensor(stem, dtype=torch.int64)
    return TrainSequence(
        token_ids=token_ids,
        loss_mask=loss_mask,
        behavior_logprobs=behavior * loss_mask,
        proximal_logprobs=(behavior + 0.3 * torch.randn(length, generator=generator)) * loss_mask,
        advantages=torch.randn(1, generator=generator) * loss_mask,
        loss_weights=torch.zeros(length),
        versions=torch.zeros(length, dtype=torch.int64),
        temperature=float(0.5 + torch.rand(1, generator=generator)),
    )


def twin_logprobs(model: PreTrainedModel, sequence: TrainSequence) -> tuple[torch.Tensor, torch.Tensor]:
    """(logprobs, entropies) of the trained tokens of one sequence, by the model's own forward and a full softmax."""
    logits = model(input_ids=sequence.token_ids[None]).logits[0, :-1] / sequence.temperature
    logp = torch.log_softmax(logits, dim=-1)
    chosen = logp.gather(-1, sequence.token_ids[1:, None])[:, 0]
    entropy = -(logp.exp() * logp).sum(-1)
    trained = sequence.loss_mask[1:]
    return chosen[trained], entropy[trained]


def twin_loss(model: PreTrainedModel, sequences: Sequence[TrainSequence], loss: TokenLoss) -> torch.Tensor:
    """The minibatch's loss, one sequence after another."""
    total = torch.zeros(())
    for sequence in sequences:
        mask = sequence.loss_mask
        current, entropy = twin_logprobs(model, sequence)
        tokens = PackedTokens(
            **{name: getattr(sequence, name)[mask] for name in TOKEN_FIELDS},
            sequence_ids=torch.zeros(int(mask.sum()), dtype=torch.int64),
        )
        outputs = TokenOutputs(logprobs=current, entropy=entropy, values=torch.zeros_like(current))
        total = total + (loss(outputs, tokens).loss * sequence.loss_weights[mask]).sum()
    return total

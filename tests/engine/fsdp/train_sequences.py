"""Training sequences at random, and a plain twin of the engine's maths: one sequence at a time, float32, unsharded."""

import os
import signal
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import cast

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn
from transformers import PreTrainedModel

from arl.algorithm.batch import weigh_tokens
from arl.algorithm.losses.reinforcement import PolicyLoss
from arl.algorithm.packing import balanced_shares
from arl.api.sampling_mask import KeptIds
from arl.api.settings.algorithm import Aggregation, preset
from arl.api.settings.engines import OptimizerConfig
from arl.api.train_engine import TOKEN_FIELDS, PackedTokens, TokenLoss, TokenLosses, TokenOutputs, TrainSequence
from arl.data.image_processor import ImageProcessor
from arl.engine.fsdp.minibatch import Microbatch
from arl.engine.fsdp.policy import TokenModel
from arl.engine.fsdp.train_engine import learning_rate

VOCABULARY = 256
LOSS = PolicyLoss.of(
    preset("decoupled_ppo", loss={"clip_high": 0.3}, weights=[{"level": "token", "upper": 2.0}], minibatches=2)
)
"""A loss whose ratios leave 1 and whose clips and bounds of weights have an effect."""
COMPOSED = PolicyLoss.of(
    preset(
        "gspo",
        weights=[{"level": "token", "lower": 0.5, "upper": 2.0}, "geometric"],
        rejections=[{"level": "geometric", "upper": 1.5}, {"level": "token", "lower": 0.1, "upper": 9.0, "veto": True}],
    )
)
"""Several weights and rejections, over tokens and whole trajectories."""
OF_WORK = {"microbatches", "packing_efficiency", "forwarded_tokens", "forwarded_share"}
"""Metrics that say how the work was split."""


def random_sequences(count: int, seed: int = 0, aggregation: Aggregation = "token_mean") -> list[TrainSequence]:
    """Sequences of 2 to 24 tokens with random masks, advantages, logprobs and temperatures, weighed as a minibatch."""
    generator = torch.Generator().manual_seed(seed)
    sequences = weigh_tokens([_random_sequence(generator) for _ in range(count)])
    if aggregation == "sequence_mean":
        sequences = [replace(s, loss_weights=s.loss_mask / s.loss_mask.sum() / count) for s in sequences]
    return sequences


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
    return weigh_tokens([*sequences, again])


def constrained_sequences(seed: int = 0) -> list[TrainSequence]:
    """Families in which two of three tokens were sampled among some ids alone, few or nearly all. Sequences that share
    a token have different sets for it."""
    generator = torch.Generator().manual_seed(seed)
    return [replace(s, kept_ids=random_kept_ids(s.token_ids, generator)) for s in family_sequences(seed)]


def random_kept_ids(token_ids: torch.Tensor, generator: torch.Generator, vocab_size: int = VOCABULARY) -> KeptIds:
    sets: list[list[int] | None] = []
    for token in token_ids.tolist():
        kind, count = torch.randint(0, 3, (2,), generator=generator).tolist()
        others = torch.randperm(vocab_size, generator=generator)[: count + 1 if kind == 1 else vocab_size - count - 2]
        sets.append(None if kind == 0 else sorted({token, *others.tolist()}))
    return KeptIds.of(sets, vocab_size)


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
    seen = _image_inputs(model, sequence)
    logits = model(input_ids=sequence.token_ids[None], **seen).logits[0, :-1] / sequence.temperature
    if sequence.kept_ids is not None:
        mask = torch.from_numpy(sequence.kept_ids.mask(logits.shape[-1]))[1:]
        logits = logits.masked_fill(~mask, -torch.inf)
    logp = torch.log_softmax(logits, dim=-1)
    chosen = logp.gather(-1, sequence.token_ids[1:, None])[:, 0]
    entropy = torch.special.entr(logp.exp()).sum(-1)
    trained = sequence.loss_mask[1:]
    return chosen[trained], entropy[trained]


@torch.no_grad()
def twin_rows(model: PreTrainedModel, sequences: Sequence[TrainSequence]) -> list[torch.Tensor]:
    """What a train engine's `forward` says of the same model."""
    rows = [torch.zeros(len(sequence)) for sequence in sequences]
    for row, sequence in zip(rows, sequences, strict=True):
        row[sequence.loss_mask] = twin_logprobs(model, sequence)[0].float()
    return rows


def assert_row_gives_what_its_sequences_do(
    policy: TokenModel, batch: Microbatch, twin: PreTrainedModel, sequences: Sequence[TrainSequence]
) -> None:
    """Logprobs, entropies, LOSS and gradients are those of the twin, one sequence at a time."""
    outputs = policy(batch)
    ours = (LOSS(outputs, batch.tokens).loss * batch.tokens.loss_weights).sum()
    ours.backward()
    theirs = twin_loss(twin, sequences, LOSS)
    theirs.backward()
    with torch.no_grad():
        logprobs, entropy = (torch.cat(x) for x in zip(*(twin_logprobs(twin, s) for s in sequences), strict=True))
    for mine, expected in ((ours, theirs), (outputs.logprobs, logprobs), (outputs.entropy, entropy)):
        torch.testing.assert_close(mine, expected, rtol=1e-5, atol=1e-5)
    for (name, p), (_, q) in zip(policy.model.named_parameters(), twin.named_parameters(), strict=True):
        assert p.grad is not None, name
        torch.testing.assert_close(p.grad, q.grad, rtol=1e-4, atol=1e-5, msg=name)


def _image_inputs(model: PreTrainedModel, sequence: TrainSequence) -> dict[str, torch.Tensor]:
    """The sequence's images as transformers takes them."""
    if not sequence.images:
        return {}
    processor = _image_processor(model.name_or_path)
    pixels = [processor.pixels(placed.image) for placed in sequence.images]
    return {
        "pixel_values": torch.from_numpy(np.concatenate([p.values for p in pixels])),
        "image_grid_thw": torch.tensor([p.grid for p in pixels]),
        "mm_token_type_ids": (sequence.token_ids[None] == processor.image_token_id).int(),
    }


@cache
def _image_processor(directory: str) -> ImageProcessor:
    return ImageProcessor(directory)


def score_of(model: PreTrainedModel) -> nn.Linear:
    return cast("nn.Linear", model.score)


def twin_loss(model: PreTrainedModel, sequences: Sequence[TrainSequence], loss: TokenLoss) -> torch.Tensor:
    """The minibatch's loss, one sequence after another."""
    total = torch.zeros(())
    for sequence in sequences:
        mask = sequence.loss_mask
        logprobs = entropy = values = torch.zeros(int(mask.sum()))
        if model.get_output_embeddings() is not None:
            logprobs, entropy = twin_logprobs(model, sequence)
        else:
            hidden = model.get_decoder()(input_ids=sequence.token_ids[None, :-1]).last_hidden_state[0]
            values = score_of(model)(hidden)[mask[1:], 0]
        tokens = PackedTokens(
            **{name: getattr(sequence, name)[mask] for name in TOKEN_FIELDS},
            sequence_ids=torch.zeros(int(mask.sum()), dtype=torch.int64),
        )
        outputs = TokenOutputs(logprobs=logprobs, entropy=entropy, values=values)
        total = total + (loss(outputs, tokens).loss * sequence.loss_weights[mask]).sum()
    return total


def twin_steps(
    model: PreTrainedModel,
    minibatches: Sequence[Sequence[TrainSequence]],
    loss: TokenLoss,
    config: OptimizerConfig,
) -> list[float]:
    """A plain loop with torch's own AdamW and clipping; the gradient norms before clipping."""
    parameters = [p for p in model.parameters() if p.requires_grad]
    groups = [
        {"params": [p for p in parameters if p.ndim > 1], "weight_decay": config.weight_decay},
        {"params": [p for p in parameters if p.ndim == 1], "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(groups, betas=config.betas, eps=config.eps)
    norms: list[float] = []
    for step, minibatch in enumerate(minibatches):
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(config, step)
        twin_loss(model, minibatch, loss).backward()
        norms.append(torch.nn.utils.clip_grad_norm_(parameters, config.max_grad_norm).item())
        optimizer.step()
        optimizer.zero_grad()
    return norms


def share_of(sequences: Sequence[TrainSequence], rank: int, world_size: int) -> list[TrainSequence]:
    """What one of several ranks is given of a minibatch."""
    return [sequences[i] for i in balanced_shares(sequences, world_size)[rank]]


def assert_same_metrics(ours: Mapping[str, float], theirs: Mapping[str, float], rel: float = 1e-5) -> None:
    """But for those that say how the work was split."""
    assert ours.keys() == theirs.keys()
    for name in theirs.keys() - OF_WORK - {f"critic/{name}" for name in OF_WORK}:
        assert ours[name] == pytest.approx(theirs[name], rel=rel, abs=1e-6), name


def assert_same_rows(
    ours: Sequence[torch.Tensor | Sequence[float]],
    theirs: Sequence[torch.Tensor | Sequence[float]],
    tolerance: float = 1e-5,
) -> None:
    """Logprobs or values, one row for each sequence."""
    for row, expected in zip(ours, theirs, strict=True):
        torch.testing.assert_close(torch.as_tensor(row), torch.as_tensor(expected), rtol=tolerance, atol=tolerance)


def same(ours: Sequence[torch.Tensor], theirs: Sequence[torch.Tensor]) -> bool:
    """To the bit."""
    return all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))


@dataclass(frozen=True)
class FailingLoss:
    """Raises on one rank, or sends it a signal; the others go on into the backward pass, and wait there."""

    rank: int
    sends: signal.Signals | None = None

    def __call__(self, outputs: TokenOutputs, tokens: PackedTokens) -> TokenLosses:
        dist.barrier()  # none is still in its forward pass
        if dist.get_rank() != self.rank:
            return LOSS(outputs, tokens)
        if self.sends is not None:
            os.kill(os.getpid(), self.sends)
            time.sleep(60)  # another thread takes the signal, and this one may go on until then
        raise ValueError("the loss is lost")

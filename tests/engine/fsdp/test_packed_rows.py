"""A packed row gives the logprobs, losses and gradients of its sequences one at a time, also with shared prefixes."""

import pickle
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from algorithm.families import Family, trees
from hypothesis import given, settings
from hypothesis import strategies as st
from mixtures import random_routes
from torch.autograd.graph import saved_tensors_hooks
from train_models import MakeEngine, Memory, load_twin, write_model
from train_sequences import (
    LOSS,
    assert_row_gives_what_its_sequences_do,
    constrained_sequences,
    family_sequences,
    random_sequences,
)
from transformers import Gemma2ForCausalLM, GptOssForCausalLM, MistralForCausalLM, Qwen3ForCausalLM

from arl.algorithm.flat_sequences import FlatSequences
from arl.algorithm.prefix_tree import PrefixOrder, RowPlan
from arl.api.train_engine import TrainSequence
from arl.engine.fsdp.attention import (
    PackedLayout,
    block_attention,
    block_mask,
    flex_attention,
    masked_attention,
)
from arl.engine.fsdp.minibatch import build_microbatch
from arl.engine.fsdp.model import load_model

CPU = torch.device("cpu")
WINDOW = 5


@pytest.mark.parametrize("share_prefixes", [True, False], ids=["shared", "apart"])
@pytest.mark.parametrize(
    ("model_class", "config"),
    [
        (Qwen3ForCausalLM, {"tied": True}),
        (Qwen3ForCausalLM, {"tied": False}),
        (MistralForCausalLM, {"sliding_window": WINDOW}),
        (GptOssForCausalLM, {"sliding_window": WINDOW, "num_local_experts": 4, "num_experts_per_tok": 2}),
        (
            Gemma2ForCausalLM,
            {"sliding_window": WINDOW, "attn_logit_softcapping": 0.5, "final_logit_softcapping": None},
        ),
    ],
    ids=["tied", "untied", "window", "sinks", "soft-capped"],
)
def test_a_row_gives_what_the_model_by_itself_gives_its_sequences_one_at_a_time(
    tmp_path: Path, model_class: type[Any], config: dict[str, Any], share_prefixes: bool
):
    sequences = family_sequences() + random_sequences(6)
    assert min(len(s) for s in family_sequences()) > 2 * WINDOW
    write_model(tmp_path, model_class, **config)
    policy, twin = load_model(tmp_path).token_model(), load_twin(tmp_path)
    batch = build_microbatch(sequences, CPU, share_prefixes=share_prefixes)
    assert_row_gives_what_its_sequences_do(policy, batch, twin, sequences)


# What is in a row


def test_positions_restart_with_each_sequence():
    first, second = random_sequences(2)
    batch = build_microbatch([first, second], CPU, share_prefixes=False)
    assert batch.position_ids.tolist() == [[*range(len(first) - 1), *range(len(second) - 1)]]
    assert [stretch.num_tokens for stretch in batch.layout.plan.stretches] == [len(first) - 1, len(second) - 1]


def test_a_trained_first_token_is_refused():
    (sequence,) = random_sequences(1)
    sequence.loss_mask[0] = True
    with pytest.raises(ValueError, match="first token"):
        build_microbatch([sequence], CPU)


def test_fewer_tokens_are_forwarded_the_more_of_a_family_a_microbatch_holds(make_engine: MakeEngine):
    sequences, shares = family_sequences(4), list[float]()
    for options in ({"share_prefixes": False}, *({"max_tokens_per_microbatch": budget} for budget in (60, 1000))):
        metrics = make_engine(**options).train_batch([sequences], LOSS)
        assert metrics["forwarded_tokens"] < metrics["tokens"] == sum(map(len, sequences))
        shares.append(metrics["forwarded_share"])
    assert shares[0] > shares[1] > shares[2]
    assert shares[2] < 0.7 * shares[0]


def test_identical_sequences_are_forwarded_once_upto_their_last_trained_token_and_count_each_for_itself():
    (sequence, *_) = family_sequences(5)
    batch = build_microbatch([sequence, replace(sequence, advantages=-sequence.advantages)], CPU)
    num_trained, last = int(sequence.loss_mask.sum()), int(sequence.loss_mask.nonzero()[-1])
    assert batch.input_ids[0].tolist() == sequence.token_ids[:last].tolist()
    assert torch.equal(batch.predictors[:num_trained], batch.predictors[num_trained:])
    assert torch.equal(batch.tokens.advantages[:num_trained], -batch.tokens.advantages[num_trained:])
    assert batch.tokens.sequence_ids.tolist() == [0] * num_trained + [1] * num_trained
    assert [len(values) for values in batch.unpack(torch.zeros(2 * num_trained))] == [len(sequence)] * 2


# Sequences on their way to a rank


@pytest.mark.parametrize("count", [0, 1, 7])
def test_flat_sequences_come_out_as_they_went_in(count: int):
    sequences = [replace(s, routes=random_routes(len(s), i)) if i % 2 else s for i, s in enumerate(family_sequences())]
    sequences = [
        replace(s, unit=i, kept_ids=c.kept_ids)
        for i, (s, c) in enumerate(zip(sequences, constrained_sequences(), strict=True))
    ]
    order = list(range(count))[::-1]
    arrived = pickle.loads(pickle.dumps(FlatSequences.of(sequences).take(order)))
    assert len(arrived) == count
    for ours, theirs in zip(arrived, [sequences[i] for i in order], strict=True):
        for field in fields(TrainSequence):
            mine, value = getattr(ours, field.name), getattr(theirs, field.name)
            if isinstance(value, torch.Tensor):
                assert mine.dtype == value.dtype, field.name
                assert torch.equal(mine, value), field.name
            else:
                assert mine == value, field.name


# Attention over a row


def layout_of(sequences: Family) -> PackedLayout:
    """One shared token is enough to share it."""
    order = PrefixOrder.of([torch.tensor(tokens) for tokens in sequences], min_shared=1)
    return PackedLayout(RowPlan.of(order), CPU)


layouts = trees.filter(bool).map(layout_of)


def seen(layout: PackedLayout, window: int | None) -> torch.Tensor:
    """bool[T, T] from the subtrees' ends: the slow twin of stretches, blocks and the block mask."""
    place = torch.arange(len(layout.positions))
    mask = (place[None, :] <= place[:, None]) & (place[:, None] < layout.subtree_stops[None, :])
    distance = layout.positions[:, None] - layout.positions[None, :]
    return mask if window is None else mask & (distance < window)


def random_heads(num_tokens: int, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """query [1, 4, T, 8], key and value [1, 2, T, 8], laid out as the model has them."""
    generator = torch.Generator().manual_seed(0)
    rows = (torch.randn(1, num_tokens, heads, 8, generator=generator, dtype=dtype) for heads in (4, 2, 2))
    query, key, value = (x.requires_grad_().transpose(1, 2) for x in rows)
    return query, key, value


def random_sinks(dtype: torch.dtype) -> torch.Tensor:
    """float[4], in scores' range."""
    return torch.randn(4, generator=torch.Generator().manual_seed(1), dtype=dtype, requires_grad=True)


def twin_attention(
    layout: PackedLayout,
    window: int | None,
    *qkv: torch.Tensor,
    softcap: float | None = None,
    sinks: torch.Tensor | None = None,
) -> torch.Tensor:
    """Scores, mask, sinks as one more column, softmax, in full: [1, T, H, D]."""
    query, key, value = qkv
    key, value = (x.repeat_interleave(2, dim=1) for x in (key, value))
    scores = 0.3 * query @ key.transpose(2, 3)
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    scores = scores.masked_fill(~seen(layout, window), float("-inf"))
    if sinks is not None:
        scores = torch.cat([scores, sinks.view(1, 4, 1, 1).expand(1, 4, scores.shape[2], 1)], dim=3)
    return (scores.softmax(-1)[..., : key.shape[2]] @ value).transpose(1, 2)


def assert_equal_with_gradients(
    ours: torch.Tensor, theirs: torch.Tensor, leaves: tuple[torch.Tensor | None, ...]
) -> None:
    torch.testing.assert_close(ours, theirs, rtol=1e-10, atol=1e-10)
    weights = torch.linspace(-1, 1, ours.numel(), dtype=ours.dtype).view(ours.shape)
    given = [leaf for leaf in leaves if leaf is not None]
    gradients = [torch.autograd.grad((x * weights).sum(), given) for x in (ours, theirs)]
    for mine, twin in zip(*gradients, strict=True):
        torch.testing.assert_close(mine, twin, rtol=1e-10, atol=1e-10)


@settings(max_examples=80, deadline=None)
@given(layouts, st.sampled_from([1, 12, 256]), st.booleans())
def test_blocks_merge_to_the_softmax_over_the_whole_prefix(layout: PackedLayout, tile: int, with_sinks: bool):
    """tile 1: every stretch for itself, causally."""
    qkv = random_heads(len(layout.positions), torch.float64)
    sinks = random_sinks(torch.float64) if with_sinks else None
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("arl.algorithm.prefix_tree._TILE", tile)
        ours = block_attention(*qkv, layout.plan.blocks(), 0.3, sinks)
    assert_equal_with_gradients(ours, twin_attention(layout, None, *qkv, sinks=sinks), (*qkv, sinks))


@settings(max_examples=80, deadline=None)
@given(layouts, st.sampled_from([None, 1, 3, 6]), st.sampled_from([None, 0.4]), st.booleans())
def test_masked_stretches_see_the_prefix_and_the_window(
    layout: PackedLayout, window: int | None, softcap: float | None, with_sinks: bool
):
    qkv = random_heads(len(layout.positions), torch.float64)
    sinks = random_sinks(torch.float64) if with_sinks else None
    ours = masked_attention(*qkv, layout.plan, 0.3, window, softcap, sinks)
    theirs = twin_attention(layout, window, *qkv, softcap=softcap, sinks=sinks)
    assert_equal_with_gradients(ours, theirs, (*qkv, sinks))


@pytest.mark.parametrize("softcap", [None, 0.4])
@pytest.mark.parametrize("window", [None, 20])
def test_masked_attention_needs_memory_for_the_row_and_not_for_what_each_branch_sees(
    window: int | None, softcap: float | None, monkeypatch: pytest.MonkeyPatch
):
    if softcap is None:
        monkeypatch.setattr("arl.engine.fsdp.attention._PIECE", 16)
    else:
        monkeypatch.setattr("arl.engine.fsdp.attention._MOST_SCORES", 0)
    turns = 60
    said = [[3 * turn] * 9 for turn in range(turns)]
    paths = [[t for words in said[: turn + 1] for t in words] + [1] * (10 + turn % 3) for turn in range(turns)]
    layout = layout_of([*paths, [5] * 300])
    qkv = random_heads(num_tokens := len(layout.positions), torch.float64)
    saved: dict[int, int] = {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        saved[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    with saved_tensors_hooks(keep, lambda tensor: tensor), Memory() as memory:
        ours = masked_attention(*qkv, layout.plan, 0.3, window, softcap)
    assert_equal_with_gradients(ours, twin_attention(layout, window, *qkv, softcap=softcap), qkv)
    assert sum(saved.values()) <= 4 * qkv[0].nbytes
    assert memory.largest <= 8 * max(4 * num_tokens * 8, 16 * num_tokens)


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
@pytest.mark.parametrize(("softcap", "with_sinks"), [(None, False), (0.4, False), (None, True), (0.4, True)])
@pytest.mark.parametrize("window", [None, 40])
def test_flex_attention_is_masked_by_the_tree_with_blocks_for_all_that_is_seen(
    window: int | None, softcap: float | None, with_sinks: bool, monkeypatch: pytest.MonkeyPatch
):
    """A row of 800 tokens: two prompts, branches within branches, and a sequence for itself."""
    # Compiled, torch's kernel for CPUs has no gradients; uncompiled it has the GPU's.
    monkeypatch.setattr("torch.nn.attention.flex_attention._validate_device", lambda *qkv: None)
    lengths, shared = torch.tensor([300, 250, 280, 90, 200, 150]), torch.tensor([0, 200, 240, 0, 60, 140])
    plan = RowPlan.of(PrefixOrder(indices=torch.arange(6), lengths=lengths, shared=shared))
    layout = PackedLayout(plan, CPU)
    query, key, value = (x.detach().requires_grad_() for x in random_heads(plan.num_tokens, torch.float64))
    qkv = query, key, value
    sinks = random_sinks(torch.float64) if with_sinks else None
    ours = flex_attention(*qkv, layout, 0.3, window, softcap, sinks)
    theirs = twin_attention(layout, window, *qkv, softcap=softcap, sinks=sinks)
    assert_equal_with_gradients(ours, theirs, (*qkv, sinks))

    # Without a compiler torch looks at the mask alone, not at its blocks.
    blocks, padding = block_mask(layout, window), -plan.num_tokens % 128
    mask = torch.nn.functional.pad(seen(layout, window), (0, padding, 0, padding))
    tiles = mask.unfold(0, 128, 128).unfold(1, 128, 128).flatten(2)
    some, everything = tiles.any(-1), tiles.all(-1)
    computed, full = blocks.to_dense()[0, 0].bool(), torch.zeros_like(some)
    assert blocks.full_kv_num_blocks is not None
    assert blocks.full_kv_indices is not None
    for q, count in enumerate(blocks.full_kv_num_blocks[0, 0].tolist()):
        full[q, blocks.full_kv_indices[0, 0, q, :count]] = True
    assert bool(full.any()) == (window is None)
    assert not (full & ~everything).any()
    assert not (some & ~computed).any()
    assert window is not None or torch.equal(some, computed)

"""A packed row gives the logprobs, losses and gradients of its sequences one at a time, also with shared prefixes."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from train_models import MakeEngine, load_twin
from train_sequences import LOSS, family_sequences, random_sequences, twin_logprobs, twin_loss
from transformers import AutoModelForCausalLM, MistralConfig, MistralForCausalLM, PreTrainedModel

from arl.algorithm.prefix_tree import PrefixOrder, RowPlan
from arl.api.types import TrainSequence
from arl.engine.fsdp.attention import (
    PACKED_ATTENTION,
    PackedLayout,
    block_attention,
    block_mask,
    flex_attention,
    masked_attention,
)
from arl.engine.fsdp.minibatch import build_microbatch
from arl.engine.fsdp.model import load_model
from arl.engine.fsdp.policy import Policy

CPU = torch.device("cpu")
WINDOW = 5


# Against the model by itself


def test_packed_loss_and_gradients_equal_those_of_one_sequence_at_a_time(any_model_dir: Path):
    sequences = random_sequences(12)
    policy = Policy(load_model(any_model_dir).model, logprob_chunk_size=16)
    batch = build_microbatch(sequences, CPU)
    losses = LOSS(policy(batch), batch.tokens)
    ours = (losses.loss * batch.tokens.loss_weights).sum()
    ours.backward()

    twin = load_twin(any_model_dir)
    theirs = twin_loss(twin, sequences, LOSS)
    theirs.backward()

    torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5)
    for (name, p), (_, q) in zip(policy.model.named_parameters(), twin.named_parameters(), strict=True):
        assert p.grad is not None, name
        torch.testing.assert_close(p.grad, q.grad, rtol=1e-4, atol=1e-5, msg=name)


def test_a_sliding_window_is_kept_inside_each_sequence(tmp_path: Path):
    packed, twin, sequences = sliding_model(tmp_path), load_twin(tmp_path), random_sequences(6)
    assert max(map(len, sequences)) > 2 * WINDOW
    with torch.no_grad():
        ours = Policy(packed, 16)(build_microbatch(sequences, CPU)).logprobs
        theirs = torch.cat([twin_logprobs(twin, s)[0] for s in sequences])
    torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5)


def test_forward_gives_the_twins_logprobs_where_trained_and_zero_elsewhere(
    any_model_dir: Path, make_engine: MakeEngine
):
    sequences = random_sequences(9)
    logprobs = make_engine(any_model_dir, max_tokens_per_microbatch=40).forward(sequences)
    twin = load_twin(any_model_dir)
    for sequence, ours in zip(sequences, logprobs, strict=True):
        expected = torch.zeros(len(sequence))
        with torch.no_grad():
            expected[sequence.loss_mask], _ = twin_logprobs(twin, sequence)
        torch.testing.assert_close(ours, expected, rtol=1e-5, atol=1e-5)


def test_positions_restart_with_each_sequence():
    first, second = random_sequences(2)
    batch = build_microbatch([first, second], CPU, share_prefixes=False)
    assert batch.position_ids.tolist() == [[*range(len(first) - 1), *range(len(second) - 1)]]
    assert [stretch.num_tokens for stretch in batch.layout.stretches] == [len(first) - 1, len(second) - 1]


def test_losses_see_which_sequence_each_trained_token_belongs_to():
    first, second = random_sequences(2)
    ids = build_microbatch([first, second], CPU).tokens.sequence_ids.tolist()
    assert ids == [0] * int(first.loss_mask.sum()) + [1] * int(second.loss_mask.sum())


def test_a_trained_first_token_is_refused():
    (sequence,) = random_sequences(1)
    sequence.loss_mask[0] = True
    with pytest.raises(ValueError, match="first token"):
        build_microbatch([sequence], CPU)


# Shared prefixes


def outcome(policy: Policy, sequences: list[TrainSequence], *, share_prefixes: bool) -> dict[str, torch.Tensor]:
    """Logprobs, entropies, loss and all gradients of one microbatch, and how many tokens it forwarded."""
    batch = build_microbatch(sequences, CPU, share_prefixes=share_prefixes)
    policy.zero_grad()
    outputs = policy(batch)
    loss = (LOSS(outputs, batch.tokens).loss * batch.tokens.loss_weights).sum()
    loss.backward()
    gradients = {name: p.grad.clone() for name, p in policy.named_parameters() if p.grad is not None}
    numbers = {"logprobs": outputs.logprobs, "entropy": outputs.entropy, "loss": loss}
    return {**numbers, **gradients, "num_forwarded": torch.tensor(batch.num_forwarded_tokens)}


def assert_sharing_changes_nothing(policy: Policy, sequences: list[TrainSequence], tolerance: float) -> None:
    shared = outcome(policy, sequences, share_prefixes=True)
    apart = outcome(policy, sequences, share_prefixes=False)
    assert shared.pop("num_forwarded") < apart.pop("num_forwarded")
    assert shared.keys() == apart.keys()
    for name, values in shared.items():
        torch.testing.assert_close(values, apart[name], rtol=tolerance, atol=tolerance, msg=name)


@pytest.mark.parametrize("seed", range(3))
def test_gradients_of_grouped_queries_equal_those_without_sharing(any_model_dir: Path, seed: int):
    policy = Policy(load_model(any_model_dir).model, logprob_chunk_size=16)
    assert_sharing_changes_nothing(policy, family_sequences(seed), 1e-5)


def test_gradients_of_sliding_windows_equal_those_without_sharing(tmp_path: Path):
    policy = Policy(sliding_model(tmp_path), logprob_chunk_size=16)
    assert_sharing_changes_nothing(policy, family_sequences(3), 1e-5)


def sliding_model(directory: Path) -> PreTrainedModel:
    config = MistralConfig(
        vocab_size=256,
        hidden_size=16,
        intermediate_size=16,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        sliding_window=WINDOW,
        initializer_range=0.2,
    )
    MistralForCausalLM(config).save_pretrained(directory)
    return AutoModelForCausalLM.from_pretrained(directory, attn_implementation=PACKED_ATTENTION).eval()


def test_fewer_tokens_are_forwarded_the_more_of_a_family_a_microbatch_holds(make_engine: MakeEngine):
    sequences, shares = family_sequences(4), list[float]()
    for options in ({"share_prefixes": False}, *({"max_tokens_per_microbatch": budget} for budget in (60, 1000))):
        metrics = make_engine(**options).train_batch([sequences], LOSS)
        assert metrics["forwarded_tokens"] < metrics["tokens"] == sum(map(len, sequences))
        shares.append(metrics["forwarded_share"])
    assert shares[0] > shares[1] > shares[2]
    assert shares[2] < 0.7 * shares[0]


def test_identical_sequences_are_forwarded_once_and_count_each_for_itself():
    (sequence, *_) = family_sequences(5)
    twice = [sequence, replace(sequence, advantages=-sequence.advantages)]
    batch = build_microbatch(twice, CPU)
    assert batch.num_forwarded_tokens == build_microbatch([sequence], CPU).num_forwarded_tokens
    num_trained = int(sequence.loss_mask.sum())
    assert torch.equal(batch.predictors[:num_trained], batch.predictors[num_trained:])
    assert torch.equal(batch.tokens.advantages[:num_trained], -batch.tokens.advantages[num_trained:])
    assert batch.tokens.sequence_ids.tolist() == [0] * num_trained + [1] * num_trained


def test_tokens_after_the_last_trained_one_are_not_forwarded():
    (sequence, *_) = family_sequences(6)
    last = int(sequence.loss_mask.nonzero()[-1])
    batch = build_microbatch([sequence], CPU)
    assert batch.input_ids[0].tolist() == sequence.token_ids[:last].tolist()
    assert [len(values) for values in batch.unpack(torch.zeros(len(batch.targets)))] == [len(sequence)]


@st.composite
def layouts(draw: st.DrawFn) -> PackedLayout:
    """Rows of random trees, in which one shared token is enough to share it."""
    sequences: list[list[int]] = []
    for _ in range(draw(st.integers(1, 8))):
        stem: list[int] = []
        if sequences:
            earlier = draw(st.sampled_from(sequences))
            stem = earlier[: draw(st.integers(0, len(earlier)))]
        sequences.append(stem + draw(st.lists(st.integers(0, 2), min_size=1, max_size=9)))
    order = PrefixOrder.of([torch.tensor(tokens) for tokens in sequences], min_shared=1)
    return PackedLayout.of_plan(RowPlan.of(order), CPU)


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


def twin_attention(layout: PackedLayout, window: int | None, *qkv: torch.Tensor) -> torch.Tensor:
    """Scores, mask, softmax, in full: [1, T, H, D]."""
    query, key, value = qkv
    key, value = (x.repeat_interleave(2, dim=1) for x in (key, value))
    scores = (0.3 * query @ key.transpose(2, 3)).masked_fill(~seen(layout, window), float("-inf"))
    return (scores.softmax(-1) @ value).transpose(1, 2)


def assert_equal_with_gradients(ours: torch.Tensor, theirs: torch.Tensor, leaves: tuple[torch.Tensor, ...]) -> None:
    torch.testing.assert_close(ours, theirs, rtol=1e-10, atol=1e-10)
    weights = torch.linspace(-1, 1, ours.numel(), dtype=ours.dtype).view(ours.shape)
    gradients = [torch.autograd.grad((x * weights).sum(), leaves) for x in (ours, theirs)]
    for mine, twin in zip(*gradients, strict=True):
        torch.testing.assert_close(mine, twin, rtol=1e-10, atol=1e-10)


@settings(max_examples=60, deadline=None)
@given(layouts())
def test_blocks_merge_to_the_softmax_over_the_whole_prefix(layout: PackedLayout):
    qkv = random_heads(len(layout.positions), torch.float64)
    ours = block_attention(*qkv, layout.blocks, 0.3)
    assert_equal_with_gradients(ours, twin_attention(layout, None, *qkv), qkv)


@settings(max_examples=40, deadline=None)
@given(layouts(), st.sampled_from([None, 1, 3, 6]))
def test_masked_stretches_see_the_prefix_and_the_window(layout: PackedLayout, window: int | None):
    qkv = random_heads(len(layout.positions), torch.float64)
    ours = masked_attention(*qkv, layout.stretches, 0.3, window)
    assert_equal_with_gradients(ours, twin_attention(layout, window, *qkv), qkv)


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
@pytest.mark.parametrize("window", [None, 40])
def test_flex_attention_is_masked_by_the_tree(window: int | None):
    layout = long_layout()
    query, key, value = (x.detach() for x in random_heads(len(layout.positions), torch.float32))
    ours = flex_attention(query, key, value, layout, 0.3, window)
    torch.testing.assert_close(ours, twin_attention(layout, window, query, key, value), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("window", [None, 40])
def test_blocks_of_the_flex_mask_hold_all_that_is_seen_and_full_ones_nothing_else(window: int | None):
    layout = long_layout()
    mask, blocks = seen(layout, window), block_mask(layout, window)
    num_blocks = -(-len(mask) // 128)
    partial = listed(blocks.kv_num_blocks, blocks.kv_indices)
    full = listed(blocks.full_kv_num_blocks, blocks.full_kv_indices)
    assert not partial & full
    assert bool(full) == (window is None)
    for q in range(num_blocks):
        for k in range(num_blocks):
            tile = mask[q * 128 : (q + 1) * 128, k * 128 : (k + 1) * 128]
            assert ((q, k) in partial | full) == bool(tile.any()) or window is not None
            assert (q, k) in partial | full or not tile.any()
            assert (q, k) not in full or tile.all()


def listed(counts: torch.Tensor | None, indices: torch.Tensor | None) -> set[tuple[int, int]]:
    assert counts is not None
    assert indices is not None
    rows = zip(counts[0, 0].tolist(), indices[0, 0].tolist(), strict=True)
    return {(q, k) for q, (count, blocks) in enumerate(rows) for k in blocks[:count]}


def long_layout() -> PackedLayout:
    """A row of 800 tokens: two prompts, branches within branches, and a sequence for itself."""
    lengths, shared = (300, 250, 280, 90, 200, 150), (0, 200, 240, 0, 60, 140)
    plan = RowPlan.of(PrefixOrder(indices=tuple(range(6)), lengths=lengths, shared=shared))
    return PackedLayout.of_plan(plan, CPU)

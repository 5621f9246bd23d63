"""A packed row is the same as its sequences one at a time, and nothing depends on how a minibatch is split."""

from pathlib import Path

import pytest
import torch
from train_models import MakeEngine, load_twin
from train_sequences import LOSS, random_sequences, twin_logprobs, twin_loss
from transformers import AutoModelForCausalLM, MistralConfig, MistralForCausalLM

from arl.api.types import TrainSequence
from arl.engine.fsdp.attention import PACKED_ATTENTION
from arl.engine.fsdp.minibatch import build_microbatch
from arl.engine.fsdp.model import Policy, load_model

CPU = torch.device("cpu")


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
    config = MistralConfig(
        vocab_size=256,
        hidden_size=16,
        intermediate_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
        sliding_window=5,
    )
    MistralForCausalLM(config).save_pretrained(tmp_path)
    packed = AutoModelForCausalLM.from_pretrained(tmp_path, attn_implementation=PACKED_ATTENTION).eval()
    twin, sequences = load_twin(tmp_path), random_sequences(6)
    assert max(map(len, sequences)) > 2 * config.sliding_window
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


def train(make_engine: MakeEngine, sequences: list[TrainSequence], **options) -> tuple[dict[str, float], torch.Tensor]:
    """The metrics of one step, and logprobs of held-out sequences after it."""
    engine = make_engine(**options)
    metrics = engine.train_batch([sequences], LOSS)
    for name in ("microbatches", "packing_efficiency"):
        metrics.pop(name)
    return metrics, torch.cat(engine.forward(random_sequences(4, seed=9)))


@pytest.mark.parametrize("aggregation", ["token_mean", "sequence_mean"])
def test_a_step_does_not_depend_on_budget_order_chunks_or_untrained_sequences(make_engine: MakeEngine, aggregation):
    sequences = random_sequences(10, aggregation=aggregation)
    untrained = random_sequences(1, seed=5)[0]
    untrained.loss_mask.zero_()
    metrics, after = train(make_engine, sequences)
    splits = [
        (sequences, {"max_tokens_per_microbatch": 1}),
        (sequences, {"max_tokens_per_microbatch": 50, "logprob_chunk_size": 7}),
        (sequences[::-1], {"max_tokens_per_microbatch": 70}),
        ([sequences[0], untrained, *sequences[1:]], {}),
    ]
    for split, options in splits:
        other_metrics, other_after = train(make_engine, split, **options)
        assert other_metrics == pytest.approx(metrics, rel=1e-4, abs=1e-6)
        torch.testing.assert_close(other_after, after, rtol=1e-5, atol=1e-5)


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

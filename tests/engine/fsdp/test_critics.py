"""Value heads say what Hugging Face's own class of a critic says, learn as in a plain loop, and load elsewhere."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils._pytree import tree_leaves
from train_models import MakeEngine, load_critic, load_twin, slow_values, write_model
from train_sequences import random_sequences, same, score_of, twin_steps
from train_variants import OPTIMIZER, VALUE, assert_same_tensors, sequences_with_returns
from transformers import AutoModelForSequenceClassification, AutoTokenizer

from arl.api.errors import ConfigError
from arl.api.train_engine import PackedTokens, TokenLosses, TokenOutputs, TrainSequence
from arl.engine.tiny import tiny_tokenizer


def scored(token_ids: torch.Tensor) -> TrainSequence:
    """A text whose score is the value of the token behind it, whichever that is."""
    longer = torch.cat([token_ids, torch.zeros(1, dtype=torch.int64)])
    return TrainSequence(token_ids=longer, loss_mask=torch.arange(len(longer)) == len(token_ids))


def test_the_value_behind_a_text_is_the_score_that_the_model_gives_it_in_a_padded_batch(
    make_engine: MakeEngine, model_dir: Path, tmp_path: Path
):
    engine = make_engine(model_dir, head="value")
    engine.train_batch([sequences_with_returns()], VALUE)
    engine.export(tmp_path / "rewards")
    texts = [s.token_ids for s in random_sequences(6, seed=3)]
    ours = torch.stack([values[-1] for values in engine.forward([scored(text) for text in texts], "values")])
    twin, tokenizer = load_critic(tmp_path / "rewards"), AutoTokenizer.from_pretrained(tmp_path / "rewards")
    batch = tokenizer.pad({"input_ids": [text.tolist() for text in texts]}, return_tensors="pt")
    with torch.no_grad():
        theirs = twin(**batch).logits[:, 0]
    assert theirs.std() > 0.01
    torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5)


def test_values_are_the_models_own_scores_of_the_tokens_before_and_a_critic_is_trained_as_by_a_plain_loop(
    critic_dir: Path, make_engine: MakeEngine, tmp_path: Path
):
    sequences, twin = sequences_with_returns(), load_critic(critic_dir)
    engine = make_engine(critic_dir, optimizer=OPTIMIZER, head="value", max_tokens_per_microbatch=30)
    for sequence, ours in zip(sequences, engine.forward(sequences, "values"), strict=True):
        torch.testing.assert_close(ours, slow_values(twin, sequence), rtol=1e-5, atol=1e-5)
    for _ in range(2):
        engine.train_batch([sequences], VALUE)
    engine.export(tmp_path / "critic")
    twin_steps(twin, [sequences] * 2, VALUE, OPTIMIZER)
    assert_same_tensors(load_critic(tmp_path / "critic").state_dict(), twin.state_dict())


def test_values_of_bfloat16_are_near_and_not_rounded_to_it(critic_dir: Path, make_engine: MakeEngine):
    sequences = random_sequences(6)
    half, full = (
        torch.cat(make_engine(critic_dir, head="value", dtype=dtype).forward(sequences, "values"))
        for dtype in ("bfloat16", "float32")
    )
    torch.testing.assert_close(half, full, rtol=0.1, atol=0.1)
    assert not torch.equal(half, half.bfloat16().float())


def test_outputs_that_a_head_does_not_have_are_refused_by_name(make_engine: MakeEngine):
    sequences = random_sequences(2)
    with pytest.raises(
        ConfigError, match=r"a train engine of head=policy has .*, and no values; build one of head=value"
    ):
        make_engine().forward(sequences, "values")
    for output in ("logprobs", "reference_logprobs"):
        with pytest.raises(ConfigError, match=f"a train engine of head=value has values, and no {output}"):
            make_engine(head="value").forward(sequences, output)
    with pytest.raises(ConfigError, match="no policy, and so no reference"):
        make_engine(head="value").update_reference()


def test_losses_see_zeros_where_there_is_no_such_head(make_engine: MakeEngine):
    seen: list[TokenOutputs] = []

    def look(outputs: TokenOutputs, tokens: PackedTokens) -> TokenLosses:
        seen.append(outputs)
        return TokenLosses(loss=outputs.logprobs + outputs.values)

    make_engine().train_batch([random_sequences(3)], look)
    make_engine(head="value").train_batch([random_sequences(3)], look)
    policy, value = seen
    assert policy.logprobs.all()
    assert not policy.values.any()
    assert not value.logprobs.any()
    assert not value.entropy.any()


def test_sharding_finds_the_tensors_in_what_a_model_says():
    """As torch before 2.13 looks for them, to gather the root's weights again for the backward pass."""
    outputs = TokenOutputs(logprobs=torch.zeros(1), entropy=torch.ones(1), values=torch.zeros(1))
    assert [id(leaf) for leaf in tree_leaves(outputs)] == [
        id(outputs.logprobs),
        id(outputs.entropy),
        id(outputs.values),
    ]


# Directories


def test_a_new_head_is_zero_on_the_language_models_own_weights_and_files_hold_a_trained_one_to_the_bit(
    any_model_dir: Path, make_engine: MakeEngine, tmp_path: Path, caplog: pytest.LogCaptureFixture
):
    engine, sequences = make_engine(any_model_dir, head="value"), random_sequences(4)
    assert not any(values.any() for values in engine.forward(sequences, "values"))
    assert "MISSING" not in caplog.text
    theirs = load_twin(any_model_dir).state_dict()
    for name, tensor in engine._policy.model.state_dict().items():
        assert name == "score.weight" or torch.equal(tensor, theirs[name]), name

    engine.train_batch([sequences_with_returns()], VALUE)
    engine.export(tmp_path / "critic")
    load: Any = AutoModelForSequenceClassification.from_pretrained
    twin, report = load(tmp_path / "critic", output_loading_info=True)
    assert not any(report.values())
    assert twin.config.architectures == ["Qwen3ForSequenceClassification"]
    assert twin.config.num_labels == 1
    assert score_of(twin).weight.any()
    for name, tensor in engine._policy.model.state_dict().items():
        assert torch.equal(tensor, twin.state_dict()[name]), name
    again = make_engine(tmp_path / "critic", head="value")
    assert same(again.forward(sequences, "values"), engine.forward(sequences, "values"))


@pytest.mark.parametrize(
    ("pad", "spare_rows", "expected"),
    [("<|endoftext|>", 0, "<|endoftext|>"), ("<|im_end|>", 8, "<|pad|>"), (None, 8, "<|pad|>"), (None, 0, None)],
)
def test_the_pad_token_of_a_critics_directory_is_one_that_no_text_ends_in(
    make_engine: MakeEngine, tmp_path: Path, pad: str | None, spare_rows: int, expected: str | None
):
    tokenizer = tiny_tokenizer()
    base = write_model(tmp_path / "base", tied=True, vocab_size=len(tokenizer) + spare_rows)
    tokenizer.pad_token = pad
    tokenizer.save_pretrained(base)
    make_engine(base, head="value").export(tmp_path / "critic")
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "critic")
    config = json.loads((tmp_path / "critic" / "config.json").read_text())
    assert tokenizer.pad_token == expected
    assert config["pad_token_id"] == tokenizer.pad_token_id

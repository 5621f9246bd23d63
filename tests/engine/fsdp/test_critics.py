"""Value heads say what Hugging Face's own class of a critic says, learn as in a plain loop, and load elsewhere."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch.utils._pytree import tree_leaves
from train_models import MakeEngine, load_critic, load_twin, score_of, slow_values, write_model
from train_sequences import assert_same_weights, random_sequences, same, twin_steps
from train_variants import OPTIMIZER, VALUE, sequences_with_returns
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer

from arl.api.engine import PackedTokens, TokenLosses, TokenOutputs
from arl.api.errors import CheckpointError, ConfigError, ModelError
from arl.api.types import TrainSequence
from arl.engine.tiny import tiny_tokenizer


@pytest.mark.parametrize("options", [{}, {"max_tokens_per_microbatch": 1}, {"activation_checkpointing": True}])
def test_values_are_the_models_own_scores_of_the_tokens_before(
    critic_dir: Path, make_engine: MakeEngine, options: dict[str, Any]
):
    sequences = random_sequences(5)
    values = make_engine(critic_dir, head="value", **options).forward(sequences, "values")
    twin = load_critic(critic_dir)
    for sequence, ours in zip(sequences, values, strict=True):
        torch.testing.assert_close(ours, slow_values(twin, sequence), rtol=1e-5, atol=1e-5)


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


def test_a_new_value_head_is_zero_on_the_language_models_own_weights(
    any_model_dir: Path, make_engine: MakeEngine, caplog: pytest.LogCaptureFixture
):
    engine = make_engine(any_model_dir, head="value")
    assert not any(values.any() for values in engine.forward(random_sequences(3), "values"))
    theirs = load_twin(any_model_dir).state_dict()
    for name, tensor in engine._policy.model.state_dict().items():
        if name != "score.weight":
            assert torch.equal(tensor.full_tensor(), theirs[name]), name
    assert "MISSING" not in caplog.text


def test_a_critic_is_trained_as_a_plain_loop_trains_the_models_own_head(
    critic_dir: Path, make_engine: MakeEngine, tmp_path: Path
):
    sequences = sequences_with_returns()
    engine = make_engine(critic_dir, optimizer=OPTIMIZER, head="value", max_tokens_per_microbatch=30)
    for _ in range(2):
        engine.train_batch([sequences], VALUE)
    engine.export(tmp_path / "critic")
    twin = load_critic(critic_dir)
    twin_steps(twin, [sequences] * 2, VALUE, OPTIMIZER)
    assert_same_weights(load_critic(tmp_path / "critic"), twin, 1e-4)


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


def test_a_checkpoint_of_one_head_is_refused_by_another(make_engine: MakeEngine, tmp_path: Path):
    make_engine(head="value").save(tmp_path / "saved").wait()
    with pytest.raises(CheckpointError, match=r"model\.lm_head\.weight is absent there"):
        make_engine().load(tmp_path / "saved")


def test_sharding_finds_the_tensors_in_what_a_model_says():
    """As torch before 2.13 looks for them, to gather the root's weights again for the backward pass."""
    outputs = TokenOutputs(logprobs=torch.zeros(1), entropy=torch.ones(1), values=torch.zeros(1))
    assert [id(leaf) for leaf in tree_leaves(outputs)] == [
        id(outputs.logprobs),
        id(outputs.entropy),
        id(outputs.values),
    ]


# Directories


def test_a_critics_directory_holds_its_weights_to_the_bit(model_dir: Path, make_engine: MakeEngine, tmp_path: Path):
    engine = make_engine(model_dir, head="value")
    engine.train_batch([sequences_with_returns()], VALUE)
    engine.export(tmp_path / "critic")
    load: Any = AutoModelForSequenceClassification.from_pretrained
    twin, report = load(tmp_path / "critic", output_loading_info=True)
    assert not any(report.values())
    assert twin.config.architectures == ["Qwen3ForSequenceClassification"]
    assert twin.config.num_labels == 1
    assert score_of(twin).weight.any()
    for name, tensor in engine._policy.model.state_dict().items():
        assert torch.equal(tensor.full_tensor(), twin.state_dict()[name]), name
    again = make_engine(tmp_path / "critic", head="value")
    sequences = random_sequences(4)
    assert same(again.forward(sequences, "values"), engine.forward(sequences, "values"))


def with_pads(directory: Path, *, pad: str | None, vocab_size: int) -> Path:
    """A language model whose tokenizer pads with `pad`, and whose embedding has so many rows."""
    tokenizer = tiny_tokenizer()
    tokenizer.pad_token = pad
    write_model(directory, tied=True)
    model = AutoModelForCausalLM.from_pretrained(directory)
    model.resize_token_embeddings(vocab_size)
    model.save_pretrained(directory)
    tokenizer.save_pretrained(directory)
    return directory


@pytest.mark.parametrize(
    ("pad", "spare_rows", "expected"),
    [("<|endoftext|>", 0, "<|endoftext|>"), ("<|im_end|>", 8, "<|pad|>"), (None, 8, "<|pad|>"), (None, 0, None)],
)
def test_the_pad_token_of_a_critics_directory_is_one_that_no_text_ends_in(
    make_engine: MakeEngine, tmp_path: Path, pad: str | None, spare_rows: int, expected: str | None
):
    base = with_pads(tmp_path / "base", pad=pad, vocab_size=len(tiny_tokenizer()) + spare_rows)
    make_engine(base, head="value").export(tmp_path / "critic")
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "critic")
    config = json.loads((tmp_path / "critic" / "config.json").read_text())
    assert tokenizer.pad_token == expected
    assert config["pad_token_id"] == tokenizer.pad_token_id


def edited(source: Path, target: Path, **tensors: torch.Tensor | None) -> Path:
    """A copy of a model directory with tensors (dots for underscores) replaced, or left out."""
    shutil.copytree(source, target)
    weights = load_file(target / "model.safetensors")
    for name, tensor in tensors.items():
        weights.pop(name.replace("__", "."), None)
        if tensor is not None:
            weights[name.replace("__", ".")] = tensor
    save_file(weights, target / "model.safetensors", metadata={"format": "pt"})
    return target


def test_missing_and_foreign_tensors_of_a_value_model_are_refused(
    critic_dir: Path, model_dir: Path, make_engine: MakeEngine, tmp_path: Path
):
    with pytest.raises(ModelError, match=r"lack score\.weight: the download or copy is incomplete"):
        make_engine(edited(critic_dir, tmp_path / "headless", score__weight=None), head="value")
    with pytest.raises(ModelError, match=r"lack model\.norm\.weight"):
        make_engine(edited(model_dir, tmp_path / "broken", model__norm__weight=None), head="value")
    with pytest.raises(ModelError, match=r"has v_head\.weight, which .* save it as score\.weight"):
        make_engine(edited(model_dir, tmp_path / "other", v_head__weight=torch.ones(1, 32)), head="value")
    with pytest.raises(ModelError, match="cannot load it from"):
        make_engine(edited(critic_dir, tmp_path / "labels", score__weight=torch.ones(3, 32)), head="value")


def test_a_critic_is_no_policy(make_engine: MakeEngine, tmp_path: Path):
    make_engine(write_model(tmp_path / "tied", tied=True), head="value").export(tmp_path / "critic")
    with pytest.raises(ModelError, match=r"has a value head \(score\.weight\)"):
        make_engine(tmp_path / "critic")

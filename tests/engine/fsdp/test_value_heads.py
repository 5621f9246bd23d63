"""A value head says what Hugging Face's own class of a critic says, and is trained as a plain loop would."""

from pathlib import Path
from typing import Any, cast

import pytest
import torch
from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_leaves
from train_critics import (
    BOTH,
    OPTIMIZER,
    VALUE,
    load_critic,
    score_of,
    scored,
    sequences_with_returns,
    slow_values,
    twin_steps,
)
from train_models import MakeEngine, load_twin
from train_ranks import Ranks, Report
from train_sequences import assert_same_metrics, assert_same_rows, assert_same_weights, random_sequences, same
from transformers import AutoTokenizer

from arl.algorithm.losses import SFTLoss
from arl.api.config import TrainConfig
from arl.api.engine import Head, PackedTokens, TokenLoss, TokenLosses, TokenOutputs
from arl.api.errors import CheckpointError, ConfigError
from arl.api.types import TrainSequence
from arl.engine.fsdp.train_engine import FSDPTrainEngine


@pytest.mark.parametrize("options", [{}, {"max_tokens_per_microbatch": 1}, {"activation_checkpointing": True}])
def test_values_are_the_models_own_scores_of_the_tokens_before(
    critic_dir: Path, make_engine: MakeEngine, options: dict[str, Any]
):
    sequences = random_sequences(5)
    values = make_engine(critic_dir, head="value", **options).forward(sequences, "values")
    twin = load_critic(critic_dir)
    for sequence, ours in zip(sequences, values, strict=True):
        torch.testing.assert_close(ours, slow_values(twin, sequence), rtol=1e-5, atol=1e-5)


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
    for head in ("value", "policy_and_value"):
        engine = make_engine(any_model_dir, head=head)
        assert not any(values.any() for values in engine.forward(random_sequences(3), "values"))
        theirs = load_twin(any_model_dir).state_dict()
        for name, tensor in engine._policy.model.state_dict().items():
            if name != "score.weight":
                assert torch.equal(tensor.full_tensor(), theirs[name]), name
    assert "MISSING" not in caplog.text


def test_values_are_had_without_the_vocabulary(make_engine: MakeEngine, monkeypatch: pytest.MonkeyPatch):
    engine = make_engine(head="policy_and_value")
    monkeypatch.setattr("arl.engine.fsdp.model.token_logprobs", None)
    assert len(engine.forward(random_sequences(2), "values")) == 2


def test_a_critic_is_trained_as_a_plain_loop_trains_the_models_own_head(
    critic_dir: Path, make_engine: MakeEngine, tmp_path: Path
):
    sequences = sequences_with_returns()
    engine = make_engine(critic_dir, optimizer=OPTIMIZER, head="value", max_tokens_per_microbatch=30)
    for _ in range(2):
        engine.train_batch([sequences], VALUE)
    engine.export(tmp_path / "critic")
    twin = load_critic(critic_dir)
    twin_steps(twin, score_of(twin), sequences, VALUE, steps=2)
    assert_same_weights(load_critic(tmp_path / "critic"), twin, 1e-4)


def test_a_shared_backbone_is_trained_by_both_heads_losses(
    any_model_dir: Path, make_engine: MakeEngine, tmp_path: Path
):
    sequences = sequences_with_returns()
    engine = make_engine(any_model_dir, optimizer=OPTIMIZER, head="policy_and_value", max_tokens_per_microbatch=30)
    metrics = [engine.train_batch([sequences], BOTH) for _ in range(2)]
    assert metrics[1]["critic/value_error"] > 0
    engine.export(tmp_path / "policy")
    twin, score = load_twin(any_model_dir), torch.nn.Linear(32, 1, bias=False)
    torch.nn.init.zeros_(score.weight)
    twin_steps(twin, score, sequences, BOTH, steps=2)
    assert_same_weights(load_twin(tmp_path / "policy"), twin, 1e-4)
    head = cast("DTensor", engine._policy.get_parameter("value_head.weight")).full_tensor()
    torch.testing.assert_close(head, score.weight, rtol=1e-4, atol=1e-5)


def after_a_step(
    engine: FSDPTrainEngine, sequences: list[TrainSequence], loss: TokenLoss
) -> tuple[dict[str, float], Any]:
    metrics = engine.train_batch([sequences], loss)
    for name in ("microbatches", "packing_efficiency", "forwarded_tokens", "forwarded_share"):
        metrics.pop(name)
    return metrics, torch.cat(engine.forward(sequences_with_returns(4, seed=7), "values"))


@pytest.mark.parametrize(("head", "loss"), [("value", VALUE), ("policy_and_value", BOTH)])
def test_a_step_does_not_depend_on_budget_order_or_sharing(make_engine: MakeEngine, head: Head, loss: TokenLoss):
    sequences = sequences_with_returns(10)
    metrics, values = after_a_step(make_engine(head=head), sequences, loss)
    for order, options in (
        (sequences, {"max_tokens_per_microbatch": 1}),
        (sequences[::-1], {"max_tokens_per_microbatch": 50, "share_prefixes": False}),
        (sequences, {"activation_checkpointing": True}),
    ):
        others, other_values = after_a_step(make_engine(head=head, **options), order, loss)
        assert others == pytest.approx(metrics, rel=1e-4, abs=1e-6)
        torch.testing.assert_close(other_values, values, rtol=1e-4, atol=1e-5)


RANKED = {"optimizer": OPTIMIZER, "max_tokens_per_microbatch": 30}


def tell(engine: FSDPTrainEngine, share: slice, directory: Path, loss: TokenLoss) -> Report:
    """Two steps with a checkpoint between them, which is gone on from after the second."""
    metrics = engine.train_batch([sequences_with_returns()[share]], loss)
    engine.save(directory / "checkpoint").wait()
    engine.train_batch([sequences_with_returns()[share]], loss)
    engine.load(directory / "checkpoint")
    values = torch.cat(engine.forward(sequences_with_returns(), "values"))
    return {"metrics": metrics, "values": values.tolist()}


def run_rank(rank: int, directory: Path, model_dir: Path) -> Report:
    report: Report = {}
    for name, head, loss, options in (
        ("value", "value", VALUE, {}),
        ("policy_and_value", "policy_and_value", BOTH, {}),
        ("split", "value", VALUE, {"num_ranks": 2, "tensor_parallel": 2}),
    ):
        engine = FSDPTrainEngine(model_dir, TrainConfig(**RANKED, **options), head=head)  # pyright: ignore[reportArgumentType]
        share = slice(None) if options else slice(rank, None, 2)
        report[name] = tell(engine, share, directory / name, loss)
        engine.close()
    return report


def test_two_ranks_whole_or_split_train_heads_like_one(model_dir: Path, make_engine: MakeEngine, tmp_path: Path):
    ranks = Ranks(run_rank, 2, tmp_path / "ranks", model_dir)
    alone = {
        head: tell(make_engine(model_dir, head=head, **RANKED), slice(None), tmp_path / "alone" / head, loss)
        for head, loss in (("value", VALUE), ("policy_and_value", BOTH))
    }
    alone["split"] = alone["value"]
    for report in ranks.reports():
        for name, ours in report.items():
            theirs = alone[name]
            assert_same_metrics(ours["metrics"], theirs["metrics"])
            assert_same_rows([ours["values"]], [theirs["values"]], 1e-4)
    for name in alone:
        engine = make_engine(model_dir, head="value" if name == "split" else name, **RANKED)
        engine.load(tmp_path / "ranks" / name / "checkpoint")
        ours = torch.cat(engine.forward(sequences_with_returns(), "values"))
        assert_same_rows([ours], [alone[name]["values"]], 1e-4)


def test_values_of_bfloat16_are_near_and_not_rounded_to_it(critic_dir: Path, make_engine: MakeEngine):
    sequences = random_sequences(6)
    half, full = (
        torch.cat(make_engine(critic_dir, head="value", dtype=dtype).forward(sequences, "values"))
        for dtype in ("bfloat16", "float32")
    )
    torch.testing.assert_close(half, full, rtol=0.1, atol=0.1)
    assert not torch.equal(half, half.bfloat16().float())


def test_what_a_head_does_not_have_is_refused_by_name(make_engine: MakeEngine):
    sequences = random_sequences(2)
    with pytest.raises(
        ConfigError, match=r"values are asked of a train engine of head=policy, .* build one of head=value"
    ):
        make_engine().forward(sequences, "values")
    for output in ("logprobs", "reference_logprobs"):
        with pytest.raises(ConfigError, match=f"{output} are asked of a train engine of head=value, which has values"):
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


def test_a_loss_without_values_leaves_the_value_head_alone(make_engine: MakeEngine):
    engine = make_engine(head="policy_and_value")
    engine.train_batch([random_sequences(4)], SFTLoss())
    assert not any(values.any() for values in engine.forward(random_sequences(3), "values"))


def test_a_run_goes_on_bit_for_bit_where_parameters_have_taken_different_numbers_of_steps(
    make_engine: MakeEngine, tmp_path: Path
):
    uninterrupted = make_engine(head="policy_and_value", optimizer=OPTIMIZER)
    uninterrupted.train_batch([random_sequences(4)], SFTLoss())
    uninterrupted.save(tmp_path / "saved").wait()
    resumed = make_engine(head="policy_and_value", optimizer=OPTIMIZER)
    resumed.load(tmp_path / "saved")
    for engine in (uninterrupted, resumed):
        engine.train_batch([sequences_with_returns()], BOTH)
    texts = random_sequences(3, seed=3)
    assert same(resumed.forward(texts, "values"), uninterrupted.forward(texts, "values"))


def test_a_checkpoint_of_one_head_is_refused_by_another(make_engine: MakeEngine, tmp_path: Path):
    make_engine(head="policy_and_value").save(tmp_path / "saved").wait()
    with pytest.raises(CheckpointError, match=r"only the checkpoint has the parameter value_head\.weight"):
        make_engine().load(tmp_path / "saved")


def test_sharding_finds_the_tensors_in_what_a_model_says():
    """As torch before 2.13 looks for them, to gather the root's weights again for the backward pass."""
    outputs = TokenOutputs(logprobs=torch.zeros(1), entropy=torch.ones(1), values=torch.zeros(1))
    assert [id(leaf) for leaf in tree_leaves(outputs)] == [
        id(outputs.logprobs),
        id(outputs.entropy),
        id(outputs.values),
    ]

"""A checkpoint continues bit for bit, or is refused by name; an export is a model that transformers loads."""

import os
import threading
from contextlib import closing
from pathlib import Path
from traceback import StackSummary
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch.distributed.checkpoint.api import CheckpointException
from train_models import EXPERTS, MakeEngine, build_model, load_twin, save_model, write_model
from train_sequences import LOSS, random_sequences, same, twin_logprobs
from train_variants import VARIANTS
from transformers import AutoTokenizer, GenerationConfig, Glm4MoeForCausalLM, Qwen3ForCausalLM, Qwen3MoeForCausalLM

from arl.algorithm.losses.supervised import SFTLoss
from arl.api.errors import CheckpointError, DamagedCheckpointError, TransportError
from arl.api.settings.engines import OptimizerConfig
from arl.api.train_engine import Saving
from arl.engine.fsdp import model as module
from arl.engine.fsdp import saving as checkpoint

DECAYING = OptimizerConfig(lr=1e-2, schedule="cosine", warmup_steps=1, total_steps=6)


@pytest.mark.parametrize("name", ["token mean", "adapters", "value"])
def test_a_loaded_run_continues_bit_for_bit(any_model_dir: Path, tmp_path: Path, name: str):
    variant = VARIANTS[name]
    uninterrupted, resumed = (variant.engine(any_model_dir, optimizer=DECAYING) for _ in range(2))
    with closing(uninterrupted), closing(resumed):
        if variant.head != "value":
            uninterrupted.update_reference()
        uninterrupted.train_batch(variant.minibatches, variant.loss)
        uninterrupted.save(tmp_path / "checkpoint").wait()
        resumed.forward(variant.minibatch(), variant.outputs[0])  # leaves nothing behind that load would not replace
        resumed.load(tmp_path / "checkpoint")
        assert resumed.version == 1
        for _ in range(2):
            ours, theirs = (one.train_batch(variant.minibatches, variant.loss) for one in (resumed, uninterrupted))
            assert ours == theirs
        for output in variant.outputs:
            assert same(*(one.forward(variant.minibatch(), output) for one in (resumed, uninterrupted)))


def test_files_are_forced_to_the_disk_before_the_checkpoint_has_its_name(
    make_engine: MakeEngine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    done, replace = list[str](), checkpoint.replace_directory
    monkeypatch.setattr(os, "fsync", lambda file: done.append(os.path.basename(os.readlink(f"/proc/self/fd/{file}"))))
    monkeypatch.setattr(checkpoint, "replace_directory", lambda *paths: (done.append("rename"), replace(*paths)))
    make_engine().save(tmp_path / "checkpoint").wait()
    assert done[0].endswith(".distcp")
    assert done[-4] == "progress.json"
    assert done[-3].startswith(".checkpoint.")
    assert done[-2:] == ["rename", tmp_path.name]


def test_a_save_that_fails_says_so_and_leaves_the_older_checkpoint_which_the_next_one_replaces(
    make_engine: MakeEngine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    engine = make_engine()
    engine.save(tmp_path / "checkpoint").wait()
    engine.train_batch([random_sequences(2)], LOSS)
    with monkeypatch.context() as broken:
        broken.setattr(checkpoint, "force_to_disk", lambda _: os.stat(tmp_path / "gone"))
        failed = engine.save(tmp_path / "checkpoint")
        with pytest.raises(CheckpointError, match=r"cannot write the checkpoint .*No such file"):
            failed.wait()
    again = make_engine()
    for version in (0, 1):
        assert [file.name for file in tmp_path.iterdir()] == ["checkpoint"]
        again.load(tmp_path / "checkpoint")
        assert again.version == version
        engine.save(tmp_path / "checkpoint").wait()


def test_steps_neither_wait_for_a_checkpoint_nor_change_it_and_the_next_one_follows_it(
    make_engine: MakeEngine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    may_write, write, savings = threading.Event(), checkpoint.save_tensors, list[Saving]()
    monkeypatch.setattr(checkpoint, "save_tensors", lambda *a, **k: may_write.wait(60) and write(*a, **k))
    engine = make_engine()
    (expected,) = engine.forward(random_sequences(1))
    engine.save(tmp_path / "first")
    engine.train_batch([random_sequences(2)], LOSS)
    second = threading.Thread(target=lambda: savings.append(engine.save(tmp_path / "second")))
    second.start()
    second.join(timeout=0.2)
    assert second.is_alive()
    assert list(tmp_path.iterdir()) == []
    may_write.set()
    second.join()
    savings[0].wait()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["first", "second"]
    engine.load(tmp_path / "first")
    assert engine.version == 0
    assert torch.equal(engine.forward(random_sequences(1))[0], expected)


def test_closing_waits_for_a_checkpoint_under_way(make_engine: MakeEngine, tmp_path: Path):
    engine = make_engine()
    engine.save(tmp_path / "checkpoint")
    engine.close()
    make_engine().load(tmp_path / "checkpoint")


def test_another_models_checkpoint_is_refused_naming_the_parameter(make_engine: MakeEngine, tmp_path: Path):
    make_engine(write_model(tmp_path / "narrow", tied=True, intermediate_size=40)).save(tmp_path / "saved").wait()
    with pytest.raises(CheckpointError, match=r"model\.lm_head\.weight is absent there"):
        make_engine().load(tmp_path / "saved")
    with pytest.raises(CheckpointError, match=r"mlp\.down_proj\.weight is \[32, 40\] there, \[32, 48\] here"):
        make_engine(write_model(tmp_path / "tied", tied=True)).load(tmp_path / "saved")


def test_a_missing_or_damaged_checkpoint_says_which_file(make_engine: MakeEngine, tmp_path: Path):
    engine = make_engine()
    with pytest.raises(DamagedCheckpointError, match=r"has no progress\.json"):
        engine.load(tmp_path / "nowhere")
    engine.save(tmp_path / "checkpoint").wait()
    (shard,) = (tmp_path / "checkpoint").glob("*.distcp")
    shard.write_bytes(shard.read_bytes()[:100])
    with pytest.raises(DamagedCheckpointError, match=r"checkpoint .* is damaged"):
        engine.load(tmp_path / "checkpoint")
    (tmp_path / "checkpoint" / "progress.json").write_text('{"version": 1')
    with pytest.raises(DamagedCheckpointError, match=r"progress\.json"):
        engine.load(tmp_path / "checkpoint")


@pytest.mark.parametrize("error", [MemoryError(), torch.OutOfMemoryError("CUDA out of memory")])
def test_a_checkpoint_that_memory_cannot_hold_is_not_called_damaged(
    make_engine: MakeEngine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: Exception
):
    engine = make_engine()
    engine.save(tmp_path / "checkpoint").wait()

    def read(tensors: object, checkpoint_id: Path) -> None:
        raise CheckpointException("on one rank", {0: (error, StackSummary())})

    monkeypatch.setattr(checkpoint, "load_tensors", read)
    with pytest.raises(CheckpointError, match=f"no memory to read .*{type(error).__name__}") as raised:
        engine.load(tmp_path / "checkpoint")
    assert type(raised.value) is CheckpointError  # a damaged one is to be deleted


@pytest.mark.parametrize(
    ("model_class", "config"),
    [(Qwen3ForCausalLM, {"tied": True}), (Qwen3ForCausalLM, {"tied": False}), (Qwen3MoeForCausalLM, EXPERTS)],
    ids=["tied", "untied", "experts"],
)
def test_an_export_is_its_source_and_after_a_step_gives_transformers_the_engines_logprobs(
    model_class: type[Any], config: dict[str, Any], make_engine: MakeEngine, tmp_path: Path
):
    source, out = write_model(tmp_path / "in", model_class, **config), tmp_path / "out"
    engine, sequences = make_engine(source, max_tokens_per_microbatch=40), random_sequences(6)
    num_bytes = engine.export(out)
    before, after = (load_file(path / "model.safetensors") for path in (source, out))
    assert after.keys() == before.keys()
    assert all(torch.equal(after[name], before[name]) for name in before)
    assert sorted(os.listdir(out)) == sorted(os.listdir(source))
    assert num_bytes == sum(file.stat().st_size for file in out.iterdir())
    for name in ("config.json", "tokenizer.json"):
        assert (out / name).read_text() == (source / name).read_text()
    assert AutoTokenizer.from_pretrained(out).encode("1+2") == [16, 10, 17]
    assert isinstance(GenerationConfig.from_pretrained(out), GenerationConfig)

    assert engine.train_batch([sequences], SFTLoss())["grad_norm"] > 0
    engine.export(out)
    assert sorted(os.listdir(tmp_path)) == ["in", "out"]
    twin = load_twin(out)
    for sequence, logprobs in zip(sequences, engine.forward(sequences), strict=True):
        expected = torch.zeros(len(sequence))
        with torch.no_grad():
            expected[sequence.loss_mask], _ = twin_logprobs(twin, sequence)
        torch.testing.assert_close(logprobs, expected, rtol=1e-4, atol=1e-4)


def test_an_export_has_the_dtypes_of_its_source_also_where_a_model_keeps_float32(
    make_engine: MakeEngine, tmp_path: Path
):
    """The biases that choose among experts differ by less than bfloat16 can tell."""
    config = {"n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 8, "first_k_dense_replace": 1}
    model, biases = build_model(Glm4MoeForCausalLM, **config).bfloat16(), torch.tensor([10.01, 10.02, 10.03, 10.04])
    name = "model.layers.1.mlp.gate.e_score_correction_bias"
    model.get_submodule(name.rpartition(".")[0]).e_score_correction_bias = biases
    make_engine(save_model(model, tmp_path / "in")).export(tmp_path / "out")
    assert (tmp_path / "out" / "config.json").read_text() == (tmp_path / "in" / "config.json").read_text()
    out = load_file(tmp_path / "out" / "model.safetensors")
    assert torch.equal(out.pop(name), biases)
    assert {tensor.dtype for tensor in out.values()} == {torch.bfloat16}


def test_an_export_that_fails_leaves_the_older_one(make_engine: MakeEngine, tmp_path: Path, monkeypatch):
    engine = make_engine()
    engine.export(tmp_path / "out")

    monkeypatch.setattr(module, "save_file", lambda *_, **__: os.stat(tmp_path / "gone"))
    with pytest.raises(TransportError, match=r"cannot write .*out on .*gone"):
        engine.export(tmp_path / "out")
    assert os.listdir(tmp_path) == ["out"]
    load_twin(tmp_path / "out")

"""A checkpoint continues bit for bit, or is refused by name; an export is a model that transformers loads; fingerprints
tell weights apart."""

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
from train_sequences import LOSS, assert_same_rows, random_sequences, same, twin_rows
from train_variants import VARIANTS
from transformers import AutoTokenizer, GenerationConfig, Glm4MoeForCausalLM, Qwen3ForCausalLM, Qwen3MoeForCausalLM

from arl.algorithm.losses.preferences import SFTLoss
from arl.api.errors import CheckpointError, ConfigError, DamagedCheckpointError, TransportError
from arl.api.settings.engines import LoRAConfig, OptimizerConfig
from arl.api.train_engine import Saving, TensorPrint, digest_of
from arl.engine.fsdp import model as module
from arl.engine.fsdp import saving as checkpoint
from arl.engine.fsdp.saving import _of_shard
from arl.engine.fsdp.snapshot import export_weights
from arl.engine.fsdp.train_engine import FSDPTrainEngine

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
    waits, wait = threading.Event(), checkpoint.wait
    monkeypatch.setattr(checkpoint, "save_tensors", lambda *a, **k: may_write.wait(60) and write(*a, **k))
    monkeypatch.setattr(checkpoint, "wait", lambda futures: (waits.set(), wait(futures)))
    engine = make_engine()
    (expected,) = engine.forward(random_sequences(1))
    engine.save(tmp_path / "first")
    engine.train_batch([random_sequences(2)], LOSS)
    second = threading.Thread(target=lambda: savings.append(engine.save(tmp_path / "second")))
    second.start()
    assert waits.wait(60)
    assert list(tmp_path.iterdir()) == savings == []
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
    assert_same_rows(engine.forward(sequences), twin_rows(load_twin(out), sequences), 1e-4)


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


# From a checkpoint, without an engine


ADAPTERS = LoRAConfig(rank=4, alpha=8, target_modules=("q_proj", "o_proj"))
MODELS: dict[str, dict[str, Any]] = {
    "tied, in bfloat16": {"tied": True, "dtype": torch.bfloat16},
    "experts": {"model_class": Qwen3MoeForCausalLM, **EXPERTS},
}


def contents(directory: Path) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in directory.iterdir()}


def trained(make_engine: MakeEngine, model: Path, checkpoint: Path, **options: Any) -> FSDPTrainEngine:
    """An engine that has trained and saved; with a reference, which an export leaves out."""
    engine = make_engine(model, optimizer=OptimizerConfig(lr=1e-2), **options)
    engine.update_reference()
    engine.train_batch([random_sequences(4, seed=1)], LOSS)
    engine.save(checkpoint).wait()
    return engine


@pytest.mark.parametrize("lora", [None, ADAPTERS], ids=["whole model", "adapters"])
@pytest.mark.parametrize("name", MODELS)
def test_an_export_is_what_the_engine_would_have_written_to_the_bit(
    make_engine: MakeEngine, tmp_path: Path, name: str, lora: LoRAConfig | None
) -> None:
    model = write_model(tmp_path / "model", **{"model_class": Qwen3ForCausalLM} | MODELS[name])
    engine = trained(make_engine, model, tmp_path / "checkpoint", lora=lora)
    engine.export(tmp_path / "written")
    export_weights(tmp_path / "checkpoint", str(model), tmp_path / "exported", adapter=False)
    assert contents(tmp_path / "exported") == contents(tmp_path / "written")
    assert contents(tmp_path / "exported")["model.safetensors"] != contents(model)["model.safetensors"]
    assert {"config.json", "generation_config.json", "tokenizer.json"} < contents(tmp_path / "exported").keys()
    if lora is None:
        with pytest.raises(ConfigError, match="has no adapters: the run trained the whole model"):
            export_weights(tmp_path / "checkpoint", str(model), tmp_path / "adapter", adapter=True)
        return
    engine.snapshot_adapter().write(tmp_path / "written adapter")
    export_weights(tmp_path / "checkpoint", str(model), tmp_path / "adapter", adapter=True)
    assert contents(tmp_path / "adapter") == contents(tmp_path / "written adapter")


def test_an_export_that_fails_leaves_nothing_but_an_older_one(
    make_engine: MakeEngine, model_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = trained(make_engine, model_dir, tmp_path / "checkpoint", lora=ADAPTERS)
    other = write_model(tmp_path / "other", Qwen3ForCausalLM, rope_theta=5.0, initializer_range=0.1)
    with pytest.raises(CheckpointError, match="holds adapters of another model"):
        export_weights(tmp_path / "checkpoint", str(other), tmp_path / "exported", adapter=False)

    def full(*_: object, **__: object) -> None:
        raise OSError(28, "No space left on device")

    engine.export(tmp_path / "older")
    before = contents(tmp_path / "older")
    monkeypatch.setattr(module, "save_file", full)
    with pytest.raises(TransportError, match=r"cannot write .*/exported on .*No space left"):
        export_weights(tmp_path / "checkpoint", str(model_dir), tmp_path / "exported", adapter=False)
    with pytest.raises(TransportError, match=r"cannot write .*/older on .*No space left"):
        engine.export(tmp_path / "older")
    assert contents(tmp_path / "older") == before
    assert sorted(path.name for path in tmp_path.iterdir()) == ["checkpoint", "older", "other"]


# Fingerprints


def sums(shard: torch.Tensor, offsets: list[int], whole: torch.Tensor) -> tuple[int, float, float]:
    bits, square, projection = _of_shard(shard, offsets, whole.shape)
    return int(bits), float(square), float(projection)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("cuts", [(4, 0), (0, 3), (5, 2)])
def test_the_sums_of_a_tensors_parts_are_those_of_the_whole(cuts: tuple[int, int], dtype: torch.dtype) -> None:
    whole = torch.randn(9, 7, generator=torch.Generator().manual_seed(0)).to(dtype)
    row, column = cuts
    parts = [
        (whole[r0:r1, c0:c1], [r0, c0])
        for r0, r1 in ((0, row), (row, 9))
        for c0, c1 in ((0, column), (column, 7))
        if r1 > r0 and c1 > c0
    ]
    found = [sums(part, offsets, whole) for part, offsets in parts]
    bits, square, projection = sums(whole, [0, 0], whole)
    assert (sum(own for own, _, _ in found) - bits) % 2**64 == 0
    assert sum(own for _, own, _ in found) == pytest.approx(square)
    assert sum(own for _, _, own in found) == pytest.approx(projection)


def test_any_changed_bit_changes_a_digest() -> None:
    tensor = torch.randn(5, 3, 4, generator=torch.Generator().manual_seed(0))
    seen = {sums(tensor, [0, 0, 0], tensor)[0] % 2**64}
    for place in range(tensor.numel()):
        for bit in (0, 13, 31):
            changed = tensor.clone()
            changed.view(torch.int32).view(-1)[place] ^= (1 << bit) - (1 << 32) * (bit == 31)
            seen.add(sums(changed, [0, 0, 0], tensor)[0] % 2**64)
    assert len(seen) == 1 + 3 * tensor.numel()


def test_exchanged_elements_and_exchanged_names_change_a_digest() -> None:
    tensor = torch.arange(6.0).reshape(2, 3)
    assert sums(tensor, [0, 0], tensor)[0] != sums(tensor.flip(0), [0, 0], tensor)[0]
    one, other = (TensorPrint(bits=bits, norm=0.0, projection=0.0) for bits in (1, 2))
    assert digest_of({"a": one, "b": other}) != digest_of({"a": other, "b": one})


def test_the_projection_of_a_small_change_is_about_as_large_as_the_change() -> None:
    chance = torch.Generator().manual_seed(0)
    tensor, change = torch.randn(60, 80, generator=chance), 1e-3 * torch.randn(60, 80, generator=chance)
    before, after = sums(tensor, [0, 0], tensor)[2], sums(tensor + change, [0, 0], tensor)[2]
    assert 0.05 < abs(after - before) / float(change.norm()) < 4

"""Training a model that sees: steps over splits and ranks, a frozen tower, adapters, checkpoints, what is written."""

import json
import shutil
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from safetensors.torch import load_file
from train_models import MakeEngine, engines
from train_ranks import Ranks, Report
from train_sequences import LOSS, assert_same_metrics, assert_same_rows, same, twin_rows
from train_variants import COMPILING, OPTIMIZER, assert_same_tensors, weights_of
from vision_sequences import FAMILIES, ONE, load_seeing_twin, seeing_sequences, sequence_of, write_seeing_model

from arl.algorithm.batch import weigh_tokens
from arl.api.errors import CheckpointError, ConfigError, ImageError, ModelError
from arl.api.settings.engines import LoRAConfig, TrainConfig
from arl.api.train_engine import TrainSequence
from arl.data.image_processor import ImageProcessor
from arl.engine.fsdp import ray_engine
from arl.engine.fsdp.snapshot import export_weights
from arl.engine.fsdp.train_engine import FSDPTrainEngine

LORA = LoRAConfig(rank=4, alpha=8, target_modules=("q_proj", "v_proj", "gate_proj", "up_proj"))
"""Of which the tower of Qwen2.5-VL has layers, too."""
Minibatches = Sequence[Sequence[TrainSequence]]


@pytest.fixture(scope="module", params=FAMILIES)
def seeing(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_seeing_model(tmp_path_factory.mktemp(request.param) / "model", request.param)


@pytest.fixture
def make(seeing: Path) -> Iterator[MakeEngine]:
    with engines(seeing, optimizer=OPTIMIZER) as make:
        yield make


@pytest.fixture
def sequences(seeing: Path) -> list[TrainSequence]:
    return seeing_sequences(ImageProcessor(seeing))


def in_tower(name: str) -> bool:
    return name.startswith("model.model.visual.")


SPLITS: dict[str, dict[str, Any]] = {
    "one sequence at a time": {"max_tokens_per_microbatch": 1},
    "nothing shared": {"share_prefixes": False, "max_tokens_per_microbatch": 150},
    "activations computed twice": {"activation_checkpointing": True},
    "compiled": {"compile": True},
}


@pytest.fixture(scope="module")
def whole() -> Callable[[Path], tuple[dict[str, float], dict[str, torch.Tensor]]]:
    @cache
    def step(directory: Path) -> tuple[dict[str, float], dict[str, torch.Tensor]]:
        with engines(directory, optimizer=OPTIMIZER) as make:
            engine = make()
            return engine.train_batch([seeing_sequences(ImageProcessor(directory))], LOSS), weights_of(engine)

    return step


@pytest.mark.parametrize("split", [pytest.param(n, marks=COMPILING if n == "compiled" else ()) for n in SPLITS])
def test_a_step_with_images_does_not_depend_on_how_it_is_computed(
    seeing: Path, make: MakeEngine, sequences: list[TrainSequence], split: str, whole: Any
) -> None:
    engine, (expected, theirs) = make(**SPLITS[split]), whole(seeing)
    before = weights_of(engine)
    assert_same_metrics(engine.train_batch([sequences], LOSS), expected, 1e-4)
    assert_same_tensors(weights_of(engine), theirs)
    assert not [name for name, tensor in weights_of(engine).items() if torch.equal(tensor, before[name])]


@torch.no_grad()
def test_bfloat16_is_as_near_as_transformers_in_it(
    seeing: Path, make: MakeEngine, sequences: list[TrainSequence]
) -> None:
    exact, half = make(), make(dtype="bfloat16")
    twin = load_seeing_twin(seeing).to(torch.bfloat16)
    rows = twin_rows(twin, sequences), exact.forward(sequences), half.forward(sequences)
    theirs, expected, ours = map(torch.cat, rows)
    assert 0 < (ours - expected).abs().mean() < 1.5 * (theirs - expected).abs().mean()


# Ranks


def shares(directory: Path, rank: int | None) -> Minibatches:
    """Images for rank 0 alone, then no images at all, then rank 0 alone has work. None: all of it."""
    given = seeing_sequences(ImageProcessor(directory))
    seen, texts = [s for s in given if s.images], [s for s in given if not s.images]
    parts = [(seen, texts), (texts[:2], texts[2:]), (seen[3:5], [])]
    return [ours + others if rank is None else (ours, others)[rank] for ours, others in parts]


RANK_OPTIONS: dict[str, dict[str, Any]] = {
    "whole model": {"max_tokens_per_microbatch": 150},
    "recomputed": {"max_tokens_per_microbatch": 60, "activation_checkpointing": True},
    "frozen tower": {"freeze_vision_tower": True, "activation_checkpointing": True},
    "adapters": {"max_tokens_per_microbatch": 100, "lora": LORA},
}


def rounds(engine: FSDPTrainEngine, directory: Path, rank: int | None, target: Path) -> Report:
    mine = shares(directory, rank)
    engine.update_reference()
    report: Report = {"metrics": engine.train_batch(mine, LOSS), "weights": weights_of(engine)}
    report["prints"] = engine.fingerprint()
    saving = engine.save(target / "checkpoint")
    engine.export(target / "model")
    forwarded = mine[0] if rank in (None, 0) else []
    report["outputs"] = engine.forward(forwarded) + engine.forward(forwarded, "reference_logprobs")
    saving.wait()
    return report


def rounds_on_a_rank(rank: int, directory: Path, options: dict[str, Any], target: Path) -> Report:
    engine = FSDPTrainEngine(directory, TrainConfig(optimizer=OPTIMIZER, num_ranks=2, **options))
    try:
        return rounds(engine, directory, rank, target)
    finally:
        engine.close()


@pytest.mark.runs
@pytest.mark.parametrize("name", RANK_OPTIONS)
def test_ranks_of_which_one_sees_train_like_one_process(
    seeing: Path, make: MakeEngine, pair: Ranks, tmp_path: Path, name: str
) -> None:
    alone = rounds(make(**RANK_OPTIONS[name]), seeing, None, tmp_path / "alone")
    first, second = pair.run(rounds_on_a_rank, seeing, RANK_OPTIONS[name], tmp_path / "ranks")
    for report in (first, second):
        assert_same_metrics(report["metrics"], alone["metrics"], 1e-4)
        assert_same_tensors(report["weights"], alone["weights"])
        assert report["prints"].keys() == alone["prints"].keys()
    own = len(shares(seeing, 0)[0])
    assert_same_rows(first["outputs"][:own], alone["outputs"][:own], 1e-4)
    written = [load_file(tmp_path / who / "model" / "model.safetensors") for who in ("ranks", "alone")]
    assert_same_tensors(*written)
    with engines(seeing, optimizer=OPTIMIZER) as again:
        engine = again(**RANK_OPTIONS[name])
        engine.load(tmp_path / "ranks" / "checkpoint")
        assert_same_tensors(weights_of(engine), alone["weights"])


def split_on_a_rank(rank: int, directory: Path, target: Path) -> Report:
    options = {"max_tokens_per_microbatch": 150, "num_ranks": 2, "tensor_parallel": 2}
    engine = FSDPTrainEngine(directory, TrainConfig(optimizer=OPTIMIZER, **options))
    try:
        return rounds(engine, directory, None, target)
    finally:
        engine.close()


@pytest.mark.runs
def test_ranks_that_split_the_layers_each_see_for_themselves(
    seeing: Path, make: MakeEngine, pair: Ranks, tmp_path: Path
) -> None:
    alone = rounds(make(max_tokens_per_microbatch=150), seeing, None, tmp_path / "alone")
    for report in pair.run(split_on_a_rank, seeing, tmp_path / "ranks"):
        assert_same_metrics(report["metrics"], alone["metrics"], 1e-4)
        assert_same_rows(report["outputs"], alone["outputs"], 1e-4)
    written = [load_file(tmp_path / who / "model" / "model.safetensors") for who in ("ranks", "alone")]
    assert_same_tensors(*written)


# A frozen tower


def test_a_frozen_tower_stays_to_the_bit_and_takes_no_memory_of_the_optimizer(
    seeing: Path, make: MakeEngine, sequences: list[TrainSequence], whole: Any
) -> None:
    engine = make(freeze_vision_tower=True)
    frozen, trained = weights_of(engine, trained=False), weights_of(engine)
    assert frozen
    assert all(map(in_tower, frozen))
    assert not any(map(in_tower, trained))
    engine.update_reference()
    engine.train_batch([sequences], LOSS)
    assert all(torch.equal(tensor, frozen[name]) for name, tensor in weights_of(engine, trained=False).items())
    assert not [name for name, tensor in weights_of(engine).items() if torch.equal(tensor, trained[name])]
    assert set(engine._optimizer.state) == {p for p in engine._policy.parameters() if p.requires_grad}
    assert engine._reference.values.keys() == trained.keys()
    assert not any(in_tower(f"model.{name}") for name in engine.fingerprint())
    assert any(in_tower(name) for name in whole(seeing)[1])


def test_a_checkpoint_beside_a_frozen_tower_is_told_from_others(
    seeing: Path, make: MakeEngine, sequences: list[TrainSequence], tmp_path: Path
) -> None:
    engine = make(freeze_vision_tower=True)
    engine.train_batch([sequences], LOSS)
    engine.save(tmp_path / "frozen").wait()
    make().save(tmp_path / "whole").wait()
    again = make(freeze_vision_tower=True)
    again.load(tmp_path / "frozen")
    assert same(again.forward(sequences), engine.forward(sequences))
    with pytest.raises(CheckpointError, match=r"with train\.freeze_vision_tower, which is unset here"):
        make().load(tmp_path / "frozen")
    with pytest.raises(CheckpointError, match=r"without train\.freeze_vision_tower, which is set here"):
        again.load(tmp_path / "whole")
    seen = make()
    seen.train_batch([sequences], LOSS)
    seen.export(tmp_path / "another")
    with pytest.raises(CheckpointError, match="beside another vision tower"):
        make(tmp_path / "another", freeze_vision_tower=True).load(tmp_path / "frozen")


def test_a_model_of_texts_has_no_tower_to_freeze(model_dir: Path, make: MakeEngine) -> None:
    with pytest.raises(ConfigError, match="has no vision tower"):
        make(model_dir, freeze_vision_tower=True)


# Adapters


def test_adapters_are_in_the_language_model_alone_and_peft_reads_them(
    seeing: Path, make: MakeEngine, sequences: list[TrainSequence], tmp_path: Path
) -> None:
    engine = make(lora=LORA)
    assert len(weights_of(engine)) == 2 * 3 * 4
    assert not any(map(in_tower, weights_of(engine)))
    engine.train_batch([sequences], LOSS)
    engine.snapshot_adapter().write(tmp_path / "adapter")
    engine.export(tmp_path / "merged")
    settings = json.loads((tmp_path / "adapter" / "adapter_config.json").read_text())
    assert settings["target_modules"] == sorted(LORA.target_modules)
    twin = peft.PeftModel.from_pretrained(load_seeing_twin(seeing), tmp_path / "adapter").eval()
    for model in (twin, load_seeing_twin(tmp_path / "merged")):
        assert_same_rows(engine.forward(sequences), twin_rows(model, sequences))


def test_all_linear_layers_are_those_of_the_language_model(make: MakeEngine) -> None:
    names = weights_of(make(lora=LoRAConfig()))
    assert len(names) == 2 * 3 * 7
    assert not any(map(in_tower, names))


def test_a_layer_of_the_tower_alone_gets_no_adapter(make: MakeEngine) -> None:
    with pytest.raises(ModelError, match="names qkv, but no layer of this model outside its vision tower"):
        make(lora=LoRAConfig(target_modules=("q_proj", "qkv")))


# What is written


@pytest.mark.parametrize(
    "options", [{}, {"freeze_vision_tower": True}, {"lora": LORA}], ids=["whole", "frozen", "lora"]
)
def test_an_export_has_the_files_and_names_that_it_began_from_and_transformers_reads_it(
    seeing: Path, make: MakeEngine, sequences: list[TrainSequence], tmp_path: Path, options: dict[str, Any]
) -> None:
    engine = make(**options)
    engine.export(tmp_path / "before")
    assert (tmp_path / "before" / "model.safetensors").read_bytes() == (seeing / "model.safetensors").read_bytes()
    engine.train_batch([sequences], LOSS)
    engine.export(tmp_path / "after")
    assert {file.name for file in (tmp_path / "after").iterdir()} == {file.name for file in seeing.iterdir()}
    assert load_file(tmp_path / "after" / "model.safetensors").keys() == load_file(seeing / "model.safetensors").keys()
    assert_same_rows(engine.forward(sequences), twin_rows(load_seeing_twin(tmp_path / "after"), sequences))
    assert same(make(tmp_path / "after").forward(sequences), engine.forward(sequences)) or "lora" in options

    engine.save(tmp_path / "checkpoint").wait()
    export_weights(tmp_path / "checkpoint", str(seeing), tmp_path / "exported", adapter=False)
    for file in (tmp_path / "after").iterdir():
        assert (tmp_path / "exported" / file.name).read_bytes() == file.read_bytes(), file.name


# What cannot be


def test_a_model_of_texts_sees_no_images(model_dir: Path, make: MakeEngine, sequences: list[TrainSequence]) -> None:
    engine = make(model_dir)
    with pytest.raises(ImageError, match=r"sequences have images, and .*model has no vision tower"):
        engine.forward(sequences)
    engine.forward([s for s in sequences if not s.images])


def test_images_that_do_not_fit_their_tokens_are_refused_before_anything_is_computed(
    seeing: Path, make: MakeEngine
) -> None:
    engine, (sequence,) = make(), weigh_tokens([sequence_of(ImageProcessor(seeing), 5, ONE, 3)])
    (placed,) = sequence.images
    with pytest.raises(ImageError, match="needs 4: another processor"):
        engine.train_batch([[replace(sequence, images=(replace(placed, stop=placed.stop - 1),))]], LOSS)
    with pytest.raises(ImageError, match="where no image was given"):
        engine.forward([replace(sequence, images=())])
    assert engine.num_computed == 0


class UnaskedRanks:
    """Ranks that have been built and get no other call."""

    def train(self, method: str, *arguments: Any, **options: Any) -> list[int]:
        assert method == "open_store", method
        return [1]

    def train_alike(self, method: str, *arguments: Any, **options: Any) -> list[None]:
        assert method == "build", method
        return [None]


@pytest.mark.parametrize("has_an_image", [True, False])
def test_ranks_get_no_shares_of_a_batch_that_one_of_them_would_refuse(
    seeing: Path, monkeypatch: pytest.MonkeyPatch, has_an_image: bool
) -> None:
    monkeypatch.setattr(ray_engine, "_start_ranks", lambda *_: (UnaskedRanks(), None, ""))
    processor = ImageProcessor(seeing)
    text, forgotten = sequence_of(processor, 5), replace(sequence_of(processor, 5, ONE, 3), images=())
    others = [sequence_of(processor, 5, ONE)] if has_an_image else []
    engine = ray_engine.RayTrainEngine(seeing, TrainConfig(num_ranks=2))
    with pytest.raises(ImageError, match="where no image was given"):
        engine.forward([text, forgotten, *others])


def test_a_placeholder_that_the_model_wrote_is_a_token_as_any_other(seeing: Path, make: MakeEngine) -> None:
    processor, twin = ImageProcessor(seeing), load_seeing_twin(seeing)
    text, seen = sequence_of(processor, 5), sequence_of(processor, 5, ONE, 3)
    for sequence in (text, seen):
        sequence.token_ids[-3] = processor.image_token_id
    seen.loss_mask[-3] = False  # as in a second trajectory that shows it
    ours, beside_an_image = make().forward([text, seen])
    assert_same_rows([ours], twin_rows(twin, [text]))
    assert beside_an_image[seen.loss_mask].all()


def test_what_cannot_see_is_refused_at_the_start(seeing: Path, make: MakeEngine, tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="arl has no value head for such models"):
        make(head="value")
    shutil.copytree(seeing, tmp_path / "blind")
    (tmp_path / "blind" / "preprocessor_config.json").unlink()
    with pytest.raises(ModelError, match="its image processor"):
        make(tmp_path / "blind")

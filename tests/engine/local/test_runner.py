"""The model: directories that are refused, the decoder in few operations, reward models, and threads for rows."""

import json
import shutil
import threading
from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from tiny_qwen import (
    SIZES,
    Reference,
    build_model,
    make_batch_of,
    make_job,
    prompt_of,
    random_model,
    run_all,
    save,
    with_random_vectors,
)
from torch import nn
from transformers import (
    AutoModelForSequenceClassification,
    GraniteConfig,
    LlamaConfig,
    Qwen3Config,
    Qwen3ForSequenceClassification,
)
from transformers.models.qwen3.modeling_qwen3 import Qwen3RMSNorm

from arl.api.errors import ArlError, ConfigError, ModelError
from arl.engine.local.fused_decoder import _Norm
from arl.engine.local.model_thread import Scheduler
from arl.engine.local.runner import ModelRunner, ModelThreads

PAD = 255


def configure(directory: Path, **changes: Any) -> None:
    config = directory / "config.json"
    config.write_text(json.dumps({**json.loads(config.read_text()), **changes}))


def lose(directory: Path, parameter: str) -> None:
    weights = load_file(directory / "model.safetensors")
    del weights[parameter]
    save_file(weights, directory / "model.safetensors", metadata={"format": "pt"})


def make_up_a_tokenizer(directory: Path) -> None:
    (directory / "tokenizer.json").unlink()
    (directory / "tokenizer_config.json").write_text('{"tokenizer_class": "Qwen2Tokenizer"}')


SPOILT: list[tuple[Callable[[Path], object], str]] = [
    (lambda at: (at / "config.json").unlink(), "is not a model directory"),
    (lambda at: (at / "model.safetensors").unlink(), "cannot be loaded"),
    (lambda at: (at / "model.safetensors").write_bytes(bytes(9)), "cannot be loaded"),
    (lambda at: (at / "tokenizer.json").unlink(), "tokenizer in .* cannot be read"),
    (make_up_a_tokenizer, "has no token for any letter"),
    (
        lambda at: lose(at, "model.layers.1.mlp.up_proj.weight"),
        r"lack 1 parameters, such as model\.layers\.1\.mlp\.up_proj\.weight",
    ),
]


@pytest.mark.parametrize(("spoil", "sentence"), SPOILT, ids=[sentence for _, sentence in SPOILT])
def test_a_directory_that_cannot_be_served_is_refused(
    model_dir: str, tmp_path: Path, spoil: Callable[[Path], object], sentence: str
) -> None:
    directory = tmp_path / "spoilt"
    shutil.copytree(model_dir, directory)
    spoil(directory)
    with pytest.raises(ModelError, match=sentence):
        Scheduler(str(directory))


UNKNOWN: list[tuple[dict[str, Any], type[ArlError], str]] = [
    ({"device": "gpu"}, ConfigError, "device"),
    ({"context_length": 513}, ModelError, "positions for 512 tokens"),
]


@pytest.mark.parametrize(("setting", "error", "sentence"), UNKNOWN)
def test_settings_that_cannot_be_are_refused(
    model_dir: str, setting: dict[str, Any], error: type[ArlError], sentence: str
) -> None:
    with pytest.raises(error, match=sentence):
        Scheduler(model_dir, **setting)


@pytest.mark.parametrize(
    "config",
    [
        Qwen3Config(**SIZES, head_dim=16),
        Qwen3Config(**SIZES, head_dim=16, attention_bias=True, tie_word_embeddings=True),
        LlamaConfig(**SIZES, attention_bias=True, mlp_bias=True),
    ],
    ids=lambda config: type(config).__name__,
)
def test_each_family_is_computed_as_its_own_code_does_before_and_after_new_weights(tmp_path: Path, config: Any) -> None:
    references = [Reference(with_random_vectors(random_model(config), seed)) for seed in range(2)]
    batch = make_batch_of(save(references[0].model, tmp_path), max_rows=4, prefill_tokens=20)
    assert batch._runner._fused is not None
    for reference in references:
        batch.load(reference.model.state_dict(), "0")
        jobs = [make_job(prompt_of(length, length)) for length in (1, 2, 3, 15, 40)]
        run_all(batch, jobs)
        for job in jobs:
            reference.check(job)


def test_a_model_in_bfloat16_is_computed_in_few_operations_too(tmp_path: Path) -> None:
    save(with_random_vectors(build_model(0), 0), tmp_path)
    runner = ModelRunner(str(tmp_path), device="cpu", dtype="bfloat16", max_rows=4, context_length=64)
    assert runner._fused is not None


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.bfloat16, 0.0)])
@torch.no_grad()
def test_norms_equal_the_models_own_to_rounding_at_every_scale(dtype: torch.dtype, tolerance: float) -> None:
    modules = [Qwen3RMSNorm(16, eps=1e-6).to(dtype) for _ in range(2)]
    for module in modules:
        nn.init.normal_(module.weight)
    norm = _Norm(modules[0], modules[0], modules[1])
    for scale in (0.0, 1e-5, 1.0, 1e4):
        x = (scale * torch.randn(5, 3, 16)).to(dtype)
        wanted = torch.cat([modules[0](x[:, :2]), modules[1](x[:, 2:])], 1)
        torch.testing.assert_close(norm(x), wanted, rtol=tolerance, atol=tolerance / 10)


@pytest.fixture(scope="module")
def scorer_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("scorer")
    config = build_model(0).config
    config.num_labels, config.pad_token_id = 1, PAD
    torch.manual_seed(0)
    save(Qwen3ForSequenceClassification(config).eval(), directory)
    return directory


@torch.no_grad()
def check(model: Any, jobs: list[Any]) -> None:
    for job in jobs:
        assert job.finish_reason == {"type": "length", "length": 0}
        assert job.output_ids == []
        tokens = torch.tensor([job.input_ids])
        wanted = model.score(model.model(tokens).last_hidden_state[0, -1])
        torch.testing.assert_close(torch.tensor(job.scores), wanted, atol=1e-4, rtol=0)


@pytest.mark.parametrize("is_short", [True, False])
def test_scores_are_the_models_own_whoever_shares_the_batch_on_each_way_through_the_layers(
    scorer_dir: Path, is_short: bool
) -> None:
    model = AutoModelForSequenceClassification.from_pretrained(scorer_dir).eval()
    shared = prompt_of(40, 3)
    jobs = [make_job(prompt_of(n, n)) for n in (1, 2, 70, 130)]
    jobs += [make_job(prompt) for prompt in (shared, shared, [*shared, 5, 6], [*shared[:30], PAD], shared[:10])]
    batch = make_batch_of(str(scorer_dir), max_rows=4, prefill_tokens=16)
    assert batch._runner._fused is not None
    if not is_short:
        batch._runner._fused = None
    run_all(batch, jobs)
    check(model, jobs)
    again = [make_job(job.input_ids) for job in jobs]
    run_all(batch, again)
    check(model, again)
    assert again[2].cached_tokens == 69


def test_a_reward_model_without_the_weights_of_its_head_is_refused(scorer_dir: Path, tmp_path: Path) -> None:
    shutil.copytree(scorer_dir, tmp_path, dirs_exist_ok=True)
    lose(tmp_path, "score.weight")
    with pytest.raises(ModelError, match=r"lack 1 parameters, such as score\.weight"):
        make_batch_of(str(tmp_path))


def test_a_model_that_scales_its_embeddings_takes_the_long_way(tmp_path: Path) -> None:
    model = random_model(GraniteConfig(**SIZES, embedding_multiplier=3.0))
    assert make_batch_of(save(model, tmp_path))._runner._fused is None


@pytest.fixture
def threads() -> Iterator[ModelThreads]:
    made = ModelThreads(3)
    yield made
    made.close()


@pytest.mark.parametrize("lengths", [[1] * 72, [1] * 100, [1] * 40 + [40, 30], [1, 1, 90, 88, 80], [30, 30, 30]])
def test_each_thread_gets_about_as_many_tokens(threads: ModelThreads, lengths: list[int]) -> None:
    cuts = threads.cuts(lengths)
    bounds = [0, *cuts, len(lengths)]
    shares = [sum(lengths[first:last]) for first, last in pairwise(bounds)]
    assert len(cuts) == 2
    assert min(shares) > 0
    assert max(shares) <= 1.5 * sum(lengths) / 3


@pytest.mark.parametrize("lengths", [[], [1] * 47, [500], [1] * 10 + [500], [500] + [1] * 10])
def test_few_tokens_and_rows_that_cannot_be_shared_are_not_cut(threads: ModelThreads, lengths: list[int]) -> None:
    assert threads.cuts(lengths) == []


def test_an_error_is_raised_when_no_thread_computes_any_longer(threads: ModelThreads) -> None:
    failed, ended = threading.Event(), []

    def fails() -> torch.Tensor:
        failed.set()
        raise RuntimeError("the first part failed")

    def ends() -> torch.Tensor:
        assert failed.wait(10)
        ended.append(torch.is_inference_mode_enabled())
        return torch.zeros(1)

    with pytest.raises(RuntimeError, match="the first part failed"):
        threads.run([fails, ends, ends])
    assert ended == [True, True]

"""Reward models, which sample nothing, and decoders whose short way leads elsewhere."""

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from tiny_qwen import SIZES, build_model, make_batch_of, make_job, prompt_of, random_model, run_all, save
from transformers import AutoModelForSequenceClassification, GraniteConfig, Qwen3ForSequenceClassification

from arl.api.errors import ModelError

PAD = 255


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
    weights = load_file(tmp_path / "model.safetensors")
    del weights["score.weight"]
    save_file(weights, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ModelError, match=r"lack 1 parameters, such as score\.weight"):
        make_batch_of(str(tmp_path))


def test_a_model_that_scales_its_embeddings_takes_the_long_way(tmp_path: Path) -> None:
    model = random_model(GraniteConfig(**SIZES, embedding_multiplier=3.0))
    assert make_batch_of(save(model, tmp_path))._runner._fused is None

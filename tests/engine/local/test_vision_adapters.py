"""Adapters of a model that sees: on its decoder alone, and on its tower, whose vectors are then the adapter's own."""

from collections.abc import Sequence
from concurrent.futures import Future
from pathlib import Path

import pytest
from adapter_files import ALL, write_adapter
from reference import close
from sighted import SEEING_FAMILIES, SeeingReference, laid_out, noise, write_sighted
from tiny_qwen import make_batch_of, make_job, prompt_of, run_all
from transformers import AutoModelForImageTextToText

from arl.engine.local.scheduler import RunningBatch
from arl.engine.local.sequences import Job
from arl.engine.local.vision import View

ONE = noise(40, 25, 0)
TARGETS = {"decoder": rf".*language_model.*({'|'.join(ALL)})", "tower": r".*(blocks.*(qkv|attn.proj)|q_proj|down_proj)"}


@pytest.fixture(scope="module", params=SEEING_FAMILIES)
def references(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> dict[str, SeeingReference]:
    """Of the model alone, by the empty name, and of each adapter's model. The files lie beside one another."""
    root = tmp_path_factory.mktemp(request.param)
    base = write_sighted(root / "base", request.param)
    for seed, (name, targets) in enumerate(TARGETS.items()):
        kind = AutoModelForImageTextToText
        write_adapter(root / name, base, seed, merged=root / f"{name}-merged", kind=kind, target_modules=targets)
    merged = {name: root / f"{name}-merged" for name in TARGETS}
    for directory in merged.values():
        (directory / "preprocessor_config.json").write_text((base / "preprocessor_config.json").read_text())
    return {name: SeeingReference(directory) for name, directory in {"": base, **merged}.items()}


def seeing_job(reference: SeeingReference, adapter: str, text: Sequence[int]) -> Job:
    tokens, placed = laid_out(reference.processor, text, ONE, prompt_of(5, 1))
    job = make_job(tokens)
    job.adapter, job.view = adapter, Future()
    job.view.set_result(View(placed, reference.processor))
    return job


def batch_with(references: dict[str, SeeingReference]) -> RunningBatch:
    base = Path(references[""].processor.model)
    batch = make_batch_of(str(base))
    for name in TARGETS:
        batch._runner.adapters.add(batch._runner.adapters.read(name, str(base.parent / name)))
    return batch


def test_each_request_sees_as_the_model_that_its_adapter_makes(references: dict[str, SeeingReference]) -> None:
    batch = batch_with(references)
    jobs = [seeing_job(references[""], name, prompt_of(n, n)) for n in (7, 20) for name in references]
    run_all(batch, jobs)
    run_all(batch, again := [seeing_job(references[""], name, prompt_of(7, 7)) for name in references])
    for job in (*jobs, *again):
        assert job.view is not None
        images = tuple(job.view.result().images)
        close(job.output_logprobs, references[job.adapter].logprobs_of(images, job.input_ids, job.output_ids))


def test_only_an_adapter_of_the_tower_makes_it_see_again(references: dict[str, SeeingReference]) -> None:
    batch = batch_with(references)
    assert batch._runner.tower is not None
    for name, count in (("", 1), ("decoder", 1), ("tower", 2), ("tower", 2)):
        run_all(batch, [seeing_job(references[""], name, prompt_of(7, 7))])
        assert batch._runner.tower.num_computed == count

"""Adapters in the embedded server's batch: each request is computed as by the model that its adapter makes."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from adapter_files import write_adapter
from safetensors.torch import load_file, save_file
from tiny_qwen import Reference, make_job, prompt_of, run_all, step_until_sampled

from arl.engine.local.scheduler import RunningBatch
from arl.engine.local.sequences import Job
from arl.engine.local.weight_receiver import WeightsError

NAMES = ("one", "two")


@pytest.fixture(scope="module")
def adapters(model_dir: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with the adapters `one` and `two`, and the models that they make as `merged-one`, `merged-two`."""
    root = tmp_path_factory.mktemp("adapters")
    for seed, name in enumerate(NAMES):
        write_adapter(root / name, model_dir, seed, merged=root / f"merged-{name}", r=4 + seed)
    return root


@pytest.fixture(scope="module")
def references(adapters: Path, reference: Reference) -> dict[str, Reference]:
    """The reference of each adapter; the empty name is the model alone."""
    merged = {n: Reference(adapters / f"merged-{n}") for n in NAMES}
    return {"": reference, **merged}


def load(batch: RunningBatch, name: str, directory: Path) -> None:
    adapter = batch._runner.adapters.read(name, str(directory))
    batch._runner.adapters.add(adapter)


def job_under(adapter: str, prompt: list[int], **options: Any) -> Job:
    job = make_job(prompt, **options)
    job.adapter = adapter
    return job


def test_running_requests_of_other_adapters_share_no_prefix(
    batch: RunningBatch, adapters: Path, references: dict[str, Reference]
) -> None:
    for name in NAMES:
        load(batch, name, adapters / name)
    jobs = [job_under(name, prompt_of(40, 0)) for name in ("one", "two", "")]
    run_all(batch, jobs)
    for job in jobs:
        assert job.cached_tokens == 0
        references[job.adapter].check(job)


def test_a_name_that_was_given_anew_finds_nothing_of_the_adapter_before(
    batch: RunningBatch, adapters: Path, references: dict[str, Reference]
) -> None:
    for name in NAMES:
        load(batch, "same", adapters / name)
        job = job_under("same", prompt_of(40, 0))
        run_all(batch, [job])
        assert job.cached_tokens == 0
        references[name].check(job)
        batch._runner.adapters.remove("same")


def test_requests_under_way_and_waiting_keep_an_adapter_that_is_unloaded(
    make_batch: Callable[..., RunningBatch], adapters: Path, references: dict[str, Reference]
) -> None:
    batch = make_batch(max_rows=1)
    load(batch, "one", adapters / "one")
    running, waiting = (job_under("one", prompt_of(20, i)) for i in range(2))
    batch.add(running)
    batch.add(waiting)
    step_until_sampled(batch, running, 3)
    batch._runner.adapters.remove("one")
    batch.retract()
    run_all(batch)
    for job in (running, waiting):
        references["one"].check(job)


def test_rank_stabilized_adapters_have_their_own_scale(batch: RunningBatch, model_dir: str, tmp_path: Path) -> None:
    write_adapter(tmp_path / "a", model_dir, 5, merged=tmp_path / "merged", use_rslora=True, target_modules=["q_proj"])
    load(batch, "a", tmp_path / "a")
    job = job_under("a", prompt_of(20, 0))
    run_all(batch, [job])
    Reference(tmp_path / "merged").check(job)


def configured(directory: Path, **changes: Any) -> None:
    file = directory / "adapter_config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **changes}))


def rewritten(directory: Path, **changes: torch.Tensor | None) -> None:
    """With other tensors; None takes one away."""
    file = directory / "adapter_model.safetensors"
    tensors = {**load_file(file), **changes}
    save_file({name: tensor.clone() for name, tensor in tensors.items() if tensor is not None}, file)


Q, ONE = "base_model.model.model.layers.0.self_attn.q_proj.lora_", torch.ones(1)
SPOILT: list[tuple[Callable[[Path], object], str]] = [
    (lambda at: configured(at, use_dora=True), "needs use_dora, which this server does not support"),
    (lambda at: configured(at, bias="lora_only"), "trains biases"),
    (lambda at: configured(at, peft_type="IA3"), "an adapter of type IA3"),
    (lambda at: configured(at, r="many"), "is not a configuration as peft writes it"),
    (lambda at: (at / "adapter_config.json").unlink(), "is not a configuration as peft writes it"),
    (lambda at: (at / "adapter_model.safetensors").unlink(), "cannot read .*adapter_model.safetensors"),
    (lambda at: (at / "adapter_model.safetensors").write_bytes(b"x"), "cannot read .*adapter_model.safetensors"),
    (lambda at: rewritten(at, **{f"{Q}B.weight": None}), r"q_proj has A \[4, 32\] and B None; it must have A"),
    (lambda at: rewritten(at, **{f"{Q}A.weight": None}), "q_proj.lora_B.weight, which no layer uses"),
    (lambda at: rewritten(at, **{f"{Q}A.weight": torch.ones(4, 31)}), r"q_proj has A \[4, 31\] and B \[64, 4\]; it"),
    (lambda at: rewritten(at, **{"base_model.model.lm_head.lora_A.weight": ONE}), "no linear layer lm_head to adapt"),
    (shutil.rmtree, "is not an absolute path of a directory here"),
]


@pytest.mark.parametrize(("spoil", "sentence"), SPOILT, ids=[sentence[:40] for _, sentence in SPOILT])
def test_what_it_cannot_hold_is_refused_with_a_reason(
    spoil: Callable[[Path], object], sentence: str, batch: RunningBatch, adapters: Path, tmp_path: Path
) -> None:
    directory = tmp_path / "spoilt"
    shutil.copytree(adapters / "one", directory)
    spoil(directory)
    with pytest.raises(WeightsError, match=sentence):
        batch._runner.adapters.read("x", str(directory))


def test_no_more_adapters_are_loaded_than_memory_may_hold(
    batch: RunningBatch, adapters: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("arl.engine.local.adapters._MAX_LOADED", 1)
    load(batch, "one", adapters / "one")
    with pytest.raises(WeightsError, match="two: 1 are loaded; unload one first"):
        load(batch, "two", adapters / "two")

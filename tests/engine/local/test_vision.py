"""Images in the embedded server's batch: every logprob is plain transformers', whoever shares batch and cache."""

from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from adapter_files import ALL, write_adapter
from reference import close
from sighted import END, SEEING_FAMILIES, START, Part, SeeingReference, laid_out, noise, write_sighted
from tiny_qwen import make_batch_of, make_job, prompt_of, run_all, step_until_sampled
from transformers import AutoModelForImageTextToText

from arl.engine.local.scheduler import RunningBatch
from arl.engine.local.sequences import Job
from arl.engine.local.vision import View

ONE, SAME_SIZE, WIDE, TALL = noise(40, 25, 0), noise(40, 25, 1), noise(120, 64, 2), noise(20, 70, 3)
TEXT, MORE = prompt_of(9, 0), prompt_of(21, 1)

Weights = dict[str, torch.Tensor]


class Sighted:
    """A model, and another version of its weights."""

    def __init__(self, root: Path, family: Any) -> None:
        self.directory, other = write_sighted(root / "a", family), write_sighted(root / "b", family, seed=1)
        self.reference, self.other = SeeingReference(self.directory), SeeingReference(other)
        self.processor = self.reference.processor

    @property
    def other_weights(self) -> Weights:
        return dict(self.other.model.named_parameters())

    def job(self, *parts: Part, **sampling: Any) -> Job:
        tokens, placed = laid_out(self.processor, *parts)
        return self.placed_job(tokens, placed, **sampling)

    def placed_job(self, tokens: list[int], placed: Any, **sampling: Any) -> Job:
        job = make_job(tokens, **{"seed": len(tokens), **sampling})  # fixed tokens, whose rounding is known
        if placed:
            job.view = Future()
            job.view.set_result(View(placed, self.processor))
        return job

    def check(self, *jobs: Job, reference: SeeingReference | None = None) -> None:
        """Their logprobs, of given and of sampled tokens, are the model's."""
        reference = reference or self.reference
        for job in jobs:
            images = () if job.view is None else tuple(job.view.result().images)
            if job.logprob_start is not None:
                first = job.logprob_start + 1
                close(job.input_logprobs, reference.logprobs_of(images, job.input_ids[:first], job.input_ids[first:]))
            if job.output_ids:
                temperature = job.sampling.logprob_temperature
                close(job.output_logprobs, reference.logprobs_of(images, job.input_ids, job.output_ids, temperature))
            assert job.is_done


@pytest.fixture(scope="module", params=("qwen2_vl", *SEEING_FAMILIES))
def sighted(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Sighted:
    return Sighted(tmp_path_factory.mktemp(request.param), request.param)


@pytest.fixture
def make_batch(sighted: Sighted) -> Callable[..., RunningBatch]:
    return partial(make_batch_of, str(sighted.directory))


@pytest.fixture
def batch(make_batch: Callable[..., RunningBatch]) -> RunningBatch:
    return make_batch()


def num_computed(batch: RunningBatch) -> int:
    """How many images the tower has computed."""
    assert batch._runner.tower is not None
    return batch._runner.tower.num_computed


def next_turn(sighted: Sighted, job: Job, *parts: Part, **sampling: Any) -> Job:
    """A job whose prompt is another's prompt and output, and more."""
    assert job.view is not None
    begun = [*job.input_ids, *job.output_ids]
    tokens, placed = laid_out(sighted.processor, *parts)
    moved = [replace(p, start=p.start + len(begun), stop=p.stop + len(begun)) for p in placed]
    return sighted.placed_job([*begun, *tokens], (*job.view.result().images, *moved), **sampling)


@pytest.mark.parametrize("is_short", [True, False])
@pytest.mark.parametrize("prefill_tokens", [5, 64])
def test_texts_and_images_share_a_batch_and_prompts_are_cut_anywhere_on_each_way_through_the_layers(
    sighted: Sighted, make_batch: Callable[..., RunningBatch], is_short: bool, prefill_tokens: int
) -> None:
    batch = make_batch(max_rows=5, prefill_tokens=prefill_tokens)
    assert batch._runner._fused is not None
    if not is_short:
        batch._runner._fused = None
    prompts: list[list[Part]] = [
        [TEXT, ONE, MORE], [MORE], [WIDE], [TEXT, TALL, TEXT, WIDE, ONE], [TEXT, SAME_SIZE, MORE], [ONE, ONE], [TEXT],
    ]  # fmt: skip
    jobs = [sighted.job(*parts, max_new_tokens=12, temperature=0.5 + i / 4) for i, parts in enumerate(prompts)]
    run_all(batch, jobs)
    sighted.check(*jobs)
    assert num_computed(batch) == 4


def test_threads_that_share_a_step_see_the_images_of_their_rows(
    sighted: Sighted, make_batch: Callable[..., RunningBatch], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("arl.engine.local.runner.TOKENS_FOR_A_THREAD", 2)
    batch = make_batch(num_threads=2)
    shares = list[int]()
    own = batch._runner._threads.run
    monkeypatch.setattr(batch._runner._threads, "run", lambda parts: shares.append(len(parts)) or own(parts))
    jobs = [sighted.job(TEXT, image, MORE) for image in (ONE, WIDE, TALL, SAME_SIZE)] + [sighted.job(MORE)]
    run_all(batch, jobs)
    sighted.check(*jobs)
    assert 2 in shares


def test_logprobs_of_given_tokens_behind_images(sighted: Sighted, make_batch: Callable[..., RunningBatch]) -> None:
    batch = make_batch(prefill_tokens=10)
    jobs = [sighted.job(TEXT, ONE, MORE, WIDE, TEXT) for _ in range(3)]
    for job, start in zip(jobs, (0, 12, 60), strict=True):
        job.logprob_start, job.is_prefill_only = start, start == 0
    run_all(batch, jobs)
    sighted.check(*jobs)


def test_a_group_and_its_later_turns_compute_each_image_once(sighted: Sighted, batch: RunningBatch) -> None:
    group = [sighted.job(TEXT, ONE, MORE, seed=seed, max_new_tokens=24) for seed in range(6)]
    run_all(batch, group)
    assert num_computed(batch) == 1
    turns = [next_turn(sighted, job, TEXT, WIDE, TEXT, ONE) for job in group]
    run_all(batch, turns)
    last = next_turn(sighted, turns[0], MORE)
    run_all(batch, [last])
    assert num_computed(batch) == 2
    assert [turn.cached_tokens for turn in turns] == [len(job.input_ids) + 23 for job in group]
    assert last.cached_tokens == len(turns[0].input_ids) + 7
    sighted.check(*group, *turns, last)


def test_prefixes_of_equal_tokens_with_other_images_are_other_prefixes(sighted: Sighted, batch: RunningBatch) -> None:
    first, other = sighted.job(MORE, ONE, TEXT), sighted.job(MORE, SAME_SIZE, TEXT)
    assert first.input_ids == other.input_ids
    run_all(batch, [first])
    run_all(batch, [other])
    again = sighted.job(MORE, ONE, TEXT)
    together = [sighted.job(MORE, image, MORE) for image in (ONE, SAME_SIZE, ONE, SAME_SIZE)]
    run_all(batch, [again])
    run_all(batch, together)
    assert other.cached_tokens == len(MORE) + 1
    assert again.cached_tokens == len(again.input_ids) - 1
    sighted.check(first, other, again, *together)


def test_a_prompt_may_end_within_an_image_or_with_one(sighted: Sighted, batch: RunningBatch) -> None:
    tokens, placed = laid_out(sighted.processor, TEXT, WIDE)
    whole = sighted.placed_job(tokens[:-1], placed)
    run_all(batch, [whole])
    again = sighted.placed_job(tokens[:-1], placed)
    run_all(batch, [again])
    assert again.cached_tokens == len(tokens) - 2
    sighted.check(whole, again)


@pytest.mark.parametrize("is_retracted", [True, False])
def test_new_weights_see_anew_and_requests_under_way_go_on(
    sighted: Sighted, batch: RunningBatch, is_retracted: bool
) -> None:
    job = sighted.job(TEXT, ONE, MORE, max_new_tokens=10)
    batch.add(job)
    step_until_sampled(batch, job, 4)
    if is_retracted:
        batch.retract()
    batch.load(sighted.other_weights, "1")
    later = sighted.job(TEXT, ONE, MORE)
    run_all(batch, [later])
    assert job.versions == ["0"] * 4 + ["1"] * 6
    assert num_computed(batch) == 2
    assert later.cached_tokens == (len(later.input_ids) - 1 if is_retracted else 0)
    sighted.check(later, reference=sighted.other)
    if is_retracted:
        wanted = sighted.other.logprobs_of(
            tuple(job.view.result().images) if job.view else (), job.input_ids, job.output_ids
        )
        close(job.output_logprobs[4:], wanted[4:])


def test_an_image_that_was_half_computed_when_the_weights_changed_is_seen_anew(
    sighted: Sighted, make_batch: Callable[..., RunningBatch]
) -> None:
    batch = make_batch(prefill_tokens=14)
    job = sighted.job(TEXT, WIDE, TEXT)
    batch.add(job)
    batch.step()
    batch.load(sighted.other_weights, "1")
    run_all(batch)
    assert num_computed(batch) == 2
    later = sighted.job(TEXT, WIDE, TEXT)
    run_all(batch, [later])
    assert later.cached_tokens == 0
    sighted.check(later, reference=sighted.other)


def test_a_load_without_the_towers_weights_keeps_what_it_saw(sighted: Sighted, batch: RunningBatch) -> None:
    run_all(batch, [sighted.job(TEXT, ONE)])
    decoder = {name: value for name, value in sighted.other_weights.items() if ".visual." not in name}
    batch.load(decoder, "1")
    run_all(batch, [sighted.job(TEXT, ONE)])
    assert num_computed(batch) == 1


def test_the_tower_keeps_no_more_than_it_may_and_sees_the_rest_again(
    sighted: Sighted, batch: RunningBatch, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("arl.engine.local.vision._VECTOR_BYTES", 1)
    jobs = [sighted.job([number], image) for number, image in enumerate((ONE, WIDE, WIDE, ONE))]
    for job in jobs:
        run_all(batch, [job])
    sighted.check(*jobs)
    assert num_computed(batch) == 3


def test_placeholders_that_were_sampled_and_tags_without_an_image_are_tokens_like_others(
    sighted: Sighted, batch: RunningBatch
) -> None:
    placeholder = sighted.processor.image_token_id
    sampled = sighted.job(TEXT, ONE, [*TEXT, placeholder, 3, placeholder, placeholder], WIDE, [placeholder])
    tags = sighted.job([START, END, START, 5], ONE, [END, END])
    run_all(batch, [sampled, tags])
    sighted.check(sampled, tags)


# Adapters: on the decoder alone, and on the tower, whose vectors are then the adapter's own.

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

"""A packed row with images gives what transformers gives its sequences one at a time, and each image is seen once."""

import pickle
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from ray import cloudpickle
from records import grouped
from train_sequences import assert_row_gives_what_its_sequences_do
from vision_sequences import (
    FAMILIES,
    ONE,
    SAME_SIZE,
    TALL,
    WIDE,
    load_seeing_twin,
    seeing_sequences,
    sequence_of,
    write_seeing_model,
)

from arl.algorithm.batch import Batch
from arl.algorithm.prefix_tree import prefix_order
from arl.api.routed_experts import Routes
from arl.api.train_engine import TrainSequence
from arl.api.types import Trajectory
from arl.data.image_processor import ImageProcessor
from arl.engine.fsdp.minibatch import build_microbatch
from arl.engine.fsdp.model import load_model
from arl.engine.fsdp.policy import TokenModel
from arl.engine.fsdp.vision import segment_attention, vision_tower

CPU = torch.device("cpu")
SEEN = (ONE, SAME_SIZE, WIDE, TALL)
"""The images of `seeing_sequences` that trained tokens follow."""


@pytest.fixture(scope="module", params=("qwen2_vl", *FAMILIES))
def model_dir(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_seeing_model(tmp_path_factory.mktemp(request.param) / "model", request.param)


@pytest.mark.parametrize("share_prefixes", [True, False], ids=["shared", "apart"])
def test_logprobs_and_gradients_are_those_of_each_sequence_by_itself(model_dir: Path, share_prefixes: bool) -> None:
    loaded = load_model(model_dir)
    assert loaded.processor is not None
    sequences = seeing_sequences(loaded.processor)
    policy, twin = loaded.token_model(), load_seeing_twin(model_dir)
    batch = build_microbatch(sequences, CPU, share_prefixes=share_prefixes, processor=loaded.processor)
    assert_row_gives_what_its_sequences_do(policy, batch, twin, sequences)


class CountedPatches:
    """Counts the patches that go through a model's tower."""

    def __init__(self, policy: TokenModel) -> None:
        self.counts: list[int] = []
        tower = vision_tower(policy.model)
        assert tower is not None
        tower.register_forward_pre_hook(lambda _, given: self.counts.append(len(given[0])))


def test_each_distinct_image_that_trained_tokens_follow_is_seen_once(model_dir: Path) -> None:
    loaded = load_model(model_dir)
    processor, policy = loaded.processor, loaded.token_model()
    assert processor is not None
    counted, sequences = CountedPatches(policy), seeing_sequences(processor)
    policy(build_microbatch(sequences, CPU, processor=processor))
    assert sum(len(s.images) for s in sequences) > len(SEEN)
    assert counted.counts == [sum(len(processor.pixels(image).values) for image in SEEN)]
    policy(build_microbatch([s for s in sequences if not s.images], CPU, processor=processor))
    ending = sequences[-4]
    assert [placed.image for placed in ending.images] == [ONE, WIDE]
    policy(build_microbatch([ending], CPU, processor=processor))
    assert counted.counts[1:] == [len(processor.pixels(ONE).values)]


def test_prefixes_are_shared_upto_the_first_image_that_differs(model_dir: Path) -> None:
    processor = ImageProcessor(model_dir)
    one, again, other = (sequence_of(processor, 9, image, 5, seed=3) for image in (ONE, ONE, SAME_SIZE))
    assert one.token_ids.tolist() == other.token_ids.tolist()
    start, length = one.images[0].start, len(one) - 1
    assert prefix_order([one, again]).num_tokens == length
    assert prefix_order([one, other]).num_tokens == 2 * length - start
    routed = [replace(s, routes=Routes.of(np.zeros((len(s), 1, 1), np.uint8))) for s in (one, other)]
    assert prefix_order(routed).shared.tolist() == prefix_order([one, other]).shared.tolist() == [0, start]


def test_no_branch_begins_within_an_image(model_dir: Path) -> None:
    sequences = seeing_sequences(ImageProcessor(model_dir))
    order = prefix_order(sequences)
    assert order.shared.any()
    for index, shared in zip(order.indices.tolist(), order.shared.tolist(), strict=True):
        assert not [p for p in sequences[index].images if p.start < shared < p.stop]


@pytest.mark.parametrize("lengths", [[5], [4, 4, 4], [7, 2, 7, 1, 2], [1] * 9])
def test_each_segment_of_patches_sees_itself(lengths: list[int]) -> None:
    random = torch.Generator().manual_seed(len(lengths))
    shape = 1, 2, sum(lengths), 8
    qkv = [torch.randn(shape, generator=random, dtype=torch.float64, requires_grad=True) for _ in range(3)]
    bounds = torch.tensor([0, *lengths]).cumsum(0)
    ours, _ = segment_attention(torch.nn.Module(), *qkv, None, cu_seq_lens_q=bounds, scaling=0.3)
    owner = torch.arange(len(lengths)).repeat_interleave(torch.tensor(lengths))
    scores = (0.3 * qkv[0] @ qkv[1].transpose(2, 3)).masked_fill(owner[:, None] != owner, -torch.inf)
    theirs = (scores.softmax(-1) @ qkv[2]).transpose(1, 2)
    torch.testing.assert_close(ours, theirs)
    weights = torch.linspace(-1, 1, ours.numel(), dtype=ours.dtype).view(ours.shape)
    gradients = [torch.autograd.grad((x * weights).sum(), qkv) for x in (ours, theirs)]
    torch.testing.assert_close(*gradients)


# Images on their way to a rank


def as_trajectory(sequence: TrainSequence) -> Trajectory:
    return Trajectory(
        token_ids=sequence.token_ids.tolist(),
        loss_mask=sequence.loss_mask.tolist(),
        behavior_logprobs=(sequence.behavior_logprobs * sequence.loss_mask).tolist(),
        versions=sequence.versions.tolist(),
        reward=1.0,
        images=sequence.images,
    )


def test_images_go_along_from_trajectories_to_a_rank(model_dir: Path) -> None:
    processor = ImageProcessor(model_dir)
    trajectories = [as_trajectory(sequence_of(processor, 9, image, 5)) for image in (ONE, WIDE, SAME_SIZE)]
    groups = [grouped(trajectory, number=i) for i, trajectory in enumerate(trajectories)]
    batch = Batch.of(pickle.loads(pickle.dumps(groups)))
    taken = batch.take([2, 0]).sequences()
    assert taken.num_bytes - replace(taken, images=()).num_bytes == len(SAME_SIZE.data) + len(ONE.data)
    arrived = cloudpickle.loads(cloudpickle.dumps(taken.take([1])))
    assert [s.images for s in taken] == [trajectories[2].images, trajectories[0].images]
    assert arrived[0].images == trajectories[0].images
    assert arrived[0].images[0].image is ONE

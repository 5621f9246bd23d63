"""Fingerprints tell weights apart, and do not depend on how ranks share them."""

import pytest
import torch
from train_models import MakeEngine

from arl.api.train_engine import TensorPrint, digest_of
from arl.engine.fsdp.fingerprint import _of_shard


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


def test_an_engine_has_a_print_of_each_trained_tensor_by_its_name_in_checkpoints(make_engine: MakeEngine) -> None:
    engine = make_engine()
    prints = engine.fingerprint()
    names = {name.removeprefix("model.") for name in engine._trained}
    assert prints.keys() == names
    weight = engine._trained["model.model.norm.weight"].detach()
    assert prints["model.norm.weight"].norm == pytest.approx(float(weight.norm()))

"""Tensors end to end: how they are split, and which rows of them a rank has."""

import threading
from concurrent.futures import ThreadPoolExecutor
from typing import cast

import pytest
import torch
import torch.distributed as dist

from arl.api.engine import TensorSpec
from arl.api.errors import ServerFailedError
from arl.engine.local.weight_receiver import WeightsError, _buffer
from arl.engine.weights import process_groups as module
from arl.engine.weights.distributed import byte_size, ranges, rows_of, views
from arl.engine.weights.process_groups import WeightSender


def spec(name: str, *shape: int, dtype: str = "float32") -> TensorSpec:
    return TensorSpec(name=name, dtype=dtype, shape=shape)


def test_ranges_are_filled_up_and_a_larger_tensor_goes_alone():
    specs = [spec("a", 2), spec("b", 2), spec("c", 100), spec("d", 1), spec("e")]
    assert ranges(specs, 16) == [(0, 2), (2, 3), (3, 5)]
    assert ranges(specs, 1) == [(i, i + 1) for i in range(5)]
    assert ranges([], 16) == []


def test_a_range_is_of_one_dtype_so_that_every_tensor_begins_where_its_dtype_may():
    specs = [spec("a", 3, dtype="bfloat16"), spec("b", 2), spec("c", 1), spec("d", 1, dtype="bfloat16")]
    assert ranges(specs, 1 << 20) == [(0, 1), (1, 3), (3, 4)]


def test_views_share_the_memory_they_are_of():
    specs = [spec("a", 2, 3), spec("b"), spec("c", 0, 5), spec("d", 4)]
    flat = torch.zeros(sum(map(byte_size, specs)), dtype=torch.uint8)
    a, b, c, d = views(specs, flat)
    for tensor, value in ((a, 1.0), (b, 2.0), (c, 3.0), (d, 4.0)):
        tensor.fill_(value)
    assert flat.view(torch.float32).tolist() == [1.0] * 6 + [2.0] + [4.0] * 4
    assert (a.shape, b.shape, c.shape) == ((2, 3), (), (0, 5))


def test_ranks_have_rows_as_torch_chunks_them():
    for num_rows in range(12):
        for num_ranks in range(1, 6):
            chunks = torch.arange(num_rows).chunk(num_ranks) if num_rows else ()
            expected = [chunk.tolist() for chunk in chunks] + [[]] * (num_ranks - len(chunks))
            assert [list(rows_of(num_rows, rank, num_ranks)) for rank in range(num_ranks)] == expected


def test_a_server_refuses_a_bucket_in_which_a_tensor_would_begin_between_two_numbers():
    flat, tensors = _buffer([("a", "float32", [2]), ("b", "bfloat16", [3])], "cpu", most_bytes=100)
    assert (flat.nbytes, tensors["b"].shape) == (14, (3,))
    with pytest.raises(WeightsError, match="b would begin at byte 6"):
        _buffer([("a", "bfloat16", [3]), ("b", "float32", [2])], "cpu", most_bytes=100)


@pytest.mark.parametrize("is_left", [True, False])
def test_a_server_that_dies_while_nccl_forms_the_group_pins_no_thread(monkeypatch: pytest.MonkeyPatch, is_left: bool):
    begun, may_end = threading.Event(), threading.Event()

    def wait_for_ever(*args: object) -> None:
        begun.set()
        may_end.wait(60)

    monkeypatch.setattr(module, "_SEND_TIMEOUT_S", 60.0 if is_left else 0.2)
    monkeypatch.setattr(WeightSender, "_broadcast_from_gpu", wait_for_ever)
    sender = WeightSender(torch.device("cpu"))
    group = sender.open("http://127.0.0.1:1", 1, "gloo")
    link = sender._links[group.name]
    link.is_nccl, link.group = True, cast("dist.ProcessGroup", object())  # it can be neither aborted nor destroyed now
    with ThreadPoolExecutor(1) as threads:
        sending = threads.submit(sender.send, group.name, torch.zeros(4, dtype=torch.uint8))
        assert begun.wait(20)
        if is_left:
            sender.leave(group.name)
        with pytest.raises(ServerFailedError, match="did not take weights"):
            sending.result(20)
        sender.close()
    may_end.set()

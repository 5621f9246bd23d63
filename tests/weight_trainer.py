"""A trainer that sends weights to a server over gloo: rank 0 of a group of two."""

import asyncio
import itertools
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from free_port import free_port
from protocol_client import Answer, Client

from arl.api.engine import WeightGroup
from arl.engine.local.weight_receiver import join_group

TIMEOUT = timedelta(seconds=60)
_names = (f"trainer-{i}" for i in itertools.count())


async def succeeds(client: Client, path: str, body: Any = None) -> Any:
    answer = await client.post(path, body)
    assert (answer.status, answer.body["success"]) == (200, True), answer.body
    return answer.body


def joining(port: int, name: str, rank: int = 1) -> dict[str, Any]:
    """The body that asks a server to join as the last rank."""
    address = {"master_address": "127.0.0.1", "master_port": port, "rank_offset": rank, "world_size": rank + 1}
    return {**address, "group_name": name, "backend": "gloo"}


def announcing(tensors: Mapping[str, torch.Tensor], name: str, **more: Any) -> dict[str, Any]:
    """The body that tells a server which tensors come next."""
    return {
        "names": list(tensors),
        "dtypes": [str(tensor.dtype).removeprefix("torch.") for tensor in tensors.values()],
        "shapes": [list(tensor.shape) for tensor in tensors.values()],
        "group_name": name,
        "load_format": "flattened_bucket",
        "flush_cache": False,
        "abort_all_requests": False,
        **more,
    }


class Trainer:
    def __init__(
        self, client: Client, name: str, group: dist.ProcessGroup, others: Sequence[dist.ProcessGroupGloo] = ()
    ) -> None:
        self.name = name
        self._others = others
        self._client = client
        self._group = group

    async def send(self, tensors: Mapping[str, torch.Tensor], **more: Any) -> None:
        receiving = self.announce(tensors, **more)
        flat = torch.cat([tensor.contiguous().view(torch.uint8).flatten() for tensor in tensors.values()])
        received = [torch.empty_like(flat) for _ in self._others]
        waiting = [
            other.broadcast([into], dist.BroadcastOptions()) for other, into in zip(self._others, received, strict=True)
        ]
        await asyncio.to_thread(dist.broadcast, flat, group_src=0, group=self._group)
        for wait in waiting:
            await asyncio.to_thread(wait.wait)
        assert all(torch.equal(into, flat) for into in received)
        answer = await receiving
        assert (answer.status, answer.body["success"]) == (200, True), answer.body

    def announce(self, tensors: Mapping[str, torch.Tensor], **more: Any) -> asyncio.Task[Answer]:
        body = announcing(tensors, self.name, **more)
        return asyncio.create_task(self._client.post("/update_weights_from_distributed", body))

    def leave(self) -> None:
        dist.destroy_process_group(self._group)


@asynccontextmanager
async def trainer_of(client: Client, others: int = 0) -> AsyncIterator[Trainer]:
    """A trainer in one group with the server, and with ranks of others before it; the caller ends the group."""
    name, port = next(_names), free_port()
    group = WeightGroup(name=name, address="127.0.0.1", port=port, world_size=2 + others, backend="gloo")
    ours = asyncio.create_task(asyncio.to_thread(join_group, group, 0, TIMEOUT))
    theirs = [asyncio.create_task(asyncio.to_thread(_other_rank, group, rank)) for rank in range(1, 1 + others)]
    await succeeds(client, "/init_weights_update_group", joining(port, name, 1 + others))
    yield Trainer(client, name, await ours, await asyncio.gather(*theirs))


def _other_rank(group: WeightGroup, rank: int) -> dist.ProcessGroupGloo:
    store: dist.Store = dist.TCPStore(group.address, group.port, group.world_size, False, timeout=TIMEOUT)
    # As torch's own groups meet; but that keeps one of a name in a process, and the trainer is here too.
    for prefix in (group.name, f"{group.name}/", "cpu/"):
        store = dist.PrefixStore(prefix, store)
    return dist.ProcessGroupGloo(store, rank, group.world_size, TIMEOUT)

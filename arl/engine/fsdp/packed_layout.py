"""How the radix tree of a packed row is told to attention kernels: as stretches, as blocks, as bounds, as a mask."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch

from arl.algorithm.prefix_tree import Block, PrefixOrder, RowPlan, Stretch

if TYPE_CHECKING:
    from torch.nn.attention.flex_attention import BlockMask


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PackedLayout:
    """What attends to what in a row of T tokens, as each kernel wants it said.

    stretches, blocks: see RowPlan. query_bounds, key_bounds int32[S+1]: where the queries and the keys of each of the
    S stretches begin and end. key_places int64[K]: the places in the row of these keys; None when they are the row,
    one after another. max_queries, max_keys: of a stretch. positions, subtree_stops int32[T]: see RowPlan.
    """

    stretches: tuple[Stretch, ...]
    blocks: tuple[Block, ...]
    query_bounds: torch.Tensor
    key_bounds: torch.Tensor
    key_places: torch.Tensor | None
    max_queries: int
    max_keys: int
    positions: torch.Tensor
    subtree_stops: torch.Tensor
    block_masks: dict[int | None, BlockMask] = field(default_factory=dict)

    @classmethod
    def of_plan(cls, plan: RowPlan, device: torch.device) -> PackedLayout:
        num_queries = [s.num_tokens for s in plan.stretches]
        num_keys = [s.num_tokens + s.num_context_tokens for s in plan.stretches]
        return cls(
            stretches=plan.stretches,
            blocks=tuple(plan.blocks()),
            query_bounds=_bounds(num_queries).to(device),
            key_bounds=_bounds(num_keys).to(device),
            key_places=plan.key_places().to(device) if plan.is_shared else None,
            max_queries=max(num_queries),
            max_keys=max(num_keys),
            positions=plan.positions().to(device, torch.int32),
            subtree_stops=plan.subtree_stops().to(device, torch.int32),
        )

    @classmethod
    def of(cls, lengths: tuple[int, ...], device: torch.device) -> PackedLayout:
        """Sequences end to end that share nothing."""
        return cls.of_plan(RowPlan.of(PrefixOrder.unshared(lengths)), device)


def _bounds(lengths: list[int]) -> torch.Tensor:
    return torch.tensor([0, *lengths], dtype=torch.int32).cumsum(0, dtype=torch.int32)

"""State and results of the cache ops, shared by their torch reference and their fast versions.

The ops themselves: kernels/cache_ops.py.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from echo_batch.kernels.cache_layout import AGE_BINS, FREE, NUM_COUNTS, NUM_TOTALS


class GroupMaps(NamedTuple):
    """Metadata of G selection groups, stacked (one group is a stack of one). Allocated once, changed in place.

    A row is free when its priority is FREE; then it maps nowhere. The two maps are inverse to each other.
    The last four fields are the workspace of the fast versions; the reference uses only `totals` of them.
    """

    priority: Tensor
    """int32 [G, N_G]: step in which the row was last used."""
    gpu_to_host: Tensor
    """int32 [G, N_G]: token slot of each GPU row."""
    host_to_gpu: Tensor
    """int32 [G, N_H]: GPU row of each token slot."""
    candidates: Tensor
    """int32 [G, C]: rows to give out in this step, free ones first, then the least recently used ones."""
    age_bins: Tensor
    """int32 [G, 2, AGE_BINS]: number of rows by age; where in `candidates` the rows of each bin go."""
    counts: Tensor
    """int32 [G, NUM_COUNTS]: counters of this step, not yet in `totals`, and the state of the candidate lists."""
    totals: Tensor
    """int64 [G, NUM_TOTALS]: rows since `reset`."""

    def group(self, group: int) -> "GroupMaps":
        """A view of one group, as a stack of one."""
        return GroupMaps(*(field[group : group + 1] for field in self))

    def reset(self) -> None:
        """Back to an empty GPU pool with all counters zero."""
        for field in (self.priority, self.gpu_to_host, self.host_to_gpu, self.candidates):
            field.fill_(FREE)
        for field in (self.age_bins, self.counts, self.totals):
            field.zero_()


def make_maps(
    num_groups: int, *, gpu_tokens: int, host_tokens: int, num_candidates: int, device: torch.device
) -> GroupMaps:
    """Maps of an empty GPU pool; `num_candidates` (C) bounds the rows that one step takes without a search."""

    def empty(*shape: int, dtype: torch.dtype = torch.int32) -> Tensor:
        return torch.empty((num_groups, *shape), dtype=dtype, device=device)

    maps = GroupMaps(
        priority=empty(gpu_tokens),
        gpu_to_host=empty(gpu_tokens),
        host_to_gpu=empty(host_tokens),
        candidates=empty(num_candidates),
        age_bins=empty(2, AGE_BINS),
        counts=empty(NUM_COUNTS),
        totals=empty(NUM_TOTALS, dtype=torch.int64),
    )
    maps.reset()
    return maps


class Marked(NamedTuple):
    """Boundary A of a fast resolve: hits are protected, misses claimed and listed; `place` finishes it."""

    rows: Tensor
    """int32 [B, k]: GPU row of every entry that was hit; -1 where nothing was selected. Of the entries that missed one
    slot the first is not written, each other one holds -2 - e: entry e is the next of them."""
    miss_slots: Tensor
    """int32 [B * k]: the slots that were missed, once each, and -1 for entries whose slot stands elsewhere."""
    miss_entries: Tensor
    """int32 [B * k]: the first entry of each of these slots. How many of both lists are in use stands in
    `GroupMaps.counts`."""
    marked_count: Tensor | None = None
    """int32 [1], not None: `place` may begin when this reaches `num_blocks`, before the launch that marks has ended (it
    still brings rows, into such as were set aside)."""
    num_blocks: int = 0


class Resolution(NamedTuple):
    """Where the rows of one selection are in the GPU pool, and which rows had to be brought there."""

    rows: Tensor
    """int32 [B, k]: GPU row of every selected slot; -1 where nothing was selected."""
    miss_slots: Tensor
    """int32 [M]: slots that were not resident, once each; -1 entries are to be skipped."""
    miss_rows: Tensor
    """int32 [M]: the GPU rows they were given."""
    miss_count: Tensor | None = None
    """int32 [1] on the device: entries of the two lists that are in use; None: all of them."""

"""Sizes of the two-pool KV cache: what is allocated, in tokens and in bytes. Pure arithmetic, no torch."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

from echo_batch.kernels.cache_layout import (
    AGE_BINS,
    CERTAIN_ENTRIES,
    LATE_ENTRIES,
    LATE_LISTS,
    NUM_COUNTS,
    NUM_TOTALS,
)
from echo_batch.kernels.formats import BLOCK_SIZE, IndexFormat, RowFormat

PrefetchMode = Literal["off", "branch", "fused"]

MAX_PREFETCH_ROWS = 4096
"""Per group and step: what the link brings in about the time that the indexer takes for 1.2M tokens on an H200."""
_PREFETCH_SHARE = 32
"""Of the GPU pool, prefetch may take one of so many rows, so that guesses cost little of the hit rate."""

_PREFETCH_COUNTER_BYTES = 4 * 8 + 8 * 5

NUM_CANDIDATES = 65536
"""GPU rows per group that are looked up in advance for each step: a batch of 31 may miss all of its 2,048 tokens."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheSpec:
    """One worker's cache.

    `group_layers[g]` lists the layers that share selection group g's top-k (one layer each but for IndexShare models).
    `host_tokens` (N_H) and `gpu_tokens` (N_G) are multiples of BLOCK_SIZE. With `offload` False there is no host pool:
    every token lives in the GPU pool and a row index is a token slot (then gpu_tokens == host_tokens).
    """

    group_layers: tuple[tuple[int, ...], ...]
    row_format: RowFormat
    index_format: IndexFormat
    index_topk: int
    host_tokens: int
    gpu_tokens: int
    offload: bool = True
    prefetch: PrefetchMode = "off"

    def __post_init__(self) -> None:
        assert self.host_tokens > 0 and self.host_tokens % BLOCK_SIZE == 0, self.host_tokens
        assert self.gpu_tokens > 0 and self.gpu_tokens % BLOCK_SIZE == 0, self.gpu_tokens
        assert self.offload or self.gpu_tokens == self.host_tokens
        assert self.offload or self.prefetch == "off"

    @property
    def num_layers(self) -> int:
        return sum(len(layers) for layers in self.group_layers)

    @property
    def num_groups(self) -> int:
        return len(self.group_layers)

    @property
    def num_blocks(self) -> int:
        return self.host_tokens // BLOCK_SIZE

    @property
    def group_of_layer(self) -> tuple[int, ...]:
        """Selection group of each layer."""
        group = [0] * self.num_layers
        for g, layers in enumerate(self.group_layers):
            for layer in layers:
                group[layer] = g
        return tuple(group)

    @property
    def prefetch_rows(self) -> int:
        """GPU rows per group that a step sets aside for prefetch; 0 without."""
        if self.prefetch == "off":
            return 0
        return min(MAX_PREFETCH_ROWS, self.gpu_tokens // _PREFETCH_SHARE)

    @property
    def host_pool_bytes(self) -> int:
        return self.num_layers * self.host_tokens * self.row_format.row_bytes if self.offload else 0

    @property
    def gpu_pool_bytes(self) -> int:
        return self.num_layers * self.gpu_tokens * self.row_format.row_bytes

    @property
    def index_cache_bytes(self) -> int:
        return self.num_groups * self.num_blocks * self.index_format.page_bytes

    @property
    def metadata_bytes(self) -> int:
        """Maps and priorities of every group (int32 each: one map of N_H, one map and the priorities of N_G), its
        candidate list and its counters."""
        if not self.offload:
            return 0
        counters = 4 * (2 * AGE_BINS + NUM_COUNTS) + 8 * NUM_TOTALS
        if self.prefetch_rows:
            # Rows set aside, the slots they are taken for, counts (kernels/prefetch_state.py).
            counters += 8 * self.prefetch_rows + _PREFETCH_COUNTER_BYTES
        shared = 0
        if self.prefetch == "fused" and self.prefetch_rows:
            counters += 4 * LATE_LISTS * LATE_ENTRIES
            shared = 4 * CERTAIN_ENTRIES
        return shared + self.num_groups * (4 * self.host_tokens + 8 * self.gpu_tokens + 4 * NUM_CANDIDATES + counters)


def minimum_gpu_tokens(context_lengths: Iterable[int], index_topk: int) -> int:
    """Smallest GPU pool (tokens) on which these requests can decode together: sum of min(k, L) + 1."""
    return sum(min(index_topk, length) + 1 for length in context_lengths)

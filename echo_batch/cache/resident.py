"""Rows addressed by token slot: the whole cache without offloading, and the GPU pool while everything fits it."""

from collections.abc import Collection, Sequence

import torch
from torch import Tensor

from echo_batch.cache.counters import CacheCounters
from echo_batch.cache.gpu_pool import GpuPool, make_gpu_pool
from echo_batch.cache.slots import slots_of_blocks
from echo_batch.cache.spec import CacheSpec
from echo_batch.kernels.cache_ops import CacheOps, select_cache_ops
from echo_batch.kernels.contracts import Resolution
from echo_batch.kernels.ops import Ops


class ResidentCache:
    """Every token lives in the GPU pool and a row is a token slot: nothing to look up, to evict or to recall.

    The cache without offloading, and what an OffloadedCache is made of while it is resident (then with its `pool`).
    Same face as OffloadedCache.
    """

    resident = True
    """Always; see OffloadedCache."""

    recalls = False
    """`recall` does nothing."""

    def __init__(
        self,
        spec: CacheSpec,
        device: torch.device,
        ops: Ops,
        *,
        poison: bool,
        cache_ops: CacheOps | None = None,
        pool: GpuPool | None = None,
    ) -> None:
        assert pool is not None or not spec.offload
        self.spec = spec
        self.device = device
        self.poison = poison
        self._ops = ops
        self._cache_ops = cache_ops or select_cache_ops(device)
        self._gpu = pool or make_gpu_pool(spec, device, poison=poison)
        self._nothing = torch.empty(0, dtype=torch.int32, device=device)
        self.fallbacks = torch.zeros((spec.num_groups, 1), dtype=torch.int32, device=device)
        """Batch rows whose selection the prediction did not serve, since `reset`."""

    def for_step(self, resident: bool) -> "ResidentCache":
        """Itself: there is only one way to address rows."""
        return self

    def begin_step(self) -> None:
        """Nothing to do: no row is ever evicted."""

    def end_step(self) -> None:
        """Nothing to do."""

    def append(self, group: int, slots: Tensor) -> Tensor:
        """Rows of new tokens: their slots."""
        return slots

    def append_all(self, slots: Tensor) -> Tensor:
        """Rows of new tokens in every group: their slots, int32 [groups, B]."""
        return slots.expand(self.spec.num_groups, -1)

    def write(self, layer: int, slots: Tensor, rows: Tensor, kv_rows: Tensor, keys: Tensor | None = None) -> None:
        """Write the new tokens' `kv_rows` (uint8 [B, row_bytes]); row -1 is skipped.

        keys: their packed indexer keys (uint8 [B, index row bytes]), with a group's first layer.
        """
        gpu = self._gpu.rows[layer]
        if keys is None:
            self._cache_ops.copy_rows(kv_rows, None, gpu, rows, None)
            return
        pages = self._gpu.index_pages[self.spec.group_of_layer[layer]]
        self._cache_ops.write_tokens(kv_rows, gpu, rows, None, slots, keys, pages, self.spec.index_format)

    def write_index(self, group: int, slots: Tensor, keys: Tensor) -> None:
        """Write packed indexer keys (uint8 [n, index row bytes]) of `slots` (int32 [n], -1 = none)."""
        self._ops.write_index_keys(self._gpu.index_pages[group], slots, keys, self.spec.index_format)

    def index_pages(self, group: int) -> Tensor:
        """Indexer keys of a group: uint8 [N_H / BLOCK_SIZE, page_bytes]."""
        return self._gpu.index_pages[group]

    def index_scores(
        self,
        group: int,
        query: Tensor,
        weights: Tensor,
        block_table: Tensor,
        seq_lens: Tensor,
        schedule: Tensor | None,
        predicted: Tensor,
    ) -> Tensor:
        """`ops.index_scores_paged` over the group's index keys; there is nothing to prefetch."""
        pages, fmt = self._gpu.index_pages[group], self.spec.index_format
        return self._ops.index_scores_paged(query, weights, pages, block_table, seq_lens, fmt, schedule)

    def select(
        self, group: int, scores: Tensor, seq_lens: Tensor, predicted: Tensor, block_table: Tensor
    ) -> Resolution:
        """The exact top-k of `scores` (fp32 [B, S]); see OffloadedCache."""
        slots, _ = self._ops.topk_positions(
            scores,
            seq_lens,
            self.spec.index_topk,
            predicted,
            update=True,
            block_table=block_table,
            fallback_count=self.fallbacks[group],
        )
        return self.resolve(group, slots)

    def resolve(self, group: int, slots: Tensor) -> Resolution:
        """Rows of a selection: its slots; nothing is ever missing."""
        return Resolution(slots, self._nothing, self._nothing)

    def recall(self, layer: int, resolution: Resolution) -> None:
        """Nothing to do: nothing is ever missing."""

    def gpu_rows(self, layer: int) -> Tensor:
        """The layer's rows: uint8 [N_G, row_bytes]."""
        return self._gpu.rows[layer]

    def write_host(self, layer: int, slots: Tensor, kv_rows: Tensor) -> None:
        """Write prefilled rows (uint8 [n, row_bytes]) of `slots` (int32 [n], -1 = none) to the one pool."""
        self._cache_ops.copy_rows(kv_rows, None, self._gpu.rows[layer], slots, None)

    def read_host(self, layer: int, slots: Tensor) -> Tensor:
        """Rows of `slots` (int32 [n]): uint8 [n, row_bytes], zeros for -1."""
        rows = torch.zeros((slots.shape[0], self.spec.row_format.row_bytes), dtype=torch.uint8, device=self.device)
        self._cache_ops.copy_rows(self._gpu.rows[layer], slots, rows, None, None)
        return rows

    def warm(self, group: int, slots: Tensor, layer_rows: Sequence[Tensor]) -> None:
        """Nothing to do: `write_host` put the rows where attention reads them."""

    def release(self, blocks: Sequence[int]) -> None:
        """Nothing to forget; with poison the rows of `blocks` become NaN."""
        if self.poison and blocks:
            slots = slots_of_blocks(torch.tensor(blocks, dtype=torch.int32, device=self.device))
            for layer in range(self.spec.num_layers):
                self._cache_ops.fill_rows(self._gpu.rows[layer], slots)

    def reset(self) -> None:
        """There are no maps: only counters become zero."""
        self.fallbacks.zero_()

    def prefetch_counters(self) -> None:
        """None: nothing is prefetched."""

    def counters(self) -> CacheCounters:
        """Mostly zero: without offloading there is nothing to hit or to miss, and counting selections would cost time.
        Waits for the device."""
        zeros = (0,) * self.spec.num_groups
        return CacheCounters(zeros, zeros, zeros, zeros, zeros, tuple(self.fallbacks[:, 0].tolist()))

    def check_invariants(self, live_blocks: Collection[int] | None = None) -> None:
        """Nothing to check: there are no maps."""

    def close(self) -> None:
        """Nothing to give back by hand."""

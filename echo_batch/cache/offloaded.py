"""The two-pool cache: every row in the host pool, those in use in the GPU pool.

Order of calls in a decode step: `begin_step` and `append_all`; per selection group `write` of its first layer with the
index keys, `index_scores`, then `select`; per layer `write` and `recall` (before attention); `end_step`. Between
steps: `write_host`, `write_index`, `warm`, `release`. On the GPU all of these only launch kernels of fixed shape, so a
step fits a CUDA graph.

Residency until pressure: while every slot in use has a GPU row of its own number (slot < N_G), the cache is *resident*.
The GPU pool then is the cache, addressed by slot; the host pool and the maps are not touched, and a step does what it
does without offloading (`for_step(True)`). `leave_residency` copies the rows to the host pool in one go and builds the
maps; from then on a step is managed (`for_step(False)`). Where a row is changes, what it holds does not.
"""

from collections.abc import Collection, Sequence

import torch
from torch import Tensor

from echo_batch.cache.counters import CacheCounters
from echo_batch.cache.gpu_pool import make_gpu_pool
from echo_batch.cache.host_pool import HostPool
from echo_batch.cache.prefetch import PrefetchCounters, make_prefetcher
from echo_batch.cache.resident import ResidentCache
from echo_batch.cache.slots import slots_of_blocks
from echo_batch.cache.spec import CacheSpec
from echo_batch.kernels.cache_layout import FALLBACKS, FREE, NUM_TOTALS
from echo_batch.kernels.cache_ops import CacheOps, select_cache_ops
from echo_batch.kernels.contracts import Resolution
from echo_batch.kernels.formats import BLOCK_SIZE
from echo_batch.kernels.ops import Ops
from echo_batch.kernels.prefetch_ops import PrefetchOps
from echo_batch.kernels.reference.cache_ops import VIOLATIONS

COMPARE_ROWS = 65536
"""Rows that `check_invariants` compares at a time."""


class OffloadedCache:
    """Host pool with every row, GPU pool with the rows in use; see the module docstring for the order of calls.

    `residency`: start resident, as after every `reset`.
    """

    recalls = True
    """`recall` may have rows to copy."""

    def __init__(
        self,
        spec: CacheSpec,
        device: torch.device,
        ops: Ops,
        *,
        poison: bool,
        cache_ops: CacheOps | None = None,
        residency: bool = False,
        prefetch_ops: PrefetchOps | None = None,
    ) -> None:
        assert spec.offload
        self.spec = spec
        self.device = device
        self.poison = poison
        self._ops = ops
        self._cache_ops = cache_ops or select_cache_ops(device)
        self._host = HostPool(spec, device, poison=poison)
        self._gpu = make_gpu_pool(spec, device, poison=poison)
        assert self._gpu.maps is not None
        self.maps = self._gpu.maps
        self.step = torch.zeros(1, dtype=torch.int32, device=device)
        self._group_maps = [self.maps.group(g) for g in range(spec.num_groups)]
        self._group_of_layer = spec.group_of_layer
        self._is_first = {layers[0] for layers in spec.group_layers}
        self._prefetcher = make_prefetcher(spec, self._gpu, self._host.rows, ops, prefetch_ops)
        self._num_reserved = spec.prefetch_rows
        self._num_appended = 0
        self._residency = residency
        self._by_slot = ResidentCache(spec, device, ops, poison=poison, cache_ops=self._cache_ops, pool=self._gpu)
        self.resident = residency
        """Whether rows are addressed by slot now. Steps must be launched accordingly."""
        self._appended: set[int] = set()
        self._resolved: set[int] = set()
        self._prefetched: dict[int, tuple[Tensor, Tensor]] = {}

    @property
    def may_be_resident(self) -> bool:
        """Whether the cache was made with residency."""
        return self._residency

    def for_step(self, resident: bool) -> "OffloadedCache | ResidentCache":
        """What a step of this kind calls. Both kinds can be captured at any time; they run only in their own mode."""
        return self._by_slot if resident else self

    def enter_residency(self) -> None:
        """Address rows by slot from now on. Only while the cache is empty: no slot holds a token."""
        for field in (self.maps.priority, self.maps.gpu_to_host, self.maps.host_to_gpu):
            field.fill_(FREE)
        self.resident = True

    def leave_residency(self, num_blocks: int, written: Tensor) -> None:
        """Copy the rows of all slots in the first `num_blocks` blocks to the host pool; the next step is managed.

        `written` (int32 [n], -1 = none, duplicates allowed): slots that hold a token and are to stay on the GPU; they
        count as used in the last step. Slots without a token must not be among them. Steps launched before go first.
        Waits for the device.
        """
        assert self.resident
        end = num_blocks * BLOCK_SIZE
        assert end <= self.spec.gpu_tokens, (end, self.spec.gpu_tokens)
        for layer in range(self.spec.num_layers):
            self._host.rows[layer, :end].copy_(self._gpu.rows[layer, :end], non_blocking=True)
        slots = written[written >= 0]
        # Rows keep their numbers: both maps are the identity there.
        self.maps.host_to_gpu[:, slots] = slots
        self.maps.gpu_to_host[:, slots] = slots
        self.maps.priority[:, slots] = self.step
        self.resident = False

    def begin_step(self) -> None:
        """Start a decode step: rows used in earlier steps may be evicted from now on."""
        self._appended.clear()
        self._resolved.clear()
        self._cache_ops.begin_step(self.maps, self.step, num_reserved=self._num_reserved)

    def end_step(self) -> None:
        """End a decode step: all groups are resolved."""
        if self._prefetcher is not None:
            self._prefetcher.end(self.step)

    def append(self, group: int, slots: Tensor) -> Tensor:
        """Give the step's new tokens `slots` (int32 [B], -1 = none) a GPU row each; returns int32 [B]."""
        return self._append(group, group + 1, slots)[0]

    def append_all(self, slots: Tensor) -> Tensor:
        """`append` for all groups in one launch, and what has to be before prefetch; returns int32 [groups, B]."""
        rows = self._append(0, self.spec.num_groups, slots)
        if self._prefetcher is not None:
            self._num_appended = slots.shape[0]
            self._prefetcher.begin(self.step, slots.shape[0])
            if self.poison:
                for layer, group in enumerate(self._group_of_layer):
                    self._cache_ops.fill_rows(self._gpu.rows[layer], self._prefetcher.state.rows[group])
        return rows

    def write(self, layer: int, slots: Tensor, rows: Tensor, kv_rows: Tensor, keys: Tensor | None = None) -> None:
        """Write the new tokens' `kv_rows` (uint8 [B, row_bytes]) to the GPU pool and to the host pool.

        keys: their packed indexer keys (uint8 [B, index row bytes]), with a group's first layer.
        """
        gpu, host = self._gpu.rows[layer], self._host.rows[layer]
        if keys is None:
            self._cache_ops.write_rows(kv_rows, gpu, rows, host, slots)
            return
        pages = self._gpu.index_pages[self._group_of_layer[layer]]
        self._cache_ops.write_tokens(kv_rows, gpu, rows, host, slots, keys, pages, self.spec.index_format)

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
        """`ops.index_scores_paged` over the group's index keys; with prefetch, rows that will probably be selected are
        copied meanwhile. predicted fp32 [B]: the k-th score that each row is expected to have. The launch before this
        call must be of what makes `query` and `weights`: it may still run when keys are read."""
        if self._prefetcher is not None:
            return self._prefetcher.scores(group, query, weights, block_table, seq_lens, predicted, self.step)
        return self._by_slot.index_scores(group, query, weights, block_table, seq_lens, schedule, predicted)

    def select(
        self, group: int, scores: Tensor, seq_lens: Tensor, predicted: Tensor, block_table: Tensor
    ) -> Resolution:
        """`resolve` the exact top-k of `scores` (fp32 [B, S], of `index_scores`); `recall` must follow for each layer.

        seq_lens int32 [B], block_table int32 [B, max_blocks]; predicted fp32 [B] is updated for the next step.
        """
        if self._prefetcher is not None and self._prefetcher.has_lists(group):
            skip = self._begin_resolve(group)
            resolution = self._prefetcher.resolve_topk(group, scores, seq_lens, predicted, block_table, self.step, skip)
            self._end_resolve(group, resolution)
            return resolution
        maps, k = self._group_maps[group], self.spec.index_topk
        resolve_topk = self._cache_ops.resolve_topk
        # Rows that come on a branch need not be there before the selection is known, but before it is looked up.
        has_branch = self._prefetcher is not None and self.spec.prefetch == "branch"
        if resolve_topk is None or has_branch:
            slots, _ = self._ops.topk_positions(
                scores,
                seq_lens,
                k,
                predicted,
                update=True,
                block_table=block_table,
                fallback_count=maps.counts[0, FALLBACKS : FALLBACKS + 1],
            )
            return self.resolve(group, slots)
        first = self.spec.group_layers[group][0]
        skip = self._begin_resolve(group)
        resolution = resolve_topk(
            maps,
            scores,
            seq_lens,
            k,
            predicted,
            block_table,
            self.step,
            self._host.rows[first],
            self._gpu.rows[first],
            skip=skip,
            late=None if self._prefetcher is None else self._prefetcher.state.group(group),
        )
        self._end_resolve(group, resolution)
        return resolution

    def resolve(self, group: int, slots: Tensor) -> Resolution:
        """Make the selection `slots` (int32 [B, k], -1 padded) resident; `recall` must follow for each layer."""
        first = self.spec.group_layers[group][0]
        skip = self._begin_resolve(group)
        resolution = self._cache_ops.resolve(
            self._group_maps[group], slots, self.step, self._host.rows[first], self._gpu.rows[first], skip=skip
        )
        self._end_resolve(group, resolution)
        return resolution

    def _begin_resolve(self, group: int) -> int | None:
        """How many rows others have taken from the head of the step's list; None: as many as there are batch rows."""
        assert group not in self._resolved, "a group is resolved once per step"
        self._resolved.add(group)
        if self._prefetcher is None:
            return None
        self._prefetcher.join()
        return self._num_appended + self._num_reserved

    def _end_resolve(self, group: int, resolution: Resolution) -> None:
        """What the group's other layers need."""
        layers = self.spec.group_layers[group]
        if self._prefetcher is not None and len(layers) > 1:
            self._prefetched[group] = self._prefetcher.rows_to_copy(group)
        if self.poison:
            # The first layer's rows have been copied; those of the others hold what was evicted until they are.
            for layer in layers[1:]:
                self._cache_ops.fill_rows(self._gpu.rows[layer], self._used_miss_rows(resolution))

    def recall(self, layer: int, resolution: Resolution) -> None:
        """Copy the rows of `layer` that the selection missed from the host to the GPU pool."""
        if layer in self._is_first:
            return  # resolve copied them in the same launch
        self._cache_ops.copy_rows(
            self._host.rows[layer],
            resolution.miss_slots,
            self._gpu.rows[layer],
            resolution.miss_rows,
            resolution.miss_count,
        )
        prefetched = self._prefetched.get(self._group_of_layer[layer])
        if prefetched is not None:
            # Into the group's first layer they were copied while it scored.
            slots, rows = prefetched
            self._cache_ops.copy_rows(self._host.rows[layer], slots, self._gpu.rows[layer], rows, None)

    def gpu_rows(self, layer: int) -> Tensor:
        """The layer's GPU pool: uint8 [N_G, row_bytes]."""
        return self._gpu.rows[layer]

    def host_rows(self, layer: int) -> Tensor:
        """The layer's host pool: uint8 [N_H, row_bytes], on the CPU. Without meaning while resident."""
        return self._host.rows[layer]

    def write_host(self, layer: int, slots: Tensor, kv_rows: Tensor) -> None:
        """Write prefilled rows (uint8 [n, row_bytes]) of `slots` (int32 [n], -1 = none) to where all rows are: the host
        pool, or the GPU pool while resident."""
        if self.resident:
            self._by_slot.write_host(layer, slots, kv_rows)
            return
        self._cache_ops.copy_rows(kv_rows, None, self._host.rows[layer], slots, None)

    def read_host(self, layer: int, slots: Tensor) -> Tensor:
        """Rows of `slots` (int32 [n]) as `write_host` and steps wrote them: uint8 [n, row_bytes], zeros for -1."""
        if self.resident:
            return self._by_slot.read_host(layer, slots)
        rows = torch.zeros((slots.shape[0], self.spec.row_format.row_bytes), dtype=torch.uint8, device=self.device)
        self._cache_ops.copy_rows(self._host.rows[layer], slots, rows, None, None)
        return rows

    def warm(self, group: int, slots: Tensor, layer_rows: Sequence[Tensor]) -> None:
        """Put rows of `slots` (int32 [n]) into free GPU rows as far as these go; never evicts.

        `layer_rows`: uint8 [n, row_bytes] for each layer of the group, equal to the host rows. Not inside a step.
        """
        if self.resident:
            return  # write_host put them there
        rows = self._cache_ops.warm(self._group_maps[group], slots, self.step)
        for layer, kv_rows in zip(self.spec.group_layers[group], layer_rows, strict=True):
            self._cache_ops.copy_rows(kv_rows, None, self._gpu.rows[layer], rows, None)

    def release(self, blocks: Sequence[int]) -> None:
        """Forget all slots of `blocks` in every group. Must come before the blocks are written again."""
        if not blocks:
            return
        if self.resident:
            self._by_slot.release(blocks)
            return
        numbers = torch.tensor(blocks, dtype=torch.int32, pin_memory=self.device.type == "cuda")
        numbers = numbers.to(self.device, non_blocking=True)
        if self.poison:
            self._poison_blocks(numbers)
        self._cache_ops.release(self.maps, numbers)

    def reset(self) -> None:
        """Empty the GPU pool, zero the counters and start again at step 0, resident if the cache may be."""
        self.resident = self._residency
        self.maps.reset()
        self._by_slot.reset()
        self.step.zero_()
        self._appended.clear()
        self._resolved.clear()
        self._prefetched.clear()
        if self._prefetcher is not None:
            self._prefetcher.reset()

    def prefetch_counters(self) -> PrefetchCounters | None:
        """What prefetch did, as numbers (waits for the device); None without it."""
        return None if self._prefetcher is None else self._prefetcher.counters()

    def counters(self) -> CacheCounters:
        """Counters as numbers (waits for the device). Resident steps look nothing up and only count fallbacks."""
        totals = self.maps.totals + self.maps.counts[:, :NUM_TOTALS]
        totals[:, FALLBACKS] += self._by_slot.fallbacks[:, 0]
        selected, missing, recalled, evicted, offloaded, fallbacks = (tuple(column.tolist()) for column in totals.T)
        hits = tuple(s - m for s, m in zip(selected, missing, strict=True))
        return CacheCounters(selected, hits, recalled, evicted, offloaded, fallbacks)

    def check_invariants(self, live_blocks: Collection[int] | None = None) -> None:
        """Raise AssertionError naming the first broken cache rule. Between steps only; waits for the device.

        `live_blocks`: blocks in use; rows of other blocks are leaks. A debug tool: it reads all resident rows twice.
        """
        counts = self._cache_ops.violations(self.maps, self.step).cpu()
        for group, column in counts.nonzero().tolist():
            raise AssertionError(f"group {group}: {int(counts[group, column])} {VIOLATIONS[column]}")
        if self.resident:
            if bool((self.maps.gpu_to_host >= 0).any()):
                raise AssertionError("rows are mapped while the cache is resident")
            return
        for group, layers in enumerate(self.spec.group_layers):
            rows = (self.maps.gpu_to_host[group] >= 0).nonzero()[:, 0].to(torch.int32)
            slots = self.maps.gpu_to_host[group][rows]
            if live_blocks is not None:
                leaked = set((slots // BLOCK_SIZE).tolist()) - set(live_blocks)
                if leaked:
                    raise AssertionError(f"group {group}: rows of freed blocks {sorted(leaked)} are resident")
            for layer in layers:
                for start in range(0, rows.shape[0], COMPARE_ROWS):
                    part = slice(start, start + COMPARE_ROWS)
                    different = (self._gpu.rows[layer][rows[part]] != self.read_host(layer, slots[part])).any(1)
                    if bool(different.any()):
                        slot = int(slots[part][different][0])
                        raise AssertionError(f"layer {layer}: slot {slot} differs between the GPU and the host pool")

    def close(self) -> None:
        """Give the host pool back; the cache cannot be used afterwards."""
        self._host.close()

    def _append(self, first: int, end: int, slots: Tensor) -> Tensor:
        groups = set(range(first, end))
        assert not groups & self._appended, "a group is appended to once per step"
        self._appended |= groups
        maps = self.maps if len(groups) == self.spec.num_groups else self._group_maps[first]
        rows = self._cache_ops.append(maps, slots, self.step)
        if self.poison:
            for group in groups:
                for layer in self.spec.group_layers[group]:
                    self._cache_ops.fill_rows(self._gpu.rows[layer], rows[group - first])
        return rows

    def _used_miss_rows(self, resolution: Resolution) -> Tensor:
        """The resolution's miss rows with unused entries set to -1."""
        if resolution.miss_count is None:
            return resolution.miss_rows
        position = torch.arange(resolution.miss_rows.shape[0], dtype=torch.int32, device=self.device)
        used = (position < resolution.miss_count) & (resolution.miss_slots >= 0)
        return torch.where(used, resolution.miss_rows, -1)

    def _poison_blocks(self, blocks: Tensor) -> None:
        """Fill the host rows of `blocks` and the GPU rows of their slots with NaN, before their maps are cleared."""
        slots = slots_of_blocks(blocks)
        for group, layers in enumerate(self.spec.group_layers):
            rows = self.maps.host_to_gpu[group][slots]
            for layer in layers:
                self._cache_ops.fill_rows(self._gpu.rows[layer], rows)
                self._cache_ops.fill_rows(self._host.rows[layer], slots)

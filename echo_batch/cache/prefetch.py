"""Prefetch in a decode step: what the step's selection will probably miss is copied while the indexer still scores.

Three modes with the same results, bit by bit. `off`: scores, then top-k, then `resolve` copies what is missing.
`branch`: the context is scored in ranges, and on a second branch of the graph each range's likely rows are copied while
the next is scored. `fused`: one kernel scores and copies. Which rows are likely: those that score above the k-th score
that the row is expected to have. Rows come from a set that is freed at the start of the step, so nothing that is in use
is ever evicted for a guess.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from echo_batch.cache.gpu_pool import GpuPool
from echo_batch.cache.spec import CacheSpec
from echo_batch.kernels.branch import Branch
from echo_batch.kernels.contracts import Resolution
from echo_batch.kernels.formats import BLOCK_SIZE
from echo_batch.kernels.ops import Ops
from echo_batch.kernels.prefetch_ops import PrefetchOps, select_prefetch_ops
from echo_batch.kernels.prefetch_state import CANDIDATES, DROPPED, LATE, PREFETCHED, make_prefetch_state
from echo_batch.kernels.score_lists import MAX_ROWS, ScoreLists, make_margins

NUM_RANGES = 2
"""Ranges of the context in `branch` mode; the last one's rows have nothing to hide behind and are not prefetched."""


@dataclass(frozen=True, slots=True)
class PrefetchCounters:
    """Rows per selection group since the last reset."""

    candidates: tuple[int, ...]
    """Scored above the expected k-th score (the newest token apart)."""
    prefetched: tuple[int, ...]
    wasted: tuple[int, ...]
    """Prefetched and not selected in the same step. (One that `resolve` evicted again in that step counts as used: it
    takes such rows last.)"""
    late: tuple[int, ...]
    """Candidates that were not looked at in time."""
    dropped: tuple[int, ...]
    """Missing candidates for which no row was left."""

    @property
    def used(self) -> tuple[int, ...]:
        """Prefetched and then selected in the same step."""
        return tuple(p - w for p, w in zip(self.prefetched, self.wasted, strict=True))


class Prefetcher:
    """Prefetch for one cache. Calls in a step: `begin` after the new tokens have got their rows; per selection group
    `scores`, then `join` before the selection is resolved (with `resolve_topk`, if it `has_lists`); `end`."""

    def __init__(self, spec: CacheSpec, pool: GpuPool, host_rows: Tensor, ops: Ops, prefetch_ops: PrefetchOps) -> None:
        assert spec.prefetch_rows > 0 and pool.maps is not None
        device = pool.rows.device
        self.spec = spec
        num_late_lists = prefetch_ops.num_late_lists if spec.prefetch == "fused" else 0
        self.state = make_prefetch_state(spec.num_groups, spec.prefetch_rows, device, num_late_lists=num_late_lists)
        self._maps, self._pool, self._host_rows = pool.maps, pool, host_rows
        self._ops, self._prefetch_ops = ops, prefetch_ops
        self._states = [self.state.group(g) for g in range(spec.num_groups)]
        self._group_maps = [pool.maps.group(g) for g in range(spec.num_groups)]
        self._wasted = torch.zeros(spec.num_groups, dtype=torch.int64, device=device)
        self._branch = Branch(device) if spec.prefetch == "branch" else None
        self._num_parts = NUM_RANGES - 1 if spec.prefetch == "branch" else 1
        # By batch row, not by request: whatever stands there is only a guess at how many scores to list.
        self._margins = make_margins(spec.num_groups, MAX_ROWS, device) if spec.prefetch == "fused" else None
        self._lists: dict[int, ScoreLists] = {}

    def begin(self, step: Tensor, num_appended: int) -> None:
        """Free the step's rows for prefetch; `num_appended` rows per group went to new tokens."""
        self._prefetch_ops.set_aside(self._maps, self.state, step, num_appended)

    def scores(
        self, group: int, query: Tensor, weights: Tensor, block_table: Tensor, seq_lens: Tensor, predicted: Tensor,
        step: Tensor,
    ) -> Tensor:  # fmt: skip
        """Index scores as `ops.index_scores_paged`, the likely ones among the missing rows on their way meanwhile.

        What was launched last must have made `query` or `weights`, nothing else that is read here: it may still run.
        predicted fp32 [B]: the k-th score that each row is expected to have, NaN where nothing is known.
        """
        layer = self.spec.group_layers[group][0]
        pages, host_rows, gpu_rows = self._pool.index_pages[group], self._host_rows[layer], self._pool.rows[layer]
        fmt = self.spec.index_format
        if self.spec.prefetch == "fused":
            width = block_table.shape[1] * BLOCK_SIZE
            lists = self._prefetch_ops.make_lists(query, width, fmt, self.spec.index_topk)
            if lists is not None:
                self._lists[group] = lists
            return self._prefetch_ops.index_scores_prefetch(
                query, weights, pages, block_table, seq_lens, fmt, predicted=predicted, maps=self._group_maps[group],
                state=self._states[group], step=step, host_rows=host_rows, gpu_rows=gpu_rows,
                margins=None if lists is None else self._margins_of(group, query.shape[0]), lists=lists,
                overlap=True,
            )  # fmt: skip
        assert self._branch is not None
        num_blocks = block_table.shape[1]
        borders = [num_blocks * i // NUM_RANGES for i in range(NUM_RANGES + 1)]
        scores = torch.empty((query.shape[0], num_blocks * BLOCK_SIZE), device=query.device)
        for number in range(NUM_RANGES):
            first, end = borders[number], borders[number + 1]
            self._prefetch_ops.index_scores_range(
                query, weights, pages, block_table, seq_lens, fmt, out=scores, first_block=first, end_block=end
            )
            if number == NUM_RANGES - 1:
                break
            with self._branch.fork():
                self._prefetch_ops.prefetch_rows(
                    self._group_maps[group], self._states[group].part(number, self._num_parts), scores, block_table,
                    seq_lens, predicted, step, host_rows, gpu_rows, first=first * BLOCK_SIZE, end=end * BLOCK_SIZE,
                )  # fmt: skip
        return scores

    def join(self) -> None:
        """What comes next comes after the copies that `scores` started. The top-k need not: it changes the prediction,
        but that only decides what else is copied."""
        if self._branch is not None:
            self._branch.join()

    def has_lists(self, group: int) -> bool:
        """Whether the group's `scores` of this step have left lists: then `resolve_topk` is faster than others."""
        return group in self._lists

    def resolve_topk(
        self,
        group: int,
        scores: Tensor,
        seq_lens: Tensor,
        predicted: Tensor,
        block_table: Tensor,
        step: Tensor,
        skip: int | None,
    ) -> Resolution:
        """Top-k from the lists, and resolve: `prefetch_ops.resolve_topk_lists` of the group. Once a step."""
        layer = self.spec.group_layers[group][0]
        return self._prefetch_ops.resolve_topk_lists(
            self._group_maps[group], scores, seq_lens, self.spec.index_topk, predicted,
            self._margins_of(group, scores.shape[0]), self._lists.pop(group), block_table, step,
            self._host_rows[layer], self._pool.rows[layer], skip=skip,
        )  # fmt: skip

    def _margins_of(self, group: int, num_rows: int) -> Tensor:
        assert self._margins is not None
        return self._margins[group, :num_rows]

    def rows_to_copy(self, group: int) -> tuple[Tensor, Tensor]:
        """Slots and GPU rows (int32 [R], -1: none) that `scores` may have linked, of which other layers of the group
        have no bytes yet. After `resolve`, which may have evicted some of them again."""
        rows = self.state.rows[group]
        slots = torch.where(rows >= 0, self._maps.gpu_to_host[group][rows.clamp(min=0)], -1)
        return slots, torch.where(slots >= 0, rows, -1)

    def end(self, step: Tensor) -> None:
        """Count what was prefetched for nothing: it still has the priority that prefetch gave it."""
        rows = self.state.rows
        is_wasted = (self._maps.priority.gather(1, rows.clamp(min=0).to(torch.int64)) == step - 1) & (rows >= 0)
        self._wasted += is_wasted.sum(1)

    def reset(self) -> None:
        """No rows set aside, all counts zero."""
        self.state.reset()
        self._wasted.zero_()
        self._lists.clear()

    def counters(self) -> PrefetchCounters:
        """Counters as numbers (waits for the device)."""
        columns = self.state.totals.T.tolist()
        return PrefetchCounters(
            candidates=tuple(columns[CANDIDATES]),
            prefetched=tuple(columns[PREFETCHED]),
            wasted=tuple(self._wasted.tolist()),
            late=tuple(columns[LATE]),
            dropped=tuple(columns[DROPPED]),
        )


def make_prefetcher(
    spec: CacheSpec, pool: GpuPool, host_rows: Tensor, ops: Ops, prefetch_ops: PrefetchOps | None = None
) -> Prefetcher | None:
    """The prefetcher that `spec` asks for, or None: switched off, or no rows to spare. `prefetch_ops`: other than those
    of the device (tests)."""
    if spec.prefetch_rows == 0:
        return None
    return Prefetcher(spec, pool, host_rows, ops, prefetch_ops or select_prefetch_ops(pool.rows.device, ops))

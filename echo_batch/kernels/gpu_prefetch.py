"""The ops of lossless prefetch on an NVIDIA GPU: the fused CUDA kernel where it fits, Triton for the rest."""

import dataclasses
from typing import Any

import torch
from torch import Tensor

from echo_batch.kernels.contracts import GroupMaps, Resolution
from echo_batch.kernels.cuda import indexer as cuda_indexer
from echo_batch.kernels.cuda import topk_lists as cuda_topk_lists
from echo_batch.kernels.cuda.topk import late_clusters
from echo_batch.kernels.formats import BLOCK_SIZE, IndexFormat
from echo_batch.kernels.ops import Ops
from echo_batch.kernels.prefetch_ops import PrefetchOps, RangesOfOps
from echo_batch.kernels.prefetch_state import PrefetchState
from echo_batch.kernels.score_lists import ScoreLists
from echo_batch.kernels.triton import indexer_prefetch as portable
from echo_batch.kernels.triton.cache_ops import place

LISTS = False
"""Whether the fused indexer lists likely scores for the top-k in a decode step. Off: the scoring
becomes longer and the top-k not shorter (docs/prefetch.md)."""
OVERLAP = False
"""Whether that top-k's blocks come as the indexer's go. With lists that makes a step as fast as without them."""


def gpu_prefetch_ops(device: torch.device, ops: Ops) -> PrefetchOps:
    """Prefetch ops whose scores have the bits of `ops.index_scores_paged` on this device."""
    has_kernel = cuda_indexer.available(device)
    found = _Dispatch(has_kernel, LISTS, RangesOfOps(ops))
    return PrefetchOps(
        num_late_lists=cuda_indexer.num_late_lists(device) if has_kernel else 0,
        set_aside=portable.set_aside,
        prefetch_rows=portable.prefetch_rows,
        index_scores_range=found.index_scores_range,
        index_scores_prefetch=found.index_scores_prefetch,
        make_lists=found.make_lists,
        resolve_topk_lists=resolve_topk_lists,
    )


def resolve_topk_lists(
    maps: GroupMaps,
    scores: Tensor,
    lengths: Tensor,
    k: int,
    predicted: Tensor,
    margins: Tensor,
    lists: ScoreLists,
    block_table: Tensor,
    step: Tensor,
    host_rows: Tensor,
    gpu_rows: Tensor,
    *,
    skip: int | None = None,
) -> Resolution:
    """See the reference. Two launches: the top-k with boundary A of `resolve` inside, and boundary B."""
    marked = cuda_topk_lists.mark_topk_lists(
        maps, scores, lengths, k, predicted, margins, lists, block_table, step, overlap=OVERLAP
    )
    return place(maps, marked, step, host_rows, gpu_rows, skip=scores.shape[0] if skip is None else skip)


@dataclasses.dataclass(frozen=True, slots=True)
class _Dispatch:
    has_kernel: bool
    """whether cuda/indexer.py can be compiled and run"""
    lists: bool
    ranges: RangesOfOps

    def make_lists(self, query: Tensor, width: int, fmt: IndexFormat, k: int) -> ScoreLists | None:
        if not self.lists or not self.has_kernel or not cuda_indexer.supports(query.shape[1], fmt):
            return None
        return cuda_indexer.make_lists(query.device) if cuda_topk_lists.supports(query.shape[0], width, k) else None

    def index_scores_range(
        self, query: Tensor, weights: Tensor, pages: Tensor, block_table: Tensor, seq_lens: Tensor, fmt: IndexFormat,
        **rest: Any,
    ) -> None:  # fmt: skip
        supported = self.has_kernel and cuda_indexer.supports(query.shape[1], fmt)
        score = cuda_indexer.index_scores_paged if supported else self.ranges
        score(query, weights, pages, block_table, seq_lens, fmt, **rest)

    def index_scores_prefetch(
        self, query: Tensor, weights: Tensor, pages: Tensor, block_table: Tensor, seq_lens: Tensor, fmt: IndexFormat,
        state: PrefetchState, **rest: Any,
    ) -> Tensor:  # fmt: skip
        if self.has_kernel and cuda_indexer.supports(query.shape[1], fmt):
            width, row_bytes = block_table.shape[1] * BLOCK_SIZE, rest["gpu_rows"].shape[1]
            if late_clusters(query.shape[0], width, row_bytes, query.device) == 0:
                state = state._replace(late=state.late[:, :0])  # nobody would read what it lists
            return cuda_indexer.index_scores_prefetch(
                query, weights, pages, block_table, seq_lens, fmt, state=state, **rest
            )
        # Scored by what scores without prefetch, so that the bits are the same.
        score = self.ranges.ops.index_scores_paged
        return portable.index_scores_prefetch(
            query, weights, pages, block_table, seq_lens, fmt, state=state, score=score, **rest
        )

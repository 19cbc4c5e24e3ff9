"""The ops of lossless prefetch on an NVIDIA GPU: the fused CUDA kernel where it fits, Triton for the rest."""

import dataclasses
from typing import Any

import torch
from torch import Tensor

from echo_batch.kernels.cuda import indexer as cuda_indexer
from echo_batch.kernels.cuda import runtime
from echo_batch.kernels.formats import IndexFormat
from echo_batch.kernels.ops import Ops
from echo_batch.kernels.prefetch_ops import PrefetchOps, RangesOfOps
from echo_batch.kernels.triton import indexer_prefetch as portable


def gpu_prefetch_ops(device: torch.device, ops: Ops) -> PrefetchOps:
    """Prefetch ops whose scores have the bits of `ops.index_scores_paged` on this device."""
    found = _Dispatch(runtime.available(device), RangesOfOps(ops))
    return PrefetchOps(
        set_aside=portable.set_aside,
        prefetch_rows=portable.prefetch_rows,
        index_scores_range=found.index_scores_range,
        index_scores_prefetch=found.index_scores_prefetch,
    )


@dataclasses.dataclass(frozen=True, slots=True)
class _Dispatch:
    cuda_kernels: bool
    ranges: RangesOfOps

    def index_scores_range(
        self, query: Tensor, weights: Tensor, pages: Tensor, block_table: Tensor, seq_lens: Tensor, fmt: IndexFormat,
        **rest: Any,
    ) -> None:  # fmt: skip
        supported = self.cuda_kernels and cuda_indexer.supports(query.shape[1], fmt)
        score = cuda_indexer.index_scores_paged if supported else self.ranges
        score(query, weights, pages, block_table, seq_lens, fmt, **rest)

    def index_scores_prefetch(
        self, query: Tensor, weights: Tensor, pages: Tensor, block_table: Tensor, seq_lens: Tensor, fmt: IndexFormat,
        **rest: Any,
    ) -> Tensor:  # fmt: skip
        if self.cuda_kernels and cuda_indexer.supports(query.shape[1], fmt):
            return cuda_indexer.index_scores_prefetch(query, weights, pages, block_table, seq_lens, fmt, **rest)
        # Scored by what scores without prefetch, so that the bits are the same.
        score = self.ranges.ops.index_scores_paged
        return portable.index_scores_prefetch(query, weights, pages, block_table, seq_lens, fmt, score=score, **rest)

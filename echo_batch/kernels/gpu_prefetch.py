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


def has_fused_indexer(device: torch.device, *, num_heads: int, fmt: IndexFormat) -> bool:
    """Whether one kernel copies while it scores (else prefetch comes after scoring and gains nothing)."""
    return runtime.available(device) and cuda_indexer.supports(num_heads, fmt)


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
        scores = self.ranges.ops.index_scores_paged(query, weights, pages, block_table, seq_lens, fmt)
        maps, state, predicted = rest["maps"], rest["state"], rest["predicted"]
        rows = rest["host_rows"], rest["gpu_rows"]
        portable.prefetch_rows(maps, state, scores, block_table, seq_lens, predicted, rest["step"], *rows)
        return scores

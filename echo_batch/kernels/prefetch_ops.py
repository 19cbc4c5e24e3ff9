"""The ops of lossless prefetch, chosen once by device. Contracts: kernels/reference/prefetch.py."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from echo_batch.kernels.contracts import GroupMaps, Resolution
from echo_batch.kernels.formats import BLOCK_SIZE, IndexFormat
from echo_batch.kernels.ops import Ops
from echo_batch.kernels.prefetch_state import PrefetchState
from echo_batch.kernels.reference import prefetch as reference
from echo_batch.kernels.score_lists import MAX_ROWS, MAX_TOPK, POSITION_BITS, ScoreLists, make_score_lists


class RangeScoresOp(Protocol):
    """Scores of blocks [first_block, end_block) of every row, written to their places in `out` fp32 [B, max_blocks *
    64]; the bits of `ops.index_scores_paged`."""

    def __call__(
        self,
        query: Tensor,
        weights: Tensor,
        pages: Tensor,
        block_table: Tensor,
        seq_lens: Tensor,
        fmt: IndexFormat,
        *,
        out: Tensor,
        first_block: int,
        end_block: int,
    ) -> None: ...


class PrefetchRowsOp(Protocol):
    """`prefetch.prefetch_rows`."""

    def __call__(
        self,
        maps: GroupMaps,
        state: PrefetchState,
        scores: Tensor,
        block_table: Tensor,
        seq_lens: Tensor,
        predicted: Tensor,
        step: Tensor,
        host_rows: Tensor,
        gpu_rows: Tensor,
        *,
        first: int = 0,
        end: int | None = None,
    ) -> None: ...


class ScoresPrefetchOp(Protocol):
    """`prefetch.index_scores_prefetch`."""

    def __call__(
        self,
        query: Tensor,
        weights: Tensor,
        pages: Tensor,
        block_table: Tensor,
        seq_lens: Tensor,
        fmt: IndexFormat,
        *,
        predicted: Tensor,
        maps: GroupMaps,
        state: PrefetchState,
        step: Tensor,
        host_rows: Tensor,
        gpu_rows: Tensor,
        margins: Tensor | None = None,
        lists: ScoreLists | None = None,
        overlap: bool = False,
    ) -> Tensor: ...


class ResolveListsOp(Protocol):
    """`prefetch.resolve_topk_lists`."""

    def __call__(
        self,
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
    ) -> Resolution: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefetchOps:
    """One callable per op, each with the signature of the reference function it is named after."""

    num_late_lists: int
    """of `PrefetchState.late`, that `index_scores_prefetch` fills"""
    set_aside: Callable[[GroupMaps, PrefetchState, Tensor, int], None]
    prefetch_rows: PrefetchRowsOp
    index_scores_range: RangeScoresOp
    index_scores_prefetch: ScoresPrefetchOp
    make_lists: Callable[[Tensor, int, IndexFormat, int], ScoreLists | None]
    """Lists for `index_scores_prefetch` with this query, rows of so many scores and a selection of k; None: it fills
    none, or should not."""
    resolve_topk_lists: ResolveListsOp


def reference_prefetch_ops(ops: Ops) -> PrefetchOps:
    """The torch references; scores by `ops`."""
    return PrefetchOps(
        num_late_lists=0,
        set_aside=reference.set_aside,
        prefetch_rows=reference.prefetch_rows,
        index_scores_range=RangesOfOps(ops),
        index_scores_prefetch=reference.index_scores_prefetch,
        make_lists=_reference_lists,
        resolve_topk_lists=reference.resolve_topk_lists,
    )


def _reference_lists(query: Tensor, width: int, fmt: IndexFormat, k: int) -> ScoreLists | None:
    fits = query.shape[0] <= MAX_ROWS and width <= 1 << POSITION_BITS and k <= MAX_TOPK
    return make_score_lists(min(4, query.shape[0]), query.device) if fits else None


def select_prefetch_ops(device: torch.device, ops: Ops) -> PrefetchOps:
    """The ops for `device`; scores that need no prefetch come from `ops`."""
    if device.type == "cpu":
        return reference_prefetch_ops(ops)
    # Triton and CUDA are only there, and only needed, on machines with a GPU.
    from echo_batch.kernels.gpu_prefetch import gpu_prefetch_ops

    return gpu_prefetch_ops(device, ops)


@dataclass(frozen=True, slots=True)
class RangesOfOps:
    """Ranges by an op that scores whole block tables."""

    ops: Ops

    def __call__(
        self,
        query: Tensor,
        weights: Tensor,
        pages: Tensor,
        block_table: Tensor,
        seq_lens: Tensor,
        fmt: IndexFormat,
        *,
        out: Tensor,
        first_block: int,
        end_block: int,
    ) -> None:
        first, end = first_block * BLOCK_SIZE, end_block * BLOCK_SIZE
        lengths = (seq_lens - first).clamp(min=0, max=end - first)
        table = block_table[:, first_block:end_block].contiguous()
        out[:, first:end] = self.ops.index_scores_paged(query, weights, pages, table, lengths, fmt)

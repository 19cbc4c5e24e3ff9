"""Indexer scores of a decode step by one kernel for Hopper that can prefetch KV rows meanwhile (method: indexer.cu).

Contracts: reference.indexer.index_scores_paged and reference.prefetch.index_scores_prefetch. Scores have the same bits
with and without prefetch, and with and without lists of the likely ones (kernels/score_lists.py).
"""

from typing import NamedTuple

import torch
from torch import Tensor

from echo_batch.kernels.contracts import GroupMaps
from echo_batch.kernels.cuda import runtime
from echo_batch.kernels.cuda.runtime import INT64, POINTER, UINT32, Argument, launch, load_kernel
from echo_batch.kernels.formats import BLOCK_SIZE, IndexFormat
from echo_batch.kernels.prefetch_state import PrefetchState
from echo_batch.kernels.score_lists import MAX_ROWS, POSITION_BITS, ScoreLists, make_score_lists

_KEY_BYTES = 128


class Instance(NamedTuple):
    """Compile-time choices of indexer.cu."""

    stages: int
    """pages that are in flight for each group"""
    consumers: int
    """groups of four warps that score"""
    read_once: bool = True
    """keys leave the L2 cache before anything else"""
    prefetch_warps: int = 0
    queue: int = 0
    """slots that the queue of a prefetch warp holds in one launch"""
    early: int = 0
    """pages before the end of a block's share from which on no row is started"""
    rows: int = 0
    """rows that a prefetch warp has in flight at most, if they are those of fp8"""

    def rows_at_once(self, vectors: int) -> int:
        """`rows`, or as many longer ones of so many vectors of 16 bytes as there are registers for."""
        return max(1, min(self.rows, 4 * 41 // vectors))

    def shared_bytes(self, heads: int) -> int:
        """sizeof(Shared) of indexer.cu, rounded up."""
        queues = max(1, self.prefetch_warps)
        pages = self.stages * (BLOCK_SIZE * (_KEY_BYTES + 4) + 16 + 16)
        return self.consumers * (heads * _KEY_BYTES + pages) + queues * 4 * (max(1, self.queue) + 1) + 64


SCORES_ONLY = Instance(stages=4, consumers=3)
WITH_PREFETCH = Instance(stages=4, consumers=3, prefetch_warps=4, queue=192, early=6, rows=2)


def available(device: torch.device) -> bool:
    """Whether the kernel can be compiled for `device`: only Hopper has its matrix instructions (wgmma)."""
    return runtime.available(device) and torch.cuda.get_device_capability(device)[0] == 9


def supports(num_heads: int, fmt: IndexFormat) -> bool:
    """Whether the kernel has an instance for this indexer."""
    return fmt.kind == "fp8" and fmt.head_dim == _KEY_BYTES and num_heads in (32, 64)


def index_scores_paged(
    query: Tensor,
    weights: Tensor,
    pages: Tensor,
    block_table: Tensor,
    seq_lens: Tensor,
    fmt: IndexFormat,
    schedule: Tensor | None = None,
    *,
    out: Tensor | None = None,
    first_block: int = 0,
    end_block: int | None = None,
    predicted: Tensor | None = None,
    margins: Tensor | None = None,
    lists: ScoreLists | None = None,
    instance: Instance = SCORES_ONLY,
) -> Tensor:
    """As reference.indexer.index_scores_paged for what it `supports`, but blocks past seq_lens are left undefined.

    With `out` (fp32 [B, max_blocks * 64]) scores are written there; blocks [first_block, end_block) of each row only.
    `lists` (of `make_lists`, with predicted and margins) are written as by reference.topk_lists.fill_lists.
    """
    scores = _scores(query, block_table) if out is None else out
    assert lists is None or (first_block == 0 and end_block is None), "lists of whole rows"
    bounds = (predicted, margins, lists)
    _launch(query, weights, pages, block_table, seq_lens, fmt, scores, first_block, end_block, instance, bounds, None)
    return scores


def make_lists(device: torch.device) -> ScoreLists:
    """Lists for the kernel on `device`: one for each of its blocks."""
    return make_score_lists(_num_blocks(device), device)


def num_late_lists(device: torch.device, instance: Instance = WITH_PREFETCH) -> int:
    """How many lists of `PrefetchState.late` a prefetch writes, if there are any."""
    return instance.prefetch_warps * _num_blocks(device)


def index_scores_prefetch(
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
    instance: Instance = WITH_PREFETCH,
) -> Tensor:
    """As reference.prefetch.index_scores_prefetch, in one launch; scores as `index_scores_paged` here.

    lists: of `make_lists`. host_rows: pinned. Rows of up to 1,280 bytes, a multiple of 16 (fp8 and bf16). Candidates
    that were not looked at in time are left in `state.late`.
    """
    scores = _scores(query, block_table)
    assert predicted.dtype == torch.float32 and predicted.is_contiguous() and step.dtype == torch.int32
    assert maps.priority.shape[0] == state.rows.shape[0] == 1, (maps.priority.shape, state.rows.shape)
    for rows in (host_rows, gpu_rows):
        assert rows.dtype == torch.uint8 and rows.is_contiguous() and rows.shape[1] % 16 == 0, rows.shape
    row_bytes = gpu_rows.shape[1]
    assert host_rows.shape[1] == row_bytes <= 1280, (host_rows.shape, gpu_rows.shape)
    num_lists = state.late.shape[1]
    assert num_lists in (0, num_late_lists(query.device, instance)), "a list for each prefetch warp, or none"
    arguments: tuple[tuple[Argument, type], ...] = (
        (host_rows, POINTER),
        (gpu_rows, POINTER),
        (maps.host_to_gpu, POINTER),
        (maps.gpu_to_host, POINTER),
        (maps.priority, POINTER),
        (state.rows, POINTER),
        (state.rows.shape[1], UINT32),
        (state.taken, POINTER),
        (state.totals, POINTER),
        (step, POINTER),
        (state.late if num_lists > 0 else None, POINTER),
    )
    _launch(
        query,
        weights,
        pages,
        block_table,
        seq_lens,
        fmt,
        scores,
        0,
        None,
        instance,
        (predicted, margins, lists),
        (row_bytes // 16, arguments),
        overlap=overlap,
    )
    return scores


_NO_PREFETCH: tuple[int, tuple[tuple[Argument, type], ...]] = (
    1,
    (
        *(((None, POINTER),) * 6),
        (0, UINT32),
        *(((None, POINTER),) * 4),
    ),
)


def _num_blocks(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count


def _scores(query: Tensor, block_table: Tensor) -> Tensor:
    return torch.empty(query.shape[0], block_table.shape[1] * BLOCK_SIZE, dtype=torch.float32, device=query.device)


def _launch(
    query: Tensor,
    weights: Tensor,
    pages: Tensor,
    block_table: Tensor,
    seq_lens: Tensor,
    fmt: IndexFormat,
    scores: Tensor,
    first_block: int,
    end_block: int | None,
    instance: Instance,
    bounds: tuple[Tensor | None, Tensor | None, ScoreLists | None],
    prefetch: tuple[int, tuple[tuple[Argument, type], ...]] | None,
    *,
    overlap: bool = False,
) -> None:
    num_rows, num_heads, _ = query.shape
    max_blocks = block_table.shape[1]
    assert supports(num_heads, fmt) and query.dtype == torch.float8_e4m3fn, (query.shape, query.dtype)
    assert query.is_contiguous() and weights.is_contiguous() and weights.dtype == torch.float32
    assert pages.is_contiguous() and pages.shape[1] == fmt.page_bytes and pages.data_ptr() % 16 == 0
    assert block_table.dtype == seq_lens.dtype == torch.int32, (block_table.dtype, seq_lens.dtype)
    assert block_table.stride(1) == 1 and seq_lens.is_contiguous()
    assert scores.shape == (num_rows, max_blocks * BLOCK_SIZE) and scores.stride(1) == 1, scores.shape
    if num_rows == 0 or max_blocks == 0:
        return
    vectors, arguments = prefetch or _NO_PREFETCH
    device = query.device
    predicted, margins, lists = bounds
    entries = headers = None
    if lists is not None:
        entries, headers = lists
        assert predicted is not None and margins is not None, "lists need bounds"
        for bound in (predicted, margins):
            assert bound.is_contiguous() and bound.dtype == torch.float32 and bound.shape == (num_rows,), bound.shape
        assert entries.is_contiguous() and headers.is_contiguous() and entries.shape[0] == _num_blocks(device)
        assert num_rows <= MAX_ROWS and scores.shape[1] <= 1 << POSITION_BITS, scores.shape
    kernel = load_kernel(
        "indexer.cu",
        "index_scores",
        (
            ("HEADS", num_heads),
            ("STAGES", instance.stages),
            ("READ_ONCE", int(instance.read_once)),
            ("CONSUMERS", instance.consumers),
            ("PREFETCH", instance.prefetch_warps if prefetch else 0),
            ("QUEUE", max(1, instance.queue)),
            ("EARLY", instance.early),
            ("VECTORS", vectors),
            ("ROWS", instance.rows_at_once(vectors)),
            ("LISTS", int(lists is not None)),
            ("OVERLAP", int(overlap)),
        ),
        instance.shared_bytes(num_heads),
        device.index,
    )
    launch(
        kernel,
        (_num_blocks(device), 1, 1),
        32 * (5 * instance.consumers + (instance.prefetch_warps if prefetch else 0)),
        (
            (query, POINTER),
            (weights, POINTER),
            (pages, POINTER),
            (block_table, POINTER),
            (block_table.stride(0), INT64),
            (seq_lens, POINTER),
            (num_rows, UINT32),
            (first_block, UINT32),
            (max_blocks if end_block is None else min(end_block, max_blocks), UINT32),
            (scores, POINTER),
            (scores.stride(0), INT64),
            (predicted, POINTER),
            (margins, POINTER),
            (entries, POINTER),
            (headers, POINTER),
            (0 if entries is None else entries.shape[1], UINT32),
            *arguments,
        ),
        overlap=overlap,
    )

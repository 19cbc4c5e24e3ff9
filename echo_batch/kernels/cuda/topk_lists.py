"""Exact top-k from lists of likely scores, one block a row (kernel and method: topk_lists.cu)."""

import torch
from torch import Tensor

from echo_batch.kernels import cache_layout as layout
from echo_batch.kernels.contracts import GroupMaps, Marked
from echo_batch.kernels.cuda.runtime import INT64, POINTER, UINT32, Argument, launch, load_kernel
from echo_batch.kernels.cuda.topk import MAX_WIDTH
from echo_batch.kernels.score_lists import MAX_ENTRIES, MAX_ROWS, MAX_TOPK, ScoreLists

THREADS = 1024
MAX_LISTS = 256
"""Multiprocessors of the largest GPU, rounded up: scoring has one list for each."""
_SHARED_BYTES = 12 << 10
"""At least sizeof(Shared) of topk_lists.cu."""


def supports(num_rows: int, width: int, k: int) -> bool:
    """Whether there is a kernel for `num_rows` rows of so many scores."""
    return num_rows <= MAX_ROWS and width <= MAX_WIDTH and k <= MAX_TOPK


def shared_bytes(width: int, k: int) -> int:
    """Shared memory of a block: its state, the selection, the keys taken from a row, a bit for every position."""
    return _SHARED_BYTES + 4 * (k + 1) + 8 * MAX_ENTRIES + 4 * (-(-width // 32))


def topk_lists(
    scores: Tensor,
    lengths: Tensor,
    k: int,
    predicted: Tensor,
    margins: Tensor,
    lists: ScoreLists,
    *,
    block_table: Tensor | None = None,
    num_whole: Tensor | None = None,
    threads: int = THREADS,
    overlap: bool = False,
) -> tuple[Tensor, Tensor]:
    """As reference.topk_lists.topk_lists for what it `supports`.

    num_whole: int32. `overlap`: blocks may come as those of the kernel before go, and wait for its end there.
    """
    num_rows, _ = scores.shape
    positions = torch.empty(num_rows, k, dtype=torch.int32, device=scores.device)
    kth = torch.empty(num_rows, dtype=torch.float32, device=scores.device)
    marks: tuple[tuple[Argument, type], ...] = ((None, POINTER),) * 7
    _launch(
        scores, lengths, k, predicted, margins, lists, positions, kth, block_table, num_whole, marks, threads, overlap
    )
    return positions, kth


def mark_topk_lists(
    maps: GroupMaps,
    scores: Tensor,
    lengths: Tensor,
    k: int,
    predicted: Tensor,
    margins: Tensor,
    lists: ScoreLists,
    block_table: Tensor,
    step: Tensor,
    *,
    max_delay: int = 0,
    threads: int = THREADS,
    overlap: bool = False,
) -> Marked:
    """The slots that `topk_lists` selects, looked up in the maps of one group: boundary A of resolve.

    In the same launch. Rows that were not selected from their lists count as fallbacks. `max_delay`: clock cycles that
    warps wait before the look-up at most (tests of races). `overlap`: as of `topk_lists`.
    """
    num_rows = scores.shape[0]
    assert maps.priority.shape[0] == 1 and num_rows * k < 1 << 31, (maps.priority.shape, num_rows)
    rows = torch.empty(num_rows, k, dtype=torch.int32, device=scores.device)
    miss_slots, miss_entries = torch.empty(2, num_rows * k, dtype=torch.int32, device=scores.device)
    counts = maps.counts[0]
    num_whole = counts[layout.FALLBACKS :]
    marks = (
        (miss_slots, POINTER),
        (miss_entries, POINTER),
        (counts[layout.MISSING :], POINTER),
        (counts[layout.SELECTED :], POINTER),
        (maps.priority, POINTER),
        (maps.host_to_gpu, POINTER),
        (step, POINTER),
    )
    _launch(
        scores, lengths, k, predicted, margins, lists, rows, None, block_table, num_whole, marks, threads, overlap,
        max_delay,
    )  # fmt: skip
    return Marked(rows, miss_slots, miss_entries)


def _launch(
    scores: Tensor,
    lengths: Tensor,
    k: int,
    predicted: Tensor,
    margins: Tensor,
    lists: ScoreLists,
    rows: Tensor,
    kth: Tensor | None,
    block_table: Tensor | None,
    num_whole: Tensor | None,
    marks: tuple[tuple[Argument, type], ...],
    threads: int,
    overlap: bool,
    max_delay: int = 0,
) -> None:
    num_rows, width = scores.shape
    num_lists, capacity, _ = lists.entries.shape
    assert supports(num_rows, width, k) and k > 0 and num_lists <= MAX_LISTS, (scores.shape, k, num_lists)
    assert scores.dtype == torch.float32 and lengths.dtype == torch.int32 and lengths.is_contiguous()
    assert scores.stride(1) == 1, scores.stride()
    for state in (predicted, margins):
        assert state.dtype == torch.float32 and state.is_contiguous() and state.shape == (num_rows,), state.shape
    assert lists.entries.is_contiguous() and lists.headers.is_contiguous()
    assert block_table is None or (block_table.dtype == torch.int32 and block_table.stride(1) == 1)
    if num_rows == 0:
        return
    stride = scores.stride(0)
    is_aligned = stride % 4 == 0 and width % 4 == 0 and scores.data_ptr() % 16 == 0
    kernel = load_kernel(
        "topk_lists.cu",
        "topk_lists",
        (
            ("THREADS", threads),
            ("MAX_ENTRIES", MAX_ENTRIES),
            ("MAX_LISTS", -(-num_lists // 32) * 32),
            ("ALIGNED", int(is_aligned)),
            ("MARK", int(marks[0][0] is not None)),
            ("MAX_DELAY", max_delay),
        ),
        shared_bytes(MAX_WIDTH, MAX_TOPK),
        scores.device.index,
    )
    launch(
        kernel._replace(shared_bytes=shared_bytes(width, k)),
        (num_rows, 1, 1),
        threads,
        (
            (scores, POINTER),
            (stride, INT64),
            (width, UINT32),
            (lengths, POINTER),
            (predicted, POINTER),
            (margins, POINTER),
            (k, UINT32),
            (lists.entries, POINTER),
            (lists.headers, POINTER),
            (num_lists, UINT32),
            (capacity, UINT32),
            (rows, POINTER),
            (kth, POINTER),
            (block_table, POINTER),
            (0 if block_table is None else block_table.stride(0), INT64),
            (num_whole, POINTER),
            *marks,
        ),
        overlap=overlap,
    )

"""Exact top-k of index scores in one launch, on GPUs with block clusters (kernel and method: topk.cu).

In a decode step the same launch looks the selection up in the cache's maps (`mark_topk`), which otherwise is a launch
that waits for this one and does nothing but follow pointers.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from echo_batch.kernels import cache_layout as layout
from echo_batch.kernels.contracts import GroupMaps, Marked
from echo_batch.kernels.cuda.runtime import INT32, INT64, POINTER, UINT32, Kernel, launch, load_kernel

_CLUSTER = 8
"""Blocks that share a row: the largest portable cluster."""
_SHARED_BYTES = 16384
"""At least sizeof(Shared) of topk.cu: its SCORES_OFFSET."""
MAX_WIDTH = 1 << 20
"""Positions have 20 bits in the kernel's keys."""


def topk_positions(
    scores: Tensor,
    lengths: Tensor,
    k: int,
    predicted: Tensor | None = None,
    *,
    update: bool = False,
    block_table: Tensor | None = None,
    fallback_count: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """As reference.topk.topk_positions, with an optional prediction that only makes it faster (design: top-k).

    scores fp32 [T, S] (S up to 2^20, unit stride in a row), lengths int32 [T], predicted fp32 [T]: the expected k-th
    score of each row, NaN where unknown. With `update`, predicted becomes 0.5 * predicted + 0.5 * kth (kth where it was
    NaN) in rows longer than k. Returns positions int32 [T, k] ascending, then -1 (their token slots if a block_table
    int32 [T, max_blocks] is given); kth fp32 [T]. `fallback_count`: also counts rows for which one histogram around the
    prediction was not enough.
    """
    num_rows, width = scores.shape
    assert predicted is not None or not update
    assert block_table is None or (block_table.dtype == torch.int32 and block_table.stride(1) == 1)
    positions = torch.empty(num_rows, k, dtype=torch.int32, device=scores.device)
    kth = torch.empty(num_rows, dtype=torch.float32, device=scores.device)
    if num_rows == 0:
        return positions, kth
    kernel, num_threads = _load(scores, lengths, k, predicted)
    # Grids have at most 65,535 rows of blocks.
    for start in range(0, num_rows, 65535):
        part = slice(start, start + 65535)
        launch(
            kernel,
            (_CLUSTER, min(65535, num_rows - start), 1),
            num_threads,
            (
                (scores[part], POINTER),
                (scores.stride(0), INT64),
                (width, UINT32),
                (lengths[part], POINTER),
                (None if predicted is None else predicted[part], POINTER),
                (int(update), INT32),
                (k, UINT32),
                (positions[part], POINTER),
                (kth[part], POINTER),
                (None if block_table is None else block_table[part], POINTER),
                (0 if block_table is None else block_table.stride(0), INT64),
                (fallback_count, POINTER),
            ),
        )
    return positions, kth


def mark_topk(
    maps: GroupMaps,
    scores: Tensor,
    lengths: Tensor,
    k: int,
    predicted: Tensor,
    block_table: Tensor,
    step: Tensor,
    *,
    max_delay: int = 0,
) -> Marked:
    """The slots that `topk_positions` selects (with `update`), looked up in the maps of one group: boundary A of
    resolve, in the same launch. `max_delay`: clock cycles that warps wait before it at most (tests of races).
    """
    num_rows, width = scores.shape
    assert maps.priority.shape[0] == 1 and num_rows * k < 1 << 31 and num_rows <= 65535, (maps.priority.shape, num_rows)
    assert block_table.dtype == torch.int32 and block_table.stride(1) == 1
    rows = torch.empty(num_rows, k, dtype=torch.int32, device=scores.device)
    miss_slots, miss_entries = torch.empty(2, num_rows * k, dtype=torch.int32, device=scores.device)
    counts = maps.counts[0]
    if num_rows > 0:
        kernel, num_threads = _load(scores, lengths, k, predicted, mark=True, max_delay=max_delay)
        launch(
            kernel,
            (_CLUSTER, num_rows, 1),
            num_threads,
            (
                (scores, POINTER),
                (scores.stride(0), INT64),
                (width, UINT32),
                (lengths, POINTER),
                (predicted, POINTER),
                (1, INT32),
                (k, UINT32),
                (rows, POINTER),
                (None, POINTER),  # the k-th scores: nobody asks for them
                (block_table, POINTER),
                (block_table.stride(0), INT64),
                (counts[layout.FALLBACKS :], POINTER),
                (miss_slots, POINTER),
                (miss_entries, POINTER),
                (counts[layout.MISSING :], POINTER),
                (counts[layout.SELECTED :], POINTER),
                (maps.priority, POINTER),
                (maps.host_to_gpu, POINTER),
                (step, POINTER),
            ),
        )
    return Marked(rows, miss_slots, miss_entries)


def _load(
    scores: Tensor, lengths: Tensor, k: int, predicted: Tensor | None, *, mark: bool = False, max_delay: int = 0
) -> tuple[Kernel, int]:
    """The kernel for these arguments, and its threads a block."""
    num_rows, width = scores.shape
    assert scores.dtype == torch.float32 and lengths.dtype == torch.int32 and lengths.is_contiguous()
    assert scores.stride(1) == 1 and width <= MAX_WIDTH, (scores.stride(), width)
    assert predicted is None or (predicted.dtype == torch.float32 and predicted.is_contiguous())
    assert k > 0
    aligned = scores.stride(0) % 4 == 0 and width % 4 == 0 and scores.data_ptr() % 16 == 0
    instance = choose_instance(num_rows, width)
    kernel = load_kernel(
        "topk.cu",
        "topk_positions",
        tuple(instance_defines(instance, aligned=aligned, mark=mark, max_delay=max_delay).items()),
        _SHARED_BYTES + (16 * instance.threads * instance.chunks if instance.in_shared else 0),
        scores.device.index,
    )
    return kernel, instance.threads


class Instance(NamedTuple):
    """Compile-time choices of topk.cu."""

    threads: int
    min_blocks: int
    chunks: int
    resident: bool
    in_shared: bool = False


def choose_instance(num_rows: int, width: int) -> Instance:
    """The instance for rows of this width; a pure function of the shape.

    Few rows: the largest blocks, one on a multiprocessor, for latency. Many: two smaller ones, so that one works while
    the other waits (B=32, L=65,536: 18 against 23 us; B=256, L=98,304: 110 against 156 us on an H200). An H200 runs at
    most 16 clusters of blocks that fill a multiprocessor at once, 32 of the smaller ones.
    """
    small, large = (-(-width // (_CLUSTER * threads * 4)) for threads in (512, 1024))
    if num_rows > 16 and small <= 12:
        return Instance(512, 2, max(1, small), True, in_shared=small > 6)
    if large <= 5:
        return Instance(1024, 1, max(1, large), True)
    # The row does not fit into registers: it is read again in every pass.
    return Instance(1024, 1, 4, False)


def instance_defines(instance: Instance, *, aligned: bool, mark: bool, max_delay: int = 0) -> dict[str, int]:
    """What topk.cu is compiled with. `aligned`: rows of scores start on 16 bytes; `mark`: for `mark_topk`."""
    return {
        "CLUSTER": _CLUSTER,
        "THREADS": instance.threads,
        "MIN_BLOCKS": instance.min_blocks,
        "MAX_CHUNKS": instance.chunks,
        "RESIDENT": int(instance.resident),
        "IN_SHARED": int(instance.in_shared),
        "ALIGNED": int(aligned),
        "MARK": int(mark),
        "MAX_DELAY": max_delay,
    }

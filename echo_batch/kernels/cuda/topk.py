"""Exact top-k of index scores in one launch, on GPUs with block clusters (kernel and method: topk.cu).

In a decode step the same launch looks the selection up in the cache's maps (`mark_topk`), which otherwise is a launch
that waits for this one and does nothing but follow pointers.
"""

import functools
from typing import NamedTuple

import torch
from torch import Tensor

from echo_batch.kernels import cache_layout as layout
from echo_batch.kernels.contracts import GroupMaps, Marked
from echo_batch.kernels.cuda.runtime import (
    INT32,
    INT64,
    POINTER,
    UINT32,
    Argument,
    Kernel,
    launch,
    load_kernel,
    max_clusters,
)
from echo_batch.kernels.prefetch_state import PrefetchState

_CLUSTER = 8
"""Blocks that share a row: the largest portable cluster."""
_SHARED_BYTES = 16384
"""At least sizeof(Shared) of topk.cu: its SCORES_OFFSET."""
MAX_WIDTH = 1 << 20
"""Positions have 20 bits in the kernel's keys."""
_LARGE_AT_ONCE = 15
"""Clusters of the largest blocks that an H200 runs at once, by the driver's count."""
_LATE_CLUSTERS = 4
"""That bring what the prefetch did not, at most."""
_LATE_VECTORS = 96
"""Vectors that one of their warps has in flight at most, in whole rows: there are no registers for more."""

_Arguments = tuple[tuple[Argument, type], ...]


class Late(NamedTuple):
    """A prefetch that is not over yet (of one group), and where rows are: uint8 [N_H, row_bytes], pinned, and [N_G,
    row_bytes]."""

    state: PrefetchState
    host_rows: Tensor
    gpu_rows: Tensor


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
    late: Late | None = None,
    max_delay: int = 0,
) -> Marked:
    """The slots that `topk_positions` selects (with `update`), looked up in the maps of one group: boundary A of
    resolve, in the same launch.

    With `late` blocks come as those of the kernel before go, and wait for its end there; beside them the prefetch goes
    on, as far as there is room for other clusters, which reserve rows before that end. `max_delay`: clock cycles that
    warps wait before the look-up at most (tests of races).
    """
    num_rows, width = scores.shape
    assert maps.priority.shape[0] == 1 and num_rows * k < 1 << 31 and num_rows <= 65535, (maps.priority.shape, num_rows)
    assert block_table.dtype == torch.int32 and block_table.stride(1) == 1
    rows = torch.empty(num_rows, k, dtype=torch.int32, device=scores.device)
    miss_slots, miss_entries = torch.empty(2, num_rows * k, dtype=torch.int32, device=scores.device)
    counts = maps.counts[0]
    num_clusters = vectors = 0
    if num_rows > 0:
        late_arguments: _Arguments = ()
        if late is not None and late.state.late.shape[1] > 0:
            num_clusters = late_clusters(num_rows, width, late.gpu_rows.shape[1], scores.device)
        if late is not None and num_clusters > 0:
            vectors, late_arguments = late.gpu_rows.shape[1] // 16, _late_arguments(late, maps, num_rows)
        kernel, num_threads = _load(scores, lengths, k, predicted, mark=True, max_delay=max_delay, vectors=vectors)
        launch(
            kernel,
            (_CLUSTER, num_rows + num_clusters, 1),
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
                *late_arguments,
            ),
            overlap=late is not None,
        )
    marked = Marked(rows, miss_slots, miss_entries)
    if num_clusters == 0:
        return marked
    return marked._replace(marked_count=counts[layout.NUM_MARKED :][:1], num_blocks=_CLUSTER * num_rows)


def _late_arguments(late: Late, maps: GroupMaps, num_rows: int) -> _Arguments:
    """The arguments that come last."""
    state, host_rows, gpu_rows = late
    assert state.rows.shape[0] == 1 and state.rows.is_contiguous() and state.late.is_contiguous(), state.rows.shape
    assert num_rows * _CLUSTER * 32 * 32 <= state.certain.shape[1], (num_rows, state.certain.shape)
    for rows in (host_rows, gpu_rows):
        assert rows.dtype == torch.uint8 and rows.is_contiguous() and rows.shape[1] % 16 == 0, rows.shape
    assert host_rows.shape[1] == gpu_rows.shape[1] <= 1280, (host_rows.shape, gpu_rows.shape)
    return (
        (num_rows, UINT32),
        (state.late, POINTER),
        (state.late.shape[1], UINT32),
        (state.certain, POINTER),
        (host_rows, POINTER),
        (gpu_rows, POINTER),
        (maps.gpu_to_host, POINTER),
        (state.rows, POINTER),
        (state.rows.shape[1], UINT32),
        (state.taken, POINTER),
        (state.totals, POINTER),
        (maps.counts[0, layout.NUM_MARKED :], POINTER),
    )


def _load(
    scores: Tensor,
    lengths: Tensor,
    k: int,
    predicted: Tensor | None,
    *,
    mark: bool = False,
    max_delay: int = 0,
    vectors: int = 0,
) -> tuple[Kernel, int]:
    """The kernel for these arguments, and its threads a block."""
    width = scores.shape[1]
    assert scores.dtype == torch.float32 and lengths.dtype == torch.int32 and lengths.is_contiguous()
    assert scores.stride(1) == 1 and width <= MAX_WIDTH, (scores.stride(), width)
    assert predicted is None or (predicted.dtype == torch.float32 and predicted.is_contiguous())
    assert k > 0
    aligned = scores.stride(0) % 4 == 0 and width % 4 == 0 and scores.data_ptr() % 16 == 0
    instance = choose_instance(*scores.shape)
    defines = instance_defines(instance, aligned=aligned, mark=mark, max_delay=max_delay, vectors=vectors)
    return _load_instance(instance, defines, scores.device), instance.threads


def _load_instance(instance: "Instance", defines: dict[str, int], device: torch.device) -> Kernel:
    shared_bytes = _SHARED_BYTES + (16 * instance.threads * instance.chunks if instance.in_shared else 0)
    return load_kernel("topk.cu", "topk_positions", tuple(defines.items()), shared_bytes, device.index)


class Instance(NamedTuple):
    """Compile-time choices of topk.cu."""

    threads: int
    min_blocks: int
    chunks: int
    resident: bool
    in_shared: bool = False


def choose_instance(num_rows: int, width: int) -> Instance:
    """The instance for rows of this width; a pure function of the shape.

    Few rows, which all run at once: the largest blocks, one on a multiprocessor, for latency. Many: two smaller ones,
    so that one works while the other waits (B=32, L=65,536: 18 against 23 us; B=256, L=98,304: 110 against 156 us on an
    H200).
    """
    small, large = (-(-width // (_CLUSTER * threads * 4)) for threads in (512, 1024))
    if num_rows > _LARGE_AT_ONCE and small <= 12:
        return Instance(512, 2, max(1, small), True, in_shared=small > 6)
    if large <= 5:
        return Instance(1024, 1, max(1, large), True)
    # The row does not fit into registers: it is read again in every pass.
    return Instance(1024, 1, 4, False)


@functools.cache
def late_clusters(num_rows: int, width: int, row_bytes: int, device: torch.device) -> int:
    """Clusters beside those of `num_rows` rows of this width, for a prefetch of KV rows of `row_bytes` to go on in."""
    if not 0 < num_rows < layout.CERTAIN_ROWS:
        return 0
    instance = choose_instance(num_rows, width)
    defines = instance_defines(instance, aligned=True, mark=True, vectors=row_bytes // 16)
    return late_clusters_in(
        max_clusters(_load_instance(instance, defines, device), instance.threads, _CLUSTER), num_rows
    )


def late_clusters_in(room: int, num_rows: int) -> int:
    """The same where `room` clusters run at once (H200: 15 of the largest blocks, 30 of the smaller ones): those that
    start with the rows' clusters. One that had to wait for a row's to end would hold up the launch, and what comes
    after it."""
    return min(_LATE_CLUSTERS, max(0, min(room, layout.CERTAIN_ROWS) - num_rows))


def instance_defines(
    instance: Instance, *, aligned: bool, mark: bool, max_delay: int = 0, vectors: int = 0
) -> dict[str, int]:
    """What topk.cu is compiled with. `aligned`: rows of scores start on 16 bytes; `mark`: for `mark_topk`; `vectors`:
    more than 0 for one with a `late` prefetch of rows of so many vectors of 16 bytes."""
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
        "LATE": min(2, _LATE_VECTORS // vectors) if vectors > 0 else 0,
        "VECTORS": max(1, vectors),
    }

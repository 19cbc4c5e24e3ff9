"""Cache management by Triton kernels: resolve, append, warm, release. Contracts: kernels/reference/cache_ops.py.

Launches of fixed shape without host involvement, so all of them can be captured in a CUDA graph.

Eviction. `begin_step` counts the rows of every group by age and lists the oldest ones in order of age (free rows first,
then bins of a quarter octave). The i-th row that a step needs is the i-th of the list, taken by one atomic_max on its
priority; nothing is scanned on the critical path. Where that row was used meanwhile the list goes on; where it ends, a
clock hand walks over windows of rows and takes the least recently used one of each. Where CUDA kernels run, they count
and list (kernels/cuda/ages.cu), with `prepare` in between.

Resolve is two launches, because marking and evicting must not share one: a program could evict what another has just
hit. `mark` protects hits and claims misses: it pushes each missing entry onto a chain whose head is the slot's place in
host_to_gpu (as -2 - entry); the entry that found the place empty owns the miss. `place` gives each owner a row, copies
the bytes and writes the row to all entries of the chain. Where a CUDA kernel makes the selection, it marks it as well
(kernels/cuda/mark.cuh), and only `place` follows (kernels/gpu_cache.py). It may begin once all is marked, although that
launch still brings rows that were set aside (kernels/cuda/late.cuh).
"""

import torch
import triton
from torch import Tensor

from echo_batch.kernels import cache_layout as layout
from echo_batch.kernels.contracts import GroupMaps, Marked, Resolution
from echo_batch.kernels.formats import BLOCK_SIZE
from echo_batch.kernels.triton.cache_kernels import (
    append_kernel,
    count_kernel,
    list_kernel,
    mark_kernel,
    place_kernel,
    prepare_kernel,
    release_kernel,
    violations_kernel,
)
from echo_batch.kernels.triton.row_copy import row_words

MARK_ENTRIES = 128
PLACE_PROGRAMS = 512
SCAN_ROWS = 4096
WINDOW_ROWS = 1024
CHECK_ITEMS = 1024


def begin_step(maps: GroupMaps, step: Tensor, *, num_reserved: int = 0) -> None:
    """See the reference; also lists the rows that this step may take. Three launches for all groups together."""
    num_groups, num_rows = maps.priority.shape
    count_kernel[(triton.cdiv(num_rows, SCAN_ROWS), num_groups)](
        maps.priority, maps.age_bins, step, num_rows, R=SCAN_ROWS
    )
    prepare(maps, step, num_reserved=num_reserved)
    _list(maps, step, only_free=False)


def prepare(maps: GroupMaps, step: Tensor, *, num_reserved: int) -> None:
    """The launch of `begin_step` between counting and listing: advance `step`, and decide which bins are listed, and
    where. Leaves the counts of rows by age zero for the next step."""
    num_groups, num_rows = maps.priority.shape
    prepare_kernel[(num_groups,)](
        maps.counts, maps.age_bins, maps.totals, step, num_rows, num_reserved, maps.candidates.shape[1], num_warps=1
    )


def append(maps: GroupMaps, slots: Tensor, step: Tensor) -> Tensor:
    """See the reference. One launch; a batch takes the first len(slots) candidates."""
    num_groups, num_rows = maps.priority.shape
    rows = torch.empty((num_groups, slots.shape[0]), dtype=torch.int32, device=slots.device)
    if slots.shape[0] == 0:
        return rows
    append_kernel[(slots.shape[0], num_groups)](
        slots,
        rows,
        maps.priority,
        maps.gpu_to_host,
        maps.host_to_gpu,
        maps.candidates,
        maps.counts,
        step,
        num_rows,
        maps.host_to_gpu.shape[1],
        maps.candidates.shape[1],
        W=WINDOW_ROWS,
        num_warps=1,
    )
    return rows


def resolve(
    maps: GroupMaps,
    selected: Tensor,
    step: Tensor,
    host_rows: Tensor,
    gpu_rows: Tensor,
    *,
    skip: int | None = None,
    max_delay: int = 0,
) -> Resolution:
    """See the reference. Two launches; `host_rows` is pinned memory. `max_delay` > 0 delays programs (tests of races).

    `skip`: candidates that others have taken; default: one per batch row, for the appended tokens.
    The lists of misses have room for all entries; `miss_count` is valid until the next `begin_step`.
    """
    miss_count = maps.counts[0, layout.MISSING :]
    marked = _mark(maps, selected, step, miss_count, warm=False, max_delay=max_delay)
    skip = selected.shape[0] if skip is None else skip
    return place(maps, marked, step, host_rows, gpu_rows, skip=skip, max_delay=max_delay)


def place(
    maps: GroupMaps,
    marked: Marked,
    step: Tensor,
    host_rows: Tensor,
    gpu_rows: Tensor,
    *,
    skip: int,
    dependent: bool = False,
    max_delay: int = 0,
) -> Resolution:
    """Boundary B of resolve: rows for the misses of `marked`, whose `rows` it completes. One launch.

    dependent: the launch before is the one that marked, and lets this one's programs come while it ends (Hopper and
    later): they wait there for its results.
    """
    miss_count = maps.counts[0, layout.MISSING :]
    listed_count = maps.counts[0, layout.NUM_LISTED :]
    miss_rows = _place(
        maps,
        marked,
        step,
        host_rows,
        gpu_rows,
        miss_count,
        listed_count,
        skip=skip,
        warm=False,
        dependent=dependent,
        max_delay=max_delay,
    )
    return Resolution(marked.rows, marked.miss_slots, miss_rows, miss_count[:1])


def warm(maps: GroupMaps, slots: Tensor, step: Tensor) -> Tensor:
    """See the reference. Also lists the free rows anew, which `begin_step` does again."""
    if slots.shape[0] == 0:
        return torch.empty_like(slots)
    num_warmed = maps.counts[0, layout.NUM_WARMED :]
    num_warmed[:1].zero_()
    num_free = maps.age_bins[0, 1, layout.AGE_BINS - 1 :]
    num_free.zero_()
    _list(maps, step, only_free=True)
    marked = _mark(maps, slots, step, num_warmed, warm=True, max_delay=0)
    _place(maps, marked, step, None, None, num_warmed, num_free, skip=0, warm=True, max_delay=0)
    return marked.rows


def release(maps: GroupMaps, blocks: Tensor) -> None:
    """See the reference. One launch."""
    num_groups, num_rows = maps.priority.shape
    release_kernel[(blocks.shape[0], num_groups)](
        blocks,
        maps.priority,
        maps.gpu_to_host,
        maps.host_to_gpu,
        num_rows,
        maps.host_to_gpu.shape[1],
        S=BLOCK_SIZE,
        num_warps=1,
    )


def violations(maps: GroupMaps, step: Tensor) -> Tensor:
    """See the reference. One launch, so that it can run after every layer of a captured step."""
    num_groups, num_rows = maps.priority.shape
    num_slots = maps.host_to_gpu.shape[1]
    found = torch.zeros((num_groups, 4), dtype=torch.int32, device=step.device)
    violations_kernel[(triton.cdiv(max(num_rows, num_slots), CHECK_ITEMS), num_groups)](
        found,
        maps.priority,
        maps.gpu_to_host,
        maps.host_to_gpu,
        maps.counts,
        step,
        num_rows,
        num_slots,
        E=CHECK_ITEMS,
    )
    return found


def _list(maps: GroupMaps, step: Tensor, *, only_free: bool) -> None:
    num_groups, num_rows = maps.priority.shape
    list_kernel[(triton.cdiv(num_rows, SCAN_ROWS), num_groups)](
        maps.priority,
        maps.candidates,
        maps.counts,
        maps.age_bins,
        step,
        num_rows,
        maps.candidates.shape[1],
        ONLY_FREE=only_free,
        R=SCAN_ROWS,
    )


def _mark(maps: GroupMaps, selected: Tensor, step: Tensor, miss_count: Tensor, *, warm: bool, max_delay: int) -> Marked:
    """Boundary A of a resolve (or of a warm start, which protects nothing)."""
    assert maps.priority.shape[0] == 1 and selected.is_contiguous(), (maps.priority.shape, selected.stride())
    n = selected.numel()
    rows = torch.empty_like(selected)
    miss_slots, miss_entries = torch.empty((2, n), dtype=torch.int32, device=selected.device)
    mark_kernel[(triton.cdiv(n, MARK_ENTRIES),)](
        selected,
        rows,
        miss_slots,
        miss_entries,
        miss_count,
        maps.priority,
        maps.host_to_gpu,
        maps.counts,
        step,
        n,
        WARM=warm,
        DELAY=max_delay,
        E=MARK_ENTRIES,
        num_warps=1,
    )
    return Marked(rows, miss_slots, miss_entries)


def _place(
    maps: GroupMaps,
    marked: Marked,
    step: Tensor,
    host_rows: Tensor | None,
    gpu_rows: Tensor | None,
    miss_count: Tensor,
    listed_count: Tensor,
    *,
    skip: int,
    warm: bool,
    max_delay: int,
    dependent: bool = False,
) -> Tensor:
    """Boundary B of a resolve (or of a warm start, which copies nothing); returns miss_rows."""
    n = marked.miss_slots.shape[0]
    miss_rows = torch.empty_like(marked.miss_slots)
    host_words, words = (marked.rows, 1) if host_rows is None else row_words(host_rows)
    gpu_words = marked.rows if gpu_rows is None else row_words(gpu_rows)[0]
    place_kernel[(min(n, PLACE_PROGRAMS),)](
        marked.rows,
        marked.miss_slots,
        marked.miss_entries,
        miss_rows,
        miss_count,
        host_words,
        gpu_words,
        maps.priority,
        maps.gpu_to_host,
        maps.host_to_gpu,
        maps.candidates,
        listed_count,
        maps.counts,
        step,
        marked.marked_count,
        n,
        skip,
        maps.priority.shape[1],
        marked.num_blocks,
        maps.candidates.shape[1],
        WARM=warm,
        DEPENDENT=dependent,
        EARLY=dependent and marked.marked_count is not None,
        DELAY=max_delay,
        WORDS=words,
        BLOCK=triton.next_power_of_2(words),
        W=WINDOW_ROWS,
        num_warps=1,
        # Only where it is wanted: the interpreter, for one, does not know it.
        **({"launch_pdl": True} if dependent else {}),
    )
    return miss_rows

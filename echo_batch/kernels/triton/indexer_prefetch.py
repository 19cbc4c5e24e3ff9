"""Lossless prefetch in Triton: the portable version, and the pieces of prefetch on a branch of a graph.

Contracts: kernels/reference/prefetch.py. A range of positions is prefetched in two launches once its scores are there.
`claim` finds the missing candidates and claims each slot once, by an exchange that leaves -2 in host_to_gpu; `fetch`
copies the rows and links them (or gives the claim up where no row was left). With the range's scores computed on one
branch of a graph and these launches on another, copies run beside the scoring of the next range.
"""

from collections.abc import Callable

import triton
import triton.language as tl
from torch import Tensor

from echo_batch.kernels import cache_layout as layout
from echo_batch.kernels import prefetch_state
from echo_batch.kernels.contracts import GroupMaps
from echo_batch.kernels.formats import BLOCK_SIZE, IndexFormat
from echo_batch.kernels.prefetch_state import PrefetchState
from echo_batch.kernels.score_lists import ScoreLists
from echo_batch.kernels.triton.indexer import index_scores_paged
from echo_batch.kernels.triton.row_copy import load_row, row_words, store_row

SET_ASIDE_ROWS = 256
CLAIM_POSITIONS = 2048
FETCH_PROGRAMS = 264
"""One row each at a time: what saturates the link (kernels/triton/row_copy.py), in warps that leave room for others."""

EVICTED = tl.constexpr(layout.EVICTED)
NUM_LISTED = tl.constexpr(layout.NUM_LISTED)
NUM_COUNTS = tl.constexpr(layout.NUM_COUNTS)
CANDIDATES = tl.constexpr(prefetch_state.CANDIDATES)
PREFETCHED = tl.constexpr(prefetch_state.PREFETCHED)
DROPPED = tl.constexpr(prefetch_state.DROPPED)
NUM_TOTALS = tl.constexpr(prefetch_state.NUM_TOTALS)
PARTS = tl.constexpr(prefetch_state.MAX_PARTS)


@triton.jit
def set_aside_kernel(
    rows,
    taken,
    slots,
    candidates,
    counts,
    priority,
    gpu_to_host,
    host_to_gpu,
    step,
    skip,
    num_set_aside,
    C,
    num_rows,
    num_slots,
    E: tl.constexpr,
):
    group = tl.program_id(1)
    i = tl.program_id(0) * E + tl.arange(0, E)
    inside = i < num_set_aside
    listed = (skip + i < C) & (skip + i < tl.load(counts + group * NUM_COUNTS + NUM_LISTED))
    row = tl.load(candidates + group * C + skip + i, mask=inside & listed, other=-1)
    place = group * num_rows + row
    usable = (row >= 0) & (tl.load(priority + place, mask=row >= 0, other=0) < tl.load(step))
    old = tl.load(gpu_to_host + place, mask=usable, other=-1)
    evicted = usable & (old >= 0)
    tl.store(host_to_gpu + group.to(tl.int64) * num_slots + old, -1, mask=evicted)
    tl.store(gpu_to_host + place, -1, mask=usable)
    tl.store(priority + place, -1, mask=usable)
    tl.store(rows + group * num_set_aside + i, tl.where(usable, row, -1), mask=inside)
    tl.store(slots + group * num_set_aside + i, tl.full([E], -1, tl.int32), mask=inside)
    num_evicted = tl.sum(evicted.to(tl.int32))
    if num_evicted > 0:
        tl.atomic_add(counts + group * NUM_COUNTS + EVICTED, num_evicted, sem="relaxed")
    if tl.program_id(0) == 0:
        tl.store(taken + group * PARTS + tl.arange(0, PARTS), tl.zeros([PARTS], tl.int32))


@triton.jit(do_not_specialize=["first", "end"])
def claim_kernel(
    scores,
    lengths,
    predicted,
    block_table,
    host_to_gpu,
    rows,
    slots,
    taken,
    totals,
    num_set_aside,
    first,
    end,
    score_stride,
    table_stride,
    BLOCK: tl.constexpr,
    E: tl.constexpr,
):
    """List the missing candidates of one stretch of positions: slots[i] is to get rows[i]."""
    row = tl.program_id(1)
    threshold = tl.load(predicted + row)
    last = tl.minimum(end, tl.load(lengths + row) - 1)  # the newest token is resident
    position = first + tl.program_id(0) * E + tl.arange(0, E)
    score = tl.load(scores + row.to(tl.int64) * score_stride + position, mask=position < last, other=float("-inf"))
    above = (position < last) & (score > threshold)
    if tl.sum(above.to(tl.int32)) > 0:
        block = tl.load(block_table + row.to(tl.int64) * table_stride + position // BLOCK, mask=above, other=-1)
        above = above & (block >= 0)
        slot = block * BLOCK + position % BLOCK
        resident = tl.load(host_to_gpu + slot, mask=above, other=0)
        missing = above & (resident == -1)
        num_missing = tl.sum(missing.to(tl.int32))
        num_dropped = tl.zeros([], tl.int32)
        if num_missing > 0:
            place = tl.atomic_add(taken, num_missing, sem="relaxed") + tl.cumsum(missing.to(tl.int32), 0) - 1
            has_row = missing & (place < num_set_aside)
            has_row = has_row & (tl.load(rows + place, mask=has_row, other=-1) >= 0)
            before = tl.atomic_xchg(host_to_gpu + slot, tl.full([E], -2, tl.int32), mask=has_row, sem="relaxed")
            tl.store(slots + place, slot, mask=has_row & (before == -1))
            num_dropped += tl.sum((missing & (~has_row)).to(tl.int32))
        tl.atomic_add(totals + CANDIDATES, tl.sum(above.to(tl.int64)), sem="relaxed")
        if num_dropped > 0:
            tl.atomic_add(totals + DROPPED, num_dropped.to(tl.int64), sem="relaxed")


@triton.jit
def fetch_kernel(
    rows,
    slots,
    taken,
    num_set_aside,
    host_pool,
    gpu_pool,
    priority,
    gpu_to_host,
    host_to_gpu,
    totals,
    step,
    WORDS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Copy and link what is listed. One warp a program."""
    i = tl.program_id(0)
    # Loaded together: the chain of loads is what takes the time when few rows are listed.
    slot = tl.load(slots + i, mask=i < num_set_aside, other=-1, volatile=True)
    row = tl.load(rows + i, mask=i < num_set_aside, other=-1, volatile=True)
    before = tl.load(step, volatile=True) - 1
    num = tl.minimum(tl.load(taken, volatile=True), num_set_aside)
    num_fetched = tl.full([], 0, tl.int32)
    while i < num:
        if slot >= 0:
            store_row(gpu_pool, row, load_row(host_pool, slot, WORDS, BLOCK), WORDS, BLOCK)
            tl.store(host_to_gpu + slot, row)
            tl.store(gpu_to_host + row, slot)
            tl.store(priority + row, before)
            num_fetched += 1
        i += tl.num_programs(0)
        slot = tl.load(slots + i, mask=i < num, other=-1)
        row = tl.load(rows + i, mask=i < num, other=-1)
    if num_fetched > 0:
        tl.atomic_add(totals + PREFETCHED, num_fetched.to(tl.int64), sem="relaxed")


def set_aside(maps: GroupMaps, state: PrefetchState, step: Tensor, skip: int) -> None:
    """See the reference. One launch for all groups, after `begin_step` has listed candidates."""
    num_groups, num_set_aside = state.rows.shape
    assert state.rows.is_contiguous() and state.taken.shape[1] == prefetch_state.MAX_PARTS, "a part of a state"
    set_aside_kernel[(triton.cdiv(num_set_aside, SET_ASIDE_ROWS), num_groups)](
        state.rows,
        state.taken,
        state.slots,
        maps.candidates,
        maps.counts,
        maps.priority,
        maps.gpu_to_host,
        maps.host_to_gpu,
        step,
        skip,
        num_set_aside,
        maps.candidates.shape[1],
        maps.priority.shape[1],
        maps.host_to_gpu.shape[1],
        E=SET_ASIDE_ROWS,
    )


def prefetch_rows(
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
) -> None:
    """See the reference. Two launches; `host_rows` is pinned memory."""
    assert maps.priority.shape[0] == state.rows.shape[0] == 1, (maps.priority.shape, state.rows.shape)
    assert scores.stride(1) == block_table.stride(1) == 1
    num_set_aside = state.rows.shape[1]
    end = scores.shape[1] if end is None else end
    if scores.shape[0] == 0 or end <= first or num_set_aside == 0:
        return
    claim_kernel[(triton.cdiv(end - first, CLAIM_POSITIONS), scores.shape[0])](
        scores,
        seq_lens,
        predicted,
        block_table,
        maps.host_to_gpu,
        state.rows,
        state.slots,
        state.taken,
        state.totals,
        num_set_aside,
        first,
        end,
        scores.stride(0),
        block_table.stride(0),
        BLOCK=BLOCK_SIZE,
        E=CLAIM_POSITIONS,
        num_warps=4,
    )
    host_words, words = row_words(host_rows)
    fetch_kernel[(min(num_set_aside, FETCH_PROGRAMS),)](
        state.rows,
        state.slots,
        state.taken,
        num_set_aside,
        host_words,
        row_words(gpu_rows)[0],
        maps.priority,
        maps.gpu_to_host,
        maps.host_to_gpu,
        state.totals,
        step,
        WORDS=words,
        BLOCK=triton.next_power_of_2(words),
        num_warps=1,
    )


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
    score: Callable[..., Tensor] = index_scores_paged,
) -> Tensor:
    """See the reference: the portable version, one launch after the other; scores by `score`.

    It has no use for lists: those of its own would cost a launch that reads all scores, as the top-k does.
    """
    assert lists is None and margins is None, "lists are for kernels that fill them while they score"
    scores = score(query, weights, pages, block_table, seq_lens, fmt)
    prefetch_rows(maps, state, scores, block_table, seq_lens, predicted, step, host_rows, gpu_rows)
    return scores

"""Device code of the cache ops; kernels/triton/cache_ops.py launches it and explains how the launches work together."""

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_wait

from echo_batch.kernels import cache_layout as layout
from echo_batch.kernels.triton.row_copy import load_row, store_row

SELECTED = tl.constexpr(layout.SELECTED)
MISSING = tl.constexpr(layout.MISSING)
RECALLED = tl.constexpr(layout.RECALLED)
EVICTED = tl.constexpr(layout.EVICTED)
OFFLOADED = tl.constexpr(layout.OFFLOADED)
NUM_TOTALS = tl.constexpr(layout.NUM_TOTALS)
NUM_LISTED = tl.constexpr(layout.NUM_LISTED)
NUM_RETRIED = tl.constexpr(layout.NUM_RETRIED)
HAND = tl.constexpr(layout.HAND)
FAILED = tl.constexpr(layout.FAILED)
FIRST_BIN = tl.constexpr(layout.FIRST_BIN)
LAST_BIN = tl.constexpr(layout.LAST_BIN)
NUM_MARKED = tl.constexpr(layout.NUM_MARKED)
NUM_COUNTS = tl.constexpr(layout.NUM_COUNTS)
BINS = tl.constexpr(layout.AGE_BINS)
FREE_BIN = tl.constexpr(layout.AGE_BINS - 1)

# Ages are binned by the upper bits of their float32 form: four bins an octave, age 1 in bin 0.
BIN_SHIFT = tl.constexpr(21)
BIN_OF_ONE = tl.constexpr(127 << 2)


@triton.jit
def bin_of(last_used, now):
    age = tl.maximum(now - last_used, 1)
    age_bin = (age.to(tl.float32).to(tl.int32, bitcast=True) >> BIN_SHIFT) - BIN_OF_ONE
    return tl.where(last_used < 0, FREE_BIN, tl.minimum(age_bin, FREE_BIN - 1))


@triton.jit
def count_kernel(priority, age_bins, step, num_rows, R: tl.constexpr):
    """Count rows by their age in the step that is about to start. The counts are zero before."""
    group = tl.program_id(1)
    rows = tl.program_id(0) * R + tl.arange(0, R)
    inside = rows < num_rows
    last_used = tl.load(priority + group * num_rows + rows, mask=inside, other=0)
    by_age = tl.histogram(tl.where(inside, bin_of(last_used, tl.load(step) + 1), 0), BINS)
    bins = tl.arange(0, BINS)
    by_age = by_age - tl.where(bins == 0, R - tl.sum(inside.to(tl.int32)), 0)
    tl.atomic_add(age_bins + group * 2 * BINS + bins, by_age, mask=by_age > 0, sem="relaxed")


@triton.jit
def prepare_kernel(counts, age_bins, totals, step, num_rows, num_reserved, C):
    """Start a step: add the last one's counts to the totals; decide which bins are listed, and where. One warp."""
    group = tl.program_id(0)
    counts += group * NUM_COUNTS
    age_bins += group * 2 * BINS
    totals += group * NUM_TOTALS
    columns = tl.arange(0, 8)
    is_total = columns < NUM_TOTALS
    last = tl.load(counts + columns, mask=is_total, other=0)
    tl.store(totals + columns, tl.load(totals + columns, mask=is_total, other=0) + last, mask=is_total)
    taken = tl.sum(tl.where((columns == MISSING) | (columns == OFFLOADED), last, 0))
    # Twice what the last step took, and 1/64 of the pool to be ready for a sudden change; and what prefetch sets aside.
    wanted = 2 * taken + num_rows // 64 + 16 + num_reserved
    bins = tl.arange(0, BINS)
    num = tl.load(age_bins + bins)
    num_older = tl.sum(num) - tl.cumsum(num, 0)
    is_listed = num_older < wanted
    tl.store(age_bins + bins, tl.zeros([BINS], tl.int32))
    tl.store(age_bins + BINS + bins, tl.where(is_listed, num_older, -1))
    num_listed = tl.minimum(tl.sum(tl.where(is_listed, num, 0)), C)
    tl.store(counts + columns, tl.where(columns == NUM_LISTED, num_listed, 0))  # the first eight: not the hand
    is_used = (num > 0) & (bins < FREE_BIN)
    tl.store(counts + FIRST_BIN, tl.min(tl.where(is_used & is_listed, bins, FREE_BIN)))
    tl.store(counts + LAST_BIN, tl.max(tl.where(is_used, bins, -1)))
    tl.store(counts + NUM_MARKED, 0)
    if group == 0:
        tl.store(step, tl.load(step) + 1)


@triton.jit
def list_kernel(priority, candidates, counts, age_bins, step, num_rows, C, ONLY_FREE: tl.constexpr, R: tl.constexpr):
    """Write the rows of the listed bins (or the free ones alone) to `candidates`, the oldest first."""
    group = tl.program_id(1)
    candidates += group * C
    ends = age_bins + group * 2 * BINS + BINS
    rows = tl.program_id(0) * R + tl.arange(0, R)
    inside = rows < num_rows
    last_used = tl.load(priority + group * num_rows + rows, mask=inside, other=0)
    is_free = inside & (last_used < 0)
    num_free = tl.sum(is_free.to(tl.int32))
    if num_free > 0:
        place = tl.atomic_add(ends + FREE_BIN, num_free, sem="relaxed") + tl.cumsum(is_free.to(tl.int32), 0) - 1
        tl.store(candidates + place, rows, mask=is_free & (place < C))
    if not ONLY_FREE:
        age_bin = tl.where(inside & (last_used >= 0), bin_of(last_used, tl.load(step)), -1)
        # Mostly one to three bins. An atomic for each row instead would queue thousands on one address.
        current = tl.load(counts + group * NUM_COUNTS + FIRST_BIN)
        last = tl.load(counts + group * NUM_COUNTS + LAST_BIN)
        while current <= last:
            is_current = age_bin == current
            num = tl.sum(is_current.to(tl.int32))
            if num > 0:
                place = tl.atomic_add(ends + current, num, sem="relaxed") + tl.cumsum(is_current.to(tl.int32), 0) - 1
                tl.store(candidates + place, rows, mask=is_current & (place < C))
            current += 1


@triton.jit
def search(priority, counts, now, num_rows, W: tl.constexpr):
    """Claim the least recently used row of the window at the clock hand, or of a later one; -1 if none is left."""
    num_windows = tl.cdiv(num_rows, W)
    start = tl.atomic_add(counts + HAND, 1, sem="relaxed") & 0x7FFFFFFF
    found = tl.full([], -1, tl.int32)
    visited = tl.full([], 0, tl.int32)
    while (found < 0) & (visited < num_windows):
        rows = ((start + visited) % num_windows) * W + tl.arange(0, W)
        # Volatile: after a lost race the row's new priority must be seen, not a cached one.
        last_used = tl.load(priority + rows, mask=rows < num_rows, other=0x7FFFFFFF, volatile=True)
        lowest = tl.min(last_used, 0)
        if lowest < now:
            row = tl.min(tl.where(last_used == lowest, rows, 0x7FFFFFFF), 0)
            if tl.atomic_max(priority + row, now, sem="relaxed") < now:
                found = row
        else:
            visited += 1  # it stays empty: rows only gain priority in this launch
    return found


@triton.jit
def append_kernel(
    slots, rows, priority, gpu_to_host, host_to_gpu, candidates, counts, step, num_rows, num_slots, C, W: tl.constexpr
):
    b = tl.program_id(0)
    group = tl.program_id(1)
    priority += group * num_rows
    gpu_to_host += group * num_rows
    host_to_gpu += group.to(tl.int64) * num_slots
    counts += group * NUM_COUNTS
    slot = tl.load(slots + b)
    listed = tl.load(candidates + group * C + b, mask=b < C, other=-1)
    num_listed = tl.load(counts + NUM_LISTED)
    now = tl.load(step)
    row = tl.full([], -1, tl.int32)
    if slot >= 0:
        if b < num_listed:  # noqa: SIM102 (`and` evaluates both sides)
            if tl.atomic_max(priority + listed, now, sem="relaxed") < now:
                row = listed
        if row < 0:
            row = search(priority, counts, now, num_rows, W)
        if row >= 0:
            before = tl.load(gpu_to_host + row)
            tl.store(host_to_gpu + before, -1, mask=before >= 0)
            tl.store(gpu_to_host + row, slot)
            tl.store(host_to_gpu + slot, row)
            tl.atomic_add(counts + OFFLOADED, 1, sem="relaxed")
            if before >= 0:
                tl.atomic_add(counts + EVICTED, 1, sem="relaxed")
        else:
            tl.atomic_add(counts + FAILED, 1, sem="relaxed")
    tl.store(rows + group * tl.num_programs(0) + b, row)


@triton.jit
def delay(step, now, MOST: tl.constexpr):
    """Wait a time that differs between programs and steps (tests of races)."""
    rounds = ((tl.program_id(0) + 1) * 40503 + now * 10007) % MOST
    i = tl.full([], 0, tl.int32)
    while i < rounds:
        i += 1 + (tl.load(step, volatile=True) - now)


@triton.jit(do_not_specialize=["n"])
def mark_kernel(
    selected,
    rows,
    miss_slots,
    miss_entries,
    miss_count,
    priority,
    host_to_gpu,
    counts,
    step,
    n,
    WARM: tl.constexpr,
    DELAY: tl.constexpr,
    E: tl.constexpr,
):
    """Protect hits; chain the entries of each missing slot and list its owner (-1 in the list for the others)."""
    now = tl.load(step)
    if DELAY > 0:
        delay(step, now, DELAY)
    entries = tl.program_id(0) * E + tl.arange(0, E)
    inside = entries < n
    slot = tl.load(selected + entries, mask=inside, other=-1)
    chosen = slot >= 0
    row = tl.load(host_to_gpu + slot, mask=chosen, other=-1)
    is_hit = chosen & (row >= 0)
    is_missing = chosen & (row < 0)
    if WARM:
        tl.store(rows + entries, tl.full([E], -1, tl.int32), mask=inside)
    else:
        tl.store(priority + row, tl.zeros([E], tl.int32) + now, mask=is_hit)
        tl.store(rows + entries, tl.where(is_hit, row, -1), mask=inside & (~is_missing))
        tl.atomic_add(counts + SELECTED, tl.sum(chosen.to(tl.int32)), sem="relaxed")
    num_missing = tl.sum(is_missing.to(tl.int32))
    if num_missing > 0:
        before = tl.atomic_xchg(host_to_gpu + slot, -2 - entries, mask=is_missing, sem="relaxed")
        base = tl.atomic_add(miss_count, num_missing, sem="relaxed")  # of all missing entries: needs no answer
        place = base + tl.cumsum(is_missing.to(tl.int32), 0) - 1
        is_owner = is_missing & (before == -1)
        tl.store(rows + entries, before, mask=is_missing & (before != -1))
        tl.store(miss_slots + place, tl.where(is_owner, slot, -1), mask=is_missing)
        tl.store(miss_entries + place, entries, mask=is_missing)


@triton.jit
def load_acquire(address):
    return tl.inline_asm_elementwise(
        "ld.acquire.gpu.global.u32 $0, [$1];", "=r,l", [address], tl.int32, is_pure=False, pack=1
    )


@triton.jit
def wait_until(count, target):
    """Until `count` has reached `target`; what was written before others counted can be read then."""
    address = count.to(tl.int64)
    while load_acquire(address) < target:
        pass


@triton.jit(do_not_specialize=["n", "skip", "num_blocks"])
def place_kernel(
    rows,
    miss_slots,
    miss_entries,
    miss_rows,
    miss_count,
    host_pool,
    gpu_pool,
    priority,
    gpu_to_host,
    host_to_gpu,
    candidates,
    listed_count,
    counts,
    step,
    marked_count,
    n,
    skip,
    num_rows,
    num_blocks,
    C,
    WARM: tl.constexpr,
    DEPENDENT: tl.constexpr,
    EARLY: tl.constexpr,
    DELAY: tl.constexpr,
    WORDS: tl.constexpr,
    BLOCK: tl.constexpr,
    W: tl.constexpr,
):
    """Give the misses rows: candidates from `skip` on (those before went to appended tokens). One warp a program.

    DEPENDENT: the launch that marks may not have ended; it changes nothing of what is read before the wait. EARLY: that
    is a wait for `num_blocks` blocks to have marked. The launch may go on to bring rows that were set aside: of these
    none may be taken before it has ended, nor may those go on who wait for this launch.
    """
    # The chain of loads is what takes the time, so what does not depend on the number of misses is loaded before it is
    # known; volatile, or the compiler would move these loads behind the comparison with that number.
    i = tl.program_id(0)
    listed = tl.load(candidates + skip + i, mask=skip + i < C, other=-1, volatile=True)
    num_listed = tl.load(listed_count, volatile=True)
    listed = tl.where(skip + i < num_listed, listed, -1)
    now = tl.load(step, volatile=True)
    # Nobody else gives the listed row away, but with its priority; that comes into the L2 cache here.
    listed_before = tl.load(gpu_to_host + listed, mask=listed >= 0, other=-1, volatile=True)
    tl.load(priority + listed, mask=listed >= 0, other=-1, volatile=True)
    if DEPENDENT:
        if EARLY:
            wait_until(marked_count, num_blocks)
        else:
            gdc_wait()
    slot = tl.load(miss_slots + i, mask=i < n, other=-1, volatile=True)
    entry = tl.load(miss_entries + i, mask=i < n, other=-1, volatile=True)
    num_missing = tl.load(miss_count, volatile=True)
    if DELAY > 0:
        delay(step, now, DELAY)
    num_recalled = tl.full([], 0, tl.int32)
    num_evicted = tl.full([], 0, tl.int32)
    while i < num_missing:
        row = tl.full([], -1, tl.int32)
        # All four have come when the first is known. What is not asked for here the compiler waits for later, and then
        # also for all that is on its way.
        if (slot >= 0) & (entry >= 0) & (listed >= -1) & (listed_before >= -1):
            # The slot's bytes, its chain and a row for it: all on their way at once. With a branch between them the
            # compiler would wait in front of it for whatever is on its way.
            if not WARM:
                words = load_row(host_pool, slot, WORDS, BLOCK)
            current = -2 - tl.load(host_to_gpu + slot)
            last_used = tl.atomic_max(priority + listed, now, mask=listed >= 0, sem="relaxed")
            before = listed_before
            if listed >= 0:  # noqa: SIM102 (`and` evaluates both sides)
                if last_used < now:
                    row = listed
            if not WARM:
                if row < 0:
                    j = skip + i
                    while (row < 0) & (j < num_listed):
                        j = skip + num_missing + tl.atomic_add(counts + NUM_RETRIED, 1, sem="relaxed")
                        other = tl.load(candidates + j, mask=j < num_listed, other=-1)
                        if other >= 0:  # noqa: SIM102
                            if tl.atomic_max(priority + other, now, sem="relaxed") < now:
                                row = other
                    if row < 0:
                        if EARLY:
                            gdc_wait()
                        row = search(priority, counts, now, num_rows, W)
                    before = tl.load(gpu_to_host + row, mask=row >= 0, other=-1)
                    if row < 0:
                        tl.atomic_add(counts + FAILED, 1, sem="relaxed")
                store_row(gpu_pool, row, words, WORDS, BLOCK)
            if row >= 0:
                tl.store(host_to_gpu + before, -1, mask=before >= 0)
                tl.store(gpu_to_host + row, slot)
                num_recalled += 1
                num_evicted += (before >= 0).to(tl.int32)
            tl.store(host_to_gpu + slot, row)
            # Each load of a link comes before the store that replaces it because one warp runs them in order.
            while current != entry:
                following = -2 - tl.load(rows + current)
                tl.store(rows + current, -1 if WARM else row)
                current = following
            tl.store(rows + entry, row)
        tl.store(miss_rows + i, row)
        i += tl.num_programs(0)
        slot = tl.load(miss_slots + i, mask=i < n, other=-1)
        entry = tl.load(miss_entries + i, mask=i < n, other=-1)
        listed = tl.load(candidates + skip + i, mask=(skip + i < C) & (skip + i < num_listed), other=-1)
        listed_before = tl.load(gpu_to_host + listed, mask=listed >= 0, other=-1)
    if not WARM:
        if num_recalled > 0:
            tl.atomic_add(counts + RECALLED, num_recalled, sem="relaxed")
        if num_evicted > 0:
            tl.atomic_add(counts + EVICTED, num_evicted, sem="relaxed")
    if EARLY:
        gdc_wait()


@triton.jit
def release_kernel(blocks, priority, gpu_to_host, host_to_gpu, num_rows, num_slots, S: tl.constexpr):
    group = tl.program_id(1)
    place = group.to(tl.int64) * num_slots + tl.load(blocks + tl.program_id(0)) * S + tl.arange(0, S)
    row = tl.load(host_to_gpu + place)
    tl.store(priority + group * num_rows + row, tl.full([S], -1, tl.int32), mask=row >= 0)
    tl.store(gpu_to_host + group * num_rows + row, tl.full([S], -1, tl.int32), mask=row >= 0)
    tl.store(host_to_gpu + place, tl.full([S], -1, tl.int32))


@triton.jit
def violations_kernel(found, priority, gpu_to_host, host_to_gpu, counts, step, num_rows, num_slots, E: tl.constexpr):
    group = tl.program_id(1)
    priority += group * num_rows
    gpu_to_host += group * num_rows
    host_to_gpu += group.to(tl.int64) * num_slots
    found += group * 4
    items = tl.program_id(0) * E + tl.arange(0, E)
    is_row = items < num_rows
    slot = tl.load(gpu_to_host + items, mask=is_row, other=-1)
    last_used = tl.load(priority + items, mask=is_row, other=-1)
    linked = (slot >= 0) & (slot < num_slots)
    back = tl.load(host_to_gpu + slot, mask=linked, other=-1)
    in_use = (last_used >= 0) & (last_used <= tl.load(step))
    wrong_rows = (slot != -1) & ((~linked) | (back != items))
    wrong_state = is_row & tl.where(slot == -1, last_used != -1, ~in_use)
    is_slot = items < num_slots
    row = tl.load(host_to_gpu + items, mask=is_slot, other=-1)
    resident = (row >= 0) & (row < num_rows)
    forth = tl.load(gpu_to_host + row, mask=resident, other=-1)
    wrong_slots = (row >= 0) & ((~resident) | (forth != items))
    tl.atomic_add(found, tl.sum(wrong_rows.to(tl.int32)), sem="relaxed")
    tl.atomic_add(found + 1, tl.sum(wrong_slots.to(tl.int32)), sem="relaxed")
    tl.atomic_add(found + 2, tl.sum(wrong_state.to(tl.int32)), sem="relaxed")
    left_behind = tl.sum((row < -1).to(tl.int32))
    if tl.program_id(0) == 0:
        left_behind += tl.load(counts + group * NUM_COUNTS + FAILED)
    tl.atomic_add(found + 3, left_behind, sem="relaxed")

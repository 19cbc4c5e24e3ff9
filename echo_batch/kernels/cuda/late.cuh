// What the prefetch (indexer.cu) did not bring, in the launch of the top-k, by blocks that have no scores to select from
// (topk.cu): its late candidates, and then what is selected, certainly or perhaps, though it scored below the prediction.
//
// Other blocks of the launch look their selections up meanwhile (mark.cuh, with LATE). So a row must be as it is to be
// before it can be found: its priority first, then the link, by an exchange that finds the slot unclaimed. A slot that a
// selection has claimed is left to `place`. Bytes may come after the link: they are there when the launch ends.
#pragma once

constexpr unsigned LATE_ENTRIES = 32;  // of a list

struct Late {
    const int* lists;  // [num_lists][LATE_ENTRIES]: slots of late candidates; -1: none
    unsigned num_lists;
    const uint4* host_pool;
    uint4* gpu_pool;
    int* host_to_gpu;
    int* gpu_to_host;
    int* priority;
    const int* rows;  // [num_rows]: set aside
    unsigned num_rows;
    unsigned* taken;
    unsigned long long* totals;  // prefetch_state.py
    const int* step;
};

// Copies the row of `slot` to `row` for the lanes in `lanes`, of which there are at most MOST. Lanes without a part load
// something else from GPU memory: with a load that depends on a condition the compiler waits for those before it.
template <unsigned MOST, unsigned ROW_VECTORS>
static __device__ __forceinline__ void copy_rows_of(const Late& late, unsigned lanes, int slot, int row) {
    constexpr unsigned ALL = 0xffffffffu, LOADS = (MOST * ROW_VECTORS + 31) / 32;
    const unsigned lane = threadIdx.x & 31, num = __popc(lanes);
    if (num == 0) return;
    unsigned owners[MOST];
#pragma unroll
    for (unsigned i = 0; i < MOST; ++i) {
        owners[i] = lanes != 0 ? __ffs((int)lanes) - 1 : 0;
        lanes &= lanes - 1;
    }
    uint4 vectors[LOADS];
    int targets[LOADS];
#pragma unroll
    for (unsigned j = 0; j < LOADS; ++j) {
        const unsigned at = j * 32 + lane, i = at / ROW_VECTORS;
        unsigned owner = owners[0];
#pragma unroll
        for (unsigned other = 1; other < MOST; ++other) owner = i == other ? owners[other] : owner;
        const int from = __shfl_sync(ALL, slot, (int)owner);
        targets[j] = __shfl_sync(ALL, row, (int)owner);
        const uint4* const source =
            i < num ? late.host_pool + (long long)from * ROW_VECTORS + at % ROW_VECTORS : late.gpu_pool;
        vectors[j] = load_row_vector(source);
    }
#pragma unroll
    for (unsigned j = 0; j < LOADS; ++j) {
        const unsigned at = j * 32 + lane;
        if (at / ROW_VECTORS < num)
            late.gpu_pool[(long long)targets[j] * ROW_VECTORS + at % ROW_VECTORS] = vectors[j];
    }
}

// Reserves the next `num` rows, one for each lane below that: lane i gets the i-th; -1: there is none.
static __device__ __forceinline__ int reserve_rows(const Late& late, unsigned num, int now) {
    const unsigned lane = threadIdx.x & 31;
    unsigned base = 0;
    if (lane == 0) base = atomicAdd(late.taken, num);
    base = __shfl_sync(0xffffffffu, base, 0);
    const int row = lane < num && base + lane < late.num_rows ? late.rows[base + lane] : -1;
    // The priority of a guess. Those who find the row raise it.
    if (row >= 0) late.priority[row] = now - 1;
    gpu_fence();
    return row;
}

// Rows for the first list of warp `warp`, one for each of the first MOST lanes, as long as so many are left for each list;
// else -1. They cost a warp two accesses and a fence, which pass while it waits for the scoring to end: the kernel that
// scores may still take rows, but by the same counter, and those before it have ended.
template <unsigned MOST>
static __device__ __forceinline__ int reserve_ahead(const Late& late, unsigned warp) {
    const bool enough = warp < late.num_lists && look(late.taken) + MOST * late.num_lists <= late.num_rows;
    return __all_sync(0xffffffffu, enough) ? reserve_rows(late, MOST, *late.step) : -1;
}

// Links each `slot` >= 0 that is missing to the lane's `row` >= 0; true where that was done.
static __device__ __forceinline__ bool link_row(const Late& late, int slot, int row) {
    const bool linked = slot >= 0 && row >= 0 && atomicCAS(late.host_to_gpu + slot, -1, row) == -1;
    if (linked) late.gpu_to_host[row] = slot;
    return linked;
}

// Brings the first MOST missing rows of every list that falls to this warp, `warp` of `num_warps`; those of its first list
// to rows that were `reserved` ahead, if there are any. No more: what a wrong prediction lists would hold up the launch,
// and the rest is for `place` if it is selected.
template <unsigned MOST, unsigned ROW_VECTORS>
static __device__ __forceinline__ void bring_late(const Late& late, unsigned warp, unsigned num_warps, int reserved) {
    constexpr unsigned ALL = 0xffffffffu;
    const unsigned lane = threadIdx.x & 31;
    const int now = *late.step;
    unsigned num_looked_at = 0, num_brought = 0, num_dropped = 0;
    for (unsigned list = warp; list < late.num_lists; list += num_warps) {
        const int slot = __ldcg(late.lists + list * LATE_ENTRIES + lane);
        const int found = slot >= 0 ? __ldcg(late.host_to_gpu + slot) : 0;
        unsigned missing = __ballot_sync(ALL, found == -1);
        num_looked_at += __popc(__ballot_sync(ALL, slot >= 0)) - __popc(missing);
        int row = reserved;
        reserved = -1;
        const bool has_rows = __any_sync(ALL, row >= 0);
        if (missing == 0) {
            if (row >= 0) late.priority[row] = -1;  // it stays free
            continue;
        }
        // Lane i gets the i-th missing slot.
        int own = -1;
        const unsigned num = min((unsigned)__popc(missing), MOST);
        for (unsigned i = 0; i < num; ++i) {
            const int other = __shfl_sync(ALL, slot, __ffs((int)missing) - 1);
            if (lane == i) own = other;
            missing &= missing - 1;
        }
        num_looked_at += num;
        if (!has_rows) row = reserve_rows(late, num, now);
        const bool linked = link_row(late, own, row);
        if (row >= 0 && !linked) late.priority[row] = -1;  // it stays free
        const unsigned brought = __ballot_sync(ALL, linked);
        num_brought += __popc(brought);
        num_dropped += __popc(__ballot_sync(ALL, lane < num && row < 0));
        copy_rows_of<MOST, ROW_VECTORS>(late, brought, own, row);
    }
    if (lane == 0) {
        if (num_brought != 0) atomicAdd(late.totals + 1, (unsigned long long)num_brought);
        if (num_dropped != 0) atomicAdd(late.totals + 2, (unsigned long long)num_dropped);
        if (num_looked_at != 0) atomicAdd(late.totals + 3, 0ull - num_looked_at);  // not late after all
    }
}

// What a warp that selects says about its scores as soon as the threshold's bin is known: one entry a lane, either
// CERTAIN and the position of a score that will be selected, or is in doubt, but was no candidate of the prefetch (of
// several, the first), or CERTAIN and NO_POSITION. Whoever has read an entry writes 0. One that nobody has read is taken
// for the next launch's: it may name anything, so a position says only what may be brought.
constexpr unsigned CERTAIN = 1u << 31, NO_POSITION = (1u << 20) - 1;

// Brings such rows as soon as they are named: lists[num_lists][32], of which `per_row` belong to one row of the batch.
// slot_of_row(row, position): -1 where no such token is in the cache.
template <unsigned MOST, unsigned ROW_VECTORS, typename SlotOf>
static __device__ __forceinline__ void bring_certain(const Late& late, unsigned* lists, unsigned num_lists,
                                                     unsigned per_row, unsigned warp, unsigned num_warps,
                                                     SlotOf slot_of_row) {
    constexpr unsigned ALL = 0xffffffffu, AT_ONCE = 5, PATIENCE = 2, TRIES = 256;
    const unsigned lane = threadIdx.x & 31;
    const int now = *late.step;
    unsigned num_brought = 0;
    for (unsigned start = warp; start < num_lists; start += AT_ONCE * num_warps) {
        unsigned entries[AT_ONCE];
#pragma unroll
        for (unsigned i = 0; i < AT_ONCE; ++i) entries[i] = start + i * num_warps < num_lists ? 0 : CERTAIN | NO_POSITION;
        bool all = false;
        int row = -1;
        // Warps that select wait for nobody, so all entries come; but who knows when these blocks are let in.
        for (unsigned tries = 0; tries < TRIES && !all; ++tries) {
            // Rows before entries: when a position is known, it takes two accesses until others find the row. But not
            // at once, as they should not go short for late candidates.
            if (tries == PATIENCE) row = reserve_rows(late, MOST, now);
            bool mine = true;
#pragma unroll
            for (unsigned i = 0; i < AT_ONCE; ++i) {
                if (entries[i] == 0) entries[i] = *(volatile unsigned*)(lists + (start + i * num_warps) * 32 + lane);
                mine &= entries[i] != 0;
            }
            all = __all_sync(ALL, mine);
        }
        unsigned named_list = 0, named_position = NO_POSITION;  // the first one
#pragma unroll
        for (unsigned i = 0; i < AT_ONCE; ++i) {
            const unsigned list = start + i * num_warps, position = entries[i] & NO_POSITION;
            if (list < num_lists) lists[list * 32 + lane] = 0;
            if (entries[i] != 0 && named_position == NO_POSITION) named_list = list, named_position = position;
        }
        const bool is_named = named_position != NO_POSITION;
        const int slot = is_named ? slot_of_row(named_list / per_row, named_position) : -1;
        unsigned named = __ballot_sync(ALL, slot >= 0);
        if (named != 0 && !__any_sync(ALL, row >= 0)) row = reserve_rows(late, MOST, now);
        int rows[MOST], own_row = -1;
#pragma unroll
        for (unsigned i = 0; i < MOST; ++i) rows[i] = __shfl_sync(ALL, row, (int)i);
        // Most of these slots are resident: a row that was of no use is tried with the next one.
        while (named != 0) {
            int trial = -1;
            bool is_tried = false;
#pragma unroll
            for (unsigned i = 0; i < MOST; ++i) {
                if (rows[i] < 0 || named == 0) continue;
                if (lane == (unsigned)__ffs((int)named) - 1) trial = rows[i];
                named &= named - 1;
                is_tried = true;
            }
            if (!is_tried) break;
            if (trial >= 0 && link_row(late, slot, trial)) own_row = trial;
#pragma unroll
            for (unsigned i = 0; i < MOST; ++i)
                if (__any_sync(ALL, rows[i] >= 0 && own_row == rows[i])) rows[i] = -1;
        }
#pragma unroll
        for (unsigned i = 0; i < MOST; ++i)
            if (lane == 0 && rows[i] >= 0) late.priority[rows[i]] = -1;  // it stays free
        const unsigned brought = __ballot_sync(ALL, own_row >= 0);
        num_brought += __popc(brought);
        copy_rows_of<MOST, ROW_VECTORS>(late, brought, slot, own_row);
    }
    if (lane == 0 && num_brought != 0) atomicAdd(late.totals + 1, (unsigned long long)num_brought);
}

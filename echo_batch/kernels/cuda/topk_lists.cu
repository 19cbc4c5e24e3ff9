// Exact top-k positions of fp32 rows from lists of their likely scores: one block a row, one launch.
//
// The kernel that scored has listed every score above a bound of its row (kernels/score_lists.py). When the lists that
// may hold a row are complete and have k of its scores or more, the row's top-k is among these: a block takes them into
// registers, a few thousand keys, and needs no other block. Otherwise it makes such a list itself: a sample of the row
// tells a bound, and a pass over the row what is above it. If that fails too (scores that are equal, or lie together),
// every pass reads the whole row, so that every input is served.
//
// The threshold is found as in topk.cu: a histogram around the predicted k-th score, equal bins over what is left if too
// much is, and a ranking of the few keys in doubt. What is selected becomes a bitmap of the row's positions, from which
// they are listed in order.
//
// Compile-time: THREADS (a multiple of BINS), MAX_ENTRIES (keys that a block holds), MAX_LISTS (a multiple of 32),
// ALIGNED (rows start on 16 bytes), MARK, MAX_DELAY (mark.cuh).

#include "hopper.cuh"
#include "mark.cuh"
#include "topk_keys.cuh"

constexpr u32 BIN_BITS = THREADS < 512 ? 6 : 9;
constexpr u32 BINS = 1 << BIN_BITS;
constexpr u32 MAX_DOUBT = BINS;
constexpr u32 WARPS = THREADS / 32;
constexpr u32 HELD = MAX_ENTRIES / THREADS;  // entries that a lane holds
constexpr u32 LOADS = 4;                     // float4 of the row that a lane reads at once
constexpr float SMALLEST = 1.17549435e-38f, LARGEST = 1e30f;  // margins
static_assert(THREADS % BINS == 0, "one thread a bin");
static_assert(MAX_ENTRIES % THREADS == 0 && MAX_LISTS % 32 == 0, "whole rounds");

struct Shared {
    u32 histogram[2][BINS];
    u64 doubt[MAX_DOUBT];
    u32 warp_sum[32];
    u32 list[MAX_LISTS];       // lists that may hold scores of the row
    u32 start[MAX_LISTS + 1];  // entries before each of them, and of all
    u32 num_lists;
    u32 complete;
    u32 count;  // entries of the row
    u32 num_doubt;
    u32 found_bin, found_above, found_count;
    u32 num_kept;  // of the row, in `kept`
    u32 max_key;
    u64 threshold;
};

constexpr u32 SHARED_BYTES = 12 << 10;  // from the start of shared memory to what depends on the arguments
static_assert(sizeof(Shared) <= SHARED_BYTES, "shared memory");

// A list's header as uint4: entries that were to be written (more than its capacity when it is not complete), the first
// and the last row that it may hold.

struct alignas(8) Entry {
    float score;
    u32 place;  // row << POSITION_BITS | position
};

// Inclusive sum over this lane and those before.
static __device__ __forceinline__ u32 sum_before(u32 value, u32 lane) {
#pragma unroll
    for (u32 step = 1; step < 32; step *= 2) {
        const u32 other = __shfl_up_sync(FULL_MASK, value, step);
        if (lane >= step) value += other;
    }
    return value;
}

// Sum of shared.warp_sum over the warps for which `include` is set, in every lane.
static __device__ __forceinline__ u32 sum_warps(const Shared& shared, u32 lane, bool include) {
    return __reduce_add_sync(FULL_MASK, include ? shared.warp_sum[lane] : 0);
}

// Keys of the row's listed scores, in registers; 0: none.
struct Listed {
    u64 held[HELD];

    template <typename Visit>
    __device__ __forceinline__ void each(Visit visit) const {
#pragma unroll
        for (u32 i = 0; i < HELD; ++i)
            if (held[i] != 0) visit(held[i]);
    }
};

// Keys of all scores of the row, read anew each time.
struct Whole {
    const float* row;
    u32 length;

    template <typename Visit>
    __device__ __forceinline__ void each(Visit visit) const {
        for (u32 start = 4 * threadIdx.x; start < length; start += 4 * LOADS * THREADS) {
            float scores[LOADS][4];
#pragma unroll
            for (u32 i = 0; i < LOADS; ++i) {
                const u32 at = start + 4 * i * THREADS;
#pragma unroll
                for (u32 j = 0; j < 4; ++j) scores[i][j] = 0.0f;
                if (ALIGNED) {
                    if (at < length) {
                        const float4 four = *reinterpret_cast<const float4*>(row + at);
                        scores[i][0] = four.x, scores[i][1] = four.y, scores[i][2] = four.z, scores[i][3] = four.w;
                    }
                } else {
#pragma unroll
                    for (u32 j = 0; j < 4; ++j)
                        if (at + j < length) scores[i][j] = row[at + j];
                }
            }
#pragma unroll
            for (u32 i = 0; i < LOADS; ++i) {
                const u32 at = start + 4 * i * THREADS;
#pragma unroll
                for (u32 j = 0; j < 4; ++j)
                    if (at + j < length) visit(full_key(scores[i][j], at + j));
            }
        }
    }
};

// Finds the bin of a histogram where the count from above reaches `wanted`; leaves it in shared.found_*. Ends with a
// barrier.
static __device__ __forceinline__ void find_bin(Shared& shared, const u32* histogram, u32 wanted) {
    const u32 thread = threadIdx.x, lane = thread & 31, warp = thread >> 5;
    const u32 count = thread < BINS ? histogram[thread] : 0;
    // Inclusive sum over this bin and all higher ones.
    u32 sum = count;
#pragma unroll
    for (u32 step = 1; step < 32; step *= 2) {
        const u32 other = __shfl_down_sync(FULL_MASK, sum, step);
        if (lane + step < 32) sum += other;
    }
    if (lane == 0) shared.warp_sum[warp] = sum;
    __syncthreads();
    sum += sum_warps(shared, lane, lane > warp && lane < WARPS);
    if (thread < BINS && sum >= wanted && sum - count < wanted) {
        shared.found_bin = thread;
        shared.found_above = sum - count;
        shared.found_count = count;
    }
    __syncthreads();
}

// The k-th largest key, in every thread; there are k or more. Histograms and shared.num_doubt are zero before.
template <typename Source>
static __device__ __forceinline__ u64 find_threshold(Shared& shared, const Source& source, u32 k, float prediction) {
    const u32 thread = threadIdx.x;
    u32 above = 0, count = MAX_DOUBT + 1, round = 0, doubt_bin = 0;
    if (is_finite(prediction)) {
        source.each([&](u64 key) { atomicAdd(&shared.histogram[0][near_bin<BINS>(score_of_full(key), prediction)], 1u); });
        __syncthreads();
        find_bin(shared, shared.histogram[0], k);
        doubt_bin = shared.found_bin;
        above = shared.found_above;
        count = shared.found_count;
        round = 1;
    }
    const bool by_bin = count <= MAX_DOUBT;

    // Otherwise keys in [low, high] are in doubt.
    u64 low = 0, high = ~0ull >> (32 - POSITION_BITS);
    if (!by_bin) above = 0;
    while (count > MAX_DOUBT) {
        u32* const histogram = shared.histogram[round & 1];
        const u32 range_bits = 64 - __clzll((long long)(high - low));
        const u32 shift = range_bits > BIN_BITS ? range_bits - BIN_BITS : 0;
        source.each([&](u64 key) {
            if (key >= low && key <= high) atomicAdd(&histogram[(u32)((key - low) >> shift)], 1u);
        });
        __syncthreads();
        // The other histogram has been read: clear it for the next round.
        if (thread < BINS) shared.histogram[(round & 1) ^ 1][thread] = 0;
        find_bin(shared, histogram, k - above);
        low += (u64)shared.found_bin << shift;
        high = min(high, low + (1ull << shift) - 1);
        above += shared.found_above;
        count = shared.found_count;
        ++round;
    }

    source.each([&](u64 key) {
        const bool in_doubt =
            by_bin ? near_bin<BINS>(score_of_full(key), prediction) == doubt_bin : key >= low && key <= high;
        if (in_doubt) shared.doubt[atomicAdd(&shared.num_doubt, 1u)] = key;
    });
    __syncthreads();
    const u32 total = shared.num_doubt, wanted = k - above;  // 1 <= wanted <= total
    if (thread < total) {
        const u64 key = shared.doubt[thread];
        u32 larger = 0;
        for (u32 i = 0; i < total; ++i) larger += shared.doubt[i] > key;
        if (larger == wanted - 1) shared.threshold = key;
    }
    __syncthreads();
    return shared.threshold;
}

// The margin for the next step (contract: reference/topk_lists.py). `scale`: of the row's scores, where it is unknown.
static __device__ __forceinline__ float next_margin(float margin, bool complete, u32 count, u32 k, float scale) {
    if (margin != margin) return is_finite(scale) ? fmaxf(scale, SMALLEST) : margin;
    float factor = 1.0f;
    if (!complete)
        factor = 0.5f;
    else if (count < k)
        factor = 2.0f;
    else if (count < k + k / 2)
        factor = 1.25f;
    else if (count > 3 * k)
        factor = 0.875f;
    return fminf(fmaxf(margin * factor, SMALLEST), LARGEST);
}

// Clears what find_threshold needs clear.
static __device__ __forceinline__ void prepare(Shared& shared) {
    for (u32 i = threadIdx.x; i < 2 * BINS; i += THREADS) shared.histogram[i / BINS][i % BINS] = 0;
    if (threadIdx.x == 0) shared.num_doubt = 0;
}

// All of a row of up to MAX_ENTRIES scores, or as many of a longer one, evenly spread; returns their largest key.
static __device__ __forceinline__ u32 take_sample(Listed& listed, const Whole& whole) {
    u32 max_key = 0;
#pragma unroll
    for (u32 i = 0; i < HELD; ++i) {
        const u32 flat = i * THREADS + threadIdx.x;
        const u32 at = whole.length <= MAX_ENTRIES ? flat : (u32)((u64)whole.length * flat / MAX_ENTRIES);
        listed.held[i] = at < whole.length ? full_key(whole.row[at], at) : 0;
        max_key = max(max_key, (u32)(listed.held[i] >> POSITION_BITS));
    }
    return max_key;
}

// Above the key of this rank in a sample of MAX_ENTRIES are probably k to MAX_ENTRIES of the row's keys.
static __device__ __forceinline__ u32 sample_rank(u32 k, u32 length) {
    const u32 expected = (u32)((u64)k * MAX_ENTRIES / length);
    return min(expected + expected / 4 + 16, MAX_ENTRIES);
}

// Gives out the row's k entries: marks them (mark.cuh), or writes their slots. slot_at(i): the slot of entry i. Entries
// without a slot are left out of `selected_count`, which has all of them.
template <typename SlotAt>
static __device__ __forceinline__ void give_out(const Marks& marks, u32* selected_count, u32 row, u32 k,
                                                SlotAt slot_at) {
#if MARK
    const u32 lane = threadIdx.x & 31;
    constexpr u32 N = 2048 / THREADS;  // look-ups of a lane that are on their way together
    if (threadIdx.x == 0) atomicAdd(selected_count, k);
    for (u32 start = threadIdx.x - lane; start < k; start += N * THREADS) {
        int entries[N], slots[N];
        u32 empty = 0;
#pragma unroll
        for (u32 i = 0; i < N; ++i) {
            const u32 at = start + i * THREADS + lane;
            entries[i] = at < k ? (int)(row * k + at) : -1;
            slots[i] = at < k ? slot_at(at) : -1;
            empty += at < k && slots[i] < 0;
        }
        mark(marks, entries, slots);
        empty = __reduce_add_sync(FULL_MASK, empty);
        if (empty > 0 && lane == 0) atomicAdd(selected_count, 0u - empty);
    }
#else
    for (u32 i = threadIdx.x; i < k; i += THREADS) marks.rows[row * k + i] = slot_at(i);
#endif
}

// Scores, entries and headers may be written while this kernel's blocks already stand by (wait_for_previous): none of
// them is declared as constant for its life.
extern "C" __global__ void __launch_bounds__(THREADS, 1)
topk_lists(const float* all_scores, long long row_stride, u32 width, const int* __restrict__ lengths,
           float* predicted, float* margins, u32 k, const Entry* entries, const uint4* headers, u32 num_lists,
           u32 capacity, int* rows, float* __restrict__ kth, const int* __restrict__ block_tables, long long table_stride,
           u32* whole_count, int* miss_slots, int* miss_entries, u32* miss_count, u32* selected_count, int* priority,
           int* host_to_gpu, const int* step) {
    extern __shared__ __align__(16) unsigned char shared_bytes[];
    Shared& shared = *reinterpret_cast<Shared*>(shared_bytes);
    int* const selected = reinterpret_cast<int*>(shared_bytes + SHARED_BYTES);  // k positions
    u64* const kept = reinterpret_cast<u64*>(selected + (k + 1) / 2 * 2);       // [MAX_ENTRIES]
    u32* const bitmap = reinterpret_cast<u32*>(kept + MAX_ENTRIES);             // of all positions
    const u32 thread = threadIdx.x, lane = thread & 31, warp = thread >> 5;
    const u32 row = blockIdx.x;
    for (u32 i = thread; i < (width + 31) / 32; i += THREADS) bitmap[i] = 0;
    prepare(shared);
    wait_for_previous();
    uint4 header[MAX_LISTS / 32];  // as Header; on its way before anything is waited for
    if (warp == 0) {
#pragma unroll
        for (u32 i = 0; i < MAX_LISTS / 32; ++i) {
            header[i] = make_uint4(0, 0, 0, 0);
            if (i * 32 + lane < num_lists) header[i] = load_row_vector(headers + i * 32 + lane);
        }
    }
    const u32 length = lengths[row] <= 0 ? 0 : min((u32)lengths[row], width);
    const float prediction = predicted[row], margin = margins[row];
    const int* const block_table = block_tables == nullptr ? nullptr : block_tables + (long long)row * table_stride;
    const Marks marks = {rows, miss_slots, miss_entries, miss_count, priority, host_to_gpu, step};

    if (length < k) {  // Everything is selected.
        give_out(marks, selected_count, row, k, [&](u32 i) { return i < length ? slot_of(block_table, i) : -1; });
        if (thread == 0 && kth != nullptr) kth[row] = score_of(KEY_MINUS_INF);
        return;
    }

    if (warp == 0) {  // Which lists may hold scores of this row.
        u32 total = 0, num = 0;
        bool complete = true;
#pragma unroll
        for (u32 i = 0; i < MAX_LISTS / 32; ++i) {
            const bool mine = header[i].x > 0 && header[i].y <= row && row <= header[i].z;
            const u32 mask = __ballot_sync(FULL_MASK, mine);
            if (mask == 0) continue;
            const u32 count = mine ? min(header[i].x, capacity) : 0, sum = sum_before(count, lane);
            if (mine) {
                const u32 at = num + __popc(mask & ((1u << lane) - 1));
                shared.list[at] = i * 32 + lane;
                shared.start[at] = total + sum - count;
                if (header[i].x > capacity) complete = false;
            }
            num += __popc(mask);
            total += __shfl_sync(FULL_MASK, sum, 31);
        }
        complete = __ballot_sync(FULL_MASK, complete) == FULL_MASK && total <= MAX_ENTRIES;
        if (lane == 0) {
            shared.num_lists = num;
            shared.start[num] = total;
            shared.complete = complete;
            shared.count = shared.num_kept = shared.max_key = 0;
        }
    }
    __syncthreads();
    const bool complete = shared.complete;
    const u32 total = complete ? shared.start[shared.num_lists] : 0;

    Listed listed;
    u32 own = 0, at = 0;
    Entry entry[HELD];
#pragma unroll
    for (u32 i = 0; i < HELD; ++i) {
        const u32 flat = i * THREADS + thread;
        entry[i] = {0.0f, ~0u};
        if (flat < total) {
            while (shared.start[at + 1] <= flat) ++at;
            entry[i] = entries[(long long)shared.list[at] * capacity + (flat - shared.start[at])];
        }
    }
#pragma unroll
    for (u32 i = 0; i < HELD; ++i) {
        const bool is_own = i * THREADS + thread < total && entry[i].place >> POSITION_BITS == row;
        listed.held[i] = is_own ? full_key(entry[i].score, entry[i].place & LAST_POSITION) : 0;
        own += is_own;
    }
    own = __reduce_add_sync(FULL_MASK, own);
    if (lane == 0 && own != 0) atomicAdd(&shared.count, own);
    __syncthreads();
    const u32 count = shared.count;

    const Whole whole = {all_scores + (long long)row * row_stride, length};
    const bool is_listed = complete && count >= k;
    bool usable = is_listed, held = true;  // whether `listed` has all of the top-k; whether it will have in the end
    u32 max_key = 0;
    if (!is_listed) {
        if (thread == 0 && length > k && whole_count != nullptr) atomicAdd(whole_count, 1u);
        usable = length <= MAX_ENTRIES;
        max_key = take_sample(listed, whole);
    }
    u64 threshold = find_threshold(shared, listed, usable ? k : sample_rank(k, length), prediction);
    if (!usable) {
        whole.each([&](u64 key) {
            max_key = max(max_key, (u32)(key >> POSITION_BITS));
            if (key < threshold) return;
            const u32 place = atomicAdd(&shared.num_kept, 1u);
            if (place < MAX_ENTRIES) kept[place] = key;
        });
        prepare(shared);
        __syncthreads();
        const u32 num_kept = shared.num_kept;
        held = num_kept >= k && num_kept <= MAX_ENTRIES;
        if (held) {
#pragma unroll
            for (u32 i = 0; i < HELD; ++i) {
                const u32 flat = i * THREADS + thread;
                listed.held[i] = flat < num_kept ? kept[flat] : 0;
            }
            threshold = find_threshold(shared, listed, k, prediction);
        } else {
            threshold = find_threshold(shared, whole, k, prediction);
        }
    }
    if (!is_listed) {
        max_key = __reduce_max_sync(FULL_MASK, max_key);
        if (lane == 0) atomicMax(&shared.max_key, max_key);
    }
    auto choose = [&](u64 key) {
        if (key < threshold) return;
        const u32 position = position_of_full(key);
        atomicOr(&bitmap[position / 32], 1u << (position % 32));
    };
    if (held)
        listed.each(choose);
    else
        whole.each(choose);
    __syncthreads();

    // List the bitmap's positions: a warp has as many words as any other, a lane every 32nd of them.
    const u32 num_words = (length + 31) / 32;
    const u32 words_each = (num_words + THREADS - 1) / THREADS, first_word = warp * words_each * 32 + lane;
    u32 warp_count = 0;
    for (u32 i = 0; i < words_each; ++i) {
        const u32 word = first_word + i * 32;
        if (word < num_words) warp_count += __popc(bitmap[word]);
    }
    warp_count = __reduce_add_sync(FULL_MASK, warp_count);
    if (lane == 0) shared.warp_sum[warp] = warp_count;
    __syncthreads();
    u32 offset = sum_warps(shared, lane, lane < warp);
    for (u32 i = 0; i < words_each; ++i) {
        const u32 word = first_word + i * 32;
        u32 bits = word < num_words ? bitmap[word] : 0;
        const u32 sum = sum_before(__popc(bits), lane);
        u32 place = offset + sum - __popc(bits);
        while (bits != 0) {
            selected[place++] = (int)(word * 32 + __ffs((int)bits) - 1);
            bits &= bits - 1;
        }
        offset += __shfl_sync(FULL_MASK, sum, 31);
    }
    __syncthreads();
    give_out(marks, selected_count, row, k, [&](u32 i) { return slot_of(block_table, (u32)selected[i]); });

    if (thread == 0) {
        const u32 threshold_key = (u32)(threshold >> POSITION_BITS);
        const float score = score_of(threshold_key == KEY_NAN ? KEY_MINUS_INF : threshold_key);
        if (kth != nullptr) kth[row] = score;
        if (length > k && threshold_key > KEY_MINUS_INF && threshold_key < KEY_PLUS_INF) {
            predicted[row] = prediction == prediction ? 0.5f * prediction + 0.5f * score : score;
            const float scale = (score_of(shared.max_key) - score) / 16.0f;
            if (margin != margin || is_finite(prediction)) margins[row] = next_margin(margin, complete, count, k, scale);
        }
    }
}

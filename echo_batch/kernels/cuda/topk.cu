// Exact top-k positions of fp32 rows: one cluster of CLUSTER blocks a row, one launch, no scratch in global memory.
//
// A row is cut into CLUSTER * WARPS contiguous slices, one a warp. A block reads its part once, as order-preserving
// keys, into registers or shared memory (longer rows: tile by tile, again in every pass, from the L2 cache). Blocks
// agree on the threshold by histograms that they read from each other's shared memory:
//   1. one histogram around the predicted k-th score, finest near it, which leaves a few dozen keys in doubt;
//   2. only if more than MAX_DOUBT keys are left (no prediction, or a wrong one): equal bins over what is left;
//   3. the keys in doubt are exchanged and ranked against each other.
// Keys carry their position in the low bits (earlier is larger), so no two are equal and ties need no further rule.
//
// With MARK the selection does not leave the kernel: each selected slot is looked up in the cache's maps where its
// position would have been written (mark.cuh). Positions lie unevenly over a block's lanes, so they pass through a list:
// then every lane has as many look-ups as any other, all at once.
//
// With LATE clusters beyond the batch bring what the prefetch did not (late.cuh): what it listed too late, and then what
// warps say will be selected as soon as they know, half a kernel before it can be looked up.
//
// Compile-time: CLUSTER, THREADS (a multiple of BINS), MAX_CHUNKS (float4 that a lane holds), RESIDENT (a lane holds
// all of its part), IN_SHARED (in shared memory: for what does not fit into registers), ALIGNED (rows start on 16
// bytes), MIN_BLOCKS (a multiprocessor is to hold), MARK, MAX_DELAY (mark.cuh), LATE (rows that a warp brings at once;
// 0: none; with MARK), VECTORS (16-byte vectors of a KV row).

#include "cluster.cuh"
#include "hopper.cuh"
#include "late.cuh"
#include "mark.cuh"
#include "topk_keys.cuh"

constexpr u32 BINS = 512;
constexpr u32 MAX_DOUBT = 512;
constexpr u32 MAX_LIST = 2048;  // positions that a block lists in shared memory
constexpr u32 WARPS = THREADS / 32;
constexpr u32 CHUNK = 128;  // positions that a warp reads at once
constexpr u32 MAX_HELD = IN_SHARED ? 1 : MAX_CHUNKS;
constexpr u32 NO_CANDIDATE = 0xffffffffu;  // bits of a score outside of the row; a NaN of the row has others
static_assert(THREADS % BINS == 0, "one thread a bin");
static_assert(2 * CLUSTER <= 32, "one lane a count");

template <bool WIDE>
struct BitsOf {
    typedef u32 type;
};
template <>
struct BitsOf<true> {
    typedef u64 type;
};
typedef BitsOf<(MAX_CHUNKS > 8)>::type Bits;  // one bit a score that a lane holds
static_assert(MAX_CHUNKS <= 16, "bits");

static __device__ __forceinline__ u32 count_bits(u32 bits) { return __popc(bits); }
static __device__ __forceinline__ u32 first_bit(u32 bits) { return bits != 0 ? __ffs((int)bits) - 1 : 0; }
static __device__ __forceinline__ u32 first_bit(u64 bits) { return bits != 0 ? __ffsll((long long)bits) - 1 : 0; }
static __device__ __forceinline__ u32 count_bits(u64 bits) { return __popcll((long long)bits); }

struct Shared {
    union {
        struct {
            u32 histogram[2][BINS];  // read by the other blocks: two, so that one can be cleared while the other is read
            u64 all_doubt[MAX_DOUBT];
        };
        int list[MAX_LIST];  // positions of this block's selected scores, when both others have done their work
    };
    u64 doubt[MAX_DOUBT];  // read by the other blocks
    u32 num_doubt;
    u32 num_above;
    u32 warp_sum[32];
    u32 found_bin;
    u32 found_above;
    u32 found_count;
    u64 threshold;
    u32 offset;
};

constexpr u32 SCORES_OFFSET = 16384;  // of the scores in shared memory
static_assert(sizeof(Shared) <= SCORES_OFFSET, "shared memory");

// Keys of scores as they are held (Slice::settle): no -0.0, and a NaN of the row has other bits than no score.
static __device__ __forceinline__ u32 held_key(float score) {
    const u32 bits = __float_as_uint(score), key = ordered(bits);
    return score == score ? key : bits == NO_CANDIDATE ? 0 : KEY_NAN;
}

static __device__ __forceinline__ u64 full_held_key(float score, u32 position) {
    const u32 key = held_key(score);
    return key == 0 ? 0 : ((u64)key << POSITION_BITS) | (LAST_POSITION - position);
}

// The part of the row that one warp owns. Lane l holds positions first + 128 * chunk + 4 * l + (0..3).
struct Slice {
    const float* row;
    u32 first;
    u32 num_chunks;
    u32 length;

    __device__ __forceinline__ u32 position(u32 chunk, u32 lane) const { return first + chunk * CHUNK + lane * 4; }

    __device__ __forceinline__ void load(u32 chunk, u32 lane, float (&scores)[4]) const {
        const u32 at = position(chunk, lane);
        const u32 end = chunk < num_chunks ? length : 0;
#pragma unroll
        for (u32 j = 0; j < 4; ++j) scores[j] = __uint_as_float(NO_CANDIDATE);
        if (ALIGNED) {
            if (at < end) {
                const float4 four = *reinterpret_cast<const float4*>(row + at);
                scores[0] = four.x, scores[1] = four.y, scores[2] = four.z, scores[3] = four.w;
            }
        } else {
#pragma unroll
            for (u32 j = 0; j < 4; ++j)
                if (at + j < end) scores[j] = row[at + j];
        }
    }

    // What `load` has brought, as it is held.
    __device__ __forceinline__ void settle(u32 chunk, u32 lane, float (&scores)[4]) const {
        const u32 at = position(chunk, lane);
        const u32 end = chunk < num_chunks ? length : 0;
#pragma unroll
        for (u32 j = 0; j < 4; ++j) scores[j] += 0.0f;  // one NaN, one zero
        if (at + 4 > end) {
#pragma unroll
            for (u32 j = 0; j < 4; ++j)
                if (at + j >= end) scores[j] = __uint_as_float(NO_CANDIDATE);
        }
    }
};

struct Scores {
    Slice slice;
    u32 lane;
    float held[MAX_HELD][4];
    float4* stored;  // IN_SHARED: [MAX_CHUNKS][THREADS], this thread's column

    // Chunks `start` and on; as many loads as registers allow are issued before any is used.
    __device__ __forceinline__ void fill(u32 start) {
        if (IN_SHARED) {
            constexpr u32 AT_ONCE = 4;
            for (u32 first = 0; first < MAX_CHUNKS; first += AT_ONCE) {
                float some[AT_ONCE][4];
#pragma unroll
                for (u32 i = 0; i < AT_ONCE; ++i) slice.load(start + first + i, lane, some[i]);
#pragma unroll
                for (u32 i = 0; i < AT_ONCE; ++i) {
                    slice.settle(start + first + i, lane, some[i]);
                    if (first + i < MAX_CHUNKS)
                        stored[(first + i) * THREADS] = make_float4(some[i][0], some[i][1], some[i][2], some[i][3]);
                }
            }
            return;
        }
#pragma unroll
        for (u32 i = 0; i < MAX_CHUNKS; ++i) slice.load(start + i, lane, held[i % MAX_HELD]);
#pragma unroll
        for (u32 i = 0; i < MAX_CHUNKS; ++i) slice.settle(start + i, lane, held[i % MAX_HELD]);
    }

    // The four scores of chunk i of those that are held.
    __device__ __forceinline__ void get(u32 i, float (&four)[4]) const {
        if (IN_SHARED) {
            const float4 vector = stored[i * THREADS];
            four[0] = vector.x, four[1] = vector.y, four[2] = vector.z, four[3] = vector.w;
        } else {
#pragma unroll
            for (u32 j = 0; j < 4; ++j) four[j] = held[i % MAX_HELD][j];
        }
    }

    // Calls visit(first chunk) for all of the slice, MAX_CHUNKS chunks at a time.
    template <typename Visit>
    __device__ __forceinline__ void each_tile(Visit visit) {
        if (RESIDENT) {
            visit(0u);
        } else {
            for (u32 start = 0; start < slice.num_chunks; start += MAX_CHUNKS) {
                fill(start);
                visit(start);
            }
        }
    }

    // The bits (bit 4 * i + j: held[i][j]) for which is_chosen(score, position) holds.
    template <typename Choose>
    __device__ __forceinline__ Bits bits(u32 start, Choose is_chosen) const {
        Bits chosen = 0;
#pragma unroll
        for (u32 i = 0; i < MAX_CHUNKS; ++i) {
            float four[4];
            get(i, four);
#pragma unroll
            for (u32 j = 0; j < 4; ++j)
                if (is_chosen(four[j], slice.position(start + i, lane) + j)) chosen |= (Bits)1 << (4 * i + j);
        }
        return chosen;
    }
};

// Sum of shared.warp_sum over the warps for which `include` is set, in every lane.
static __device__ __forceinline__ u32 sum_warps(const Shared& shared, u32 lane, bool include) {
    return __reduce_add_sync(FULL_MASK, include ? shared.warp_sum[lane] : 0);
}

// Adds up the cluster's histograms and finds the bin where the count from above reaches `wanted`; leaves it in
// shared.found_*. Ends with a barrier.
static __device__ __forceinline__ void find_bin(Shared& shared, const u32* histogram, u32 wanted) {
    const u32 thread = threadIdx.x, lane = thread & 31, warp = thread >> 5;
    u32 count = 0;
    if (thread < BINS) {
#pragma unroll
        for (u32 rank = 0; rank < CLUSTER; ++rank) count += load_remote(histogram + thread, rank);
    }
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

// Marks `num` entries of a row from `first` on, with one block; slot_at(i) is the slot of entry first + i. Leaves those
// without a slot out of `selected_count`, which has all of them.
template <int N, typename SlotAt>
static __device__ __forceinline__ void mark_entries(const Marks& marks, u32* selected_count, u32 first, u32 num,
                                                    SlotAt slot_at) {
    const u32 lane = threadIdx.x & 31;
    for (u32 start = threadIdx.x - lane; start < num; start += N * THREADS) {
        int entries[N], slots[N];
        u32 empty = 0;
#pragma unroll
        for (int i = 0; i < N; ++i) {
            const u32 at = start + i * THREADS + lane;
            entries[i] = at < num ? (int)(first + at) : -1;
            slots[i] = at < num ? slot_at(at) : -1;
            empty += at < num && slots[i] < 0;
        }
        mark(marks, entries, slots);
        empty = __reduce_add_sync(FULL_MASK, empty);
        if (empty > 0 && lane == 0) atomicAdd(selected_count, 0u - empty);
    }
}

#if LATE > 0
// Boundary A is behind this block; `place` need not wait until late rows have come, too.
static __device__ __forceinline__ void tell_marked(u32* marked_count) {
    __syncthreads();
    if (threadIdx.x == 0) {
        gpu_fence();
        atomicAdd(marked_count, 1u);
    }
}
#endif

extern "C" __global__ void __cluster_dims__(CLUSTER, 1, 1) __launch_bounds__(THREADS, MIN_BLOCKS)
topk_positions(const float* __restrict__ all_scores, long long row_stride, u32 width, const int* __restrict__ lengths,
               float* predicted, int update_predicted, u32 k, int* __restrict__ positions, float* __restrict__ kth,
               const int* __restrict__ block_tables, long long table_stride, u32* fallback_count
#if MARK
               ,
               int* miss_slots, int* miss_entries, u32* miss_count, u32* selected_count, int* priority, int* host_to_gpu,
               const int* step
#endif
#if LATE > 0
               ,
               u32 num_rows, const int* late_lists, u32 num_late_lists, u32* certain, const uint4* host_pool,
               uint4* gpu_pool, int* gpu_to_host, const int* set_aside, u32 num_set_aside, u32* taken,
               u64* prefetch_totals, u32* marked_count
#endif
) {
    extern __shared__ __align__(16) unsigned char shared_bytes[];
    Shared& shared = *reinterpret_cast<Shared*>(shared_bytes);
    const u32 thread = threadIdx.x, lane = thread & 31, warp = thread >> 5;
    const u32 rank = cluster_rank(), row = blockIdx.y;
#if LATE > 0
    if (row >= num_rows) {
        const Late late = {late_lists,  num_late_lists, host_pool,     gpu_pool, host_to_gpu,     gpu_to_host,
                           priority,    set_aside,      num_set_aside, taken,    prefetch_totals, step};
        const u32 own = ((row - num_rows) * CLUSTER + rank) * WARPS + warp;
        const u32 num_warps = (gridDim.y - num_rows) * CLUSTER * WARPS;
        const int reserved = reserve_ahead<LATE>(late, own);
        wait_for_previous();
        let_next_start();
        bring_late<LATE, VECTORS>(late, own, num_warps, reserved);
        // Those who had nothing to do are the first to listen.
        bring_certain<LATE, VECTORS>(late, certain, num_rows * CLUSTER * WARPS, CLUSTER * WARPS, own, num_warps,
                                     [&](u32 of, u32 position) {
            const int slot = slot_of(block_tables + (long long)of * table_stride, min(position, width - 1));
            return (int)position < min(lengths[of], (int)width) - 1 ? slot : -1;
        });
        return;
    }
    u32* const own_certain = certain + ((row * CLUSTER + rank) * WARPS + warp) * 32 + lane;
#endif
#if MARK
    wait_for_previous();
    let_next_start();  // `place`, which waits for the end of all blocks, or until all have marked
#endif
    for (u32 i = thread; i < 2 * BINS; i += THREADS) shared.histogram[i / BINS][i % BINS] = 0;
    if (thread == 0) shared.num_doubt = 0, shared.num_above = 0, shared.offset = 0;
    const u32 length = lengths[row] <= 0 ? 0 : min((u32)lengths[row], width);
    const float prediction = predicted != nullptr ? predicted[row] : __uint_as_float(0x7fc00000u);
    int* const out = positions + (long long)row * k;
    const int* const block_table = block_tables == nullptr ? nullptr : block_tables + (long long)row * table_stride;

#if MARK
    const Marks marks = {positions, miss_slots, miss_entries, miss_count, priority, host_to_gpu, step};
    if (rank == 0 && thread == 0) atomicAdd(selected_count, k);
    if (length < k) {  // Everything is selected; the whole cluster leaves here.
#if LATE > 0
        *(volatile u32*)own_certain = CERTAIN | NO_POSITION;
#endif
        const u32 share = (k + CLUSTER - 1) / CLUSTER, first = rank * share;
        if (first < k)
            mark_entries<1>(marks, selected_count, row * k + first, min(share, k - first), [&](u32 i) {
                return first + i < length ? slot_of(block_table, first + i) : -1;
            });
#if LATE > 0
        tell_marked(marked_count);
#endif
        return;
    }
#endif
    if (!MARK && length < k) {  // The same.
        for (u32 i = rank * THREADS + thread; i < k; i += CLUSTER * THREADS)
            out[i] = i < length ? slot_of(block_table, i) : -1;
        if (rank == 0 && thread == 0) kth[row] = score_of(KEY_MINUS_INF);
        return;
    }

    Scores scores;
    scores.lane = lane;
    scores.slice.row = all_scores + (long long)row * row_stride;
    scores.slice.length = length;
    scores.slice.num_chunks = (length + CLUSTER * WARPS * CHUNK - 1) / (CLUSTER * WARPS * CHUNK);
    scores.slice.first = (rank * WARPS + warp) * scores.slice.num_chunks * CHUNK;
    scores.stored = reinterpret_cast<float4*>(shared_bytes + SCORES_OFFSET) + thread;
    if (RESIDENT) scores.fill(0);
    __syncthreads();

    // Scores above those in doubt are chosen: `above` of them. `count` are in doubt.
    u32 above = 0, count = MAX_DOUBT + 1, round = 0, doubt_bin = 0;
    if (is_finite(prediction)) {
        scores.each_tile([&](u32 start) {
            scores.bits(start, [&](float score, u32) {
                atomicAdd(&shared.histogram[0][near_bin<BINS>(score, prediction)], 1u);
                return false;
            });
        });
        cluster_sync(thread);
        find_bin(shared, shared.histogram[0], k);
        doubt_bin = shared.found_bin;
        above = shared.found_above;
        count = shared.found_count;
        round = 1;
    }
    const bool by_bin = count <= MAX_DOUBT;
#if LATE > 0
    if (!by_bin || !RESIDENT) *(volatile u32*)own_certain = CERTAIN | NO_POSITION;
#endif

    if (!by_bin && length > k && rank == 0 && thread == 0 && fallback_count != nullptr) atomicAdd(fallback_count, 1u);

    // Otherwise full keys in [low, high] are in doubt.
    u64 low = 0, high = ~0ull >> (32 - POSITION_BITS);
    if (!by_bin) above = 0;
    while (count > MAX_DOUBT) {
        u32* const histogram = shared.histogram[round & 1];
        const u32 range_bits = 64 - __clzll((long long)(high - low));
        const u32 shift = range_bits > 9 ? range_bits - 9 : 0;
        scores.each_tile([&](u32 start) {
            scores.bits(start, [&](float score, u32 position) {
                const u64 key = full_held_key(score, position);
                if (key >= low && key <= high) atomicAdd(&histogram[(u32)((key - low) >> shift)], 1u);
                return false;
            });
        });
        cluster_sync(thread);
        // Every block has read the other histogram by now: clear it for the next round.
        if (thread < BINS) shared.histogram[(round & 1) ^ 1][thread] = 0;
        find_bin(shared, histogram, k - above);
        low += (u64)shared.found_bin << shift;
        high = min(high, low + (1ull << shift) - 1);
        above += shared.found_above;
        count = shared.found_count;
        ++round;
    }

    // Exchange the keys in doubt. A resident lane remembers which of its scores are chosen or in doubt.
    Bits chosen = 0, in_doubt = 0;
    u32 mine_above = 0;
    scores.each_tile([&](u32 start) {
        if (by_bin) {
            chosen = scores.bits(start, [&](float score, u32) { return near_bin<BINS>(score, prediction) > doubt_bin; });
            in_doubt = scores.bits(
                start, [&](float score, u32) { return near_bin<BINS>(score, prediction) == doubt_bin; });
#if LATE > 0
            if (RESIDENT) {
                const Bits below =
                    (chosen | in_doubt) & scores.bits(start, [&](float score, u32) { return !(score > prediction); });
                const u32 first = first_bit(below);  // 4 * chunk + place in it
                const u32 position = scores.slice.position(start + first / 4, lane) + first % 4;
                *(volatile u32*)own_certain = CERTAIN | (below != 0 ? position : NO_POSITION);
            }
#endif
        } else {
            chosen = scores.bits(
                start, [&](float score, u32 position) { return full_held_key(score, position) > high; });
            in_doubt = ~chosen & scores.bits(start, [&](float score, u32 position) {
                return full_held_key(score, position) >= low;
            });
        }
        mine_above += count_bits(chosen);
        if (in_doubt != 0) {  // few lanes
#pragma unroll
            for (u32 i = 0; i < MAX_CHUNKS; ++i) {
                float four[4];
                scores.get(i, four);
#pragma unroll
                for (u32 j = 0; j < 4; ++j) {
                    if (in_doubt >> (4 * i + j) & 1) {
                        const u64 key = full_held_key(four[j], scores.slice.position(start + i, lane) + j);
                        shared.doubt[atomicAdd(&shared.num_doubt, 1u)] = key;
                    }
                }
            }
        }
    });
    mine_above = __reduce_add_sync(FULL_MASK, mine_above);
    if (lane == 0) atomicAdd(&shared.num_above, mine_above);
    cluster_sync(thread);

    // Lane r has block r's count in doubt, lane CLUSTER + r its count above: two round trips, not one a block.
    u32 theirs = 0;
    if (lane < 2 * CLUSTER)
        theirs = load_remote(lane < CLUSTER ? &shared.num_doubt : &shared.num_above, lane % CLUSTER);
    const u32 before = __reduce_add_sync(FULL_MASK, lane >= CLUSTER && lane - CLUSTER < rank ? theirs : 0);
    u32 total = 0, owner = CLUSTER, place = 0;
#pragma unroll
    for (u32 r = 0; r < CLUSTER; ++r) {
        const u32 num = __shfl_sync(FULL_MASK, theirs, (int)r);
        if (thread >= total && thread < total + num) owner = r, place = thread - total;
        total += num;
    }
    if (owner < CLUSTER) shared.all_doubt[thread] = load_remote(&shared.doubt[place], owner);
    __syncthreads();
    cluster_arrive();              // this block reads no other block's memory from here on
    const u32 wanted = k - above;  // 1 <= wanted <= total
    if (thread < total) {
        const u64 key = shared.all_doubt[thread];
        u32 larger = 0;
        for (u32 i = 0; i < total; ++i) larger += shared.all_doubt[i] > key;
        if (larger < wanted && owner < rank) atomicAdd(&shared.offset, 1u);
        if (larger == wanted - 1) shared.threshold = key;
    }
    __syncthreads();
    const u64 threshold = shared.threshold;

    // Write the positions of all scores >= threshold, in order: first how many each warp has, then their places.
    u32 warp_count = 0;
    scores.each_tile([&](u32 start) {
        if (!RESIDENT) {
            chosen = scores.bits(
                start, [&](float score, u32 position) { return full_held_key(score, position) >= threshold; });
        } else if (in_doubt != 0) {
            chosen |= in_doubt & scores.bits(start, [&](float score, u32 position) {
                return full_held_key(score, position) >= threshold;
            });
        }
        warp_count += count_bits(chosen);
    });
    warp_count = __reduce_add_sync(FULL_MASK, warp_count);
    if (lane == 0) shared.warp_sum[warp] = warp_count;
    __syncthreads();
    u32 offset = before + shared.offset + sum_warps(shared, lane, lane < warp);
#if MARK
    const u32 block_offset = before + shared.offset, block_count = sum_warps(shared, lane, lane < WARPS);
    // What the list has no room for can wait in the places of the result: each is read before it is written.
    const bool is_listed = block_count <= MAX_LIST;
#endif
    scores.each_tile([&](u32 start) {
        if (!RESIDENT)
            chosen = scores.bits(
                start, [&](float score, u32 position) { return full_held_key(score, position) >= threshold; });
        // A byte a chunk: how many scores of it this lane and the lanes before have chosen (at most 128).
        constexpr u32 WORDS = (MAX_CHUNKS + 3) / 4;
        u32 places[WORDS], totals[WORDS];
#pragma unroll
        for (u32 w = 0; w < WORDS; ++w) {
            const u32 nibbles = (u32)(chosen >> (16 * w)) & 0xffffu;
            u32 own = 0;
#pragma unroll
            for (u32 i = 0; i < 4; ++i) own |= __popc(nibbles >> (4 * i) & 15u) << (8 * i);
            u32 sum = own;
#pragma unroll
            for (u32 step = 1; step < 32; step *= 2) {
                const u32 other = __shfl_up_sync(FULL_MASK, sum, step);
                if (lane >= step) sum += other;
            }
            totals[w] = __shfl_sync(FULL_MASK, sum, 31);
            places[w] = sum - own;
        }
#pragma unroll
        for (u32 i = 0; i < MAX_CHUNKS; ++i) {
            u32 four = (u32)(chosen >> (4 * i)) & 15u;
            u32 place = offset + (places[i / 4] >> (8 * (i % 4)) & 255u);
            const u32 at = scores.slice.position(start + i, lane);
            while (four != 0) {
                const u32 position = at + __ffs((int)four) - 1;
#if MARK
                if (is_listed)
                    shared.list[place++ - block_offset] = (int)position;
                else
                    out[place++] = (int)position;
#else
                out[place++] = slot_of(block_table, position);
#endif
                four &= four - 1;
            }
            offset += totals[i / 4] >> (8 * (i % 4)) & 255u;
        }
    });

    const u32 threshold_key = (u32)(threshold >> POSITION_BITS);
    if (rank == 0 && thread == 0) {
        const float score = score_of(threshold_key == KEY_NAN ? KEY_MINUS_INF : threshold_key);
        if (!MARK) kth[row] = score;
        if (update_predicted && length > k && threshold_key > KEY_MINUS_INF && threshold_key < KEY_PLUS_INF) {
            predicted[row] = prediction == prediction ? 0.5f * prediction + 0.5f * score : score;
        }
    }
#if MARK
    __syncthreads();
    mark_entries<MAX_LIST / THREADS>(marks, selected_count, row * k + block_offset, block_count,
                                     [&](u32 i) {
        return slot_of(block_table, (u32)(is_listed ? shared.list[i] : out[block_offset + i]));
    });
#endif
#if LATE > 0
    tell_marked(marked_count);
#endif
    cluster_wait();  // a block's shared memory must outlive the others' reads
}

// Exact top-k positions of fp32 rows: one cluster of CLUSTER blocks a row, one launch, no scratch in global memory.
//
// A row is cut into CLUSTER contiguous slices. Every block reads its slice once, as order-preserving keys, into
// registers (RESIDENT) or again from the L2 cache in every pass. Blocks agree on the threshold by histograms that they
// read from each other's shared memory:
//   1. one histogram around the predicted k-th score, finest near it, which leaves a few dozen keys in doubt;
//   2. only if more than MAX_DOUBT keys are left (no prediction, or a wrong one): equal bins over what is left;
//   3. the keys in doubt are exchanged and ranked against each other.
// Keys carry their position in the low bits (earlier is larger), so no two are equal and ties need no further rule.
//
// Compile-time: CLUSTER, THREADS (a multiple of BINS), MAX_CHUNKS (float4 a lane can hold; 0: nothing is resident),
// ALIGNED (rows start on 16 bytes).

typedef unsigned int u32;
typedef unsigned long long u64;

// --- device primitives
static __device__ __forceinline__ u32 cluster_rank() {
    u32 rank;
    asm volatile("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
    return rank;
}

static __device__ __forceinline__ void cluster_arrive() {
    asm volatile("barrier.cluster.arrive.release;" ::: "memory");
}

static __device__ __forceinline__ void cluster_wait() {
    asm volatile("barrier.cluster.wait.acquire;" ::: "memory");
}

static __device__ __forceinline__ u32 remote_address(const void* local, u32 rank) {
    u32 address;
    asm volatile("mapa.shared::cluster.u32 %0, %1, %2;"
                 : "=r"(address)
                 : "r"((u32)__cvta_generic_to_shared(local)), "r"(rank));
    return address;
}

static __device__ __forceinline__ u32 load_remote(const u32* local, u32 rank) {
    u32 value;
    asm volatile("ld.shared::cluster.u32 %0, [%1];" : "=r"(value) : "r"(remote_address(local, rank)) : "memory");
    return value;
}

static __device__ __forceinline__ u64 load_remote(const u64* local, u32 rank) {
    u64 value;
    asm volatile("ld.shared::cluster.u64 %0, [%1];" : "=l"(value) : "r"(remote_address(local, rank)) : "memory");
    return value;
}
// --- end of device primitives

constexpr u32 BINS = 512;
constexpr u32 MAX_DOUBT = 512;
constexpr u32 WARPS = THREADS / 32;
constexpr u32 POSITION_BITS = 20;
constexpr u32 LAST_POSITION = (1u << POSITION_BITS) - 1;
constexpr u32 FULL_MASK = 0xffffffffu;
constexpr u32 KEY_NAN = 1;      // below -inf, above "no candidate" (0)
constexpr u32 KEY_MINUS_INF = 0x007fffffu;
constexpr u32 KEY_PLUS_INF = 0xff800000u;

// Bins around the prediction: 8 to an octave of the distance between keys, from 2^8 (all nearer ones share the middle
// bin) up to 2^32 above and 2^22 below. Further below nothing is counted: those are nearly all scores of a long row.
constexpr u32 STEPS = 8;
constexpr u32 NEAR_OCTAVE = 8;
constexpr u32 OCTAVES_ABOVE = 32 - NEAR_OCTAVE;
constexpr u32 OCTAVES_BELOW = 22 - NEAR_OCTAVE;
constexpr u32 MIDDLE_BIN = OCTAVES_BELOW * STEPS;
static_assert(MIDDLE_BIN + OCTAVES_ABOVE * STEPS < BINS, "bins");
static_assert(THREADS % BINS == 0, "one thread a bin");

struct Shared {
    u32 histogram[2][BINS];  // read by the other blocks: two, so that one can be cleared while the other is read
    u64 doubt[MAX_DOUBT];    // read by the other blocks
    u32 num_doubt;
    u32 num_above;
    u64 all_doubt[MAX_DOUBT];
    u32 warp_sum[WARPS];
    u32 found_bin;
    u32 found_above;
    u32 found_count;
    u64 threshold;
    u32 offset;
};

static __device__ __forceinline__ u32 key_of(float score) {
    u32 bits = __float_as_uint(score);
    if ((bits << 1) == 0) bits = 0;  // -0.0 equals 0.0
    const u32 key = bits ^ ((u32)((int)bits >> 31) | 0x80000000u);
    return (bits << 1) > 0xff000000u ? KEY_NAN : key;
}

static __device__ __forceinline__ float score_of(u32 key) {
    return __uint_as_float(key & 0x80000000u ? key ^ 0x80000000u : ~key);
}

static __device__ __forceinline__ u64 full_key(u32 key, u32 position) {
    return key == 0 ? 0 : ((u64)key << POSITION_BITS) | (LAST_POSITION - position);
}

static __device__ __forceinline__ u32 distance_step(u32 distance) {
    if (distance < (1u << NEAR_OCTAVE)) return 0;
    const u32 octave = 31 - __clz((int)distance);
    return (octave - NEAR_OCTAVE) * STEPS + ((distance >> (octave - 3)) & (STEPS - 1)) + 1;
}

// Smallest distance of a step >= 1.
static __device__ __forceinline__ u64 step_start(u32 step) {
    const u32 octave = NEAR_OCTAVE + (step - 1) / STEPS;
    return (u64)(STEPS + (step - 1) % STEPS) << (octave - 3);
}

// The slice of one warp. Lane l holds positions first + 128 * i + 4 * l + (0..3) for i < num_chunks.
struct Slice {
    const float* row;
    u32 first;
    u32 num_chunks;
    u32 length;

    __device__ __forceinline__ void load(u32 chunk, u32 lane, u32 (&keys)[4]) const {
        const u32 position = first + chunk * 128 + lane * 4;
        float scores[4] = {0.f, 0.f, 0.f, 0.f};
        if (ALIGNED) {
            if (position < length) {
                const float4 four = *reinterpret_cast<const float4*>(row + position);
                scores[0] = four.x, scores[1] = four.y, scores[2] = four.z, scores[3] = four.w;
            }
        } else {
#pragma unroll
            for (u32 j = 0; j < 4; ++j)
                if (position + j < length) scores[j] = row[position + j];
        }
#pragma unroll
        for (u32 j = 0; j < 4; ++j) keys[j] = position + j < length ? key_of(scores[j]) : 0;
    }
};

struct Keys {
    Slice slice;
    u32 lane;
    u32 held[MAX_CHUNKS > 0 ? MAX_CHUNKS : 1][4];

    __device__ __forceinline__ void fill() {
#pragma unroll
        for (u32 i = 0; i < MAX_CHUNKS; ++i) {
            if (i < slice.num_chunks) {
                slice.load(i, lane, held[i]);
            } else {
#pragma unroll
                for (u32 j = 0; j < 4; ++j) held[i][j] = 0;
            }
        }
    }

    // Calls visit(position of the lane's first key, its 4 keys) for every chunk, in the order of positions.
    template <typename Visit>
    __device__ __forceinline__ void each(Visit visit) const {
        if (MAX_CHUNKS > 0) {
#pragma unroll
            for (u32 i = 0; i < MAX_CHUNKS; ++i)
                if (i < slice.num_chunks) visit(slice.first + i * 128 + lane * 4, held[i]);
        } else {
            for (u32 i = 0; i < slice.num_chunks; ++i) {
                u32 keys[4];
                slice.load(i, lane, keys);
                visit(slice.first + i * 128 + lane * 4, keys);
            }
        }
    }
};

// Adds up the cluster's histograms and finds the bin where the count from above reaches `wanted`; leaves it in
// shared.found_* (found_bin = BINS: not reached in any bin, found_above = all that was counted). Ends with a barrier.
static __device__ void find_bin(Shared& shared, const u32* histogram, u32 wanted) {
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
    for (u32 w = warp + 1; w < BINS / 32; ++w) sum += shared.warp_sum[w];
    if (thread < BINS && sum >= wanted && sum - count < wanted) {
        shared.found_bin = thread;
        shared.found_above = sum - count;
        shared.found_count = count;
    }
    if (thread == 0 && sum < wanted) {
        shared.found_bin = BINS;
        shared.found_above = sum;
    }
    __syncthreads();
}

extern "C" __global__ void __cluster_dims__(CLUSTER, 1, 1) __launch_bounds__(THREADS)
topk_positions(const float* __restrict__ scores, long long row_stride, u32 width, const int* __restrict__ lengths,
               float* predicted, int update_predicted, u32 k, int* __restrict__ positions, float* __restrict__ kth) {
    extern __shared__ __align__(16) unsigned char shared_bytes[];
    Shared& shared = *reinterpret_cast<Shared*>(shared_bytes);
    const u32 thread = threadIdx.x, lane = thread & 31, warp = thread >> 5;
    const u32 rank = cluster_rank(), row = blockIdx.y;
    const u32 length = lengths[row] <= 0 ? 0 : min((u32)lengths[row], width);
    const float prediction = predicted != nullptr ? predicted[row] : __uint_as_float(0x7fc00000u);
    int* const out = positions + (long long)row * k;

    if (length < k) {  // Everything is selected; the whole cluster leaves here.
        for (u32 i = rank * THREADS + thread; i < k; i += CLUSTER * THREADS) out[i] = i < length ? (int)i : -1;
        if (rank == 0 && thread == 0) kth[row] = score_of(KEY_MINUS_INF);
        return;
    }

    Keys keys;
    keys.lane = lane;
    keys.slice.row = scores + (long long)row * row_stride;
    keys.slice.length = length;
    keys.slice.num_chunks = (length + CLUSTER * THREADS * 4 - 1) / (CLUSTER * THREADS * 4);
    keys.slice.first = (rank * WARPS + warp) * keys.slice.num_chunks * 128;
    keys.fill();

    for (u32 i = thread; i < 2 * BINS; i += THREADS) shared.histogram[i / BINS][i % BINS] = 0;
    if (thread == 0) shared.num_doubt = 0, shared.num_above = 0, shared.offset = 0;
    __syncthreads();

    // The k-th key lies in [low, high]; `above` keys are larger than high, `count` in the range (or more than MAX_DOUBT).
    u64 low = 0, high = ~0ull >> (32 - POSITION_BITS);
    u32 above = 0, count = MAX_DOUBT + 1, round = 0;

    const u32 center = key_of(prediction);
    if (center > KEY_NAN) {
        const u32 floor_distance = 1u << (NEAR_OCTAVE + OCTAVES_BELOW);
        const u32 floor_key = center > floor_distance ? center - floor_distance : 0;  // excluded
        keys.each([&](u32, const u32(&four)[4]) {
#pragma unroll
            for (u32 j = 0; j < 4; ++j) {
                const u32 key = four[j];
                if (key > floor_key) {
                    const u32 bin = key >= center ? MIDDLE_BIN + distance_step(key - center)
                                                  : MIDDLE_BIN - distance_step(center - key);
                    atomicAdd(&shared.histogram[0][bin], 1u);
                }
            }
        });
        cluster_arrive();
        cluster_wait();
        find_bin(shared, shared.histogram[0], k);
        const u32 bin = shared.found_bin;
        above = shared.found_above;
        u64 low_key, high_key;
        if (bin == BINS) {
            low_key = 0, high_key = floor_key;
        } else {
            count = shared.found_count;
            if (bin > MIDDLE_BIN) {
                low_key = center + step_start(bin - MIDDLE_BIN);
                high_key = center + step_start(bin - MIDDLE_BIN + 1) - 1;
            } else if (bin < MIDDLE_BIN) {
                const u64 far = step_start(MIDDLE_BIN - bin + 1) - 1;
                low_key = center > far ? center - far : 0;
                high_key = center - step_start(MIDDLE_BIN - bin);
            } else {
                const u32 near = (1u << NEAR_OCTAVE) - 1;
                low_key = center > near ? center - near : 0;
                high_key = (u64)center + near;
            }
            if (low_key <= floor_key) low_key = (u64)floor_key + 1;
        }
        low = low_key << POSITION_BITS;
        high = (high_key << POSITION_BITS) | LAST_POSITION;
        round = 1;
    }

    while (count > MAX_DOUBT) {
        u32* const histogram = shared.histogram[round & 1];
        const u32 range_bits = 64 - __clzll((long long)(high - low));
        const u32 shift = range_bits > 9 ? range_bits - 9 : 0;
        keys.each([&](u32 position, const u32(&four)[4]) {
#pragma unroll
            for (u32 j = 0; j < 4; ++j) {
                const u64 key = full_key(four[j], position + j);
                if (key >= low && key <= high) atomicAdd(&histogram[(u32)((key - low) >> shift)], 1u);
            }
        });
        cluster_arrive();
        cluster_wait();
        // Every block has read the other histogram by now: clear it for the next round.
        if (thread < BINS) shared.histogram[(round & 1) ^ 1][thread] = 0;
        find_bin(shared, histogram, k - above);
        const u64 start = low + ((u64)shared.found_bin << shift);
        above += shared.found_above;
        count = shared.found_count;
        low = start;
        high = min(high, start + (1ull << shift) - 1);
        ++round;
    }

    // Exchange the keys in doubt.
    u32 mine_above = 0;
    keys.each([&](u32 position, const u32(&four)[4]) {
#pragma unroll
        for (u32 j = 0; j < 4; ++j) {
            const u64 key = full_key(four[j], position + j);
            if (key >= low) {
                if (key > high)
                    ++mine_above;
                else
                    shared.doubt[atomicAdd(&shared.num_doubt, 1u)] = key;
            }
        }
    });
    mine_above = __reduce_add_sync(FULL_MASK, mine_above);
    if (lane == 0) atomicAdd(&shared.num_above, mine_above);
    cluster_arrive();
    cluster_wait();

    u32 total = 0, before = 0, owner = 0;
#pragma unroll
    for (u32 r = 0; r < CLUSTER; ++r) {
        const u32 num = load_remote(&shared.num_doubt, r);
        if (r < rank) before += load_remote(&shared.num_above, r);
        for (u32 i = thread; i < MAX_DOUBT; i += THREADS) {
            if (i >= total && i < total + num) {
                shared.all_doubt[i] = load_remote(&shared.doubt[i - total], r);
                owner = r;
            }
        }
        total += num;
    }
    __syncthreads();
    cluster_arrive();  // this block reads no other block's memory from here on
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

    // Write the positions of all keys >= threshold.
    u32 warp_count = 0;
    keys.each([&](u32 position, const u32(&four)[4]) {
#pragma unroll
        for (u32 j = 0; j < 4; ++j) warp_count += full_key(four[j], position + j) >= threshold;
    });
    warp_count = __reduce_add_sync(FULL_MASK, warp_count);
    if (lane == 0) shared.warp_sum[warp] = warp_count;
    __syncthreads();
    u32 offset = before + shared.offset;
    for (u32 w = 0; w < warp; ++w) offset += shared.warp_sum[w];
    const u32 lower_lanes = (1u << lane) - 1;
    keys.each([&](u32 position, const u32(&four)[4]) {
        u32 chosen = 0, rank_in_chunk = 0, in_chunk = 0;
#pragma unroll
        for (u32 j = 0; j < 4; ++j) {
            const bool is_chosen = full_key(four[j], position + j) >= threshold;
            const u32 lanes = __ballot_sync(FULL_MASK, is_chosen);
            chosen |= (u32)is_chosen << j;
            rank_in_chunk += __popc(lanes & lower_lanes);
            in_chunk += __popc(lanes);
        }
        u32 at = offset + rank_in_chunk;
#pragma unroll
        for (u32 j = 0; j < 4; ++j)
            if (chosen >> j & 1) out[at++] = (int)(position + j);
        offset += in_chunk;
    });

    if (rank == 0 && thread == 0) {
        const u32 key = (u32)(threshold >> POSITION_BITS);
        const bool is_nan = key == KEY_NAN;
        const float score = score_of(is_nan ? KEY_MINUS_INF : key);
        kth[row] = score;
        if (update_predicted && length > k && key > KEY_MINUS_INF && key < KEY_PLUS_INF) {
            predicted[row] = prediction == prediction ? 0.5f * prediction + 0.5f * score : score;
        }
    }
    cluster_wait();  // a block's shared memory must outlive the others' reads
}

// Exact top-k positions of many fp32 rows (prefill): one block a row, one pass over the row.
//
// 1. A sample of the row (quads of scores at regular distances) gives a threshold that a few more than k scores should
//    reach.
// 2. The pass: scores at or above it are marked in a bit map and listed with their positions, in shared memory.
// 3. The exact k-th of the list, by radix selection; marks of those below it are cleared.
// 4. The marks are written out as ascending positions.
// If fewer than k or more than MAX_LIST scores reached the threshold, the k-th is found by radix selection over the row
// itself, several passes, and the marks are made again.
//
// Keys carry their position in the low bits (earlier is larger), so no two are equal and ties need no further rule.
//
// Compile-time: THREADS, MIN_BLOCKS (a multiprocessor is to hold), MAX_LIST, ALIGNED (rows start on 16 bytes).

#include "topk_keys.cuh"

constexpr u32 WARPS = THREADS / 32;
constexpr u32 CHUNK = 128;  // positions that a warp reads at once; lane l has 4 * l + (0..3)
constexpr u32 UNROLL = 4;
constexpr u32 BINS = 2048;
constexpr u32 DIGIT_BITS = 11;
constexpr u32 TOP_SHIFT = 41;  // of the first digit of a full key (32 + POSITION_BITS bits)
constexpr u32 SAMPLE_STRIDE = 24;
constexpr u32 MIN_SAMPLE = 1024, MAX_SAMPLE = 8192;  // quads
static_assert(BINS % (4 * THREADS) == 0, "whole quads of bins a thread");

struct Shared {
    u32 histogram[BINS];
    u64 list[MAX_LIST];
    u32 warp_sum[32];
    u32 found_bin, found_above, found_count;
    u32 num_listed;
    u32 kth_key;
};

static __device__ __forceinline__ u32 before_lane(u32 bits, u32 lane) { return __popc(bits & ((1u << lane) - 1)); }

struct Row {
    const float* scores;
    u32 length;

    // Four scores from `at` on; NaN past the end of the row.
    __device__ __forceinline__ void load(u32 at, float (&four)[4]) const {
        if (ALIGNED && at + 4 <= length) {
            const float4 quad = *reinterpret_cast<const float4*>(scores + at);
            four[0] = quad.x, four[1] = quad.y, four[2] = quad.z, four[3] = quad.w;
        } else {
#pragma unroll
            for (u32 j = 0; j < 4; ++j) four[j] = at + j < length ? scores[at + j] : __uint_as_float(0x7fc00000u);
        }
    }
};

// The bin where the count from above reaches `wanted` (there is one), in shared.found_*. Clean barriers on both sides.
static __device__ __forceinline__ void find_bin(Shared& shared, u32 wanted) {
    constexpr u32 OWN = BINS / THREADS;
    const u32 thread = threadIdx.x, lane = thread & 31, warp = thread >> 5;
    u32 counts[OWN], own = 0;
#pragma unroll
    for (u32 i = 0; i < OWN; ++i) own += counts[i] = shared.histogram[thread * OWN + i];
    u32 sum = own;  // of this thread's bins and those of higher lanes
#pragma unroll
    for (u32 step = 1; step < 32; step *= 2) {
        const u32 other = __shfl_down_sync(FULL_MASK, sum, step);
        if (lane + step < 32) sum += other;
    }
    if (lane == 0) shared.warp_sum[warp] = sum;
    __syncthreads();
    u32 above = sum - own + __reduce_add_sync(FULL_MASK, lane > warp && lane < WARPS ? shared.warp_sum[lane] : 0);
#pragma unroll
    for (u32 i = OWN; i-- > 0;) {
        if (above < wanted && above + counts[i] >= wanted) {
            shared.found_bin = thread * OWN + i;
            shared.found_above = above;
            shared.found_count = counts[i];
        }
        above += counts[i];
    }
    __syncthreads();
}

// Sources of keys: each calls visit(key) for this thread's share of them.
struct SampleKeys {
    Row row;
    u32 num_sampled, num_quads;

    template <typename Visit>
    __device__ __forceinline__ void each(Visit visit) const {
        for (u32 i = threadIdx.x; i < num_sampled; i += THREADS) {
            float four[4];
            row.load(4 * (u32)((u64)i * num_quads / num_sampled), four);
#pragma unroll
            for (u32 j = 0; j < 4; ++j) visit((u64)key_of(four[j]) << POSITION_BITS);
        }
    }
};

struct ListKeys {
    const u64* list;
    u32 count;

    template <typename Visit>
    __device__ __forceinline__ void each(Visit visit) const {
        for (u32 i = threadIdx.x; i < count; i += THREADS) visit(list[i]);
    }
};

struct RowKeys {
    Row row;

    template <typename Visit>
    __device__ __forceinline__ void each(Visit visit) const {
        for (u32 at = 4 * threadIdx.x; at < row.length; at += 4 * THREADS) {
            float four[4];
            row.load(at, four);
#pragma unroll
            for (u32 j = 0; j < 4; ++j)
                if (at + j < row.length) visit(full_key(four[j], at + j));
        }
    }
};

// A bound that exactly `wanted` keys reach, or, if the search ends at the digit `last_shift`, the tightest lower bound
// of that precision.
template <typename Source>
static __device__ __forceinline__ u64 bound_of(Shared& shared, u32 wanted, u32 last_shift, const Source& source) {
    u64 bound = 0;
    u32 above = 0, shift = TOP_SHIFT, digit_end = TOP_SHIFT + DIGIT_BITS;
    while (true) {
        for (u32 i = threadIdx.x; i < BINS; i += THREADS) shared.histogram[i] = 0;
        __syncthreads();
        const u32 mask = (1u << (digit_end - shift)) - 1;
        source.each([&](u64 key) {
            if (key >> digit_end == bound >> digit_end) atomicAdd(&shared.histogram[(u32)(key >> shift) & mask], 1u);
        });
        __syncthreads();
        find_bin(shared, wanted - above);
        bound |= (u64)shared.found_bin << shift;
        above += shared.found_above;
        if (shift <= last_shift || above + shared.found_count == wanted) return bound;
        digit_end = shift;
        shift = shift > DIGIT_BITS ? shift - DIGIT_BITS : 0;
    }
}

// Mark the scores of the row for which is_chosen(score, position) holds. For every chunk with such scores,
// visit(this lane's four scores, position of the first, bits of those chosen, how many the warp has in the chunk, how
// many of these the lanes before have).
template <typename Choose, typename Visit>
static __device__ __forceinline__ void mark(const Row& row, u32* marks, u32 num_chunks, Choose is_chosen, Visit visit) {
    const u32 lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
    for (u32 start = warp; start < num_chunks; start += UNROLL * WARPS) {
        float scores[UNROLL][4];
#pragma unroll
        for (u32 i = 0; i < UNROLL; ++i) row.load((start + i * WARPS) * CHUNK + 4 * lane, scores[i]);
#pragma unroll
        for (u32 i = 0; i < UNROLL; ++i) {
            const u32 chunk = start + i * WARPS, at = chunk * CHUNK + 4 * lane;
            if (chunk >= num_chunks) break;
            u32 votes[4], own = 0, total = 0, rank = 0;
#pragma unroll
            for (u32 j = 0; j < 4; ++j) {
                const bool chosen = at + j < row.length && is_chosen(scores[i][j], at + j);
                votes[j] = __ballot_sync(FULL_MASK, chosen);
                own |= (u32)chosen << j;
                total += __popc(votes[j]);
                rank += before_lane(votes[j], lane);
            }
            if (lane == 0) *reinterpret_cast<uint4*>(marks + 4 * chunk) = make_uint4(votes[0], votes[1], votes[2], votes[3]);
            if (total != 0) visit(scores[i], at, own, total, rank);
        }
    }
}

extern "C" __global__ void __launch_bounds__(THREADS, MIN_BLOCKS)
topk_rows(const float* __restrict__ all_scores, long long row_stride, u32 width, const int* __restrict__ lengths, u32 k,
          int first, int* __restrict__ positions, long long out_stride, float* __restrict__ kth) {
    extern __shared__ __align__(16) unsigned char shared_bytes[];
    Shared& shared = *reinterpret_cast<Shared*>(shared_bytes);
    u32* const marks = reinterpret_cast<u32*>(shared_bytes + (sizeof(Shared) + 15) / 16 * 16);
    const u32 thread = threadIdx.x, lane = thread & 31, warp = thread >> 5;
    // The last rows of a prompt are the longest: they start first, so that the end of the launch is short.
    const long long index = gridDim.x - 1 - blockIdx.x;
    const u32 length = lengths[index] <= 0 ? 0 : min((u32)lengths[index], width);
    int* const out = positions + index * out_stride;

    if (length < k) {  // everything is selected
        for (u32 i = thread; i < k; i += THREADS) out[i] = i < length ? (int)i + first : -1;
        if (thread == 0) kth[index] = score_of(KEY_MINUS_INF);
        return;
    }
    const Row row = {all_scores + index * row_stride, length};
    const u32 num_chunks = (length + CHUNK - 1) / CHUNK;
    if (thread == 0) shared.num_listed = 0, shared.kth_key = 0xffffffffu;

    // 1. Threshold from the sample: four standard deviations below where k scores of the row are expected.
    const u32 num_quads = length / 4;
    const u32 num_sampled = min(num_quads, max(MIN_SAMPLE, min(MAX_SAMPLE, num_quads / SAMPLE_STRIDE)));
    u32 low = 0;
    if (num_sampled >= 64) {
        const float share = 4.0f * num_sampled / length, rank = k * share;
        const u32 wanted = (u32)(rank + 4.0f * sqrtf(rank * fmaxf(0.0f, 1.0f - share)) + 2.0f);
        const SampleKeys sample = {row, num_sampled, num_quads};
        low = bound_of(shared, min(wanted, 4 * num_sampled), TOP_SHIFT - DIGIT_BITS, sample) >> POSITION_BITS;
    }
    __syncthreads();

    // 2. The pass.
    u32 num_listed = 0;
    if (low >= KEY_MINUS_INF) {
        const float threshold = score_of(low);
        mark(
            row, marks, num_chunks, [&](float score, u32) { return score >= threshold; },
            [&](const float(&scores)[4], u32 at, u32 own, u32 total, u32 rank) {
                u32 place = 0;
                if (lane == 0) place = atomicAdd(&shared.num_listed, total);
                place = __shfl_sync(FULL_MASK, place, 0) + rank;
#pragma unroll
                for (u32 j = 0; j < 4; ++j) {
                    if (own >> j & 1) {
                        if (place < MAX_LIST) shared.list[place] = full_key(scores[j], at + j);
                        ++place;
                    }
                }
            });
        __syncthreads();
        num_listed = shared.num_listed;
    }

    // 3. The exact bound.
    u32 smallest = 0xffffffffu;
    if (num_listed >= k && num_listed <= MAX_LIST) {
        const u64 bound = bound_of(shared, k, 0, ListKeys{shared.list, num_listed});
        for (u32 i = thread; i < num_listed; i += THREADS) {
            const u64 key = shared.list[i];
            if (key >= bound) {
                smallest = min(smallest, (u32)(key >> POSITION_BITS));
            } else {
                const u32 position = position_of_full(key);
                atomicAnd(marks + 4 * (position / CHUNK) + position % 4, ~(1u << (position % CHUNK / 4)));
            }
        }
    } else {
        const u64 bound = bound_of(shared, k, 0, RowKeys{row});
        mark(
            row, marks, num_chunks, [&](float score, u32 position) { return full_key(score, position) >= bound; },
            [&](const float(&scores)[4], u32, u32 own, u32, u32) {
#pragma unroll
                for (u32 j = 0; j < 4; ++j)
                    if (own >> j & 1) smallest = min(smallest, key_of(scores[j]));
            });
    }
    smallest = __reduce_min_sync(FULL_MASK, smallest);
    if (lane == 0) atomicMin(&shared.kth_key, smallest);
    __syncthreads();

    // 4. Write what is marked, in order: each warp has a contiguous part.
    const u32 part = (num_chunks + WARPS - 1) / WARPS;
    const u32 begin = min(warp * part, num_chunks), end = min(begin + part, num_chunks);
    u32 count = 0;
    for (u32 i = 4 * begin + lane; i < 4 * end; i += 32) count += __popc(marks[i]);
    count = __reduce_add_sync(FULL_MASK, count);
    if (lane == 0) shared.warp_sum[warp] = count;
    __syncthreads();
    u32 offset = __reduce_add_sync(FULL_MASK, lane < warp ? shared.warp_sum[lane] : 0);
    for (u32 chunk = begin; chunk < end; ++chunk) {
        const uint4 words = *reinterpret_cast<const uint4*>(marks + 4 * chunk);
        const u32 votes[4] = {words.x, words.y, words.z, words.w};
        u32 place = offset;
#pragma unroll
        for (u32 j = 0; j < 4; ++j) place += before_lane(votes[j], lane), offset += __popc(votes[j]);
#pragma unroll
        for (u32 j = 0; j < 4; ++j)
            if (votes[j] >> lane & 1) out[place++] = (int)(chunk * CHUNK + 4 * lane + j) + first;
    }
    if (thread == 0) kth[index] = score_of(shared.kth_key == KEY_NAN ? KEY_MINUS_INF : shared.kth_key);
}

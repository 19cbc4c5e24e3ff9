// One token a row by the sampling contract (reference/sampling.py), in one launch: one cluster of CLUSTER blocks a row.
//
// A block keeps its part of the row, divided by the temperature, in shared memory. Probabilities relative to the largest
// one are fixed-point numbers (2^-40), so that their sums do not depend on any order. What top-k and top-p keep is every
// token from some key on; that key is found by a radix search over histograms of counts or of probabilities, which the
// blocks read from each other's shared memory. The token is the largest of the kept scores plus Gumbel noise.
// Keys carry the token in the low bits (smaller is larger), so no two are equal and ties need no further rule.
//
// Compile-time: CLUSTER, THREADS (at least BINS), MIN_BLOCKS (a multiprocessor is to hold), ALIGNED (rows start on 16
// bytes and have whole quads).

#include "cluster.cuh"

constexpr u32 BINS = 512;
constexpr u32 BIN_BITS = 9;
constexpr u32 MAX_DOUBT = 512;
constexpr u32 WARPS = THREADS / 32;
constexpr u32 TOKEN_BITS = 20;
constexpr u32 LAST_TOKEN = (1u << TOKEN_BITS) - 1;
constexpr u32 FULL_MASK = 0xffffffffu;
constexpr u32 SCORES_OFFSET = 32768;  // of the scores in shared memory
static_assert(THREADS >= BINS && THREADS >= MAX_DOUBT, "one thread a bin, one thread a key in doubt");
static_assert(CLUSTER <= 32, "one lane a block");

struct Shared {
    // Of weights, in 64 bits as two words: shared memory adds 32-bit words only. Two, so that one can be cleared while
    // the other is read. All of this is read by the other blocks.
    u32 histogram[2][2][BINS];
    u64 doubt_key[MAX_DOUBT];
    u64 doubt_weight[MAX_DOUBT];
    u64 sum;
    u64 best;
    u64 chosen;
    u32 num_doubt;
    // Of this block alone.
    u64 all_key[MAX_DOUBT];
    u64 all_weight[MAX_DOUBT];
    u64 warp_value[32];
    u64 found_above;
    u64 threshold;
    u32 found_bin;
};
static_assert(sizeof(Shared) <= SCORES_OFFSET, "shared memory");

// Order-preserving key of a finite score (no -0.0) and its token.
static __device__ __forceinline__ u64 full_key(float score, u32 token) {
    const u32 bits = __float_as_uint(score);
    const u32 key = bits ^ ((u32)((int)bits >> 31) | 0x80000000u);
    return ((u64)key << TOKEN_BITS) | (LAST_TOKEN - token);
}

static __device__ __forceinline__ float score_of(u64 key) {
    const u32 bits = (u32)(key >> TOKEN_BITS);
    return __uint_as_float(bits ^ (~(u32)((int)bits >> 31) | 0x80000000u));
}

static __device__ __forceinline__ u64 weight_of(float score, float largest) {
    return __float2ull_rn(expf(score - largest) * 1099511627776.0f);
}

static __device__ __forceinline__ u64 warp_max(u64 value) {
#pragma unroll
    for (u32 step = 16; step > 0; step /= 2) value = max(value, __shfl_xor_sync(FULL_MASK, value, step));
    return value;
}

static __device__ __forceinline__ u64 warp_sum(u64 value) {
#pragma unroll
    for (u32 step = 16; step > 0; step /= 2) value += __shfl_xor_sync(FULL_MASK, value, step);
    return value;
}

struct Row {
    Shared& shared;
    const float* scores;  // this block's, in shared memory
    u32 first, size;      // its tokens
    u32 thread, lane, warp, rank;
    u32 round;
    float largest;

    // Calls visit(score, token) for all scores of this thread.
    template <typename Visit>
    __device__ __forceinline__ void each(Visit visit) const {
        for (u32 i = thread; i < size; i += THREADS) visit(scores[i], first + i);
    }

    // The largest / the sum of all threads' values in the cluster, in every thread. `slot` is read by other blocks: one
    // of its own for each call.
    __device__ __forceinline__ u64 cluster_reduce(u64 value, bool is_sum, u64* slot) const {
        value = is_sum ? warp_sum(value) : warp_max(value);
        __syncthreads();  // warp_value may still be read
        if (lane == 0) shared.warp_value[warp] = value;
        __syncthreads();
        value = lane < WARPS ? shared.warp_value[lane] : 0;
        value = is_sum ? warp_sum(value) : warp_max(value);
        if (thread == 0) *slot = value;
        cluster_sync(thread);
        value = lane < CLUSTER ? load_remote(slot, lane) : 0;
        return is_sum ? warp_sum(value) : warp_max(value);
    }

    // The smallest key whose larger keys weigh less than `wanted` together. Of keys from `low` on, which weigh at least
    // `wanted` >= 1; `weigh(score)` is 1 or the probability.
    template <typename Weigh>
    __device__ u64 search(u64 low, u64 high, u64 wanted, Weigh weigh) {
        u64 base = 0;  // weight of all keys above `high`
        while (low < high) {
            const u32 bits = 64 - __clzll((long long)(high - low));
            const u32 shift = bits > BIN_BITS ? bits - BIN_BITS : 0;
            u32(&histogram)[2][BINS] = shared.histogram[round & 1];
            each([&](float score, u32 token) {
                const u64 key = full_key(score, token);
                if (key < low || key > high) return;
                const u64 weight = weigh(score);
                const u32 bin = (u32)((key - low) >> shift), word = (u32)weight;
                const u32 before = word == 0 ? 0 : atomicAdd(&histogram[0][bin], word);
                const u32 carried = (u32)(weight >> 32) + (before + word < before);
                if (carried != 0) atomicAdd(&histogram[1][bin], carried);
            });
            cluster_sync(thread);
            // Every block has read the other histogram, and the keys in doubt, by now.
            if (thread < BINS) {
                shared.histogram[(round & 1) ^ 1][0][thread] = 0;
                shared.histogram[(round & 1) ^ 1][1][thread] = 0;
            }
            if (thread == 0) shared.num_doubt = 0;
            ++round;
            u64 count = 0;
            if (thread < BINS) {
#pragma unroll
                for (u32 r = 0; r < CLUSTER; ++r)
                    count += load_remote(&histogram[0][thread], r) + ((u64)load_remote(&histogram[1][thread], r) << 32);
            }
            u64 sum = count;  // of this bin and all higher ones
#pragma unroll
            for (u32 step = 1; step < 32; step *= 2) {
                const u64 other = __shfl_down_sync(FULL_MASK, sum, step);
                if (lane + step < 32) sum += other;
            }
            if (lane == 0) shared.warp_value[warp] = sum;
            __syncthreads();
            sum += warp_sum(lane > warp && lane < WARPS ? shared.warp_value[lane] : 0) + base;
            if (thread < BINS && sum >= wanted && sum - count < wanted) {
                shared.found_bin = thread;
                shared.found_above = sum - count;
            }
            __syncthreads();
            base = shared.found_above;
            low += (u64)shared.found_bin << shift;
            high = min(high, low + ((1ull << shift) - 1));
            if (low == high) break;
            // Few keys left: rank them against each other.
            each([&](float score, u32 token) {
                const u64 key = full_key(score, token);
                if (key < low || key > high) return;
                const u32 place = atomicAdd(&shared.num_doubt, 1u);
                if (place < MAX_DOUBT) shared.doubt_key[place] = key, shared.doubt_weight[place] = weigh(score);
            });
            cluster_sync(thread);
            const u32 theirs = lane < CLUSTER ? load_remote(&shared.num_doubt, lane) : 0;
            u32 total = 0, owner = CLUSTER, place = 0;
#pragma unroll
            for (u32 r = 0; r < CLUSTER; ++r) {
                const u32 num = __shfl_sync(FULL_MASK, theirs, (int)r);
                if (thread >= total && thread < total + num) owner = r, place = thread - total;
                total += num;
            }
            if (total > MAX_DOUBT) continue;
            if (owner < CLUSTER) {
                shared.all_key[thread] = load_remote(&shared.doubt_key[place], owner);
                shared.all_weight[thread] = load_remote(&shared.doubt_weight[place], owner);
            }
            __syncthreads();
            u64 smallest = ~0ull;
            if (thread < total) {
                const u64 key = shared.all_key[thread];
                u64 above = base;
                for (u32 i = 0; i < total; ++i) above += shared.all_key[i] > key ? shared.all_weight[i] : 0;
                if (above < wanted) smallest = key;
            }
            smallest = ~warp_max(~smallest);
            if (lane == 0) shared.warp_value[warp] = smallest;
            __syncthreads();
            low = ~warp_max(lane < WARPS ? ~shared.warp_value[lane] : 0);
            break;
        }
        __syncthreads();  // warp_value and the found_* may be written again
        return low;
    }
};

// Philox-4x32-10 (Salmon et al., SC'11).
static __device__ __forceinline__ void philox(u64 seed, u32 (&c)[4]) {
    u32 k0 = (u32)seed, k1 = (u32)(seed >> 32);
#pragma unroll
    for (u32 i = 0; i < 10; ++i) {
        const u32 hi0 = __umulhi(0xD2511F53u, c[0]), lo0 = 0xD2511F53u * c[0];
        const u32 hi1 = __umulhi(0xCD9E8D57u, c[2]), lo1 = 0xCD9E8D57u * c[2];
        c[0] = hi1 ^ c[1] ^ k0, c[1] = lo1, c[2] = hi0 ^ c[3] ^ k1, c[3] = lo0;
        k0 += 0x9E3779B9u, k1 += 0xBB67AE85u;
    }
}

extern "C" __global__ void __cluster_dims__(CLUSTER, 1, 1) __launch_bounds__(THREADS, MIN_BLOCKS)
sample_tokens(const float* __restrict__ logits, long long row_stride, u32 vocab, u32 part,
              const float* __restrict__ temperatures, const float* __restrict__ top_ps, const int* __restrict__ top_ks,
              const float* __restrict__ min_ps, const u64* __restrict__ seeds, const u64* __restrict__ row_ids,
              const int* __restrict__ positions, long long* __restrict__ tokens, unsigned char* __restrict__ finite) {
    extern __shared__ __align__(16) unsigned char shared_bytes[];
    Shared& shared = *reinterpret_cast<Shared*>(shared_bytes);
    float* const scores = reinterpret_cast<float*>(shared_bytes + SCORES_OFFSET);
    const u32 thread = threadIdx.x, rank = cluster_rank(), row = blockIdx.y;
    const u32 first = rank * part;  // a multiple of 4
    const u32 size = first < vocab ? min(part, vocab - first) : 0;
    Row self{shared, scores, first, size, thread, thread & 31, thread >> 5, rank, 0, 0.0f};
    for (u32 i = thread; i < 4 * BINS; i += THREADS) (&shared.histogram[0][0][0])[i] = 0;
    if (thread == 0) shared.num_doubt = 0;

    const float temperature = temperatures[row];
    const bool is_greedy = !(temperature > 0.0f);
    const float divisor = is_greedy ? 1.0f : fmaxf(temperature, 1e-5f);
    const float* const source = logits + (long long)row * row_stride + first;
    u64 best = 0;
    bool all_finite = true;
    const auto take = [&](float logit, u32 i) {
        all_finite &= logit - logit == 0.0f;
        // A quotient of finite numbers may overflow; the limit keeps differences finite.
        float score = fminf(fmaxf(__fdiv_rn(logit, divisor), -3.402823466e38f), 3.402823466e38f) + 0.0f;
        scores[i] = score;
        best = max(best, full_key(score, first + i));
    };
    if (ALIGNED) {
        for (u32 i = thread; i < size / 4; i += THREADS) {
            const float4 four = reinterpret_cast<const float4*>(source)[i];
            take(four.x, 4 * i), take(four.y, 4 * i + 1), take(four.z, 4 * i + 2), take(four.w, 4 * i + 3);
        }
    } else {
        for (u32 i = thread; i < size; i += THREADS) take(source[i], i);
    }
    // The flag rides on the reduction: a row that is not finite beats every key.
    best = self.cluster_reduce(all_finite ? best : ~0ull, false, &shared.best);
    const bool row_finite = best != ~0ull;
    if (!row_finite || is_greedy) {
        if (rank == 0 && thread == 0) {
            tokens[row] = row_finite ? LAST_TOKEN - ((u32)best & LAST_TOKEN) : 0;
            finite[row] = row_finite;
        }
        cluster_sync(thread);  // a block's shared memory must outlive the others' reads
        return;
    }
    const float largest = self.largest = score_of(best);

    u64 threshold = 0;
    const int top_k = top_ks[row];
    if (top_k > 0 && (u32)top_k < vocab)
        threshold = self.search(0, best, (u64)top_k, [](float) { return (u64)1; });
    const float top_p = top_ps[row];
    if (top_p < 1.0f) {
        u64 sum = 0;
        self.each([&](float score, u32 token) {
            if (full_key(score, token) >= threshold) sum += weight_of(score, largest);
        });
        sum = self.cluster_reduce(sum, true, &shared.sum);
        // What rounds to top_p in fp32 has reached it.
        const float below = top_p > 0.0f ? __uint_as_float(__float_as_uint(top_p) - 1) : 0.0f;
        const u64 wanted = max(1ull, (u64)ceil(((double)top_p + (double)below) * 0.5 * (double)sum));
        const u64 by_mass = self.search(threshold, best, wanted, [&](float s) { return weight_of(s, largest); });
        threshold = max(threshold, by_mass);
    }

    const float min_p = min_ps[row];
    const u64 seed = seeds[row], row_id = row_ids[row];
    const u32 position = (u32)positions[row];
    u64 chosen = 0;
    for (u32 quad = thread; 4 * quad < size; quad += THREADS) {
        u32 kept = 0;
#pragma unroll
        for (u32 j = 0; j < 4; ++j) {
            const u32 i = 4 * quad + j;
            if (i < size) {
                const u64 key = full_key(scores[i], first + i);
                const bool likely = key == best || expf(scores[i] - largest) >= min_p;
                kept |= (key >= threshold && likely ? 1u : 0u) << j;
            }
        }
        if (kept == 0) continue;
        u32 words[4] = {first / 4 + quad, position, (u32)row_id, (u32)(row_id >> 32)};
        philox(seed, words);
#pragma unroll
        for (u32 j = 0; j < 4; ++j) {
            if (kept >> j & 1) {
                // 23 random bits at the centre of their interval: neither 0 nor 1.
                const float uniform = ((float)(words[j] >> 9) + 0.5f) * 1.1920928955078125e-07f;
                const float noisy = scores[4 * quad + j] - logf(-logf(uniform)) + 0.0f;
                chosen = max(chosen, full_key(noisy, first + 4 * quad + j));
            }
        }
    }
    chosen = self.cluster_reduce(chosen, false, &shared.chosen);
    if (rank == 0 && thread == 0) {
        tokens[row] = LAST_TOKEN - ((u32)chosen & LAST_TOKEN);
        finite[row] = 1;
    }
    cluster_sync(thread);
}

// Scores as keys that order as the top-k does, and what a selected position becomes.
#pragma once

typedef unsigned int u32;
typedef unsigned long long u64;

constexpr u32 FULL_MASK = 0xffffffffu;
constexpr u32 BLOCK_SIZE = 64;  // token slots of a block
constexpr u32 POSITION_BITS = 20;
constexpr u32 LAST_POSITION = (1u << POSITION_BITS) - 1;
constexpr u32 KEY_NAN = 1;  // below -inf, above "nothing" (0)
constexpr u32 KEY_MINUS_INF = 0x007fffffu;
constexpr u32 KEY_PLUS_INF = 0xff800000u;

static __device__ __forceinline__ bool is_finite(float value) {
    return fabsf(value) < __uint_as_float(0x7f800000u);
}

// Bits of a score that is no NaN, as a number of the same order.
static __device__ __forceinline__ u32 ordered(u32 bits) { return bits ^ ((u32)((int)bits >> 31) | 0x80000000u); }

// Order-preserving key of a score: -0.0 counts as 0.0, all NaNs are equal.
static __device__ __forceinline__ u32 key_of(float score) {
    const u32 key = ordered(__float_as_uint(score + 0.0f));
    return score == score ? key : KEY_NAN;
}

static __device__ __forceinline__ float score_of(u32 key) {
    return __uint_as_float(key ^ (~(u32)((int)key >> 31) | 0x80000000u));
}

// With the position below it, so that no two are equal and ties need no further rule: the earlier is larger.
static __device__ __forceinline__ u64 full_key(float score, u32 position) {
    return ((u64)key_of(score) << POSITION_BITS) | (LAST_POSITION - position);
}

static __device__ __forceinline__ float score_of_full(u64 key) { return score_of((u32)(key >> POSITION_BITS)); }

static __device__ __forceinline__ u32 position_of_full(u64 key) { return LAST_POSITION - ((u32)key & LAST_POSITION); }

// Token slot of a position by its row's block table (-1: no block); without a table the position itself.
static __device__ __forceinline__ int slot_of(const int* block_table, u32 position) {
    if (block_table == nullptr) return (int)position;
    const int block = block_table[position / BLOCK_SIZE];
    return block < 0 ? -1 : block * (int)BLOCK_SIZE + (int)(position % BLOCK_SIZE);
}

// One of NUM bins around the prediction, by distance: 8 to an octave from 2^-17 on (512 bins: to 2^15) on each side. The
// difference is rounded monotonically, so scores that order one way never bin the other way. NaN goes to the lowest bin.
template <u32 NUM>
static __device__ __forceinline__ u32 near_bin(float score, float prediction) {
    constexpr u32 FIRST = 8 * (127 - 17);
    const float nearest = __uint_as_float(FIRST << 20), farthest = __uint_as_float(((FIRST + NUM / 2) << 20) - 1);
    const float distance = fmaxf(fminf(fabsf(score - prediction), farthest), nearest);
    const u32 step = __float_as_uint(distance) >> 20;
    return score >= prediction ? step - (FIRST - NUM / 2) : FIRST + NUM / 2 - 1 - step;
}

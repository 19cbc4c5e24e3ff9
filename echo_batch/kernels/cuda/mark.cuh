// Boundary A of resolve (echo_batch/kernels/triton/cache_ops.py explains both) for kernels that know a selection first:
// protects the rows of selected slots that are resident, claims the others and lists them for `place`.
//
// Must not share a launch with anything that evicts: what is evicted could have been hit.
//
// Compile-time: MAX_DELAY (tests of races: clock cycles that a warp waits at most before it marks; 0: none), LATE
// (more than 0: rows may be linked meanwhile, late.cuh).
#pragma once

// State of one selection group; `entry` is the place of a slot in the selection.
struct Marks {
    int* rows;             // [entries]: GPU row; -1: nothing selected; -2 - e: missing, entry e misses the same slot;
                           // not written for the first entry that misses a slot: `place` does it
    int* miss_slots;       // [misses]: slot to recall; -1: another entry of the list has it
    int* miss_entries;     // [misses]: its entry
    unsigned* miss_count;  // length of both lists; zero when the step begins
    int* priority;         // [N_G]
    int* host_to_gpu;      // [N_H]: row; -1: none; -2 - e: claimed, entry e is the last of the chain
    const int* step;       // [1]: the current one
};

#if MAX_DELAY > 0
static __device__ __forceinline__ void delay(int now) {
    const unsigned place = (blockIdx.y * gridDim.x + blockIdx.x) * 64 + threadIdx.x / 32;
    const long long until = clock64() + ((place + 1) * 40503u + (unsigned)now * 10007u) % MAX_DELAY;
    while (clock64() < until) {
    }
}
#endif

// Puts `claimed` where `seen` was; what was there before. With LATE only if that is `seen`.
static __device__ __forceinline__ int claim(int* place, int seen, int claimed) {
#if LATE > 0
    return atomicCAS(place, seen, claimed);
#else
    return atomicExch(place, claimed);
#endif
}

// Marks N entries of every lane; the whole warp calls it. slots[i] < 0: nothing is selected; entries[i] < 0: there is
// no such entry. All look-ups are on their way before one is used.
template <int N>
static __device__ __forceinline__ void mark(const Marks& marks, const int (&entries)[N], const int (&slots)[N]) {
    constexpr unsigned ALL = 0xffffffffu;
    const unsigned lane = threadIdx.x & 31;
    int rows[N];
    const int now = *marks.step;
#if MAX_DELAY > 0
    delay(now);
#endif
#pragma unroll
    for (int i = 0; i < N; ++i) rows[i] = slots[i] >= 0 ? __ldcg(marks.host_to_gpu + slots[i]) : 0;
    unsigned places[N], num_missing = 0;
#pragma unroll
    for (int i = 0; i < N; ++i) {
        const unsigned missing = __ballot_sync(ALL, rows[i] < 0);
        places[i] = num_missing + __popc(missing & ((1u << lane) - 1));
        num_missing += __popc(missing);
    }
    unsigned first = 0;
    int before[N];
    if (num_missing > 0) {  // of the whole warp
#pragma unroll
        for (int i = 0; i < N; ++i)
            if (rows[i] < 0) before[i] = claim(marks.host_to_gpu + slots[i], rows[i], -2 - entries[i]);
        if (lane == 0) first = atomicAdd(marks.miss_count, num_missing);
    }
    // Hits while the answers are on their way.
#pragma unroll
    for (int i = 0; i < N; ++i) {
        if (slots[i] >= 0 && rows[i] >= 0) marks.priority[rows[i]] = now;
        if (entries[i] >= 0 && rows[i] >= 0) marks.rows[entries[i]] = slots[i] >= 0 ? rows[i] : -1;
    }
    if (num_missing > 0) {
        first = __shfl_sync(ALL, first, 0);
#pragma unroll
        for (int i = 0; i < N; ++i) {
            if (rows[i] >= 0) continue;
#if LATE > 0
            while (before[i] != rows[i] && before[i] < 0) {  // others have claimed it meanwhile
                rows[i] = before[i];
                before[i] = claim(marks.host_to_gpu + slots[i], rows[i], -2 - entries[i]);
            }
            if (before[i] >= 0) marks.priority[before[i]] = now;  // it has come
#endif
            marks.miss_slots[first + places[i]] = before[i] == -1 ? slots[i] : -1;
            marks.miss_entries[first + places[i]] = entries[i];
            if (before[i] != -1) marks.rows[entries[i]] = before[i];
        }
    }
}

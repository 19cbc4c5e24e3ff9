// As much of CUDA as the kernels of echo_batch/kernels/cuda without clusters need, on a CPU: one system thread a CUDA
// thread, barriers for blocks and warps. Slow, and right about everything but memory order.
#include <algorithm>
#include <atomic>
#include <barrier>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <functional>
#include <memory>
#include <thread>
#include <vector>

using std::max;
using std::min;
#define __device__
#define __global__
#define __shared__
#define __forceinline__ inline
#define __launch_bounds__(...)
#define __align__(bytes)
#define __restrict__

struct Dim3 {
    unsigned x, y, z;
};
struct float4 {
    float x, y, z, w;
};
struct uint4 {
    unsigned x, y, z, w;
};
struct float2 {
    float x, y;
};
struct uint2 {
    unsigned x, y;
};
static inline float4 make_float4(float x, float y, float z, float w) { return {x, y, z, w}; }
static inline uint4 make_uint4(unsigned x, unsigned y, unsigned z, unsigned w) { return {x, y, z, w}; }

struct Warp {
    std::barrier<> barrier{32};
    unsigned values[32];
};

struct Block {
    std::vector<unsigned char> shared;
    std::barrier<> barrier;
    std::vector<std::unique_ptr<Warp>> warps;
    Block(unsigned num_threads, size_t shared_bytes) : shared(shared_bytes, 0xa5), barrier(num_threads) {
        for (unsigned i = 0; i < num_threads / 32; ++i) warps.push_back(std::make_unique<Warp>());
    }
};

static thread_local Dim3 threadIdx, blockIdx;
static Dim3 gridDim;
static thread_local Block* block;  // of this thread
#define shared_memory (block->shared)

static inline void __syncthreads() { block->barrier.arrive_and_wait(); }

// What `result` makes of the values of a warp's 32 threads.
template <typename Result>
static unsigned exchange(unsigned value, Result result) {
    Warp& warp = *block->warps[threadIdx.x / 32];
    warp.values[threadIdx.x % 32] = value;
    warp.barrier.arrive_and_wait();
    const unsigned answer = result(warp.values);
    warp.barrier.arrive_and_wait();
    return answer;
}

static inline unsigned __ballot_sync(unsigned, bool vote) {
    return exchange(vote, [](const unsigned* votes) {
        unsigned bits = 0;
        for (unsigned i = 0; i < 32; ++i) bits |= votes[i] << i;
        return bits;
    });
}
static inline bool __any_sync(unsigned, bool vote) { return __ballot_sync(0, vote) != 0; }
static inline bool __all_sync(unsigned, bool vote) { return __ballot_sync(0, vote) == 0xffffffffu; }
static inline unsigned __shfl_sync(unsigned, unsigned value, int source) {
    return exchange(value, [=](const unsigned* values) { return values[source]; });
}
static inline unsigned __shfl_down_sync(unsigned, unsigned value, unsigned step) {
    const unsigned lane = threadIdx.x % 32;
    return exchange(value, [=](const unsigned* values) { return values[lane + step < 32 ? lane + step : lane]; });
}
static inline unsigned __reduce_add_sync(unsigned, unsigned value) {
    return exchange(value, [](const unsigned* values) {
        unsigned sum = 0;
        for (unsigned i = 0; i < 32; ++i) sum += values[i];
        return sum;
    });
}
static inline unsigned __shfl_up_sync(unsigned, unsigned value, unsigned step) {
    const unsigned lane = threadIdx.x % 32;
    return exchange(value, [=](const unsigned* values) { return values[lane >= step ? lane - step : lane]; });
}
static inline unsigned __reduce_max_sync(unsigned, unsigned value) {
    return exchange(value, [](const unsigned* values) { return *std::max_element(values, values + 32); });
}
static inline unsigned __reduce_min_sync(unsigned, unsigned value) {
    return exchange(value, [](const unsigned* values) { return *std::min_element(values, values + 32); });
}
static inline unsigned atomicAdd(unsigned* target, unsigned value) {
    return std::atomic_ref<unsigned>(*target).fetch_add(value);
}
static inline unsigned atomicAnd(unsigned* target, unsigned value) {
    return std::atomic_ref<unsigned>(*target).fetch_and(value);
}
static inline unsigned atomicOr(unsigned* target, unsigned value) {
    return std::atomic_ref<unsigned>(*target).fetch_or(value);
}
static inline unsigned long long atomicAdd(unsigned long long* target, unsigned long long value) {
    return std::atomic_ref<unsigned long long>(*target).fetch_add(value);
}
static inline int atomicCAS(int* target, int expected, int value) {
    std::atomic_ref<int>(*target).compare_exchange_strong(expected, value);
    return expected;
}
static inline int atomicExch(int* target, int value) { return std::atomic_ref<int>(*target).exchange(value); }
static inline unsigned atomicMax(unsigned* target, unsigned value) {
    std::atomic_ref<unsigned> current(*target);
    unsigned old = current.load();
    while (old < value && !current.compare_exchange_weak(old, value)) {
    }
    return old;
}
static inline unsigned atomicMin(unsigned* target, unsigned value) {
    std::atomic_ref<unsigned> current(*target);
    unsigned old = current.load();
    while (old > value && !current.compare_exchange_weak(old, value)) {
    }
    return old;
}
static inline int __ldcg(const int* from) { return *from; }
static inline int __clz(int bits) { return bits == 0 ? 32 : __builtin_clz((unsigned)bits); }
static inline int __clzll(long long bits) { return bits == 0 ? 64 : __builtin_clzll((unsigned long long)bits); }
static inline int __ffs(int bits) { return __builtin_ffs(bits); }
static inline int __ffsll(long long bits) { return __builtin_ffsll(bits); }
static inline int __popcll(long long bits) { return __builtin_popcountll((unsigned long long)bits); }
static inline int __popc(unsigned bits) { return __builtin_popcount(bits); }
static inline unsigned __float_as_uint(float value) {
    unsigned bits;
    std::memcpy(&bits, &value, 4);
    return bits;
}
static inline float __uint_as_float(unsigned bits) {
    float value;
    std::memcpy(&value, &bits, 4);
    return value;
}

// Blocks of one cluster, which run at the same time (emulated cluster.cuh: cluster_emulation.h).
static std::vector<std::unique_ptr<Block>> cluster;
static std::unique_ptr<std::barrier<>> cluster_barrier;

// Runs `kernel` for grid.y clusters of grid.x blocks, one cluster after the other; only those from `first` to `end`.
static inline void launch_clusters(Dim3 grid, unsigned num_threads, size_t shared_bytes,
                                   std::function<void()> kernel, unsigned first = 0, unsigned end = ~0u) {
    cluster.clear();
    for (unsigned i = 0; i < grid.x; ++i) cluster.push_back(std::make_unique<Block>(num_threads, shared_bytes));
    cluster_barrier = std::make_unique<std::barrier<>>(grid.x * num_threads);
    gridDim = grid;
    std::barrier<> next(grid.x * num_threads);
    std::vector<std::thread> threads;
    for (unsigned i = 0; i < grid.x * num_threads; ++i) {
        threads.emplace_back([&, i] {
            block = cluster[i / num_threads].get();
            threadIdx = {i % num_threads, 0, 0};
            for (unsigned y = first; y < min(grid.y, end); ++y) {
                blockIdx = {i / num_threads, y, 0};
                kernel();
                next.arrive_and_wait();
            }
        });
    }
    for (std::thread& thread : threads) thread.join();
}

// Runs `kernel` for a grid of `num_blocks`, one block after the other.
static inline void launch(unsigned num_blocks, unsigned num_threads, size_t shared_bytes,
                          std::function<void()> kernel) {
    launch_clusters({1, num_blocks, 1}, num_threads, shared_bytes, [&] {
        blockIdx = {blockIdx.y, 0, 0};
        gridDim = {num_blocks, 1, 1};
        kernel();
    });
}

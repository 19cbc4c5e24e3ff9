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
static inline uint4 make_uint4(unsigned x, unsigned y, unsigned z, unsigned w) { return {x, y, z, w}; }

struct Warp {
    std::barrier<> barrier{32};
    unsigned values[32];
};

static thread_local Dim3 threadIdx, blockIdx;
static Dim3 gridDim;
static std::vector<unsigned char> shared_memory;
static std::unique_ptr<std::barrier<>> block_barrier;
static std::vector<std::unique_ptr<Warp>> warps;

static inline void __syncthreads() { block_barrier->arrive_and_wait(); }

// What `result` makes of the values of a warp's 32 threads.
template <typename Result>
static unsigned exchange(unsigned value, Result result) {
    Warp& warp = *warps[threadIdx.x / 32];
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
static inline unsigned __reduce_min_sync(unsigned, unsigned value) {
    return exchange(value, [](const unsigned* values) { return *std::min_element(values, values + 32); });
}
static inline unsigned atomicAdd(unsigned* target, unsigned value) {
    return std::atomic_ref<unsigned>(*target).fetch_add(value);
}
static inline unsigned atomicAnd(unsigned* target, unsigned value) {
    return std::atomic_ref<unsigned>(*target).fetch_and(value);
}
static inline unsigned atomicMin(unsigned* target, unsigned value) {
    std::atomic_ref<unsigned> current(*target);
    unsigned old = current.load();
    while (old > value && !current.compare_exchange_weak(old, value)) {
    }
    return old;
}
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

// Runs `kernel` for a grid of `num_blocks`, one block after the other.
static void launch(unsigned num_blocks, unsigned num_threads, size_t shared_bytes, std::function<void()> kernel) {
    shared_memory.assign(shared_bytes, 0xa5);
    block_barrier = std::make_unique<std::barrier<>>(num_threads);
    warps.clear();
    for (unsigned i = 0; i < num_threads / 32; ++i) warps.push_back(std::make_unique<Warp>());
    gridDim = {num_blocks, 1, 1};
    std::barrier<> next(num_threads);
    std::vector<std::thread> threads;
    for (unsigned thread = 0; thread < num_threads; ++thread) {
        threads.emplace_back([&, thread] {
            threadIdx = {thread, 0, 0};
            for (unsigned block = 0; block < num_blocks; ++block) {
                blockIdx = {block, 0, 0};
                kernel();
                next.arrive_and_wait();
            }
        });
    }
    for (std::thread& thread : threads) thread.join();
}

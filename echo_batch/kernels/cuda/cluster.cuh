// What blocks of one cluster need to read each other's shared memory.
#pragma once

typedef unsigned int u32;
typedef unsigned long long u64;

static __device__ __forceinline__ u32 cluster_rank() {
    u32 rank;
    asm volatile("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
    return rank;
}

// Makes this thread's writes, and those that a block barrier has shown it, visible to the cluster.
static __device__ __forceinline__ void cluster_fence() {
    asm volatile("fence.acq_rel.cluster;" ::: "memory");
}

static __device__ __forceinline__ void cluster_arrive() {
    asm volatile("barrier.cluster.arrive.relaxed;" ::: "memory");
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

// What all threads of a block have written to its shared memory can be read by the whole cluster afterwards. One
// thread's fence is enough behind a block barrier; a fence of every thread takes several times as long.
static __device__ __forceinline__ void cluster_sync(u32 thread) {
    __syncthreads();
    if (thread == 0) cluster_fence();
    cluster_arrive();
    cluster_wait();
}

// Hopper instructions behind names: barriers in shared memory, bulk copies, loads that the compiler must not move.
#pragma once

typedef unsigned char u8;
typedef unsigned int u32;
typedef unsigned long long u64;

static __device__ __forceinline__ u32 address_of(const void* pointer) { return (u32)__cvta_generic_to_shared(pointer); }

static __device__ __forceinline__ void barrier_init(u64* barrier, u32 count) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(address_of(barrier)), "r"(count) : "memory");
}

static __device__ __forceinline__ void barrier_arrive(u64* barrier) {
    asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(address_of(barrier)) : "memory");
}

static __device__ __forceinline__ void barrier_expect(u64* barrier, u32 bytes) {
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(address_of(barrier)), "r"(bytes)
                 : "memory");
}

static __device__ __forceinline__ void barrier_wait(u64* barrier, u32 parity) {
    asm volatile(
        "{\n"
        ".reg .pred done;\n"
        "again:\n"
        "mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n"
        "@!done bra again;\n"
        "}\n" ::"r"(address_of(barrier)),
        "r"(parity)
        : "memory");
}

static __device__ __forceinline__ void bulk_copy(void* to, const void* from, u32 bytes, u64* barrier, u64 policy) {
    asm volatile(
        "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint [%0], [%1], %2, [%3], %4;" ::"r"(
            address_of(to)),
        "l"(from), "r"(bytes), "r"(address_of(barrier)), "l"(policy)
        : "memory");
}

static __device__ __forceinline__ void group_barrier(u32 group) {
    asm volatile("bar.sync %0, 128;" ::"r"(group + 1) : "memory");
}

static __device__ __forceinline__ uint2 load_shared_8(u32 address) {
    uint2 value;
    asm volatile("ld.shared.v2.u32 {%0, %1}, [%2];" : "=r"(value.x), "=r"(value.y) : "r"(address) : "memory");
    return value;
}

static __device__ __forceinline__ float load_shared_float(u32 address) {
    float value;
    asm volatile("ld.shared.f32 %0, [%1];" : "=f"(value) : "r"(address) : "memory");
    return value;
}

// Cached in L2 at most: another kernel of the same graph may have written the row.
static __device__ __forceinline__ uint4 load_row_vector(const uint4* from) {
    uint4 v;
    asm volatile("ld.global.cg.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
                 : "l"(from)
                 : "memory");
    return v;
}

template <typename T>
static __device__ __forceinline__ T look(const T* pointer) {
    return *(const volatile T*)pointer;
}

// What this thread wrote, or a barrier has shown it, can be seen on the whole GPU before what it writes from here on.
// Lighter than __threadfence(), which also puts all such fences of all threads into one order.
static __device__ __forceinline__ void gpu_fence() { asm volatile("fence.acq_rel.gpu;" ::: "memory"); }

// Between a kernel and the next one on its stream, if that was launched to overlap (runtime.py): its blocks may take the
// place of blocks of this kernel that have ended.
static __device__ __forceinline__ void let_next_start() { asm volatile("griddepcontrol.launch_dependents;"); }

// All blocks of the kernel before have ended, and what they wrote can be read. At once if there was no overlap.
static __device__ __forceinline__ void wait_for_previous() { asm volatile("griddepcontrol.wait;" ::: "memory"); }

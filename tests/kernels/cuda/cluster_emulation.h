// cluster.cuh on a CPU: blocks of a cluster run at the same time (emulation.h) and read each other's vectors.
typedef unsigned int u32;
typedef unsigned long long u64;
#define __cluster_dims__(...)

static thread_local std::unique_ptr<std::barrier<>::arrival_token> arrived;

static inline u32 cluster_rank() { return blockIdx.x; }
static inline void cluster_arrive() {
    arrived = std::make_unique<std::barrier<>::arrival_token>(cluster_barrier->arrive());
}
static inline void cluster_wait() { cluster_barrier->wait(std::move(*arrived)); }
static inline void cluster_sync(u32) { cluster_barrier->arrive_and_wait(); }
template <typename T>
static inline T load_remote(const T* local, u32 rank) {
    const size_t offset = reinterpret_cast<const unsigned char*>(local) - block->shared.data();
    return *reinterpret_cast<const T*>(cluster[rank]->shared.data() + offset);
}

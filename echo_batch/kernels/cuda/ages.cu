// First and last launch of a step's start (echo_batch/kernels/triton/cache_ops.py explains all three): how many rows
// there are of each age, and the rows of the bins that `prepare` has chosen, the oldest first.
//
// A block has ROWS rows of a group. Each thread loads its rows at once, so that it waits for memory only once. What the
// block finds is added up by bin in shared memory, and then to the group's bins with one atomic each.
//
// Rows beside each other are mostly of few ages (taken in the same step, or all free), so a warp's lanes could queue on
// one address in shared memory too.
// 1. Counting: to add 1, and not to ask what was there, is a single instruction (ATOMS.POPC.INC) that takes all lanes
//    of an address together. Free rows need nothing else.
// 2. Listing: each row needs to know what was there. Lanes of the warp's youngest listed bin, which a reduction and a
//    vote find, share an atomic; the others have one each. That is enough: only the youngest listed bin of a group may
//    be of any size, all older ones (and the free rows) together hold fewer rows than the step has asked for; and a
//    warp all of whose rows are of one of those shares an atomic as well. __match_any_sync would put all bins together,
//    but is slow.
//
// Compile-time: THREADS, ROWS (of a block), AGE_BINS, NUM_COUNTS, FIRST_BIN and LAST_BIN (columns of the counts).

typedef unsigned int u32;
typedef unsigned long long u64;

constexpr u32 FULL_MASK = 0xffffffffu;
constexpr int OWN = ROWS / THREADS;  // rows of a thread
constexpr u32 FREE_BIN = AGE_BINS - 1;
constexpr u32 NO_BIN = FREE_BIN + 1;  // of rows past the end, and of those that are not listed
constexpr int PAST_END = -2;  // in place of the step in which a row was last used; free rows have -1
static_assert(ROWS % THREADS == 0 && THREADS % 32 == 0 && THREADS > NO_BIN, "a thread for each bin");

// By the upper bits of the age's float32 form: four bins an octave, age 1 in bin 0 (as triton/cache_kernels.py).
static __device__ __forceinline__ u32 bin_of(int last_used, int now) {
    const u32 bits = __float_as_uint((float)max(now - last_used, 1));
    return last_used < 0 ? FREE_BIN + (last_used == PAST_END) : min((bits >> 21) - (127u << 2), FREE_BIN - 1);
}

// Bins of this thread's rows: `first` of the block's group and every THREADS-th after it.
static __device__ __forceinline__ void load_bins(const int* priority, u32 first, u32 num_rows, int now,
                                                 u32 (&bins)[OWN]) {
    const int* const own = priority + (u64)blockIdx.y * num_rows + first;
    const int left = (int)(num_rows - first);
    int last_used[OWN];
#pragma unroll
    for (int i = 0; i < OWN; ++i) last_used[i] = i * THREADS < left ? own[i * THREADS] : PAST_END;
#pragma unroll
    for (int i = 0; i < OWN; ++i) bins[i] = bin_of(last_used[i], now);
}

// Adds to the counts in `age_bins`, which are zero before. `step` is still the last one.
extern "C" __global__ void __launch_bounds__(THREADS)
count_ages(const int* __restrict__ priority, u32* __restrict__ age_bins, const int* __restrict__ step, u32 num_rows) {
    extern __shared__ __align__(16) unsigned char shared_bytes[];
    u32* const by_bin = reinterpret_cast<u32*>(shared_bytes);  // the last one is NO_BIN's
    const u32 thread = threadIdx.x;
    u32 bins[OWN];
    load_bins(priority, blockIdx.x * ROWS + thread, num_rows, *step + 1, bins);
    if (thread <= NO_BIN) by_bin[thread] = 0;
    __syncthreads();
#pragma unroll
    for (int i = 0; i < OWN; ++i) atomicAdd(by_bin + bins[i], 1u);
    __syncthreads();
    u32* const counts = age_bins + blockIdx.y * 2 * AGE_BINS;
    if (thread < AGE_BINS && by_bin[thread] > 0) atomicAdd(counts + thread, by_bin[thread]);
}

// Lists the free rows and, unless `only_free`, those of the bins from FIRST_BIN to LAST_BIN. Those of a bin begin at
// its end in `age_bins`, which moves on.
extern "C" __global__ void __launch_bounds__(THREADS)
list_candidates(const int* __restrict__ priority, int* __restrict__ candidates, const int* __restrict__ counts,
                u32* __restrict__ age_bins, const int* __restrict__ step, u32 num_rows, u32 capacity, int only_free) {
    extern __shared__ __align__(16) unsigned char shared_bytes[];
    u32* const by_bin = reinterpret_cast<u32*>(shared_bytes);  // how many rows the block lists; then where they begin
    const u32 thread = threadIdx.x, lane = thread & 31, group = blockIdx.y, first_row = blockIdx.x * ROWS + thread;
    const int first_bin = counts[group * NUM_COUNTS + FIRST_BIN];
    const int last_bin = only_free ? -1 : counts[group * NUM_COUNTS + LAST_BIN];
    const u32 num_bins = max(last_bin + 1 - first_bin, 0);
    u32 bins[OWN], ranks[OWN];
    load_bins(priority, first_row, num_rows, *step, bins);
    if (thread < AGE_BINS) by_bin[thread] = 0;
    __syncthreads();
#pragma unroll
    for (int i = 0; i < OWN; ++i) {
        if (bins[i] != FREE_BIN && bins[i] - first_bin >= num_bins) bins[i] = NO_BIN;
        const u32 bin = bins[i], youngest = __reduce_min_sync(FULL_MASK, bin);
        if (youngest == NO_BIN) continue;  // the whole warp
        const bool shares = bin == youngest;
        const u32 sharing = __ballot_sync(FULL_MASK, shares);
        const u32 before = __popc(sharing & ((1u << lane) - 1)), last = 31 - __clz(sharing);
        u32 begin = 0;
        if (bin != NO_BIN && !(shares && lane != last)) begin = atomicAdd(by_bin + bin, shares ? before + 1 : 1);
        const u32 shared_begin = __shfl_sync(FULL_MASK, begin, last);
        ranks[i] = shares ? shared_begin + before : begin;
    }
    __syncthreads();
    u32* const ends = age_bins + group * 2 * AGE_BINS + AGE_BINS;
    if (thread < AGE_BINS && by_bin[thread] > 0) by_bin[thread] = atomicAdd(ends + thread, by_bin[thread]);
    __syncthreads();
#pragma unroll
    for (int i = 0; i < OWN; ++i) {
        if (bins[i] == NO_BIN) continue;
        const u32 place = by_bin[bins[i]] + ranks[i];
        if (place < capacity) candidates[(u64)group * capacity + place] = (int)(first_row + i * THREADS);
    }
}

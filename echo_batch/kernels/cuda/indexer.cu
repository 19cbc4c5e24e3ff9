// Indexer scores of a decode step over a paged fp8 key cache and, beside the scoring, lossless prefetch of KV rows.
//
// One block a multiprocessor takes an equal, contiguous share of all pages of the batch. Its warps have roles:
//   consumers (CONSUMERS groups of 4 warps): each takes every CONSUMERS-th page; keys go from shared memory into
//     registers as the A operand of wgmma, the query lies in shared memory as B; then ReLU, weights, sum over heads;
//   producers (1 warp a group): copy whole pages (keys and their scales, 8,448 contiguous bytes) into the STAGES
//     buffers of their group. Copies may finish in any order; a barrier's parity tells only two rounds of a buffer
//     apart, so a buffer must not go from one group to another: a group that is ahead would see the wrong round;
//   prefetchers (PREFETCH warps): take slots that scored above the predicted k-th score from a queue in shared memory;
//     where the slot is not resident they give it a row that was set aside, link it, and copy the row from host memory.
//     What they have not come to when the scoring ends they list for the top-k's launch (late.cuh).
// With LISTS the block also lists what scores at least predicted - margin, for the top-k (kernels/score_lists.py): one
// list a block, filled by whichever consumer has something, so that nothing is waited for but a counter in shared memory.
//
// Keys lie in shared memory as in the page, 128 bytes each, unswizzled. A lane reads 8 bytes of each 32-byte segment of
// its two keys, neighbouring keys starting at different segments, so that no two lanes of a half-warp meet in a bank;
// the query's bytes are permuted within a segment to match. The sums over k and heads have DeepGEMM's order.
//
// Compile-time: HEADS (32 or 64), STAGES, READ_ONCE (keys leave L2 first), CONSUMERS, PREFETCH (warps, 0: only scores),
// QUEUE (slots that the queue of a prefetch warp holds in one launch), EARLY (pages before the end of the block's share
// from which on no row is started; none at all if the share is shorter than twice that and the top-k's launch can bring
// them), VECTORS (16-byte vectors of a KV row), ROWS (rows that a prefetch warp has in flight at most), LISTS (0 or
// 1), OVERLAP (1: the kernel before may still run; it makes query or weights, and nothing else that is read here).

#include "hopper.cuh"
#include "late.cuh"

constexpr u32 FULL_MASK = 0xffffffffu;
constexpr u32 PAGE_KEYS = 64, KEY_BYTES = 128, PAGE_BYTES = PAGE_KEYS * (KEY_BYTES + 4);
constexpr u32 QUERY_BYTES = HEADS * KEY_BYTES;
constexpr u32 CONSUMER_WARPS = 4 * CONSUMERS;
constexpr u32 NAP = 400;  // ns until a prefetch warp asks again
constexpr u32 MANY = 6;   // missing slots that a prefetch warp has at hand
constexpr u32 QUEUES = PREFETCH > 0 ? PREFETCH : 1;

struct Page {
    int row;       // of the batch
    int position;  // of its first key
    int page;      // in the cache; negative: none, its scores are -inf
    int unused;
};

struct Buffers {  // of one group
    u8 pages[STAGES][PAGE_BYTES];
    Page info[STAGES];
    u64 full[STAGES];
    u64 empty[STAGES];
};

struct Shared {
    u8 query[CONSUMERS][QUERY_BYTES];  // rows of 128 bytes, 16-byte chunks swizzled as wgmma expects
    Buffers buffers[CONSUMERS];
    int queue[QUEUES][QUEUE];  // slots; -1: not written yet
    u32 tail[QUEUES];
    u32 progress;  // pages that consumers have reached
    u32 done;      // consumer warps that have finished
    u32 listed;    // entries of this block's list
    u32 first_row, last_row;
};

// Where this block lists likely scores.
struct List {
    uint2* entries;  // score, row << POSITION_BITS | position
    u32 capacity;
    uint4* header;
};
constexpr u32 POSITION_BITS = 20;

// Keys are read once in a step: they should not push the scores, which top-k reads next, out of L2.
static __device__ __forceinline__ u64 key_policy() {
    u64 policy;
    if (READ_ONCE)
        asm volatile("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(policy));
    else
        asm volatile("createpolicy.fractional.L2::evict_normal.b64 %0, 1.0;" : "=l"(policy));
    return policy;
}

// sums[4 * i + j]: key lane / 4 + (j / 2) * 8 of the warp, head 8 * i + 2 * (lane % 4) + j % 2.
static __device__ __forceinline__ void multiply(float (&sums)[HEADS / 2], const u32 (&a)[4], u64 query, bool add) {
#if HEADS == 64
    asm volatile(
        "{\n"
        ".reg .pred add;\n"
        "setp.ne.b32 add, %37, 0;\n"
        "wgmma.mma_async.sync.aligned.m64n64k32.f32.e4m3.e4m3 "
        "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "
        "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31}, "
        "{%32, %33, %34, %35}, %36, add, 1, 1;\n"
        "}\n"
        : "+f"(sums[0]), "+f"(sums[1]), "+f"(sums[2]), "+f"(sums[3]), "+f"(sums[4]), "+f"(sums[5]), "+f"(sums[6]),
          "+f"(sums[7]), "+f"(sums[8]), "+f"(sums[9]), "+f"(sums[10]), "+f"(sums[11]), "+f"(sums[12]), "+f"(sums[13]),
          "+f"(sums[14]), "+f"(sums[15]), "+f"(sums[16]), "+f"(sums[17]), "+f"(sums[18]), "+f"(sums[19]),
          "+f"(sums[20]), "+f"(sums[21]), "+f"(sums[22]), "+f"(sums[23]), "+f"(sums[24]), "+f"(sums[25]),
          "+f"(sums[26]), "+f"(sums[27]), "+f"(sums[28]), "+f"(sums[29]), "+f"(sums[30]), "+f"(sums[31])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(query), "r"((int)add));
#else
    asm volatile(
        "{\n"
        ".reg .pred add;\n"
        "setp.ne.b32 add, %21, 0;\n"
        "wgmma.mma_async.sync.aligned.m64n32k32.f32.e4m3.e4m3 "
        "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15}, "
        "{%16, %17, %18, %19}, %20, add, 1, 1;\n"
        "}\n"
        : "+f"(sums[0]), "+f"(sums[1]), "+f"(sums[2]), "+f"(sums[3]), "+f"(sums[4]), "+f"(sums[5]), "+f"(sums[6]),
          "+f"(sums[7]), "+f"(sums[8]), "+f"(sums[9]), "+f"(sums[10]), "+f"(sums[11]), "+f"(sums[12]), "+f"(sums[13]),
          "+f"(sums[14]), "+f"(sums[15])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(query), "r"((int)add));
#endif
}

// What of the batch this block scores: pages [first, first + count) of all rows' pages in [first_block, end_block).
struct Share {
    u32 first;
    u32 count;
};

static __device__ __forceinline__ u32 pages_of_row(int length, u32 first_block, u32 end_block) {
    const u32 end = min(length <= 0 ? 0u : ((u32)length + PAGE_KEYS - 1) / PAGE_KEYS, end_block);
    return end > first_block ? end - first_block : 0;
}

static __device__ __forceinline__ Share share_of_block(const int* lengths, u32 batch, u32 first_block, u32 end_block) {
    u32 total = 0;
    for (u32 start = 0; start < batch; start += 32) {
        const u32 row = start + (threadIdx.x & 31);
        total += __reduce_add_sync(FULL_MASK, row < batch ? pages_of_row(lengths[row], first_block, end_block) : 0);
    }
    const u32 first = (u32)((u64)total * blockIdx.x / gridDim.x);
    return {first, (u32)((u64)total * (blockIdx.x + 1) / gridDim.x) - first};
}

// One lane's place in the batch: page `page` (from first_block on) of row `row`.
struct Place {
    u32 row;
    u32 page;
};

// The place of page `index` of the batch; the same in all lanes.
static __device__ __forceinline__ Place place_of(u32 index, const int* lengths, u32 batch, u32 first_block,
                                                 u32 end_block) {
    const u32 lane = threadIdx.x & 31;
    u32 before = 0;
    for (u32 start = 0; start < batch; start += 32) {
        const u32 own = start + lane < batch ? pages_of_row(lengths[start + lane], first_block, end_block) : 0;
        u32 sum = own;
#pragma unroll
        for (u32 step = 1; step < 32; step *= 2) {
            const u32 other = __shfl_up_sync(FULL_MASK, sum, step);
            if (lane >= step) sum += other;
        }
        const u32 found = __ballot_sync(FULL_MASK, before + sum > index);
        if (found != 0) {
            const u32 at = __ffs((int)found) - 1;
            return {start + at, index - before - __shfl_sync(FULL_MASK, sum - own, (int)at)};
        }
        before += __shfl_sync(FULL_MASK, sum, 31);
    }
    return {batch, 0};
}

static __device__ __forceinline__ void produce(Buffers& buffers, u32 group, Share share, const u8* pages,
                                               const int* block_table, long long table_stride, const int* lengths,
                                               u32 batch, u32 first_block, u32 end_block) {
    const u32 lane = threadIdx.x & 31;
    const u32 count = (share.count + CONSUMERS - 1 - group) / CONSUMERS;  // pages of this group
    const u64 policy = key_policy();
    Place place = place_of(share.first, lengths, batch, first_block, end_block);
    // Every lane looks up one of the group's next 32 pages, one round ahead of their use.
    auto look_up = [&](u32 ahead) {
        place.page += ahead;
        u32 num = 0;
        while (place.row < batch &&
               place.page >= (num = pages_of_row(lengths[place.row], first_block, end_block))) {
            place.page -= num;
            ++place.row;
        }
        return place.row < batch ? block_table[place.row * table_stride + first_block + place.page] : -1;
    };
    int next_page = look_up(group + lane * CONSUMERS);
    Place next_place = place;
    for (u32 start = 0; start < count; start += 32) {
        const int own_page = next_page;
        const Place own_place = next_place;
        if (start + 32 < count) {
            next_page = look_up(32 * CONSUMERS);
            next_place = place;
        }
        const u32 num = min(count - start, 32u);
#pragma unroll 1
        for (u32 i = 0; i < num; ++i) {
            const int page = __shfl_sync(FULL_MASK, own_page, (int)i);
            const u32 row = __shfl_sync(FULL_MASK, own_place.row, (int)i);
            const u32 at = __shfl_sync(FULL_MASK, own_place.page, (int)i);
            if (lane == 0) {
                const u32 stage = (start + i) % STAGES, round = (start + i) / STAGES;
                if (round > 0) barrier_wait(&buffers.empty[stage], (round - 1) & 1);
                buffers.info[stage] = {(int)row, (int)((first_block + at) * PAGE_KEYS), page, 0};
                barrier_expect(&buffers.full[stage], PAGE_BYTES);
                bulk_copy(buffers.pages[stage], pages + (long long)max(page, 0) * PAGE_BYTES, PAGE_BYTES,
                          &buffers.full[stage], policy);
            }
            __syncwarp();
        }
    }
}

// A warp's two keys of each lane, lane / 4 and that + 8, as four A operands; `keys` is the address of the warp's first.
static __device__ __forceinline__ void load_keys(u32 keys, u32 lane, u32 (&a)[4][4]) {
    const u32 key = lane >> 2, quarter = lane & 3;
    uint2 low[4], high[4];
#pragma unroll
    for (u32 i = 0; i < 4; ++i) {
        const u32 at = keys + key * KEY_BYTES + ((i + key) & 3) * 32 + quarter * 8;
        low[i] = load_shared_8(at);
        high[i] = load_shared_8(at + 8 * KEY_BYTES);
    }
    // Segment s of a key is what was loaded as number (s - key) % 4: rotate by one and by two.
    const bool by_one = key & 1, by_two = key & 2;
    uint2 low_1[4], high_1[4];
#pragma unroll
    for (u32 i = 0; i < 4; ++i) {
        low_1[i] = by_one ? low[(i + 3) & 3] : low[i];
        high_1[i] = by_one ? high[(i + 3) & 3] : high[i];
    }
#pragma unroll
    for (u32 i = 0; i < 4; ++i) {
        const uint2 first = by_two ? low_1[(i + 2) & 3] : low_1[i];
        const uint2 second = by_two ? high_1[(i + 2) & 3] : high_1[i];
        a[i][0] = first.x, a[i][1] = second.x, a[i][2] = first.y, a[i][3] = second.y;
    }
}

// The query of one row into this group's shared memory, bytes permuted as load_keys permutes those of the keys.
static __device__ __forceinline__ void load_query(u8* to, const u8* query) {
    for (u32 i = threadIdx.x & 127; i < 4 * HEADS; i += 128) {
        const u32 head = i >> 2, segment = i & 3;
        const uint4* const from = reinterpret_cast<const uint4*>(query + head * KEY_BYTES + segment * 32);
        const uint4 x = from[0], y = from[1];
        u8* const row = to + head * KEY_BYTES;
        *reinterpret_cast<uint4*>(row + (((2 * segment) ^ (head & 7)) * 16)) = make_uint4(x.x, x.z, y.x, y.z);
        *reinterpret_cast<uint4*>(row + (((2 * segment + 1) ^ (head & 7)) * 16)) = make_uint4(x.y, x.w, y.y, y.w);
    }
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}

static __device__ __forceinline__ void consume(Shared& shared, Share share, const u8* query, const float* all_weights,
                                               const int* lengths, u32 batch, u32 first_block, u32 end_block,
                                               const float* predicted, const float* margins, const List& list,
                                               float* scores, long long score_stride) {
    const u32 lane = threadIdx.x & 31, warp = (threadIdx.x >> 5) & 3, group = threadIdx.x >> 7;
    const u32 quarter = lane & 3, own_key = warp * 16 + (lane >> 2);
    Buffers& buffers = shared.buffers[group];
    // 128-byte swizzle, 1,024 bytes from 8 heads to the next 8.
    const u64 descriptor = (u64)1 << 62 | (u64)(1024 >> 4) << 32 | (u64)1 << 16 | (address_of(shared.query[group]) >> 4);
    float weights[HEADS / 4];
    int row = -1, length = 0;
    float threshold = 0.0f, bound = 0.0f;
    auto change_row = [&](int to) {
        row = to;
        group_barrier(group);  // all four warps have used the last query
        load_query(shared.query[group], query + (long long)row * QUERY_BYTES);
        length = lengths[row];
        if (PREFETCH > 0) threshold = predicted[row];
        if (LISTS) {
            bound = predicted[row] - margins[row];
            if ((threadIdx.x & 127) == 0) {
                atomicMin(&shared.first_row, (u32)row);
                atomicMax(&shared.last_row, (u32)row);
            }
        }
#pragma unroll
        for (u32 j = 0; j < HEADS / 8; ++j) {
            const float2 two =
                *reinterpret_cast<const float2*>(all_weights + (long long)row * HEADS + 8 * j + 2 * quarter);
            weights[2 * j] = two.x, weights[2 * j + 1] = two.y;
        }
        group_barrier(group);
    };
    if (OVERLAP) wait_for_previous();  // it makes query and weights; pages, lengths and the maps are older
    // The first query comes while the first pages are on their way.
    if (share.count > group) change_row((int)place_of(share.first, lengths, batch, first_block, end_block).row);
    for (u32 i = group; i < share.count; i += CONSUMERS) {
        const u32 stage = i / CONSUMERS % STAGES;
        barrier_wait(&buffers.full[stage], i / CONSUMERS / STAGES & 1);
        const Page info = buffers.info[stage];
        if (info.row != row) change_row(info.row);
        const u32 page = address_of(buffers.pages[stage]);
        u32 a[4][4];
        load_keys(page + warp * 16 * KEY_BYTES, lane, a);
        const float scale_0 = load_shared_float(page + PAGE_KEYS * KEY_BYTES + own_key * 4);
        const float scale_1 = load_shared_float(page + PAGE_KEYS * KEY_BYTES + own_key * 4 + 32);
        float sums[HEADS / 2];
#pragma unroll
        for (u32 j = 0; j < HEADS / 2; ++j) asm volatile("" : "+f"(sums[j])::"memory");
        asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
#pragma unroll
        for (u32 k = 0; k < 4; ++k) multiply(sums, a[k], descriptor + 2 * k, k > 0);
        asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
        __syncwarp();
        if (lane == 0) {  // the page is in registers
            barrier_arrive(&buffers.empty[stage]);
            if (PREFETCH > 0 && warp == 0) atomicMax(&shared.progress, i + 1);
        }
        asm volatile("wgmma.wait_group.sync.aligned 0;" ::: "memory");
#pragma unroll
        for (u32 j = 0; j < HEADS / 2; ++j) asm volatile("" : "+f"(sums[j])::"memory");

        float sum[4];
#pragma unroll
        for (u32 j = 0; j < 4; ++j) sum[j] = fmaxf(sums[j], 0.0f) * weights[j & 1];
#pragma unroll
        for (u32 h = 1; h < HEADS / 8; ++h) {
#pragma unroll
            for (u32 j = 0; j < 4; ++j) sum[j] += fmaxf(sums[4 * h + j], 0.0f) * weights[2 * h + (j & 1)];
        }
        float score_0 = (sum[0] + sum[1]) * scale_0;
        float score_1 = (sum[2] + sum[3]) * scale_1;
#pragma unroll
        for (int offset = 1; offset <= 2; offset *= 2) {
            score_0 += __shfl_xor_sync(FULL_MASK, score_0, offset);
            score_1 += __shfl_xor_sync(FULL_MASK, score_1, offset);
        }
        // Lanes 0 and 1 of a quad write a key each.
        const u32 key = own_key + 8 * quarter;
        const int position = info.position + (int)key;
        const float score = quarter == 0 ? score_0 : score_1;
        if (quarter < 2) {
            const bool inside = position < length && info.page >= 0;
            scores[row * score_stride + position] = inside ? score : __uint_as_float(0xff800000u);
        }
        if (LISTS) {
            const float listed = info.page >= 0 ? score : __uint_as_float(0xff800000u);
            const bool likely = quarter < 2 && position < length && listed >= bound;
            const u32 mask = __ballot_sync(FULL_MASK, likely);
            if (mask != 0) {
                u32 at = 0;
                if (lane == 0) at = atomicAdd(&shared.listed, (u32)__popc(mask));
                at = __shfl_sync(FULL_MASK, at, 0) + __popc(mask & ((1u << lane) - 1));
                if (likely && at < list.capacity)
                    list.entries[at] = make_uint2(__float_as_uint(listed), (u32)row << POSITION_BITS | (u32)position);
            }
        }
        if (PREFETCH > 0) {
            // Not the newest token: its row is there and may still be being written to the host.
            const bool candidate = quarter < 2 && info.page >= 0 && position < length - 1 && score > threshold;
            const u32 mask = __ballot_sync(FULL_MASK, candidate);
            if (mask != 0) {
                const u32 q = i % QUEUES;
                u32 base = 0;
                if (lane == 0) base = atomicAdd(&shared.tail[q], (u32)__popc(mask));
                base = __shfl_sync(FULL_MASK, base, 0) + __popc(mask & ((1u << lane) - 1));
                if (candidate && base < QUEUE) atomicExch(&shared.queue[q][base], info.page * (int)PAGE_KEYS + (int)key);
            }
        }
    }
    __syncwarp();
    if ((PREFETCH > 0 || LISTS) && lane == 0) {
        __threadfence_block();
        const u32 before = atomicAdd(&shared.done, 1u);
        if (LISTS && before == CONSUMER_WARPS - 1) {
            __threadfence_block();
            *list.header = make_uint4(look(&shared.listed), look(&shared.first_row), look(&shared.last_row), 0);
        }
    }
}

// Copies rows from[i] of the host pool to rows to[i] of the GPU pool, i < num <= ROWS; lane i holds from[i] and to[i]. Lanes
// without a part load something else from GPU memory: with a load that depends on a condition the compiler waits for those
// before it, and that is a trip over the link.
static __device__ __forceinline__ void copy_rows(const uint4* host_pool, uint4* gpu_pool, int from, int to, u32 num) {
    constexpr u32 LOADS = (ROWS * VECTORS + 31) / 32;
    const u32 lane = threadIdx.x & 31;
    uint4 vectors[LOADS];
    uint4* targets[LOADS];
#pragma unroll
    for (u32 j = 0; j < LOADS; ++j) {
        const u32 at = j * 32 + lane, i = at / VECTORS, column = at % VECTORS;
        const int source = __shfl_sync(FULL_MASK, from, (int)min(i, 31u));
        const int target = __shfl_sync(FULL_MASK, to, (int)min(i, 31u));
        targets[j] = i < num ? gpu_pool + (long long)target * VECTORS + column : nullptr;
        vectors[j] = load_row_vector(i < num ? host_pool + (long long)source * VECTORS + column : gpu_pool);
    }
#pragma unroll
    for (u32 j = 0; j < LOADS; ++j)
        if (targets[j] != nullptr) *targets[j] = vectors[j];
}

// Counts go to totals: candidates, prefetched, dropped (no row or no room in the queue), late (scoring had ended). The
// late ones go to late_list[0, LATE_ENTRIES), if there is one, as far as they fit, then -1.
static __device__ __forceinline__ void prefetch(Shared& shared, u32 queue, Share share, const uint4* host_pool,
                                                uint4* gpu_pool, int* host_to_gpu, int* gpu_to_host, int* priority,
                                                const int* rows, u32 num_rows, u32* taken, u64* totals, int now,
                                                int* late_list) {
    const u32 lane = threadIdx.x & 31;
    // In a short share no row would come before the end: all are left to the top-k's launch.
    const bool is_short = late_list != nullptr && share.count <= 2 * EARLY;
    const u32 last = is_short || share.count <= EARLY ? 0 : share.count - EARLY;
    u32 head = 0, num_prefetched = 0, num_dropped = 0;
    u32 missing = 0;  // lanes whose slots are to be brought
    int slot = -1;
    bool ended = false, exhausted = false;
    if (late_list != nullptr) late_list[lane] = -1;  // here, and not in the end, where others wait
    while (!ended) {
        // Whether all is scored is asked before how much there is.
        const bool complete = look(&shared.done) == CONSUMER_WARPS;
        ended = complete || look(&shared.progress) > last;
        __threadfence_block();
        const u32 ready = min(min(look(&shared.tail[queue]), (u32)QUEUE) - head, 32u);
        const u32 num = __shfl_sync(FULL_MASK, ready, 0);
        ended = __shfl_sync(FULL_MASK, (int)ended, 0);
        if (ended) break;
        if (num == 0) {
            // Asking more often costs those that score: four warps that ask every 100 ns make a launch 0.8 us longer.
            __nanosleep(NAP);
            continue;
        }
        slot = -1;
        int row = 0;
        if (lane < num) {
            while ((slot = atomicExch(&shared.queue[queue][head + lane], -1)) < 0) {
            }
            row = look(host_to_gpu + slot);
        }
        __syncwarp();
        head += num;
        missing = __ballot_sync(FULL_MASK, slot >= 0 && row == -1);
        if (exhausted) {
            num_dropped += __popc(missing);
            missing = 0;
            continue;
        }
        while (missing != 0) {
            if (look(&shared.progress) > last) ended = true;
            if (__any_sync(FULL_MASK, ended)) {
                ended = true;
                break;
            }
            // The next missing slots: lane i gets the i-th. With many at hand it is the link that they wait for, and more
            // rows in flight would only hold up the keys.
            const u32 num_missing = __popc(missing), wanted = num_missing > MANY ? 1 : min(num_missing, (u32)ROWS);
            int from = -1;
            for (u32 i = 0; i < wanted; ++i) {
                const int other = __shfl_sync(FULL_MASK, slot, __ffs((int)missing) - 1);
                if (lane == i) from = other;
                missing &= missing - 1;
            }
            u32 base = 0;
            if (lane == 0) base = atomicAdd(taken, wanted);
            base = __shfl_sync(FULL_MASK, base, 0);
            exhausted = base + wanted >= num_rows;
            const int to = lane < wanted && base + lane < num_rows ? rows[base + lane] : -1;
            // Another batch row that shares the slot may have been faster; then this row stays free.
            const bool owner = to >= 0 && atomicCAS(host_to_gpu + from, -1, to) == -1;
            if (owner) {
                gpu_to_host[to] = from;
                priority[to] = now - 1;
            }
            const u32 owners = __ballot_sync(FULL_MASK, owner);
            num_dropped += __popc(__ballot_sync(FULL_MASK, lane < wanted && to < 0));
            num_prefetched += __popc(owners);
            // Owners close ranks, as the copy takes lanes from 0 on.
            u32 rest = owners, source_lane = 0;
            for (u32 i = 0; i < (u32)__popc(owners); ++i) {
                if (lane == i) source_lane = __ffs((int)rest) - 1;
                rest &= rest - 1;
            }
            const int source = __shfl_sync(FULL_MASK, from, (int)source_lane);
            const int target = __shfl_sync(FULL_MASK, to, (int)source_lane);
            if (owners != 0) copy_rows(host_pool, gpu_pool, source, target, __popc(owners));
        }
    }
    // How many candidates there were is known when all is scored.
    while (look(&shared.done) != CONSUMER_WARPS) __nanosleep(100);
    __threadfence_block();
    __syncwarp();
    const u32 num = look(&shared.tail[queue]), queued = min(num, (u32)QUEUE);
    num_dropped += num - queued;
    // Late are those at hand and what is left in the queue.
    const u32 at_hand = __popc(missing), left = queued - min(head, queued), num_late = at_hand + left;
    if (late_list != nullptr) {
        if (missing >> lane & 1) late_list[__popc(missing & ((1u << lane) - 1))] = slot;
        const u32 at = at_hand + lane;
        if (lane < left && at < LATE_ENTRIES) late_list[at] = look(&shared.queue[queue][head + lane]);
    }
    if (lane == 0) {
        if (num != 0) atomicAdd(totals, (u64)num);
        if (num_prefetched != 0) atomicAdd(totals + 1, (u64)num_prefetched);
        if (num_dropped != 0) atomicAdd(totals + 2, (u64)num_dropped);
        if (num_late != 0) atomicAdd(totals + 3, (u64)num_late);
    }
}

extern "C" __global__ void __launch_bounds__(32 * (CONSUMER_WARPS + CONSUMERS + PREFETCH), 1)
index_scores(const u8* __restrict__ query, const float* __restrict__ weights, const u8* __restrict__ pages,
             const int* __restrict__ block_table, long long table_stride, const int* __restrict__ lengths, u32 batch,
             u32 first_block, u32 end_block, float* __restrict__ scores, long long score_stride,
             const float* __restrict__ predicted, const float* __restrict__ margins, uint2* entries, uint4* headers,
             u32 capacity, const uint4* host_pool, uint4* gpu_pool, int* host_to_gpu, int* gpu_to_host, int* priority,
             const int* rows, u32 num_rows, u32* taken, u64* totals, const int* __restrict__ step, int* late) {
    extern __shared__ __align__(1024) u8 shared_bytes[];
    Shared& shared = *reinterpret_cast<Shared*>(shared_bytes);
    const u32 warp = __shfl_sync(FULL_MASK, threadIdx.x >> 5, 0);
    if (threadIdx.x < CONSUMERS) {
        for (u32 i = 0; i < STAGES; ++i) {
            barrier_init(&shared.buffers[threadIdx.x].full[i], 1);
            barrier_init(&shared.buffers[threadIdx.x].empty[i], 4);
        }
        asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
        asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
    }
    if (PREFETCH > 0) {
        for (u32 i = threadIdx.x; i < QUEUES * QUEUE; i += blockDim.x) shared.queue[i / QUEUE][i % QUEUE] = -1;
        if (threadIdx.x < QUEUES) shared.tail[threadIdx.x] = 0;
        if (threadIdx.x == 0) shared.progress = 0;
    }
    if ((PREFETCH > 0 || LISTS) && threadIdx.x == 0)
        shared.done = 0, shared.listed = 0, shared.first_row = batch, shared.last_row = 0;
    const Share share = share_of_block(lengths, batch, first_block, end_block);
    if (LISTS || PREFETCH > 0) let_next_start();  // the top-k, whose blocks do not fit beside this one's
    __syncthreads();
    if (warp < CONSUMER_WARPS) {
        const List list = {entries + (long long)blockIdx.x * capacity, capacity, headers + blockIdx.x};
        consume(shared, share, query, weights, lengths, batch, first_block, end_block, predicted, margins, list, scores,
                score_stride);
    } else if (warp < CONSUMER_WARPS + CONSUMERS) {
        const u32 group = warp - CONSUMER_WARPS;
        produce(shared.buffers[group], group, share, pages, block_table, table_stride, lengths, batch, first_block,
                end_block);
    } else if (PREFETCH > 0) {
        const u32 queue = warp - CONSUMER_WARPS - CONSUMERS;
        prefetch(shared, queue, share, host_pool, gpu_pool, host_to_gpu, gpu_to_host, priority, rows, num_rows, taken,
                 totals, *step, late == nullptr ? late : late + (blockIdx.x * PREFETCH + queue) * LATE_ENTRIES);
    }
}

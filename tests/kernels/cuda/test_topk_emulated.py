"""The CUDA top-k on a CPU, alone and with the look-up of the cache: its own source, compiled by the C++ compiler of the
host (emulation.h). On the card: tests/kernels/triton/test_topk.py, test_resolve_topk.py.
"""

import ctypes
import math
from pathlib import Path

import pytest
import torch
from torch import Tensor

from echo_batch.kernels.cache_layout import FALLBACKS, MISSING, NUM_MARKED, SELECTED
from echo_batch.kernels.contracts import GroupMaps, Marked
from echo_batch.kernels.cuda.topk import Instance, instance_defines
from echo_batch.kernels.prefetch_state import LATE, PREFETCHED, PrefetchState, make_prefetch_state
from echo_batch.kernels.reference.topk import topk_positions as reference
from tests.kernels.cuda.emulated import FOLDER, HERE, needs_compiler
from tests.kernels.cuda.emulated import build as build_emulated
from tests.kernels.marked import STEP, Selection, check_marked, fallbacks, make_selection
from tests.kernels.triton.test_topk import scores_of

NO_MARKS = (None,) * 7
NO_LATE = (None, 0, None, None, None, None, None, 0, None, None, None)
HOPPER = """
#include <mutex>
static void let_next_start() {}
static std::function<void()> publish;  // what the kernel before has written
static std::once_flag* is_published;
static void wait_for_previous() { std::call_once(*is_published, publish); }
static void gpu_fence() { std::atomic_thread_fence(std::memory_order_seq_cst); }
template <typename T> static T look(const T* pointer) { return *pointer; }
static uint4 load_row_vector(const uint4* from) { return *from; }
"""
pytestmark = needs_compiler

LAUNCHER = """
extern "C" void run(const float* scores, long long stride, u32 width, const int* lengths, float* predicted, int update,
                    u32 k, int* positions, float* kth, const int* block_tables, long long table_stride,
                    u32* fallback_count, int* miss_slots, int* miss_entries, u32* miss_count, u32* selected_count,
                    int* priority, int* host_to_gpu, const int* step, const int* late_lists, u32 num_late_lists,
                    u32* certain, const uint4* host_pool, uint4* gpu_pool, int* gpu_to_host, const int* set_aside,
                    u32 num_set_aside, u32* taken, u64* prefetch_totals, u32* marked_count,
                    u32 num_rows, u32 num_clusters, u32 first, u32 end) {
    const size_t shared_bytes = SCORES_OFFSET + (IN_SHARED ? 16 * THREADS * MAX_CHUNKS : 0);
#if MARK
    // Scores and lists stand where they belong only when the first thread has waited; before, others do.
    float* const to = const_cast<float*>(scores);
    int* const late = const_cast<int*>(late_lists);
    const std::vector<float> true_scores(to, to + stride * num_rows);
    const std::vector<int> true_late(late, late + 32 * num_late_lists);
    std::fill(to, to + stride * num_rows, 1e9f);
    std::fill(late, late + 32 * num_late_lists, 0);
    std::once_flag flag;
    is_published = &flag;
    publish = [&] {
        std::copy(true_scores.begin(), true_scores.end(), to);
        std::copy(true_late.begin(), true_late.end(), late);
    };
#endif
    launch_clusters({CLUSTER, num_clusters, 1}, THREADS, shared_bytes, [&] {
        topk_positions(scores, stride, width, lengths, predicted, update, k, positions, kth, block_tables, table_stride,
                       fallback_count
#if MARK
                       , miss_slots, miss_entries, miss_count, selected_count, priority, host_to_gpu, step
#endif
#if LATE > 0
                       , num_rows, late_lists, num_late_lists, certain, host_pool, gpu_pool, gpu_to_host, set_aside,
                       num_set_aside, taken, prefetch_totals, marked_count
#endif
        );
    }, first, end);
}
"""


@pytest.fixture(scope="module")
def library_with_prefetch(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    return build(tmp_path_factory.mktemp("topk"), INSTANCES["registers"], mark=True, vectors=3)


def build(directory: Path, instance: Instance, *, mark: bool, vectors: int = 0) -> ctypes.CDLL:
    source, clusters = FOLDER.joinpath("topk.cu").read_text(), '#include "cluster.cuh"'
    assert source.count(clusters) == 1
    source = source.replace('#include "hopper.cuh"', HOPPER)
    source = source.replace(clusters, f'#include "{HERE / "cluster_emulation.h"}"')
    defines = instance_defines(instance, aligned=False, mark=mark, vectors=vectors) | {"CLUSTER": 2}
    return build_emulated(directory / f"topk_{mark}.so", source, LAUNCHER, defines)


def run(library: ctypes.CDLL, *arguments: Tensor | int | None) -> None:
    """Numbers by the types of LAUNCHER: long long is taken for u32 too (one register)."""
    library.run(
        *(
            ctypes.c_longlong(a) if isinstance(a, int) else ctypes.c_void_p(None if a is None else a.data_ptr())
            for a in arguments
        )
    )


INSTANCES = {
    "registers": Instance(512, 2, 2, True),
    "shared memory": Instance(512, 2, 2, True, in_shared=True),
    "read again": Instance(512, 2, 1, False),
}


def test_positions(tmp_path: Path) -> None:
    library = build(tmp_path, INSTANCES["registers"], mark=False)
    k, width = 600, 7001
    scores = torch.cat([scores_of(kind, 1, width, seed=1) for kind in ("ties", "normal", "nan", "equal")])
    lengths = torch.tensor([width, k, k - 1, width - 5], dtype=torch.int32)
    expected, expected_kth = reference(scores, lengths, k)
    predicted = torch.tensor([float(expected_kth[0]), math.nan, math.nan, 1e30])
    positions, kth, count = torch.empty_like(expected), torch.empty(4), torch.zeros(1, dtype=torch.int32)
    run(
        library, scores, scores.stride(0), width, lengths, predicted, 0, k, positions, kth, None, 0, count, *NO_MARKS,
        *NO_LATE, 4, 4, 0, 4,
    )  # fmt: skip
    assert torch.equal(positions, expected) and torch.equal(kth, expected_kth)
    assert int(count) == 1, "rows of no more than k are no fallbacks; the wrong prediction is one"


@pytest.mark.parametrize("instance", INSTANCES.values(), ids=INSTANCES.keys())
def test_marks(instance: Instance, tmp_path: Path) -> None:
    library = build(tmp_path, instance, mark=True)
    width = 7001
    # With k = 4500 a block has more than it can list. Rows are slow: all cases of one instance only.
    cases = ((600, 0.9), (4500, 0.7), (600, 0.0), (600, 1.0)) if instance.in_shared else ((4500, 0.7),)
    for k, hit_rate in cases:
        lengths = [width, width - 1, width, *([k - 1, k, 0] if hit_rate == 0.9 else [])]
        before = make_selection(lengths, width=width, k=k, hit_rate=hit_rate, seed=k)
        after = before.to(torch.device("cpu"))
        counts = after.maps.counts[0]
        num_rows = len(before.lengths)
        rows = torch.full((num_rows, k), -77, dtype=torch.int32)
        miss_slots, miss_entries = torch.full((2, num_rows * k), -77, dtype=torch.int32)
        step = torch.tensor([STEP], dtype=torch.int32)
        run(
            library, after.scores, after.scores.stride(0), width, after.lengths, after.predicted, 1, k, rows, None,
            after.block_table, after.block_table.stride(0), counts[FALLBACKS:], miss_slots, miss_entries,
            counts[MISSING:], counts[SELECTED:], after.maps.priority, after.maps.host_to_gpu, step, *NO_LATE,
            num_rows,
            num_rows, 0, num_rows,
        )  # fmt: skip
        check_marked(before, after, Marked(rows, miss_slots, miss_entries))
        assert fallbacks(after) == 1, "the third row's prediction"


@pytest.mark.parametrize(
    ("order", "num_aside", "num_lists"),
    [("before", 2000, 40), ("after", 30, 40), ("after", 81, 40), ("after", 2000, 150)],
)
def test_the_prefetch_goes_on(order: str, num_aside: int, num_lists: int, library_with_prefetch: ctypes.CDLL) -> None:
    """Clusters come one after the other here, those that bring rows before or after those that select. Either way they
    bring guesses, with the right bytes; what they are too slow for is claimed and left alone. Rows are reserved ahead
    for all of a warp's first lists, for some, or for none."""
    library = library_with_prefetch
    width, k, num_rows = 7001, 300, 3
    lengths = [width, width - 1, k - 1]
    before = make_selection(lengths, width=width, k=k, hit_rate=0.8, seed=1)
    # A little above the k-th score: some of the selected ones are no candidates. Row 1: absurd, no histogram serves it.
    _, kth = reference(before.scores, before.lengths, k)
    before = before._replace(predicted=kth + torch.tensor([0.05, 1e30, 0.0]))
    host_tokens = before.maps.host_to_gpu.shape[1]
    host = torch.arange(12 * host_tokens, dtype=torch.int32).view(host_tokens, 12)
    step = torch.tensor([STEP], dtype=torch.int32)
    slots = reference(before.scores, before.lengths, k, block_table=before.block_table)[0].flatten()
    late = torch.randint(host_tokens, (num_lists, 32), dtype=torch.int32, generator=torch.Generator().manual_seed(2))
    late[::2, 3] = slots[slots >= 0][: num_lists // 2]
    late[:, 5:] = -1

    def run_clusters(after: Selection, state: PrefetchState, gpu: Tensor, marked: Marked, first: int, end: int) -> None:
        maps, counts = after.maps, after.maps.counts[0]
        run(
            library, after.scores, after.scores.stride(0), width, after.lengths, after.predicted, 1, k, marked.rows,
            None, after.block_table, after.block_table.stride(0), counts[FALLBACKS:], marked.miss_slots,
            marked.miss_entries, counts[MISSING:], counts[SELECTED:], maps.priority, maps.host_to_gpu, step, state.late,
            num_lists, state.certain, host, gpu, maps.gpu_to_host, state.rows, num_aside, state.taken, state.totals,
            counts[NUM_MARKED:], num_rows, num_rows + 2, first, end,
        )  # fmt: skip

    def start() -> tuple[Selection, PrefetchState, Tensor, Marked]:
        after = before.to(step.device)
        state = make_prefetch_state(1, num_aside, step.device, num_late_lists=num_lists)
        state.rows[0] = (after.maps.priority[0] == -1).nonzero()[:num_aside, 0]
        state.late[0] = late
        state.totals[0, LATE] = int((late >= 0).sum())
        gpu = torch.full((after.maps.priority.shape[1], 12), -7, dtype=torch.int32)
        misses = torch.full((2, num_rows * k), -77, dtype=torch.int32)
        return after, state, gpu, Marked(torch.full((num_rows, k), -77, dtype=torch.int32), misses[0], misses[1])

    after, state, gpu, marked = start()
    if order == "before":
        # What those that select say is known from a run of theirs alone.
        run_clusters(*start()[:1], state, gpu, marked, 0, num_rows)
        said = state.certain[0].view(-1, 32)
        per_row = 2 * 16  # warps
        assert bool((said[: num_rows * per_row] < 0).all()) and not said[num_rows * per_row :].any()
        positions = (said[: num_rows * per_row] & 0xFFFFF).view(num_rows, -1)
        assert bool((positions[1:3] == 0xFFFFF).all()), "nothing of rows that fall back or are short"
        at = positions[0][positions[0] != 0xFFFFF].long()
        assert at.numel() > 3 and bool((before.scores[0, at] <= before.predicted[0]).all())
        # Selected, or in doubt: an eighth of the distance from the prediction below the k-th.
        assert bool((before.scores[0, at] >= kth[0] - 0.15 * (before.predicted[0] - kth[0])).all())
        assert torch.isin(reference(before.scores, before.lengths, k)[0][0].long(), at).sum() > 3
        named = before.block_table[0, at // 64] * 64 + at % 64
        # Left by a launch before: no such token, no such block.
        said[2 * per_row, 5:7] = torch.tensor([k + 7, 900_000], dtype=torch.int32) | -(1 << 31)
        run_clusters(after, state, gpu, marked, num_rows, num_rows + 2)
        maps = after.maps
        allowed = set(late[late >= 0].tolist()) | set(named.tolist())
    else:
        run_clusters(after, state, gpu, marked, 0, num_rows)
        run_clusters(after, state, gpu, marked, num_rows, num_rows + 2)
        maps, allowed = after.maps, set(late[late >= 0].tolist())
    assert not state.certain.any(), "all entries have been read"
    guesses = ((maps.host_to_gpu[0] >= 0) & (before.maps.host_to_gpu[0] < 0)).nonzero()[:, 0]
    assert guesses.numel() <= num_aside and int(state.totals[0, PREFETCHED]) == guesses.numel()
    assert set(guesses.tolist()) <= allowed
    if num_lists > 64:
        assert torch.isin(guesses.to(torch.int32), late[64:]).any(), "the second lists of warps, of which there are 64"
    if order == "before":
        assert int(state.totals[0, LATE]) < int((late >= 0).sum())
        assert set(guesses.tolist()) & set(named.tolist()) - set(late[late >= 0].tolist())
    guessed = maps.host_to_gpu[0, guesses].long()
    assert torch.equal(gpu[guessed], host[guesses]) and torch.isin(guessed.to(torch.int32), state.rows[0]).all()
    assert torch.equal(maps.gpu_to_host[0, guessed].long(), guesses)
    assert bool((maps.priority[0, guessed] == STEP - 1).all())
    unused = state.rows[0][~torch.isin(state.rows[0], guessed.to(torch.int32))].long()
    assert bool((maps.priority[0, unused] == -1).all()) and bool((maps.gpu_to_host[0, unused] == -1).all())
    if order == "before":
        # A selection that comes later finds them.
        before = before._replace(maps=GroupMaps(*(field.clone() for field in maps)))
        run_clusters(after, state, gpu, marked, 0, num_rows)
    else:
        # Without them it is what a look-up makes.
        maps.host_to_gpu[0, guesses] = -1
        maps.gpu_to_host[0, guessed] = -1
        maps.priority[0, guessed] = -1
    check_marked(before, after, marked)
    assert int(after.maps.counts[0, NUM_MARKED]) == 2 * num_rows

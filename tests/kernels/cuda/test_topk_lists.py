"""The CUDA top-k over lists on a CPU: the kernel's own source, compiled by the host's C++ compiler (emulation.h).

On a GPU: tests/kernels/triton/test_topk_lists.py.
"""

import ctypes
import functools
import math
import re
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor

from echo_batch.kernels.cache_layout import MISSING, SELECTED
from echo_batch.kernels.contracts import Marked
from echo_batch.kernels.cuda import topk_lists as cuda_topk_lists
from echo_batch.kernels.cuda.runtime import Kernel
from echo_batch.kernels.reference.topk_lists import count_listed, topk_lists
from echo_batch.kernels.score_lists import MAX_TOPK, ScoreLists, make_score_lists
from tests.kernels.cuda.emulated import FOLDER, needs_compiler
from tests.kernels.cuda.emulated import build as build_emulated
from tests.kernels.marked import STEP, check_marked, make_selection
from tests.kernels.score_lists_scenario import bounds, split_lists
from tests.kernels.triton.test_topk import KINDS, dirtied, scores_of

MAX_LISTS = 32
LAUNCHER = """
extern "C" void run(const float* scores, long long stride, u32 width, const int* lengths, float* predicted,
                    float* margins, u32 k, const void* entries, const void* headers, u32 num_lists, u32 capacity,
                    int* rows, float* kth, const int* tables, long long table_stride, u32* num_whole, int* miss_slots,
                    int* miss_entries, u32* miss_count, u32* selected_count, int* priority, int* host_to_gpu,
                    const int* step, u32 num_rows) {
    launch(num_rows, THREADS, SHARED_BYTES + 4 * (k + 1) + 8 * MAX_ENTRIES + 4 * ((width + 31) / 32), [&] {
        topk_lists(scores, stride, width, lengths, predicted, margins, k, (const Entry*)entries, (const uint4*)headers,
                   num_lists, capacity, rows, kth, tables, table_stride, num_whole, miss_slots, miss_entries,
                   miss_count, selected_count, priority, host_to_gpu, step);
    });
}
"""
HEADERS = """
typedef unsigned int u32;
typedef unsigned long long u64;
static uint4 load_row_vector(const uint4* from) { return *from; }
static void wait_for_previous() {}
static u64 min(u64 a, u64 b) { return a < b ? a : b; }
"""


def source_of(name: str) -> str:
    return FOLDER.joinpath(name).read_text().replace("#pragma once", "")


def build(directory: Path, *, threads: int, aligned: bool, max_entries: int, mark: bool = False) -> ctypes.CDLL:
    source = source_of("topk_lists.cu")
    source = re.sub('#include "hopper.cuh"', HEADERS, source)
    for header in ("mark.cuh", "topk_keys.cuh"):
        source = source.replace(f'#include "{header}"', source_of(header))
    name = f"topk_lists_{threads}_{aligned}_{max_entries}_{mark}"
    defines = dict(THREADS=threads, MAX_ENTRIES=max_entries, MAX_LISTS=MAX_LISTS, MAX_DELAY=0)
    defines |= dict(ALIGNED=int(aligned), MARK=int(mark))
    return build_emulated(directory / f"{name}.so", source, LAUNCHER, defines)


@pytest.fixture(scope="module")
def library_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[[bool], ctypes.CDLL]:
    """The kernel that reads aligned rows or any; each is built once."""
    directory = tmp_path_factory.mktemp("emulated")
    return functools.cache(lambda aligned: build(directory, threads=64, aligned=aligned, max_entries=512))


def run(
    library: ctypes.CDLL,
    scores: Tensor,
    lengths: Tensor,
    k: int,
    predicted: Tensor,
    margins: Tensor,
    lists: ScoreLists,
    block_table: Tensor | None = None,
    marks: tuple[Tensor, ...] = (),
) -> tuple[Tensor, Tensor, int]:
    num_rows, width = scores.shape
    num_lists, capacity, _ = lists.entries.shape
    positions = torch.full((num_rows, k), -7, dtype=torch.int32)
    kth, num_whole = torch.empty(num_rows), torch.zeros(1, dtype=torch.int32)
    # Headers are read 16 bytes at once.
    headers = torch.empty(4 * num_lists + 4, dtype=torch.int32)
    headers = headers[(-headers.data_ptr() % 16) // 4 :][: 4 * num_lists].view(num_lists, 4).copy_(lists.headers)

    def pointer(tensor: Tensor | None) -> ctypes.c_void_p:
        return ctypes.c_void_p(None if tensor is None else tensor.data_ptr())

    library.run(
        pointer(scores),
        ctypes.c_longlong(scores.stride(0)),
        ctypes.c_uint(width),
        pointer(lengths),
        pointer(predicted),
        pointer(margins),
        ctypes.c_uint(k),
        pointer(lists.entries),
        pointer(headers),
        ctypes.c_uint(num_lists),
        ctypes.c_uint(capacity),
        pointer(positions),
        pointer(kth),
        pointer(block_table),
        ctypes.c_longlong(0 if block_table is None else block_table.stride(0)),
        pointer(num_whole),
        *(pointer(tensor) for tensor in marks or (None,) * 7),
        ctypes.c_uint(num_rows),
    )
    return positions, kth, int(num_whole)


def same(a: Tensor, b: Tensor) -> bool:
    return torch.equal(a.nan_to_num(nan=-12345.0), b.nan_to_num(nan=-12345.0))


@needs_compiler
@pytest.mark.parametrize(("kind", "aligned"), [(kind, number % 2 == 0) for number, kind in enumerate(KINDS)])
def test_same_as_reference(
    library_of: Callable[[bool], ctypes.CDLL], kind: str, aligned: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    library = library_of(aligned)
    monkeypatch.setattr("echo_batch.kernels.reference.topk_lists.MAX_ENTRIES", 512)
    num_listed_rows = 0
    for number, (width, k) in enumerate(((2500, 64), (300, 32), (1000, 128))):
        scores = scores_of(kind, 5, width, seed=width)
        lengths = torch.tensor([width, k, k - 1, width - 3, 0], dtype=torch.int32)
        table = torch.randperm(5 * (width // 64 + 2)).to(torch.int32).view(5, -1)
        table[0, 1] = -1
        for i, (name, (predicted, margins)) in enumerate(bounds(scores, lengths, k).items()):
            if i % 3 != number:
                continue
            lists = split_lists(
                scores,
                lengths,
                predicted,
                margins,
                num_lists=(7, 23, 1)[number],
                capacity=(300, 40, 400)[number],
                seed=i,
            )
            used, kept = predicted.clone(), margins.clone()
            with_table = table if i % 2 else None
            dirty = dirtied(scores, lengths).cpu()
            positions, kth, num_whole = run(library, dirty, lengths, k, used, kept, lists, with_table)
            expected_whole = torch.zeros(1, dtype=torch.int32)
            expected, expected_kth = topk_lists(
                scores, lengths, k, predicted, margins, lists, block_table=with_table, num_whole=expected_whole
            )
            assert torch.equal(positions, expected) and torch.equal(kth, expected_kth), (width, k, name)
            assert same(used, predicted) and same(kept, margins), (width, k, name)
            assert num_whole == int(expected_whole), (width, k, name)
            num_listed_rows += int((lengths > k).sum()) - num_whole
    assert num_listed_rows > 0 or kind in ("zeros", "equal", "all_nan", "plus_inf", "nan", "minus_inf", "wide")


@needs_compiler
def test_with_as_many_bins_as_on_the_gpu(tmp_path: Path) -> None:
    """512 threads; predictions that the histogram around them resolves."""
    library = build(tmp_path, threads=512, aligned=True, max_entries=2048)
    scores = scores_of("normal", 2, 6000, seed=5)
    lengths = torch.tensor([6000, 5990], dtype=torch.int32)
    predicted, margins = bounds(scores, lengths, 300)["some more than k"]
    lists = split_lists(scores, lengths, predicted, margins, num_lists=5, capacity=1024, seed=0)
    positions, kth, num_whole = run(library, scores, lengths, 300, predicted.clone(), margins.clone(), lists)
    expected, expected_kth = topk_lists(scores, lengths, 300, predicted, margins, lists)
    assert torch.equal(positions, expected) and torch.equal(kth, expected_kth)
    assert num_whole == 0


@needs_compiler
def test_look_up_in_the_maps(tmp_path: Path) -> None:
    """Rows 0 and 1 miss the same slots; one row is selected from its list, others are short, empty or without one."""
    library = build(tmp_path, threads=64, aligned=True, max_entries=512, mark=True)
    before = make_selection([1200, 1200, 1190, 90, 0, 128], width=1280, k=128, hit_rate=0.6, seed=3)
    margins = torch.full((6,), 0.1)
    lists = split_lists(before.scores, before.lengths, before.predicted, margins, num_lists=9, capacity=200, seed=0)
    assert int(count_listed(lists, 6)[0][0]) >= 128
    after = before.to(torch.device("cpu"))
    counts = after.maps.counts[0]
    misses = torch.full((2, 6 * 128), -7, dtype=torch.int32)
    marks = (misses[0], misses[1], counts[MISSING:], counts[SELECTED:])
    marks += (after.maps.priority, after.maps.host_to_gpu, torch.tensor([STEP], dtype=torch.int32))
    rows, _, num_whole = run(
        library, after.scores, after.lengths, 128, after.predicted, margins, lists, after.block_table, marks
    )
    check_marked(before, after, Marked(rows, *misses))
    assert 0 < num_whole < 3


def test_a_block_has_the_shared_memory_that_it_needs() -> None:
    assert cuda_topk_lists.supports(2048, 1 << 20, MAX_TOPK)
    assert not cuda_topk_lists.supports(1, 100, MAX_TOPK + 1) and not cuda_topk_lists.supports(2049, 100, 1)
    assert cuda_topk_lists.shared_bytes(1 << 20, MAX_TOPK) <= 227 << 10
    assert math.ceil(cuda_topk_lists.shared_bytes(98304, 2048) / 1024) <= 100


def test_one_kernel_serves_every_width(monkeypatch: pytest.MonkeyPatch) -> None:
    """Eager steps see a wider table every 64 tokens: none of them may compile anew."""
    loaded, given = set(), []

    def load(*arguments: object) -> Kernel:
        loaded.add(arguments)
        return Kernel(None, 227 << 10)

    monkeypatch.setattr(cuda_topk_lists, "load_kernel", load)
    monkeypatch.setattr(cuda_topk_lists, "launch", lambda kernel, *_, **__: given.append(kernel.shared_bytes))
    lists, state = make_score_lists(132, torch.device("cpu")), torch.zeros(2)
    for width in (64, 8192, 98304):
        lengths = torch.full((2,), width, dtype=torch.int32)
        cuda_topk_lists.topk_lists(torch.zeros(2, width), lengths, 32, state, state, lists)
    assert len(loaded) == 1 and given == [cuda_topk_lists.shared_bytes(width, 32) for width in (64, 8192, 98304)]

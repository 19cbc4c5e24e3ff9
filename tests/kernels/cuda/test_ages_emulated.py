"""The CUDA kernels of a step's start on a CPU: their own source, compiled by the host's C++ compiler (emulation.h)."""

import ctypes

import pytest
import torch
from torch import Tensor

from echo_batch.kernels.cache_layout import AGE_BINS, FIRST_BIN, FREE, LAST_BIN
from echo_batch.kernels.contracts import GroupMaps, make_maps
from echo_batch.kernels.cuda.ages import DEFINES, SHARED_BYTES
from tests.kernels.cuda.emulated import FOLDER, build, needs_compiler

pytestmark = needs_compiler

THREADS, ROWS = 128, 512
FREE_BIN = AGE_BINS - 1
LAUNCHER = """
extern "C" void count(const int* priority, u32* age_bins, const int* step, u32 num_rows, u32 num_groups) {
    launch_clusters({(num_rows + ROWS - 1) / ROWS, num_groups, 1}, THREADS, SHARED_BYTES,
                    [&] { count_ages(priority, age_bins, step, num_rows); });
}
extern "C" void list(const int* priority, int* candidates, const int* counts, u32* age_bins, const int* step,
                     u32 num_rows, u32 capacity, int only_free, u32 num_groups) {
    launch_clusters({(num_rows + ROWS - 1) / ROWS, num_groups, 1}, THREADS, SHARED_BYTES, [&] {
        list_candidates(priority, candidates, counts, age_bins, step, num_rows, capacity, only_free);
    });
}
"""


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    source = FOLDER.joinpath("ages.cu").read_text()
    defines = dict(DEFINES) | dict(THREADS=THREADS, ROWS=ROWS, SHARED_BYTES=SHARED_BYTES)
    return build(tmp_path_factory.mktemp("emulated") / "ages.so", source, LAUNCHER, defines)


def address(tensor: Tensor) -> ctypes.c_void_p:
    return ctypes.c_void_p(tensor.data_ptr())


def count(library: ctypes.CDLL, maps: GroupMaps, step: Tensor) -> None:
    num_groups, num_rows = maps.priority.shape
    pointers = (maps.priority, maps.age_bins, step)
    library.count(*(address(tensor) for tensor in pointers), ctypes.c_uint(num_rows), ctypes.c_uint(num_groups))


def list_candidates(library: ctypes.CDLL, maps: GroupMaps, step: Tensor, *, only_free: bool) -> None:
    num_groups, num_rows = maps.priority.shape
    pointers = (maps.priority, maps.candidates, maps.counts, maps.age_bins, step)
    numbers = (num_rows, maps.candidates.shape[1], int(only_free), num_groups)
    library.list(*(address(tensor) for tensor in pointers), *(ctypes.c_uint(number) for number in numbers))


def bins_of(priority: Tensor, now: int) -> Tensor:
    """As bin_of of kernels/triton/cache_kernels.py."""
    age = (now - priority.clamp(min=0)).clamp(min=1)
    age_bin = (age.to(torch.float32).view(torch.int32) >> 21) - (127 << 2)
    return torch.where(priority < 0, FREE_BIN, age_bin.clamp(max=FREE_BIN - 1))


def count_bins(bins: Tensor) -> Tensor:
    return torch.stack([torch.bincount(of_group, minlength=AGE_BINS) for of_group in bins])


STEP = 1_300_000_000
"""Large enough for all bins, and for ages that fp32 rounds into the next one."""
KINDS = ("random", "few free", "all free", "one bin", "few bins in runs", "many bins", "used in this step")


def priorities(kind: str, num_groups: int, num_rows: int) -> Tensor:
    generator = torch.Generator().manual_seed(num_rows)
    shape = (num_groups, num_rows)

    def integers(end: int) -> Tensor:
        return torch.randint(0, end, shape, generator=generator)

    if kind == "all free":
        return torch.full(shape, FREE, dtype=torch.int32)
    if kind == "one bin":
        # Ages 80 to 95.
        return (STEP - 80 - integers(16)).to(torch.int32)
    if kind == "few bins in runs":
        # Of 20 rows, so that warps have one, two or three of the bins; some runs are free.
        ages = torch.tensor([3, 9, 70, 71, 500, STEP + 1])[torch.randint(0, 6, (num_groups, 1000), generator=generator)]
        return (STEP - ages.repeat_interleave(20, 1)[:, :num_rows]).to(torch.int32)
    if kind == "used in this step":
        return torch.full(shape, STEP, dtype=torch.int32)
    ages = torch.exp2(torch.rand(shape, generator=generator) * 30.2).to(torch.int64)
    if kind == "many bins":
        # At the borders between bins.
        ages = (1 << integers(30)) * (4 + integers(4)) // 4 + integers(3) - 1
    used = STEP - ages.clamp(min=0, max=STEP)
    free = torch.rand(shape, generator=generator) < (0.01 if kind == "few free" else 0.3)
    return torch.where(free, FREE, used).to(torch.int32)


def make(kind: str, num_groups: int, num_rows: int, capacity: int) -> tuple[GroupMaps, Tensor]:
    maps = make_maps(
        num_groups, gpu_tokens=num_rows, host_tokens=1, num_candidates=capacity, device=torch.device("cpu")
    )
    maps.priority.copy_(priorities(kind, num_groups, num_rows))
    return maps, torch.tensor([STEP], dtype=torch.int32)


def choose(maps: GroupMaps, now: int, wanted: int) -> Tensor:
    """What `prepare` does for the list; returns which bins are listed, [G, AGE_BINS]."""
    bins = bins_of(maps.priority, now)
    numbers = count_bins(bins)
    older = numbers.sum(1, keepdim=True) - numbers.cumsum(1)
    listed = older < wanted
    maps.age_bins[:, 1] = torch.where(listed, older, -1)
    place = torch.arange(AGE_BINS)
    used = (numbers > 0) & (place < FREE_BIN)
    maps.counts[:, FIRST_BIN] = torch.where(used & listed, place, FREE_BIN).amin(1)
    maps.counts[:, LAST_BIN] = torch.where(used, place, -1).amax(1)
    return listed


@pytest.mark.parametrize("kind", KINDS)
def test_counts(library: ctypes.CDLL, kind: str) -> None:
    for num_rows in (1, 31, 512, 1300):
        maps, step = make(kind, 2, num_rows, 1)
        count(library, maps, step)
        expected = count_bins(bins_of(maps.priority, STEP + 1))
        assert torch.equal(maps.age_bins[:, 0].long(), expected), num_rows
        assert not maps.age_bins[:, 1].any()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("share", [0.05, 0.6, 2.0])
def test_lists(library: ctypes.CDLL, kind: str, share: float) -> None:
    """All rows of the listed bins stand at their bin's places, as far as these are inside."""
    for num_rows, capacity in ((1, 1), (1300, 1300), (1300, 100), (1024, 700)):
        maps, step = make(kind, 2, num_rows, capacity)
        maps.candidates.fill_(-7)
        listed = choose(maps, STEP, 1 + int(share * num_rows))
        begin = maps.age_bins[:, 1].clone()
        list_candidates(library, maps, step, only_free=False)
        check(maps, listed, begin)


def check(maps: GroupMaps, listed: Tensor, begin: Tensor) -> None:
    capacity = maps.candidates.shape[1]
    bins = bins_of(maps.priority, STEP)
    for group in range(maps.priority.shape[0]):
        written = torch.zeros(capacity, dtype=torch.bool)
        for age_bin in range(AGE_BINS):
            rows = (bins[group] == age_bin).nonzero()[:, 0].tolist() if listed[group, age_bin] else []
            first, end = int(begin[group, age_bin]), int(maps.age_bins[group, 1, age_bin])
            assert end == first + len(rows), (group, age_bin)
            if not rows:
                continue
            got = maps.candidates[group, first:end].tolist()
            written[first:end] = True
            assert len(got) == max(0, min(end, capacity) - first) and len(set(got)) == len(got)
            assert set(got) <= set(rows), (group, age_bin)
        assert bool((maps.candidates[group, ~written] == -7).all())


def test_only_bins_from_the_first_to_the_last(library: ctypes.CDLL) -> None:
    for first, last in ((40, 44), (50, 50), (30, 29), (0, FREE_BIN - 1)):
        maps, step = make("random", 2, 1300, 1300)
        maps.candidates.fill_(-7)
        maps.counts[:, FIRST_BIN], maps.counts[:, LAST_BIN] = first, last
        place = torch.arange(AGE_BINS)
        listed = (((place >= first) & (place <= last)) | (place == FREE_BIN)).expand(2, -1)
        numbers = count_bins(bins_of(maps.priority, STEP)) * listed
        maps.age_bins[:, 1] = numbers.sum(1, keepdim=True) - numbers.cumsum(1)
        begin = maps.age_bins[:, 1].clone()
        list_candidates(library, maps, step, only_free=False)
        check(maps, listed, begin)


@pytest.mark.parametrize("kind", ["random", "few free", "all free", "one bin"])
def test_only_free_rows(library: ctypes.CDLL, kind: str) -> None:
    for capacity in (1300, 50):
        maps, step = make(kind, 2, 1300, capacity)
        maps.candidates.fill_(-7)
        # Those of the last step: they do not matter.
        maps.counts[:, FIRST_BIN], maps.counts[:, LAST_BIN] = 0, FREE_BIN - 1
        maps.age_bins[:, 1] = torch.arange(AGE_BINS) * 3
        maps.age_bins[:, 1, FREE_BIN] = 0
        begin = maps.age_bins[:, 1].clone()
        list_candidates(library, maps, step, only_free=True)
        check(maps, (torch.arange(AGE_BINS) == FREE_BIN).expand(2, -1), begin)


def test_a_step_from_counts_to_candidates(library: ctypes.CDLL) -> None:
    """The counts of one kernel lead to the places that the other fills without a gap."""
    maps, step = make("random", 2, 1300, 1300)
    count(library, maps, step - 1)
    numbers = maps.age_bins[:, 0].clone()
    listed = choose(maps, STEP, 500)
    list_candidates(library, maps, step, only_free=False)
    for group in range(2):
        num_listed = int(numbers[group][listed[group]].sum())
        bins = bins_of(maps.priority[group], STEP)
        order = bins[maps.candidates[group, :num_listed]]
        assert num_listed >= 500 and bool((order.diff() <= 0).all()), "free ones first, then the oldest bins"
        assert bool((maps.candidates[group, num_listed:] == FREE).all())
        assert int(order[-1]) > int(bins.min()), "the youngest rows are not listed"

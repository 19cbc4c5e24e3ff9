"""The CUDA kernels of a step's start count and list what the Triton ones do.

On a CPU: tests/kernels/cuda/test_ages_emulated.py.
"""

import importlib.resources

import pytest
import torch
from torch import Tensor

from echo_batch.kernels.cache_layout import AGE_BINS, FIRST_BIN, FREE, LAST_BIN, MISSING, NUM_LISTED
from echo_batch.kernels.contracts import GroupMaps, make_maps

CUDA = torch.device("cuda")
GROUPS, ROWS, STEP = 3, 110_000, 1000
FREE_BIN = AGE_BINS - 1
KINDS = ("random", "runs", "few free", "all free", "one bin")


def test_the_source_is_part_of_the_package() -> None:
    assert "count_ages" in importlib.resources.files("echo_batch.kernels.cuda").joinpath("ages.cu").read_text()


def priorities(kind: str, seed: int) -> Tensor:
    """int32 [GROUPS, ROWS]: as many rows in each octave of ages; `runs`: of 40 rows that were used in the same step."""
    generator = torch.Generator().manual_seed(seed)
    shape = (GROUPS, ROWS)
    if kind == "all free":
        return torch.full(shape, FREE, dtype=torch.int32)
    used = STEP + 1 - torch.exp2(10 * torch.rand(shape, generator=generator)).to(torch.int64).clamp(max=STEP)
    if kind == "one bin":
        used = STEP - 80 - used % 10
    if kind == "runs":
        used = used[:, : ROWS // 40].repeat_interleave(40, 1)
    is_free = torch.rand(shape, generator=generator) < {"random": 0.1, "runs": 0.02, "few free": 0.002}.get(kind, 0.0)
    return torch.where(is_free, FREE, used).to(torch.int32)


def make(kind: str, *, num_candidates: int, seed: int = 0) -> tuple[GroupMaps, Tensor]:
    """Maps whose groups have missed different numbers of rows in the last step."""
    maps = make_maps(GROUPS, gpu_tokens=ROWS, host_tokens=64, num_candidates=num_candidates, device=CUDA)
    maps.priority.copy_(priorities(kind, seed))
    maps.counts[:, MISSING] = torch.tensor([0, 700, 9000])
    return maps, torch.full((1,), STEP, dtype=torch.int32, device=CUDA)


def copy_of(maps: GroupMaps) -> GroupMaps:
    return GroupMaps(*(field.clone() for field in maps))


def bins_of(priority: Tensor, now: int) -> Tensor:
    """As bin_of of kernels/triton/cache_kernels.py."""
    age = (now - priority.clamp(min=0)).clamp(min=1)
    age_bin = (age.to(torch.float32).view(torch.int32) >> 21) - (127 << 2)
    return torch.where(priority < 0, FREE_BIN, age_bin.clamp(max=FREE_BIN - 1))


def check(got: GroupMaps, expected: GroupMaps, now: int) -> None:
    """The same state; the same candidates bin by bin, the oldest first, but in any order within a bin."""
    for name in ("priority", "age_bins", "counts", "totals"):
        assert torch.equal(getattr(got, name), getattr(expected, name)), name
    for group in range(GROUPS):
        num_listed = int(got.counts[group, NUM_LISTED])
        assert num_listed > 0
        rows, other = (maps.candidates[group, :num_listed].long() for maps in (got, expected))
        assert bool(((rows >= 0) & (rows < ROWS)).all()) and rows.unique().numel() == num_listed
        bins = bins_of(got.priority[group, rows], now)
        assert bool((bins.diff() <= 0).all()), "free ones first, then the oldest bins"
        assert torch.equal(bins, bins_of(got.priority[group, other], now))
        whole = bins != bins[-1]  # of the last bin the list may have room for some only
        if int(got.age_bins[group, 1].max()) <= got.candidates.shape[1]:
            whole[:] = True
        assert torch.equal(rows[whole].sort().values, other[whole].sort().values)


@pytest.mark.gpu
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("num_candidates", [65536, 3000])
def test_same_as_triton(kind: str, num_candidates: int) -> None:
    from echo_batch.kernels.gpu_cache import begin_step
    from echo_batch.kernels.triton import cache_ops

    for num_reserved in (0, 20_000):
        got, step = make(kind, num_candidates=num_candidates)
        expected, expected_step = copy_of(got), step.clone()
        for _ in range(3):
            begin_step(got, step, num_reserved=num_reserved)
            cache_ops.begin_step(expected, expected_step, num_reserved=num_reserved)
            assert torch.equal(step, expected_step)
            check(got, expected, int(step))


@pytest.mark.gpu
@pytest.mark.parametrize("kind", KINDS)
def test_counts(kind: str) -> None:
    from echo_batch.kernels.cuda.ages import count_ages
    from echo_batch.kernels.triton import cache_ops

    maps, step = make(kind, num_candidates=16)
    count_ages(maps, step)
    bins = bins_of(maps.priority, STEP + 1).cpu()
    expected = torch.stack([torch.bincount(of_group, minlength=AGE_BINS) for of_group in bins])
    assert torch.equal(maps.age_bins[:, 0].cpu().long(), expected) and not maps.age_bins[:, 1].any()
    other = copy_of(maps)
    other.age_bins.zero_()
    grid = (-(-ROWS // cache_ops.SCAN_ROWS), GROUPS)
    cache_ops.count_kernel[grid](other.priority, other.age_bins, step, ROWS, R=cache_ops.SCAN_ROWS)
    assert torch.equal(maps.age_bins, other.age_bins)


@pytest.mark.gpu
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("num_candidates", [65536, 3000])
def test_only_free_rows(kind: str, num_candidates: int) -> None:
    from echo_batch.kernels.cuda.ages import list_candidates

    maps, step = make(kind, num_candidates=num_candidates)
    # Those of the last step: they do not matter.
    maps.counts[:, FIRST_BIN], maps.counts[:, LAST_BIN] = 0, FREE_BIN - 1
    list_candidates(maps, step, only_free=True)
    assert not maps.age_bins[:, 0].any() and not maps.age_bins[:, 1, :FREE_BIN].any()
    for group in range(GROUPS):
        free = (maps.priority[group] == FREE).nonzero()[:, 0]
        num_listed = min(num_candidates, free.numel())
        rows = maps.candidates[group, :num_listed].long()
        assert int(maps.age_bins[group, 1, FREE_BIN]) == free.numel()
        assert rows.unique().numel() == num_listed and bool(torch.isin(rows, free).all())
        assert bool((maps.candidates[group, num_listed:] == FREE).all())


@pytest.mark.gpu
def test_replayed() -> None:
    from echo_batch.kernels.gpu_cache import begin_step
    from echo_batch.kernels.triton import cache_ops

    maps, step = make("random", num_candidates=65536)
    begin_step(maps, step)  # compiles
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        begin_step(maps, step)
    for number, kind in enumerate(KINDS * 3):
        before, _ = make(kind, num_candidates=65536, seed=number)
        before = before._replace(age_bins=maps.age_bins.clone(), totals=maps.totals.clone())
        for field, value in zip(maps, before, strict=True):
            field.copy_(value)
        step.fill_(STEP)
        expected_step = step.clone()
        graph.replay()
        cache_ops.begin_step(before, expected_step)
        assert torch.equal(step, expected_step)
        check(maps, before, STEP + 1)

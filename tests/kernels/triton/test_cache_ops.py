"""The Triton cache ops hold the same rules and move the same bytes as the reference; which row a slot gets is free.

On the CPU Triton's interpreter runs programs one after another: rules and bytes are tested, races are not. The same
tests with the mark `gpu` run on the card; tests/kernels/triton/test_cache_ops_gpu.py replays graphs there.
"""

import dataclasses
from random import Random

import pytest
import torch
from torch import Tensor

from echo_batch.cache.manager import OffloadedCache, make_cache
from echo_batch.kernels.cache_layout import EVICTED, FAILED, HAND, MISSING, NUM_TOTALS, OFFLOADED, RECALLED, SELECTED
from echo_batch.kernels.cache_ops import CacheOps, triton_cache_ops
from echo_batch.kernels.contracts import Resolution, make_maps
from echo_batch.kernels.ops import reference_ops
from echo_batch.kernels.reference import cache_ops as reference
from echo_batch.kernels.triton import cache_ops
from tests.cache.driver import Driver, run_trace, small_spec

DEVICES = [
    pytest.param("cpu", marks=pytest.mark.skipif(torch.cuda.is_available(), reason="the interpreter is off")),
    pytest.param("cuda", marks=pytest.mark.gpu),
]


@pytest.fixture(params=DEVICES)
def device(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> torch.device:
    device = torch.device(request.param)
    if device.type == "cpu":
        # Few programs: the interpreter takes milliseconds for each, and their loops are tested too.
        monkeypatch.setattr(cache_ops, "PLACE_PROGRAMS", 5)
        monkeypatch.setattr(cache_ops, "MARK_ENTRIES", 16)
        monkeypatch.setattr(cache_ops, "SCAN_ROWS", 128)
        monkeypatch.setattr(cache_ops, "WINDOW_ROWS", 32)
    return device


class Pools:
    """Maps of one group with pools of 16-byte rows; host row s holds s in every word."""

    def __init__(self, device: torch.device, *, gpu_tokens: int, host_tokens: int, num_candidates: int = 64) -> None:
        self.device = device
        self.maps = make_maps(
            1, gpu_tokens=gpu_tokens, host_tokens=host_tokens, num_candidates=num_candidates, device=device
        )
        words = torch.arange(host_tokens, dtype=torch.int32)[:, None].expand(-1, 4).contiguous()
        self.host = words.view(torch.uint8)
        if device.type == "cuda":
            self.host = self.host.pin_memory()
        self.gpu = torch.full((gpu_tokens, 16), 0xFF, dtype=torch.uint8, device=device)
        self.step = torch.zeros(1, dtype=torch.int32, device=device)

    def ints(self, *values: int) -> Tensor:
        return torch.tensor(values, dtype=torch.int32, device=self.device)

    def begin(self) -> None:
        cache_ops.begin_step(self.maps, self.step)

    def resolve(self, selected: Tensor) -> Resolution:
        """Resolve, then check rows, bytes and maps."""
        resolution = cache_ops.resolve(self.maps, selected, self.step, self.host, self.gpu)
        self.check()
        valid = selected >= 0
        assert torch.equal(resolution.rows >= 0, valid)
        words = self.gpu.view(torch.int32)[resolution.rows[valid]]
        assert (words == selected[valid][:, None]).all()
        assert (self.maps.priority[0, resolution.rows[valid]] == self.step).all()
        return resolution

    def check(self) -> None:
        assert not reference.violations(self.maps, self.step).any()
        assert not cache_ops.violations(self.maps, self.step).any()

    def total(self, column: int) -> int:
        return int(self.maps.totals[0, column] + self.maps.counts[0, column])


def cache_of(device: torch.device, *, poison: bool) -> OffloadedCache:
    ops: CacheOps = triton_cache_ops()
    if device.type == "cpu":
        # Interpreted copies of thousands of rows take too long; test_row_copy.py has them.
        ops = dataclasses.replace(
            ops, copy_rows=reference.copy_rows, write_rows=reference.write_rows, fill_rows=reference.fill_rows
        )
    spec = small_spec(groups=((0,), (1, 2)), k=7 if device.type == "cpu" else 15)
    cache = make_cache(spec, device, reference_ops(), poison=poison, cache_ops=ops)
    assert isinstance(cache, OffloadedCache)
    return cache


@pytest.mark.parametrize("poison", [False, True])
def test_random_life(device: torch.device, poison: bool) -> None:
    cache = cache_of(device, poison=poison)
    driver = Driver(cache, seed=3 + poison, free_rows_first=False)
    assert driver.admit(130, 40, warm=40) and driver.admit(130, 9, shared_with=0, warm=30)
    driver.step()
    assert driver.admit(50, 40)
    driver.step()
    driver.finish(0)
    driver.step()
    if device.type == "cuda":
        run_trace(driver, 200)
    counters = cache.counters()
    assert min(counters.evicted_rows) > 0 and min(counters.recalled_rows) > 0 and min(counters.hit_rows) > 0
    cache.close()


def test_minimum_pool_with_all_that_can_go_wrong_at_once(device: torch.device) -> None:
    """64 rows, all needed: every step replaces most of them, with duplicates, padding and hits among the oldest."""
    pools = Pools(device, gpu_tokens=64, host_tokens=512)
    random = Random(5)
    for _ in range(6 if device.type == "cpu" else 300):
        pools.begin()
        new = pools.maps.host_to_gpu[0].cpu()
        absent = [s for s in range(512) if new[s] < 0]
        appended = [*random.sample(absent, 3), -1]
        rows = cache_ops.append(pools.maps, pools.ints(*appended), pools.step)
        assert ((rows[0] >= 0).tolist()) == [True, True, True, False]
        pools.gpu.view(torch.int32)[rows[0, :3]] = pools.ints(*appended[:3])[:, None]
        selection = []
        resident = [s for s in range(512) if new[s] >= 0]
        for slot in appended:
            others = random.sample(range(512), 9) + random.sample(resident, min(5, len(resident)))
            others += [-1] * (14 - len(others))
            selection.append([slot, *others] if slot >= 0 else [-1] * 15)
        selection[1][3:6] = selection[0][3:6]
        selection[2][3] = selection[0][3]
        pools.resolve(torch.tensor(selection, dtype=torch.int32, device=device))
        assert (pools.maps.host_to_gpu[0, torch.tensor(appended[:3], device=device)] >= 0).all()
    assert pools.total(EVICTED) > 60


def test_duplicate_misses_share_one_row(device: torch.device) -> None:
    pools = Pools(device, gpu_tokens=64, host_tokens=128)
    pools.begin()
    same = torch.full((5, 8), 77, dtype=torch.int32, device=device)
    same[4] = -1
    same[3, 7] = 5
    resolution = pools.resolve(same)
    assert resolution.rows[:4].unique().numel() == 2
    assert [pools.total(c) for c in (SELECTED, MISSING, RECALLED, EVICTED)] == [32, 32, 2, 0]
    assert resolution.miss_count is not None
    used = resolution.miss_slots[: int(resolution.miss_count)]
    assert sorted(used[used >= 0].tolist()) == [5, 77]


def test_hits_among_the_listed_rows_are_not_taken(device: torch.device) -> None:
    """All listed rows are hit in the same step: the clock hand has to find others."""
    pools = Pools(device, gpu_tokens=64, host_tokens=256, num_candidates=16)
    for start in range(0, 64, 16):
        pools.begin()
        pools.resolve(torch.arange(start, start + 16, dtype=torch.int32, device=device)[None])
    pools.begin()
    oldest = torch.arange(16, dtype=torch.int32, device=device)
    pools.resolve(torch.cat([oldest, oldest + 200])[None])
    assert int(pools.maps.counts[0, HAND]) > 0
    assert (pools.maps.host_to_gpu[0, :16] >= 0).all() and pools.total(EVICTED) <= 17
    # Of the rest the least recently used went first.
    assert (pools.maps.host_to_gpu[0, 48:64] >= 0).all()


def test_free_rows_go_before_old_ones(device: torch.device) -> None:
    pools = Pools(device, gpu_tokens=64, host_tokens=256)
    pools.begin()
    pools.resolve(torch.arange(40, dtype=torch.int32, device=device)[None])
    pools.step.fill_(500)  # so old that their age is nearly that of a row which was never used
    for step in range(3):
        pools.begin()
        pools.resolve(torch.arange(100 + 5 * step, 105 + 5 * step, dtype=torch.int32, device=device)[None])
    assert pools.total(EVICTED) == 0


def test_a_pool_below_the_minimum_is_reported(device: torch.device) -> None:
    pools = Pools(device, gpu_tokens=64, host_tokens=256)
    pools.begin()
    selected = torch.arange(70, dtype=torch.int32, device=device)[None]
    resolution = cache_ops.resolve(pools.maps, selected, pools.step, pools.host, pools.gpu)
    assert int((resolution.rows >= 0).sum()) == 64 and int(pools.maps.counts[0, FAILED]) == 6
    assert cache_ops.violations(pools.maps, pools.step).tolist() == [[0, 0, 0, 6]]
    assert reference.violations(pools.maps, pools.step).tolist() == [[0, 0, 0, 6]]


def test_append_covers_all_groups_and_evicts_where_needed(device: torch.device) -> None:
    maps = make_maps(3, gpu_tokens=64, host_tokens=256, num_candidates=64, device=device)
    step = torch.zeros(1, dtype=torch.int32, device=device)
    cache_ops.begin_step(maps, step)
    full = torch.arange(64, dtype=torch.int32, device=device)
    cache_ops.append(maps.group(1), full, step)
    cache_ops.begin_step(maps, step)
    rows = cache_ops.append(maps, torch.tensor([100, -1, 102], dtype=torch.int32, device=device), step)
    assert rows.shape == (3, 3) and (rows[:, 1] == -1).all() and (rows[:, [0, 2]] >= 0).all()
    assert not cache_ops.violations(maps, step).any() and not reference.violations(maps, step).any()
    assert maps.counts[:, EVICTED].tolist() == [0, 2, 0] and maps.counts[:, OFFLOADED].tolist() == [2, 2, 2]
    assert maps.totals[:, OFFLOADED].tolist() == [0, 64, 0]


def test_warm_takes_free_rows_only(device: torch.device) -> None:
    pools = Pools(device, gpu_tokens=64, host_tokens=256)
    pools.begin()
    pools.resolve(torch.arange(58, dtype=torch.int32, device=device)[None])
    slots = pools.ints(100, 5, -1, 100, *range(101, 110))
    rows = cache_ops.warm(pools.maps, slots, pools.step).tolist()
    pools.check()
    given = [r for r in rows if r >= 0]
    # Six rows are free; the duplicate of slot 100 passes over one of them.
    assert len(given) == len(set(given)) == 5 and rows[1] == rows[2] == -1 and min(rows[0], rows[3]) == -1
    assert all(int(pools.maps.gpu_to_host[0, r]) == int(slots[i]) for i, r in enumerate(rows) if r >= 0)
    assert sum(r >= 0 for r in cache_ops.warm(pools.maps, pools.ints(200, 201), pools.step).tolist()) == 1
    assert (pools.maps.host_to_gpu[0, :58] >= 0).all() and pools.total(EVICTED) == 0
    pools.check()
    pools.begin()
    assert pools.total(MISSING) == 58


def test_release_clears_whole_blocks(device: torch.device) -> None:
    pools = Pools(device, gpu_tokens=64, host_tokens=256)
    pools.begin()
    pools.resolve(pools.ints(1, 63, 64, 130, 255)[None])
    cache_ops.release(pools.maps, pools.ints(0, 2))
    pools.check()
    assert sorted(s for s in pools.maps.gpu_to_host[0].tolist() if s >= 0) == [64, 255]
    assert int((pools.maps.priority[0] == -1).sum()) == 62


def test_violations_are_counted_like_the_reference(device: torch.device) -> None:
    pools = Pools(device, gpu_tokens=64, host_tokens=256)
    pools.begin()
    rows = pools.resolve(pools.ints(*range(30))[None]).rows[0].tolist()
    fields = pools.maps
    for field, index, value in (
        (fields.host_to_gpu, 3, -1),
        (fields.host_to_gpu, 4, rows[5]),
        (fields.host_to_gpu, 200, 1000),
        (fields.host_to_gpu, 201, -9),
        (fields.gpu_to_host, rows[6], -1),
        (fields.gpu_to_host, rows[7], 5000),
        (fields.priority, rows[8], -1),
        (fields.priority, rows[9], 44),
        (fields.priority, 63, 0),
    ):
        kept = int(field[0, index])
        field[0, index] = value
        found = cache_ops.violations(pools.maps, pools.step)
        assert found.any() and torch.equal(found, reference.violations(pools.maps, pools.step))
        field[0, index] = kept
    pools.check()


def hit_rates(device: torch.device, *, gpu_tokens: int, host_tokens: int, k: int, steps: int) -> tuple[float, float]:
    """Hit rates of the Triton ops and of exact LRU on one trace, once the pool is full.

    Each step keeps most of its selection, and takes the rest from recent or, rarely, from any slots: like a topic that
    drifts and comes back.
    """
    pools = Pools(device, gpu_tokens=gpu_tokens, host_tokens=host_tokens, num_candidates=gpu_tokens)
    exact = make_maps(1, gpu_tokens=gpu_tokens, host_tokens=host_tokens, num_candidates=1, device=torch.device("cpu"))
    cpu_host, cpu_gpu = (
        torch.zeros((host_tokens, 16), dtype=torch.uint8),
        torch.zeros((gpu_tokens, 16), dtype=torch.uint8),
    )
    cpu_step = torch.zeros(1, dtype=torch.int32)
    generator = torch.Generator().manual_seed(2)
    selection = torch.randperm(host_tokens, generator=generator)[:k]
    hits: list[Tensor] = []
    for step in range(steps):
        popular = torch.randint(
            0, host_tokens, (host_tokens // 8,), generator=torch.Generator().manual_seed(step // 16)
        )
        new = popular[torch.randint(0, popular.numel(), (k // 4,), generator=generator)]
        stay = torch.randperm(selection.numel(), generator=generator)[: k - k // 4]
        selection = torch.cat([selection[stay], new]).unique()
        padded = torch.full((1, k), -1, dtype=torch.int32)
        padded[0, : selection.numel()] = selection.to(torch.int32)
        pools.begin()
        pools.resolve(padded.to(device))
        reference.begin_step(exact, cpu_step)
        reference.resolve(exact, padded, cpu_step, cpu_host, cpu_gpu)
        both = [pools.maps.totals[0].cpu() + pools.maps.counts[0, :NUM_TOTALS].cpu(), exact.totals[0]]
        hits.append(torch.stack(both).clone())
    late = (hits[-1] - hits[steps // 4]).double()
    rates = 1 - late[:, MISSING] / late[:, SELECTED]
    assert late[0, EVICTED] > 100 and 0.5 < rates[1] < 0.99
    return float(rates[0]), float(rates[1])


@pytest.mark.gpu
def test_hit_rate_is_that_of_exact_lru() -> None:
    got, exact = hit_rates(torch.device("cuda"), gpu_tokens=8192, host_tokens=65536, k=2048, steps=300)
    print(f"hit rate {got:.4f}, exact LRU {exact:.4f}")
    assert abs(got - exact) < 0.005

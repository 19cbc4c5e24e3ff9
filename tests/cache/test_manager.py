import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from echo_batch.cache.manager import OffloadedCache, ResidentCache, make_cache
from echo_batch.kernels.contracts import Resolution
from echo_batch.kernels.ops import reference_ops
from tests.cache.driver import ROWS, Driver, run_trace, small_spec

CPU = torch.device("cpu")


def offloaded(*, poison: bool = False, residency: bool = False, **options: object) -> OffloadedCache:
    spec = small_spec(**options)  # type: ignore[arg-type]
    cache = make_cache(spec, CPU, reference_ops(), poison=poison, residency=residency)
    assert isinstance(cache, OffloadedCache)
    return cache


def ints(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


def fill_host(cache: OffloadedCache, num_slots: int) -> torch.Tensor:
    """Random host rows for slots 0 .. num_slots - 1: uint8 [layers, num_slots, row_bytes]."""
    rows = torch.randint(0, 255, (cache.spec.num_layers, num_slots, ROWS.row_bytes), dtype=torch.uint8)
    for layer in range(cache.spec.num_layers):
        cache.write_host(layer, torch.arange(num_slots, dtype=torch.int32), rows[layer])
    return rows


def select(cache: OffloadedCache, *slots: int) -> Resolution:
    """One step of group 0 that selects `slots`, its layers recalled."""
    cache.begin_step()
    resolution = cache.resolve(0, ints(*slots)[None])
    for layer in cache.spec.group_layers[0]:
        cache.recall(layer, resolution)
    return resolution


class CacheMachine(RuleBasedStateMachine):
    """Any order of admissions, steps and releases; the driver checks the rules after each."""

    @initialize(
        seed=st.integers(0, 2**20),
        # k = 15 and three requests and one padded row: 64 rows are exactly the minimum pool of four.
        gpu_tokens=st.sampled_from([64, 128, 256]),
        poison=st.booleans(),
        padded_rows=st.integers(0, 2),
        residency=st.booleans(),
    )
    def start(self, seed: int, gpu_tokens: int, poison: bool, padded_rows: int, residency: bool) -> None:
        cache = offloaded(gpu_tokens=gpu_tokens, poison=poison, residency=residency)
        self.driver = Driver(cache, seed, padded_rows)

    @rule(
        length=st.sampled_from([1, 14, 15, 16, 63, 64, 65, 128, 150]),
        extra=st.sampled_from([1, 3, 64]),
        warm=st.integers(0, 40),
        shared=st.booleans(),
    )
    def admit(self, length: int, extra: int, warm: int, shared: bool) -> None:
        other = len(self.driver.running) - 1 if shared and self.driver.running else None
        self.driver.admit(length, extra, shared_with=other, warm=warm)

    @rule(steps=st.integers(1, 3))
    def step(self, steps: int) -> None:
        for _ in range(steps):
            self.driver.step()

    @precondition(lambda self: self.driver.running)
    @rule(which=st.integers(0, 100))
    def finish(self, which: int) -> None:
        self.driver.finish(which % len(self.driver.running))

    @invariant()
    def maps_are_sound(self) -> None:
        self.driver.cache.check_invariants(self.driver.blocks.live_blocks())


TestCacheMachine = CacheMachine.TestCase
TestCacheMachine.settings = settings(max_examples=20, stateful_step_count=12, deadline=None)


@pytest.mark.parametrize("gpu_tokens", [64, 192])
def test_long_random_life_evicts_and_recalls(gpu_tokens: int) -> None:
    driver = Driver(offloaded(gpu_tokens=gpu_tokens, poison=True), seed=gpu_tokens)
    run_trace(driver, 100)
    counters = driver.cache.counters()
    assert all(n > 100 for n in counters.evicted_rows) and all(n > 100 for n in counters.recalled_rows)
    assert all(n > 100 for n in counters.hit_rows)


def test_residency_is_left_under_pressure_and_found_again() -> None:
    driver = Driver(offloaded(gpu_tokens=256, poison=True, residency=True), seed=5)
    run_trace(driver, 150)
    while driver.running:
        driver.finish(0)
    assert not driver.cache.resident
    driver.admit(100, 5)
    assert driver.cache.resident
    assert driver.num_left >= 1 and driver.resident_steps > 5 and min(driver.cache.counters().evicted_rows) > 100


def test_leaving_keeps_what_was_written_and_maps_nothing_else() -> None:
    cache = offloaded(gpu_tokens=192, poison=True, residency=True)
    fill_host(cache, 70)
    rows = cache.gpu_rows(0).clone()
    assert (cache.host_rows(0) == 0xFF).all() and torch.equal(cache.read_host(0, ints(3, 69)), rows[[3, 69]])
    cache.leave_residency(2, torch.arange(70, dtype=torch.int32))
    assert not cache.resident and torch.equal(cache.host_rows(0)[:192], rows)
    cache.check_invariants([0, 1])
    cache.begin_step()
    new_rows = cache.append_all(ints(70, -1))  # not resident: an unwritten slot of a block in use
    assert (new_rows[:, 0] >= 70).all(), "a free row is taken before a used one"
    assert cache.resolve(0, ints(69, 3)[None]).rows.tolist() == [[69, 3]]
    assert cache.counters().recalled_rows == (0, 0)
    with pytest.raises(AssertionError):
        cache.leave_residency(2, ints())
    cache.reset()
    assert cache.resident and (cache.maps.priority == -1).all()


def test_rows_outside_the_resident_set_may_hold_anything() -> None:
    cache = offloaded()
    expected = fill_host(cache, 200)
    for step in range(20):
        for group, layers in enumerate(cache.spec.group_layers):
            free = cache.maps.gpu_to_host[group] < 0
            for layer in layers:
                cache.gpu_rows(layer)[free] = 0xFF
        cache.begin_step()
        for group, layers in enumerate(cache.spec.group_layers):
            selected = torch.randperm(200, generator=torch.Generator().manual_seed(step))[:45].int().view(3, 15)
            resolution = cache.resolve(group, selected)
            for layer in layers:
                cache.recall(layer, resolution)
                assert torch.equal(cache.gpu_rows(layer)[resolution.rows], expected[layer][selected])
    assert min(cache.counters().evicted_rows) > 100


def test_recall_brings_the_bytes_of_the_host_row() -> None:
    cache = offloaded(groups=((0, 1),))
    expected = fill_host(cache, 200)
    select(cache, *range(15))
    assert torch.equal(cache.gpu_rows(1)[select(cache, 3).rows[0]], expected[1][[3]])
    for start in range(15, 150, 15):
        select(cache, *range(start, start + 15))
    assert int(cache.maps.host_to_gpu[0, 3]) == -1, "slot 3 should have been evicted by now"
    for layer in (0, 1):
        cache.host_rows(layer)[3, 5] += 1
        expected[layer, 3, 5] += 1
    rows = select(cache, 3).rows[0]
    for layer in (0, 1):
        assert torch.equal(cache.gpu_rows(layer)[rows], expected[layer][[3]])
    cache.host_rows(0)[3, 5] += 1
    with pytest.raises(AssertionError, match="slot 3 differs"):
        cache.check_invariants()


def test_the_newest_token_is_never_a_miss() -> None:
    """A token's row is on the GPU from its own step on: neither that step nor the next ones recall it."""
    cache = offloaded(gpu_tokens=128)
    fill_host(cache, 20)
    select(cache, *range(20))
    for position in range(20, 60):
        cache.begin_step()
        before = cache.counters().recalled_rows
        cache.append_all(ints(position))
        for group, layers in enumerate(cache.spec.group_layers):
            resolution = cache.resolve(group, torch.arange(position - 14, position + 1, dtype=torch.int32)[None])
            for layer in layers:
                cache.recall(layer, resolution)
        recalled = [b - a for a, b in zip(before, cache.counters().recalled_rows, strict=True)]
        # The second group was never told of the prompt: it recalls that, once, and no new token.
        assert recalled == [0, 14 if position == 20 else 0]


def test_a_released_slot_is_no_false_hit() -> None:
    cache = offloaded()
    fill_host(cache, 64)
    select(cache, 1, 2, 3)
    cache.release([0])
    expected = fill_host(cache, 64)
    before = cache.counters()
    rows = select(cache, 1, 2, 3).rows[0]
    assert torch.equal(cache.gpu_rows(0)[rows], expected[0][[1, 2, 3]])
    after = cache.counters()
    assert after.hit_rows == before.hit_rows and after.recalled_rows[0] == before.recalled_rows[0] + 3


def test_poison_marks_what_is_gone() -> None:
    cache = offloaded(poison=True)
    assert (cache.gpu_rows(0) == 0xFF).all() and (cache.host_rows(0) == 0xFF).all()
    fill_host(cache, 128)
    rows = select(cache, 1, 70).rows[0]
    cache.release([0])
    assert (cache.host_rows(0)[:64] == 0xFF).all() and not (cache.host_rows(0)[64:128] == 0xFF).all(1).any()
    assert (cache.gpu_rows(0)[rows[0]] == 0xFF).all() and not (cache.gpu_rows(0)[rows[1]] == 0xFF).all()
    new_rows = cache.append(0, ints(5))
    assert torch.isnan(cache.gpu_rows(0)[new_rows].view(torch.float32)).all(), "appended, not yet written"


def test_one_group_and_one_step_at_a_time() -> None:
    cache = offloaded()
    cache.begin_step()
    cache.append_all(ints(0, -1))
    with pytest.raises(AssertionError, match="once per step"):
        cache.append(1, ints(1))
    cache.resolve(0, ints(0)[None])
    with pytest.raises(AssertionError, match="once per step"):
        cache.resolve(0, ints(0)[None])
    cache.begin_step()
    cache.append(1, ints(1))


def test_append_all_is_append_of_every_group() -> None:
    one, other = offloaded(), offloaded()
    for cache in (one, other):
        cache.begin_step()
    rows = one.append_all(ints(7, -1, 9))
    assert torch.equal(rows, torch.stack([other.append(g, ints(7, -1, 9)) for g in range(2)]))
    assert all(torch.equal(a, b) for a, b in zip(one.maps, other.maps, strict=True))


def test_padding_touches_no_state() -> None:
    cache = offloaded()
    before = [field.clone() for field in cache.maps]
    pools = cache.gpu_rows(0).clone(), cache.host_rows(0).clone()
    cache.begin_step()
    nothing = ints(-1, -1)
    assert cache.append(0, nothing).tolist() == [-1, -1]
    cache.write(0, nothing, nothing, torch.ones((2, ROWS.row_bytes), dtype=torch.uint8))
    cache.write_host(0, nothing, torch.ones((2, ROWS.row_bytes), dtype=torch.uint8))
    resolution = cache.resolve(0, torch.full((2, 15), -1, dtype=torch.int32))
    assert (resolution.rows == -1).all() and resolution.miss_slots.numel() == 0
    assert all(torch.equal(a, b) for a, b in zip(before, cache.maps, strict=True))
    assert torch.equal(pools[0], cache.gpu_rows(0)) and torch.equal(pools[1], cache.host_rows(0))


def test_reset_forgets_everything() -> None:
    cache = offloaded()
    fill_host(cache, 64)
    select(cache, 1, 2)
    cache.reset()
    assert int(cache.step) == 0 and cache.counters().selected_rows == (0, 0)
    assert (cache.maps.host_to_gpu == -1).all() and (cache.maps.priority == -1).all()


def test_invariants_notice_what_is_broken() -> None:
    cache = offloaded()
    fill_host(cache, 128)
    rows = select(cache, 1, 70).rows[0]
    cache.check_invariants([0, 1])
    with pytest.raises(AssertionError, match="freed blocks \\[1\\]"):
        cache.check_invariants([0])
    for field, index, value, message in (
        (cache.maps.host_to_gpu, 1, -1, "maps elsewhere"),
        (cache.maps.gpu_to_host, int(rows[0]), -1, "maps elsewhere"),
        (cache.maps.priority, int(rows[1]), -1, "neither free nor in use"),
        (cache.maps.priority, int(rows[1]), 99, "neither free nor in use"),
        (cache.maps.host_to_gpu, 5, -7, "left behind"),
    ):
        kept = int(field[0, index])
        field[0, index] = value
        with pytest.raises(AssertionError, match=message):
            cache.check_invariants()
        field[0, index] = kept
    cache.check_invariants()


def test_index_keys_of_slots() -> None:
    cache = offloaded()
    ops = reference_ops()
    keys = torch.randint(0, 255, (3, cache.spec.index_format.row_bytes), dtype=torch.uint8)
    cache.write_index(1, ints(5, -1, 130), keys)
    read = ops.read_index_keys(cache.index_pages(1), ints(5, 130), cache.spec.index_format)
    assert torch.equal(read, keys[[0, 2]])
    assert not cache.index_pages(0).any() and cache.index_pages(1).shape == (12, cache.spec.index_format.page_bytes)


@pytest.mark.parametrize("residency", [False, True])
def test_a_selection_by_scores(residency: bool) -> None:
    """The best positions, made resident, as slots of the row's blocks; selections without a prediction are counted."""
    cache = offloaded(residency=residency, gpu_tokens=256)
    view = cache.for_step(residency)
    host = fill_host(cache, 256)
    k = cache.spec.index_topk
    scores, table = torch.randn(2, 128), ints(3, 1, 2, -1).view(2, 2)
    lengths, predicted = ints(100, k - 1), torch.full((2,), float("nan"))
    for step in range(3):
        view.begin_step()
        resolution = view.select(1, scores, lengths, predicted, table)
        for layer in cache.spec.group_layers[1]:
            view.recall(layer, resolution)
            positions = scores[0, :100].topk(k).indices.sort().values
            slots = table[0, positions // 64] * 64 + positions % 64
            rows = view.gpu_rows(layer)
            assert torch.equal(rows[resolution.rows[0]], host[layer, slots])
            assert torch.equal(rows[resolution.rows[1, : k - 1]], host[layer, 128 : 128 + k - 1])
            assert resolution.rows[1, k - 1] == -1
        assert cache.counters().fallback_rows == (0, 1), step
        assert predicted[0] == scores[0, positions].min() and predicted[1].isnan()
    assert (cache.counters().recalled_rows[1] > 0) != residency
    cache.reset()
    assert cache.counters().fallback_rows == (0, 0)
    cache.close()


def test_resident_cache_reads_rows_by_slot() -> None:
    spec = small_spec(gpu_tokens=768, offload=False)
    cache = make_cache(spec, CPU, reference_ops(), poison=True)
    assert isinstance(cache, ResidentCache)
    prompt = torch.randint(0, 255, (64, ROWS.row_bytes), dtype=torch.uint8)
    cache.write_host(2, torch.arange(64, dtype=torch.int32), prompt)
    cache.begin_step()
    new = ints(64, -1)
    rows = cache.append(1, new)
    assert torch.equal(cache.append_all(new)[1], new)
    token = torch.randint(0, 255, (2, ROWS.row_bytes), dtype=torch.uint8)
    cache.write(2, new, rows, token)
    resolution = cache.resolve(1, ints(3, 64, -1)[None])
    cache.recall(2, resolution)
    assert resolution.rows.tolist() == [[3, 64, -1]]
    assert torch.equal(cache.gpu_rows(2)[[3, 64]], torch.stack([prompt[3], token[0]]))
    assert torch.equal(cache.read_host(2, ints(64, -1)), torch.stack([token[0], torch.zeros_like(token[0])]))
    cache.warm(1, ints(3), [prompt[3:4]] * 3)
    cache.check_invariants()
    cache.release([0])
    assert (cache.gpu_rows(2)[:64] == 0xFF).all() and torch.equal(cache.gpu_rows(2)[64], token[0])
    assert cache.counters().selected_rows == (0, 0)
    cache.reset()
    cache.close()

"""Prefetch in Triton and CUDA under the rules of the reference; on the CPU Triton's interpreter runs the Triton one."""

from collections.abc import Callable
from functools import partial

import pytest
import torch
from torch import Tensor

from echo_batch.kernels.cuda import indexer as cuda_indexer
from echo_batch.kernels.prefetch_state import CANDIDATES, PREFETCHED
from echo_batch.kernels.reference import indexer as reference_indexer
from echo_batch.kernels.reference import rows
from echo_batch.kernels.triton import cache_ops, indexer_prefetch
from tests.kernels.prefetch_scenario import FP8, Scenario, check_resolve, check_step
from tests.kernels.triton.common import DEVICE, difference, randn

FUSED = cuda_indexer.WITH_PREFETCH


def in_ranges(*arguments: Tensor, num_parts: int = 3, **rest: object) -> Tensor:
    """Scores, then prefetch of one range of positions after the other, each with its share of the rows."""
    query, weights, pages, table, lengths, fmt = arguments
    state = rest.pop("state")
    predicted, maps, step = rest["predicted"], rest["maps"], rest["step"]
    scores = indexer_prefetch.index_scores_paged(query, weights, pages, table, lengths, fmt)
    width = scores.shape[1]
    for i in range(num_parts):
        indexer_prefetch.prefetch_rows(
            maps,
            state.part(i, num_parts),
            scores,
            table,
            lengths,
            predicted,
            step,
            rest["host_rows"],
            rest["gpu_rows"],
            first=width * i // num_parts,
            end=width * (i + 1) // num_parts,
        )
    return scores


def forget(scenario: Scenario, slots: Tensor) -> None:
    """Make `slots` absent, so that they can be appended again."""
    maps = scenario.maps
    slots = slots[slots >= 0]
    gone = maps.host_to_gpu[0, slots]
    slots, gone = slots[gone >= 0], gone[gone >= 0]
    maps.host_to_gpu[0, slots] = -1
    maps.gpu_to_host[0, gone] = -1
    maps.priority[0, gone] = -1


def run_steps(scenario: Scenario, version: Callable[..., Tensor], num_above: int, *, complete: bool) -> list[int]:
    counted = torch.zeros(4, dtype=torch.int64)
    for number in range(4):
        totals = check_step(
            scenario,
            cache_ops,
            indexer_prefetch,
            version,
            scenario.threshold(num_above + number),
            complete=complete,
        )
        counted += torch.tensor(totals)
        check_resolve(scenario, cache_ops.resolve, num_above + 4)
        blocks = scenario.table[:1, :2].flatten().contiguous()
        cache_ops.release(scenario.maps, blocks)
        forget(scenario, scenario.new_slots())
    return counted.tolist()


@pytest.fixture
def small_programs(monkeypatch: pytest.MonkeyPatch) -> None:
    if DEVICE.type == "cpu":
        monkeypatch.setattr(cache_ops, "PLACE_PROGRAMS", 5)
        monkeypatch.setattr(cache_ops, "SCAN_ROWS", 128)
        monkeypatch.setattr(cache_ops, "WINDOW_ROWS", 32)
        monkeypatch.setattr(indexer_prefetch, "SET_ASIDE_ROWS", 32)
        monkeypatch.setattr(indexer_prefetch, "CLAIM_POSITIONS", 128)
        monkeypatch.setattr(indexer_prefetch, "FETCH_PROGRAMS", 5)


@pytest.mark.usefixtures("small_programs")
@pytest.mark.parametrize("set_aside", [64, 16])
def test_triton_steps(set_aside: int) -> None:
    scenario = Scenario(DEVICE, set_aside=set_aside)
    totals = run_steps(scenario, indexer_prefetch.index_scores_prefetch, 20, complete=True)
    assert totals[PREFETCHED] > 0


@pytest.mark.usefixtures("small_programs")
def test_triton_range_by_range() -> None:
    totals = run_steps(Scenario(DEVICE), in_ranges, 20, complete=False)
    assert totals[PREFETCHED] > 0


@pytest.mark.usefixtures("small_programs")
def test_triton_without_a_prediction() -> None:
    scenario = Scenario(DEVICE)
    unknown = torch.full((5,), float("nan"), device=DEVICE)
    totals = check_step(
        scenario, cache_ops, indexer_prefetch, indexer_prefetch.index_scores_prefetch, unknown, complete=True
    )
    assert totals == [0, 0, 0, 0]


def check_low_prediction(version: Callable[..., Tensor], *, complete: bool) -> None:
    """Every token is a candidate but the newest of each row."""
    scenario = Scenario(DEVICE)
    low = torch.full((5,), -1e9, device=DEVICE)
    totals = check_step(scenario, cache_ops, indexer_prefetch, version, low, complete=complete)
    assert totals[CANDIDATES] == sum(max(0, length - 1) for length in scenario.lengths.tolist())


@pytest.mark.usefixtures("small_programs")
def test_triton_with_a_low_prediction() -> None:
    check_low_prediction(indexer_prefetch.index_scores_prefetch, complete=True)


@pytest.fixture
def hopper() -> None:
    if not cuda_indexer.available(DEVICE):
        pytest.skip("needs a Hopper GPU and NVRTC")


@pytest.mark.parametrize("instance", [cuda_indexer.SCORES_ONLY, FUSED])
def test_shared_memory_stays_below_the_slow_split(instance: cuda_indexer.Instance) -> None:
    # CUDA keeps 1 KiB a block; what is beyond 132 KiB costs up to a quarter of the speed (docs/prefetch.md).
    assert instance.shared_bytes(64) + 1024 <= 132 << 10


@pytest.mark.gpu
@pytest.mark.usefixtures("hopper")
@pytest.mark.parametrize("early", [0, 8])
@pytest.mark.parametrize("set_aside", [64, 16])
@pytest.mark.parametrize("num_heads", [32, 64])
def test_cuda_steps(num_heads: int, set_aside: int, early: int) -> None:
    version = partial(cuda_indexer.index_scores_prefetch, instance=FUSED._replace(early=early))
    totals = run_steps(Scenario(DEVICE, num_heads=num_heads, set_aside=set_aside), version, 20, complete=False)
    assert totals[CANDIDATES] > 0


@pytest.mark.gpu
@pytest.mark.usefixtures("hopper")
def test_cuda_with_a_low_prediction() -> None:
    check_low_prediction(cuda_indexer.index_scores_prefetch, complete=False)


@pytest.mark.gpu
@pytest.mark.usefixtures("hopper")
@pytest.mark.parametrize("queue", [192, 32])
def test_cuda_long_contexts(queue: int) -> None:
    """Long enough that rows arrive while others are scored; a short queue drops some."""
    scenario = Scenario(
        DEVICE,
        lengths=(40000, 33, 25000, 0, 30001),
        num_blocks=1500,
        shared_blocks=100,
        num_heads=64,
        gpu_tokens=8192,
        set_aside=2048,
    )
    version = partial(cuda_indexer.index_scores_prefetch, instance=FUSED._replace(queue=queue, early=0))
    totals = run_steps(scenario, version, 500, complete=False)
    assert totals[PREFETCHED] > 200, totals


@pytest.mark.gpu
@pytest.mark.usefixtures("hopper")
@pytest.mark.parametrize("num_heads", [32, 64])
@pytest.mark.parametrize("batch", [5, 70])
def test_cuda_scores(num_heads: int, batch: int) -> None:
    pages = torch.zeros(1300, FP8.page_bytes, dtype=torch.uint8, device=DEVICE)
    slots = torch.arange(1300 * 64, dtype=torch.int32, device=DEVICE)
    rows.write_index_keys(pages, slots, rows.pack_index_keys(randn(slots.shape[0], 128, seed=3), FP8, True), FP8)
    pages[1299] = 255  # NaN: of no row
    lengths = torch.tensor([30000, 0, 1, 38400, 64], dtype=torch.int32, device=DEVICE).repeat(batch // 5)
    table = torch.stack([torch.randperm(1299, device=DEVICE)[:600] for _ in range(batch)]).to(torch.int32)
    table[1] = -1
    table[2, 1:] = -1
    query, _ = rows.quantize_index_query(randn(batch, num_heads, 128, seed=1), True)
    weights = randn(batch, num_heads, seed=2)
    got = cuda_indexer.index_scores_paged(query, weights, pages, table, lengths, FP8)
    expected = reference_indexer.index_scores_paged(query[:5], weights[:5], pages, table[:5], lengths[:5], FP8)
    # All at once: a single score of both signs may be small by chance.
    pairs = [(got[row, :length], expected[row, :length]) for row, length in enumerate(lengths[:5].tolist())]
    assert difference(torch.cat([pair[0] for pair in pairs]), torch.cat([pair[1] for pair in pairs])) < 1e-7
    for _ in range(300):  # copies of pages finish in any order
        again = cuda_indexer.index_scores_paged(query, weights, pages, table, lengths, FP8)
    for row, length in enumerate(lengths.tolist()):
        assert torch.equal(got[row, :length], again[row, :length])
    # In two ranges, into the same tensor: the same bits.
    parts = torch.full_like(got, float("nan"))
    for first, end in ((0, 123), (123, None)):
        cuda_indexer.index_scores_paged(
            query, weights, pages, table, lengths, FP8, out=parts, first_block=first, end_block=end
        )
    for row, length in enumerate(lengths.tolist()):
        assert torch.equal(got[row, :length], parts[row, :length])

"""The CUDA top-k over lists and the lists that the CUDA indexer makes, on a GPU. (On a CPU: tests/kernels/cuda.)"""

import math

import pytest
import torch
from torch import Tensor

from echo_batch.kernels.cuda import indexer as cuda_indexer
from echo_batch.kernels.cuda import runtime
from echo_batch.kernels.cuda.topk_lists import mark_topk_lists, topk_lists
from echo_batch.kernels.reference import rows
from echo_batch.kernels.reference.topk import topk_positions
from echo_batch.kernels.reference.topk_lists import fill_lists
from echo_batch.kernels.reference.topk_lists import topk_lists as reference
from echo_batch.kernels.score_lists import COUNT, FIRST_ROW, LAST_ROW, POSITION_BITS, ScoreLists, make_score_lists
from echo_batch.kernels.triton import cache_ops, indexer_prefetch
from tests.kernels.marked import STEP, check_marked, fallbacks, make_selection
from tests.kernels.prefetch_scenario import FP8, Scenario, check_step
from tests.kernels.score_lists_scenario import bounds, split_lists
from tests.kernels.triton.common import DEVICE, randn
from tests.kernels.triton.test_topk import KINDS, dirtied, scores_of

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("hopper")]


@pytest.fixture
def hopper() -> None:
    if not runtime.available(DEVICE):
        pytest.skip("needs a GPU of capability 9.0 and NVRTC")


def same(a: Tensor, b: Tensor) -> bool:
    return torch.equal(a.cpu().nan_to_num(nan=-12345.0), b.cpu().nan_to_num(nan=-12345.0))


@pytest.mark.parametrize("threads", [512, 1024])
@pytest.mark.parametrize("kind", KINDS)
def test_same_as_reference(kind: str, threads: int) -> None:
    num_listed_rows = 0
    for number, (width, k) in enumerate(((98304, 2048), (20003, 2048), (9000, 64))):
        scores = scores_of(kind, 4, width, seed=width)
        lengths = torch.tensor([width, k, k - 1, width - 1], dtype=torch.int32)
        table = torch.randperm(4 * (width // 64 + 2)).to(torch.int32).view(4, -1)
        dirty = dirtied(scores, lengths)
        for i, (name, (predicted, margins)) in enumerate(bounds(scores, lengths, k).items()):
            if kind != "normal" and i % 3 != number:
                continue
            num_lists, capacity = ((132, 1000), (7, 4096), (20, 200))[i % 3]
            lists = split_lists(scores, lengths, predicted, margins, num_lists=num_lists, capacity=capacity, seed=i)
            used, kept = predicted.to(DEVICE), margins.to(DEVICE)
            num_whole = torch.zeros(1, dtype=torch.int32, device=DEVICE)
            with_table = table if i % 2 else None
            positions, kth = topk_lists(
                dirty,
                lengths.to(DEVICE),
                k,
                used,
                kept,
                ScoreLists(*(field.to(DEVICE) for field in lists)),
                block_table=None if with_table is None else with_table.to(DEVICE),
                num_whole=num_whole,
                threads=threads,
            )
            expected_whole = torch.zeros(1, dtype=torch.int32)
            expected, expected_kth = reference(
                scores, lengths, k, predicted, margins, lists, block_table=with_table, num_whole=expected_whole
            )
            assert torch.equal(positions.cpu(), expected) and torch.equal(kth.cpu(), expected_kth), (width, k, name)
            assert same(used, predicted) and same(kept, margins), (width, k, name)
            assert int(num_whole) == int(expected_whole), (width, k, name)
            num_listed_rows += int((lengths > k).sum()) - int(num_whole)
    assert num_listed_rows > 0 or kind != "normal"


def test_wide_and_many_rows() -> None:
    """As wide as the kernel allows; more rows than a GPU has multiprocessors, of every length."""
    for num_rows, width, k in ((2, 1 << 20, 2048), (200, 5000, 300)):
        scores = scores_of("ties", num_rows, width, seed=1)
        lengths = torch.linspace(width if num_rows == 2 else 0, width, num_rows).to(torch.int32)
        predicted, margins = bounds(scores, lengths, k)["uneven"]
        lists = split_lists(scores, lengths, predicted, margins, num_lists=132, capacity=4096, seed=0)
        on_gpu = ScoreLists(*(field.to(DEVICE) for field in lists))
        got = topk_lists(scores.to(DEVICE), lengths.to(DEVICE), k, predicted.to(DEVICE), margins.to(DEVICE), on_gpu)
        expected = topk_positions(scores, lengths, k)
        assert all(torch.equal(a.cpu(), b) for a, b in zip(got, expected, strict=True))


@pytest.mark.parametrize("max_delay", [0, 20000])
@pytest.mark.parametrize("threads", [512, 1024])
def test_look_up_in_the_maps(threads: int, max_delay: int) -> None:
    lengths = [40000, 40000, 39990, 30000, 2047, 0, 2048, 38000] * 2
    before = make_selection(lengths, width=40000, k=2048, hit_rate=0.7, seed=4)
    margins = torch.full((len(lengths),), 0.1)
    lists = split_lists(before.scores, before.lengths, before.predicted, margins, num_lists=132, capacity=4096, seed=0)
    for _ in range(3):
        after = before.to(DEVICE)
        marked = mark_topk_lists(
            after.maps,
            after.scores,
            after.lengths,
            2048,
            after.predicted,
            margins.to(DEVICE),
            ScoreLists(*(field.to(DEVICE) for field in lists)),
            after.block_table,
            torch.tensor([STEP], dtype=torch.int32, device=DEVICE),
            max_delay=max_delay,
            threads=threads,
        )
        check_marked(before, after, marked)
        assert 0 < fallbacks(after) < len(lengths) - 6


def sorted_entries(lists: ScoreLists) -> Tensor:
    """int64 [entries]: all entries of complete lists, (row, position, score bits) in one number, sorted."""
    capacity = lists.entries.shape[1]
    inside = torch.arange(capacity, device=lists.entries.device) < lists.headers[:, COUNT, None]
    entries = lists.entries[inside].to(torch.int64)
    return (entries[:, 1] << 32 | (entries[:, 0] & 0xFFFFFFFF)).sort().values


def index_batch(batch: int, num_heads: int) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    pages = torch.zeros(1300, FP8.page_bytes, dtype=torch.uint8, device=DEVICE)
    slots = torch.arange(1300 * 64, dtype=torch.int32, device=DEVICE)
    rows.write_index_keys(pages, slots, rows.pack_index_keys(randn(slots.shape[0], 128, seed=3), FP8, True), FP8)
    lengths = torch.tensor([30000, 0, 1, 38400, 64], dtype=torch.int32, device=DEVICE).repeat(batch // 5)
    table = torch.stack([torch.randperm(1300, device=DEVICE)[:600] for _ in range(batch)]).to(torch.int32)
    table[1] = -1
    table[2, 1:] = -1
    table[3, 5:9] = -1
    query, _ = rows.quantize_index_query(randn(batch, num_heads, 128, seed=1), True)
    return query, randn(batch, num_heads, seed=2), pages, table, lengths


@pytest.mark.parametrize("num_heads", [32, 64])
@pytest.mark.parametrize("batch", [5, 70])
def test_the_indexer_lists_every_score_from_the_bound_on(num_heads: int, batch: int) -> None:
    arguments = index_batch(batch, num_heads)
    lengths = arguments[4]
    scores = cuda_indexer.index_scores_paged(*arguments, FP8)
    inside = torch.arange(scores.shape[1], device=DEVICE) < lengths[:, None]
    for predicted, margin in ((float(scores[0, :30000].median()), 3.0), (0.0, 1e30), (-math.inf, 1.0)):
        bound = torch.full((batch,), predicted, device=DEVICE), torch.full((batch,), margin, device=DEVICE)
        lists = make_score_lists(cuda_indexer.make_lists(DEVICE).headers.shape[0], DEVICE, capacity=40000)
        expected = make_score_lists(4, DEVICE, capacity=batch * 40000)
        fill_lists(torch.where(inside, scores, 0.0), lengths, *bound, expected)
        wanted = sorted_entries(expected)
        for number in range(300 if margin == 3.0 else 2):  # entries come in any order
            lists.entries.fill_(-1)
            again = cuda_indexer.index_scores_paged(*arguments, FP8, predicted=bound[0], margins=bound[1], lists=lists)
            if number % 20 < 2:
                assert torch.equal(sorted_entries(lists), wanted)
        assert torch.equal(again[inside], scores[inside])
        place = lists.entries[:, 0, 1] >> POSITION_BITS
        used = lists.headers[:, COUNT] > 0
        assert bool((lists.headers[used, FIRST_ROW] <= place[used]).all())
        assert bool((place[used] <= lists.headers[used, LAST_ROW]).all())
    # Lists that are too short say so, and nothing is written behind them.
    short = make_score_lists(lists.headers.shape[0], DEVICE, capacity=16)
    memory = torch.full((short.entries.numel() + 4096,), -1, dtype=torch.int32, device=DEVICE)
    short = short._replace(entries=memory[: short.entries.numel()].view_as(short.entries))
    cuda_indexer.index_scores_paged(*arguments, FP8, predicted=bound[0], margins=bound[1], lists=short)
    assert torch.equal(short.headers, lists.headers) and bool((short.headers[:, COUNT] > 16).any())
    assert bool((memory[short.entries.numel() :] == -1).all())


def test_a_prefetching_step_with_lists() -> None:
    """Prefetch keeps its rules, and the lists are those of the scores; rows of the batch share blocks."""
    scenario = Scenario(
        DEVICE, lengths=(40000, 33, 25000, 0, 30001), num_blocks=1500, shared_blocks=100, num_heads=64,
        gpu_tokens=8192, set_aside=2048,
    )  # fmt: skip
    predicted, margins = scenario.threshold(500), torch.full((5,), 1.0, device=DEVICE)
    lists = cuda_indexer.make_lists(DEVICE)
    kept: list[Tensor] = []

    def version(*arguments: Tensor, **rest: Tensor) -> Tensor:
        kept.append(cuda_indexer.index_scores_prefetch(*arguments, margins=margins, lists=lists, **rest))
        return kept[-1]

    check_step(scenario, cache_ops, indexer_prefetch, version, predicted, complete=False)
    expected = make_score_lists(5, DEVICE, capacity=40000)
    inside = torch.arange(kept[0].shape[1], device=DEVICE) < scenario.lengths[:, None]
    fill_lists(torch.where(inside, kept[0], 0.0), scenario.lengths, predicted, margins, expected)
    assert torch.equal(sorted_entries(lists), sorted_entries(expected))
    assert sorted_entries(lists).numel() > 1000


@pytest.mark.parametrize("overlap", [False, True])
def test_in_a_graph_the_margins_find_their_size(overlap: bool) -> None:
    """Scores, lists and top-k of drifting queries, replayed: the selections of whole rows, soon without whole rows."""
    batch, k = 5, 2048
    _, weights, pages, table, lengths = index_batch(batch, 64)
    lengths.copy_(torch.tensor([38400, 30000, 1, 38000, 2048]))
    table[:] = torch.stack([torch.randperm(1300, device=DEVICE)[:600] for _ in range(batch)])
    values = randn(batch, 64, 128, seed=5)
    query = rows.quantize_index_query(values, True)[0]
    predicted, margins = torch.full((2, batch), math.nan, device=DEVICE)
    num_whole = torch.zeros(1, dtype=torch.int32, device=DEVICE)
    lists = cuda_indexer.make_lists(DEVICE)

    def step() -> tuple[Tensor, Tensor, Tensor]:
        scores = cuda_indexer.index_scores_paged(
            query, weights, pages, table, lengths, FP8, predicted=predicted, margins=margins, lists=lists
        )
        return scores, *topk_lists(scores, lengths, k, predicted, margins, lists, num_whole=num_whole, overlap=overlap)

    step()
    predicted.fill_(math.nan)
    margins.fill_(math.nan)
    num_whole.zero_()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        scores, positions, kth = step()
    counts = []
    for number in range(300):
        values.mul_(0.99).add_(randn(batch, 64, 128, seed=number), alpha=0.14)
        query.copy_(rows.quantize_index_query(values, True)[0])
        graph.replay()
        counts.append(int(num_whole))
        if number < 20 or number % 20 == 0:
            expected, expected_kth = topk_positions(scores, lengths, k)
            assert torch.equal(positions, expected) and torch.equal(kth, expected_kth)
    assert counts[0] == 3  # no prediction: the three rows that are longer than k
    assert counts[-1] - counts[20] < 3 * 280 * 0.05, counts

"""The look-up inside the CUDA top-k, on the card: what it marks, what `place` makes of it, races, and graph replay.

On a CPU: tests/kernels/cuda/test_topk_emulated.py, where clusters come one after the other.
"""

import math

import pytest
import torch

from echo_batch.kernels.cache_layout import EVICTED, FAILED, FALLBACKS, NUM_TOTALS, RECALLED
from echo_batch.kernels.contracts import make_maps
from echo_batch.kernels.prefetch_state import LATE, PREFETCHED, make_prefetch_state
from echo_batch.kernels.reference import cache_ops as reference
from echo_batch.kernels.reference.topk import topk_positions
from tests.kernels.marked import STEP, check_marked, fallbacks, make_selection

pytestmark = pytest.mark.gpu

CUDA = torch.device("cuda")


@pytest.mark.parametrize("max_delay", [0, 3000])
@pytest.mark.parametrize("hit_rate", [0.0, 0.93, 1.0])
@pytest.mark.parametrize(
    ("num_rows", "width", "k"),
    [(5, 98304, 2048), (20, 98432, 2048), (18, 40000, 2048), (4, 200000, 2048), (3, 3000, 64), (4, 50000, 20000)],
)
def test_marks(num_rows: int, width: int, k: int, hit_rate: float, max_delay: int) -> None:
    from echo_batch.kernels.cuda.topk import mark_topk

    lengths = [width, width - 1, width - 100, k, k - 1, 3, 0]
    lengths = (lengths * 3)[:num_rows]
    before = make_selection(lengths, width=width, k=k, hit_rate=hit_rate, seed=num_rows + width)
    after = before.to(CUDA)
    step = torch.full((1,), STEP, dtype=torch.int32, device=CUDA)
    marked = mark_topk(
        after.maps, after.scores, after.lengths, k, after.predicted, after.block_table, step, max_delay=max_delay
    )
    check_marked(before, after, marked)
    # Predictions of the third row and every fourth after it are absurd, of the next row none.
    long = [row for row, length in enumerate(lengths) if length > k]
    assert fallbacks(after) == sum(row % 4 >= 2 for row in long)


@pytest.mark.parametrize("max_delay", [0, 24])
def test_replays_at_the_minimum_pool(max_delay: int) -> None:
    """Steps as a graph: appended tokens, two rows over the same blocks, short and padded rows; every row's bytes."""
    from echo_batch.kernels.gpu_cache import resolve_topk
    from echo_batch.kernels.triton import cache_ops
    from echo_batch.kernels.triton.row_copy import write_rows

    batch, k, num_blocks, num_steps = 8, 128, 40, 200
    width, host_tokens, gpu_tokens = num_blocks * 64, batch * num_blocks * 64, batch * (k + 1) + 24
    maps = make_maps(1, gpu_tokens=gpu_tokens, host_tokens=host_tokens, num_candidates=gpu_tokens, device=CUDA)
    words = torch.arange(host_tokens, dtype=torch.int32)[:, None].expand(-1, 4).contiguous()
    host = words.view(torch.uint8).pin_memory()
    gpu = torch.full((gpu_tokens, 16), 0xFF, dtype=torch.uint8, device=CUDA)
    step = torch.zeros(1, dtype=torch.int32, device=CUDA)
    generator = torch.Generator().manual_seed(1)
    table = torch.randperm(batch * num_blocks, generator=generator).to(torch.int32).view(batch, num_blocks)
    table[1, : num_blocks // 2] = table[0, : num_blocks // 2]
    table[2, 3] = -1
    lengths = torch.tensor([width - 500, width - 500, width - 600, k - 60, k - 1, 40, width - 900, 0])
    lengths = lengths.to(torch.int32)
    scores = torch.randn(batch, width, generator=generator)
    predicted = torch.full((batch,), math.nan)
    inputs = [tensor.to(CUDA) for tensor in (scores, lengths, table)]
    new = torch.full((batch,), -1, dtype=torch.int32, device=CUDA)
    expected = predicted.to(CUDA)
    wrong = torch.zeros(4, dtype=torch.int64, device=CUDA)
    rows = torch.zeros(batch, k, dtype=torch.int32, device=CUDA)

    def body() -> None:
        cache_ops.begin_step(maps, step)
        new_rows = cache_ops.append(maps, new, step)[0]
        write_rows(new[:, None].expand(-1, 4).contiguous().view(torch.uint8), gpu, new_rows, host, new)
        resolution = resolve_topk(
            maps, inputs[0], inputs[1], k, expected, inputs[2], step, host, gpu, max_delay=max_delay
        )
        rows.copy_(resolution.rows)
        wrong.add_(cache_ops.violations(maps, step)[0])

    body()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        body()
    maps.reset()
    step.zero_()
    wrong.zero_()
    expected.fill_(math.nan)
    for number in range(num_steps):
        scores += 0.15 * torch.randn(scores.shape, generator=generator)
        # Positions next to each other in one block of the cluster, and the newest token, are selected too.
        scores[:, 100:130] += 2.0
        active = lengths > 0
        lengths += active.to(torch.int32)
        at = (lengths - 1).clamp(min=0)
        scores[torch.arange(batch), at.long()] = 9.0
        slots = table[torch.arange(batch), (at // 64).long()] * 64 + at % 64
        new.copy_(torch.where(active, slots, -1))
        for target, source in zip(inputs, (scores, lengths, table), strict=True):
            target.copy_(source)
        graph.replay()
        selected, _ = topk_positions(scores, lengths, k, predicted, update=True, block_table=table)
        got = rows.cpu()
        valid = selected >= 0
        assert torch.equal(got >= 0, valid), number
        assert torch.equal(gpu.cpu().view(torch.int32)[got[valid].long(), 0], selected[valid]), number
        assert torch.equal(expected.cpu().nan_to_num(nan=-1e9), predicted.nan_to_num(nan=-1e9)), number
        assert bool((maps.priority[0].cpu()[got[valid].long()] == number + 1).all()), number
        scores[:, 100:130] -= 2.0
    assert wrong.tolist() == [0] * 4 and int(maps.counts[0, FAILED]) == 0
    totals = (maps.totals + maps.counts[:, :NUM_TOTALS])[0].tolist()
    assert totals[EVICTED] > 1000 and totals[RECALLED] > 1000
    assert totals[FALLBACKS] >= 4, "the first step of every long row"
    assert not reference.violations(maps, step).any()


@pytest.mark.parametrize("max_delay", [0, 24])
@pytest.mark.parametrize("set_aside", [3000, 100])
@pytest.mark.parametrize(
    ("num_rows", "width"), [(3, 9000), (13, 9000), (15, 9000), (16, 9000), (30, 30000), (40, 9000)]
)
def test_the_prefetch_goes_on(num_rows: int, width: int, set_aside: int, max_delay: int) -> None:
    """Late candidates and what is certain come beside the look-up of the selection, which claims some of them."""
    from echo_batch.kernels.gpu_cache import resolve_topk
    from echo_batch.kernels.triton import cache_ops, indexer_prefetch

    k, num_lists = 512, 400
    lengths = ([width, width - 1, width - 100, k - 1, 3] * num_rows)[:num_rows]
    before = make_selection(lengths, width=width, k=k, hit_rate=0.8, seed=num_rows + width)
    selected, kth = topk_positions(before.scores, before.lengths, k, block_table=before.block_table)
    # Some selected ones are no candidates of the prefetch, others late candidates.
    before = before._replace(predicted=kth + torch.tensor([0.05, 0.1]).repeat(num_rows)[:num_rows])
    valid = selected >= 0
    # What scores next to the k-th is in doubt when it is brought: an eighth of the distance from the prediction.
    near = before.scores >= (kth - 0.15 * (before.predicted - kth))[:, None]
    row, position = near.nonzero(as_tuple=True)
    inside = position < before.lengths[row]
    row, position = row[inside], position[inside]
    in_doubt = set((before.block_table[row, position // 64] * 64 + position % 64).tolist())
    words = torch.arange(before.maps.host_to_gpu.shape[1], dtype=torch.int32)[:, None].expand(-1, 4).contiguous()
    host = words.view(torch.uint8).pin_memory()
    generator = torch.Generator().manual_seed(num_rows)
    num_came = 0
    for _ in range(10):
        after = before.to(CUDA)
        maps, step = after.maps, torch.full((1,), STEP, dtype=torch.int32, device=CUDA)
        gpu = torch.full((maps.priority.shape[1], 16), 0xFF, dtype=torch.uint8, device=CUDA)
        resident = maps.gpu_to_host[0] >= 0
        gpu[resident] = host[maps.gpu_to_host[0][resident].cpu()].to(CUDA)
        state = make_prefetch_state(1, set_aside, CUDA, num_late_lists=num_lists)
        cache_ops.begin_step(maps, step, num_reserved=set_aside)
        indexer_prefetch.set_aside(maps, state, step, 0)
        linked = maps.host_to_gpu.clone()
        # Of the selection and from anywhere, the same slot in several lists, resident ones among them.
        late = torch.randint(words.shape[0], state.late.shape, dtype=torch.int32, generator=generator)
        chosen = selected[valid][torch.randint(int(valid.sum()), late.shape, generator=generator)]
        late = torch.where(torch.rand(late.shape, generator=generator) < 0.5, chosen, late)
        late[torch.rand(late.shape, generator=generator) < 0.9] = -1
        state.late.copy_(late)
        resolution = resolve_topk(
            maps, after.scores, after.lengths, k, after.predicted, after.block_table, step, host, gpu,
            skip=set_aside, late=state, max_delay=max_delay,
        )  # fmt: skip
        assert not reference.violations(maps, step).any()
        rows = resolution.rows.cpu()
        assert torch.equal(rows >= 0, valid)
        assert torch.equal(gpu.cpu().view(torch.int32)[rows[valid].long(), 0], selected[valid])
        assert bool((maps.priority[0].cpu()[rows[valid].long()] == STEP + 1).all())
        new = ((maps.host_to_gpu[0] >= 0) & (linked[0] < 0)).nonzero()[:, 0]
        new_rows = maps.host_to_gpu[0, new]
        assert torch.equal(gpu[new_rows].cpu(), host[new.cpu()])
        came = torch.isin(new_rows, state.rows[0])
        wanted = set(late[late >= 0].tolist()) | set(selected[valid].tolist()) | in_doubt
        assert set(new.tolist()) <= wanted and not state.certain.any()
        # A selected slot that came late counts as used now, any other as a guess of this step.
        assert bool((maps.priority[0, new_rows[came]] >= STEP).all())
        totals = state.totals[0].tolist()
        assert totals[PREFETCHED] == int(came.sum()) and totals[LATE] <= 0
        left = torch.isin(state.rows[0], new_rows[came], invert=True) & (state.rows[0] >= 0)
        assert bool((maps.priority[0, state.rows[0][left]] == -1).all()), "rows that were not used stay free"
        num_came += int(came.sum())
    assert (num_came > 0) == (num_rows not in (16, 40)), "clusters for them fit beside those of the rows, or not"

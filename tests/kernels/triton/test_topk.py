"""The Triton and CUDA top-k select exactly what the reference selects, whatever is predicted."""

import math

import pytest
import torch
from torch import Tensor

from echo_batch.kernels.reference.slots import positions_to_slots
from echo_batch.kernels.reference.topk import topk_positions as reference
from echo_batch.kernels.triton.topk import topk_positions, update_prediction

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def scores_of(kind: str, num_rows: int, width: int, seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    scores = torch.randn(num_rows, width, generator=generator)
    coin = torch.rand(num_rows, width, generator=generator)
    match kind:
        case "normal":
            return scores
        case "negative":
            return scores.abs().neg() * 1e-3 - 3.5
        case "ties":
            return (scores * 4).round() / 4
        case "equal":
            return torch.full_like(scores, 1.5)
        case "zeros":
            return torch.where(coin < 0.5, 0.0, -0.0)
        case "minus_inf":
            return scores.masked_fill(coin < 0.9, -math.inf)
        case "plus_inf":
            return scores.masked_fill(coin < 0.5, math.inf)
        case "nan":
            return scores.masked_fill(coin < 0.9, math.nan)
        case "all_nan":
            return torch.full_like(scores, math.nan)
        case "wide":
            return scores.mul(20).exp() * scores.sign()
        case "sorted":
            return scores.sort(1).values
    raise AssertionError(kind)


KINDS = ["normal", "negative", "ties", "equal", "zeros", "minus_inf", "plus_inf", "nan", "all_nan", "wide", "sorted"]


def predictions(kth: Tensor) -> list[Tensor | None]:
    """None, exact, near, and absurdly wrong both ways."""
    mixed = torch.tensor([math.nan, 1e30, -1e30, 0.0]).repeat(kth.shape[0] // 4 + 1)[: kth.shape[0]]
    infinite = torch.tensor([math.inf, -math.inf, 1e-42, -0.0]).repeat(kth.shape[0] // 4 + 1)[: kth.shape[0]]
    return [None, kth, kth * 1.05 + 0.01, kth * 0.9 - 0.01, mixed, infinite]


def dirtied(scores: Tensor, lengths: Tensor) -> Tensor:
    """The same scores on DEVICE, garbage past each row's length: it must not matter."""
    garbage = torch.tensor([math.nan, math.inf, 1e30, -math.inf]).repeat(scores.shape[1] // 4 + 1)[: scores.shape[1]]
    outside = torch.arange(scores.shape[1])[None, :] >= lengths[:, None]
    return torch.where(outside, garbage, scores).to(DEVICE)


def check(ops, scores: Tensor, lengths: Tensor, k: int, predicted: list[Tensor | None]) -> None:
    positions, kth = reference(scores, lengths, k)
    dirty, device_lengths = dirtied(scores, lengths), lengths.to(DEVICE)
    for op in ops:
        for values in predicted:
            got_positions, got_kth = op(dirty, device_lengths, k, None if values is None else values.to(DEVICE))
            assert torch.equal(got_positions.cpu(), positions)
            assert torch.equal(got_kth.cpu(), kth)


@pytest.mark.parametrize("kind", KINDS)
def test_same_as_reference(kind: str) -> None:
    scores = scores_of(kind, 4, 500, seed=KINDS.index(kind))
    lengths = torch.tensor([500, 64, 63, 499], dtype=torch.int32)
    _, kth = reference(scores, lengths, 64)
    check([topk_positions], scores, lengths, 64, predictions(kth)[KINDS.index(kind) % 2 :: 2])


def test_whole_row_when_many_candidates_pass() -> None:
    scores = scores_of("normal", 2, 10000, seed=1)
    scores[1, :9000] = 2.5
    lengths = torch.tensor([10000, 9999], dtype=torch.int32)
    check([topk_positions], scores, lengths, 200, [torch.tensor([-5.0, 2.6])])


def check_slots(op, num_rows: int, width: int, k: int) -> None:
    """Positions by a block table: wider than the scores, with blocks that are not there."""
    scores = scores_of("ties", num_rows, width, seed=3)
    lengths = torch.randint(0, width + 1, (num_rows,), generator=torch.Generator().manual_seed(4)).to(torch.int32)
    table = torch.randperm(num_rows * (width // 64 + 3)).to(torch.int32).view(num_rows, -1)
    table[0, 1] = -1
    table = table[:, :-1]
    expected, _ = reference(scores, lengths, k, block_table=table)
    got, _ = op(scores.to(DEVICE), lengths.to(DEVICE), k, block_table=table.to(DEVICE))
    assert torch.equal(got.cpu(), expected)
    positions, _ = reference(scores, lengths, k)
    assert torch.equal(expected, positions_to_slots(positions, table))


def test_slots_of_positions() -> None:
    check_slots(topk_positions, 5, 600, 100)


@pytest.mark.parametrize("k", [1, 2, 100])
def test_every_short_length(k: int) -> None:
    lengths = torch.tensor([0, 1, 2, 3, 99, 100, 101, 130], dtype=torch.int32)
    scores = scores_of("ties", len(lengths), 130, seed=k)
    check([topk_positions], scores, lengths, k, [None])


def test_fallbacks_are_counted() -> None:
    """Too low a prediction lets too many pass, too high a one too few; a row of k is no choice."""
    scores = scores_of("normal", 6, 10000, seed=2)
    scores[1, :9000] += 20.0
    lengths = torch.tensor([10000, 10000, 10000, 200, 9000, 9000], dtype=torch.int32)
    kth = reference(scores, lengths, 200)[1]
    predicted = torch.stack((kth[0], torch.tensor(0.0), kth[2] + 5.0, kth[3] + 5.0, torch.tensor(math.nan), kth[5]))
    count = torch.full((1,), 3, dtype=torch.int32, device=DEVICE)
    topk_positions(scores.to(DEVICE), lengths.to(DEVICE), 200, predicted.to(DEVICE), fallback_count=count)
    assert int(count) == 3 + 3


def test_prediction_update() -> None:
    predicted = torch.tensor([math.nan, 1.0, 2.0, 3.0, 4.0, math.nan], device=DEVICE)
    kth = torch.tensor([5.0, 2.0, 7.0, -math.inf, math.inf, 6.0], device=DEVICE)
    lengths = torch.tensor([65, 65, 64, 99, 99, 3], dtype=torch.int32, device=DEVICE)
    update_prediction(predicted, kth, lengths, 64)
    expected = torch.tensor([5.0, 1.5, 2.0, 3.0, 4.0, math.nan], device=DEVICE)
    assert torch.equal(predicted.nan_to_num(nan=-1.0), expected.nan_to_num(nan=-1.0))


@pytest.mark.gpu
@pytest.mark.parametrize("kind", KINDS)
def test_cuda_same_as_reference(kind: str) -> None:
    from echo_batch.kernels.cuda.topk import topk_positions as cuda_topk

    for width, k in ((98304, 2048), (20003, 2048), (2500, 64), (163840, 2048), (200000, 2048)):
        scores = scores_of(kind, 4, width, seed=width)
        lengths = torch.tensor([width, k, k - 1, width - 1], dtype=torch.int32)
        ops = [cuda_topk, topk_positions] if width == 98304 else [cuda_topk]
        check(ops, scores, lengths, k, predictions(reference(scores, lengths, k)[1]))


@pytest.mark.gpu
@pytest.mark.parametrize("width", [98432, 131072, 190003])
def test_cuda_many_wide_rows(width: int) -> None:
    """Two rows on a multiprocessor, their scores in shared memory."""
    from echo_batch.kernels.cuda.topk import choose_instance
    from echo_batch.kernels.cuda.topk import topk_positions as cuda_topk

    assert choose_instance(18, width).in_shared
    scores = torch.cat([scores_of(kind, 2, width, seed=width) for kind in KINDS])
    lengths = torch.tensor([width, width - 5], dtype=torch.int32).repeat(len(KINDS))
    check([cuda_topk], scores, lengths, 2048, predictions(reference(scores, lengths, 2048)[1]))


@pytest.mark.gpu
def test_cuda_every_length_in_one_batch_and_update() -> None:
    from echo_batch.kernels.cuda.topk import topk_positions as cuda_topk

    lengths = torch.cat((torch.arange(0, 5000, 7), torch.tensor([2047, 2048, 2049, 90000]))).to(torch.int32)
    scores = scores_of("ties", lengths.shape[0], 90000, seed=3)
    check([cuda_topk], scores, lengths, 2048, [None])
    predicted = torch.linspace(-1.0, 3.0, lengths.shape[0])
    predicted[::5] = math.nan
    updated = predicted.to(DEVICE)
    _, kth = cuda_topk(scores.to(DEVICE), lengths.to(DEVICE), 2048, updated, update=True)
    expected = predicted.to(DEVICE)
    update_prediction(expected, kth, lengths.to(DEVICE), 2048)
    assert torch.equal(updated.nan_to_num(nan=-1e9), expected.nan_to_num(nan=-1e9))


@pytest.mark.gpu
def test_cuda_slots_of_positions() -> None:
    from echo_batch.kernels.cuda.topk import topk_positions as cuda_topk

    for num_rows, width, k in ((5, 600, 100), (20, 98432, 2048), (3, 40000, 2048)):
        check_slots(cuda_topk, num_rows, width, k)


@pytest.mark.gpu
def test_cuda_in_a_graph_follows_its_inputs() -> None:
    from echo_batch.kernels.cuda.topk import topk_positions as cuda_topk

    scores = torch.zeros(3, 32768, device=DEVICE)
    lengths = torch.zeros(3, dtype=torch.int32, device=DEVICE)
    predicted = torch.full((3,), math.nan, device=DEVICE)
    cuda_topk(scores, lengths, 2048, predicted)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        positions, kth = cuda_topk(scores, lengths, 2048, predicted, update=True)
    for seed in range(5):
        fresh = scores_of("normal", 3, 32768, seed)
        fresh_lengths = torch.tensor([32768, 2048 + seed, 100 * seed], dtype=torch.int32)
        scores.copy_(fresh)
        lengths.copy_(fresh_lengths)
        graph.replay()
        expected_positions, expected_kth = reference(fresh, fresh_lengths, 2048)
        assert torch.equal(positions.cpu(), expected_positions)
        assert torch.equal(kth.cpu(), expected_kth)

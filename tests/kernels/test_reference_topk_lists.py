"""The lists of likely scores and the margins that bound them, on the torch reference."""

import math

import torch

from echo_batch.kernels.formats import IndexFormat
from echo_batch.kernels.ops import reference_ops
from echo_batch.kernels.prefetch_ops import reference_prefetch_ops
from echo_batch.kernels.reference.topk import topk_positions
from echo_batch.kernels.reference.topk_lists import count_listed, fill_lists, topk_lists
from echo_batch.kernels.score_lists import (
    COUNT,
    MAX_ROWS,
    MAX_TOPK,
    POSITION_BITS,
    make_margins,
    make_score_lists,
)

CPU = torch.device("cpu")


def test_lists_hold_every_score_from_the_bound_on() -> None:
    scores = torch.randn(5, 300, generator=torch.Generator().manual_seed(0))
    scores[1, 7], scores[2, 3], scores[3, 9] = math.inf, math.nan, -math.inf
    lengths = torch.tensor([300, 200, 299, 0, 77], dtype=torch.int32)
    predicted, margins = torch.tensor([1.0, 0.5, math.nan, 0.0, -1.0]), torch.full((5,), 0.25)
    lists = make_score_lists(3, CPU, capacity=512)
    fill_lists(scores, lengths, predicted, margins, lists)
    found = set()
    for entries, header in zip(lists.entries, lists.headers.tolist(), strict=True):
        for bits, place in entries[: header[COUNT]].tolist():
            row, position = place >> POSITION_BITS, place & ((1 << POSITION_BITS) - 1)
            assert header[1] <= row <= header[2]
            assert torch.tensor(bits, dtype=torch.int32).view(torch.float32) == scores[row, position]
            found.add((row, position))
    expected = {
        (row, position)
        for row in range(5)
        for position in range(int(lengths[row]))
        if scores[row, position] >= predicted[row] - margins[row]
    }
    assert found == expected
    num_listed, complete = count_listed(lists, 5)
    assert num_listed.tolist() == [sum(r == row for r, _ in expected) for row in range(5)] and bool(complete.all())


def test_lists_are_made_where_an_entry_can_name_its_place() -> None:
    make, fmt = reference_prefetch_ops(reference_ops()).make_lists, IndexFormat("fp32")
    width = 1 << POSITION_BITS
    for num_rows, num_scores, k, fits in (
        (MAX_ROWS, width, MAX_TOPK, True),
        (MAX_ROWS + 1, width, MAX_TOPK, False),
        (1, width + 64, MAX_TOPK, False),
        (1, 64, MAX_TOPK + 1, False),
    ):
        assert (make(torch.empty(num_rows, 1, 128), num_scores, fmt, k) is not None) == fits, (num_rows, num_scores, k)


def test_short_lists_are_incomplete() -> None:
    scores = torch.randn(4, 100, generator=torch.Generator().manual_seed(0))
    lists = make_score_lists(2, CPU, capacity=20)
    lengths = torch.full((4,), 100, dtype=torch.int32)
    fill_lists(scores, lengths, torch.tensor([-9.0, 9.0, 9.0, 1.8]), torch.zeros(4), lists)
    _, complete = count_listed(lists, 4)
    assert complete.tolist() == [False, False, True, True]


def test_selections_are_those_of_the_whole_rows_and_the_margin_finds_its_size() -> None:
    """Scores drift and change their scale; the lists come to hold k to 4 k scores and stay there."""
    generator = torch.Generator().manual_seed(1)
    k, width, rows = 256, 8000, 3
    scores = torch.randn(rows, width, generator=generator)
    lengths = torch.tensor([width, width - 100, 5000], dtype=torch.int32)
    predicted, margins = torch.full((rows,), math.nan), make_margins(1, rows, CPU)[0]
    lists = make_score_lists(2, CPU, capacity=4096)
    counts = []
    for number in range(60):
        scores = 0.97 * scores + 0.24 * torch.randn(rows, width, generator=generator)
        scaled = scores * (100.0 if number >= 30 else 1.0) + 5
        fill_lists(scaled, lengths, predicted, margins, lists)
        counts.append(count_listed(lists, rows)[0])
        expected = topk_positions(scaled, lengths, k)
        got = topk_lists(scaled, lengths, k, predicted, margins, lists)
        assert all(torch.equal(a, b) for a, b in zip(got, expected, strict=True))
    assert not counts[0].any()
    for part in (counts[10:30], counts[50:]):
        listed = torch.stack(part)
        served = (listed >= k) & (listed <= 4 * k)
        assert float(served.float().mean()) > 0.95, listed


def test_margins_are_kept_where_nothing_can_be_learned() -> None:
    scores = torch.zeros(4, 100)
    scores[2] = -math.inf
    lengths = torch.tensor([100, 8, 100, 100], dtype=torch.int32)
    predicted, margins = torch.tensor([math.nan, 0.0, 0.0, math.inf]), torch.tensor([0.5, 0.5, 0.5, 0.5])
    lists = make_score_lists(1, CPU)
    fill_lists(scores, lengths, predicted, margins, lists)
    topk_lists(scores, lengths, 8, predicted, margins, lists)
    assert margins.tolist() == [0.5, 0.5, 0.5, 0.5]
    unknown = torch.full((4,), math.nan)
    scores[0, 5], scores[3] = math.inf, 1.0
    fill_lists(scores, lengths, predicted, unknown, lists)
    topk_lists(scores, lengths, 8, predicted, unknown, lists)
    # A distance of infinity is none, one of zero becomes the smallest margin.
    assert unknown[:3].isnan().all() and unknown[3] == torch.finfo(torch.float32).tiny

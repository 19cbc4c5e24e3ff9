"""topk_positions against a sort in plain Python, over ties, infinities, NaN and garbage past the length."""

import math

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from echo_batch.kernels.reference.topk import topk_positions

# Few distinct values make ties the rule.
SCORES = st.sampled_from([0.0, -0.0, 1.0, -1.0, 1e-40, 2.5, float("inf"), float("-inf"), float("nan"), -float("nan")])
ROW = st.lists(SCORES, min_size=1, max_size=24)


def expected(scores: list[float], length: int, k: int) -> tuple[list[int], float]:
    candidates = range(min(length, len(scores)))
    ranked = sorted(candidates, key=lambda p: (math.isnan(scores[p]), 0 if math.isnan(scores[p]) else -scores[p], p))
    chosen = sorted(ranked[:k])
    kth = scores[ranked[k - 1]] if len(ranked) >= k else float("-inf")
    return chosen + [-1] * (k - len(chosen)), float("-inf") if math.isnan(kth) else kth


@settings(max_examples=300, deadline=None)
@given(st.data())
def test_against_sorting(data: st.DataObject) -> None:
    width = data.draw(st.integers(1, 24))
    rows = data.draw(st.lists(st.lists(SCORES, min_size=width, max_size=width), min_size=1, max_size=5))
    lengths = data.draw(st.lists(st.integers(0, width), min_size=len(rows), max_size=len(rows)))
    k = data.draw(st.integers(1, 30))
    scores = torch.tensor(rows)
    before = scores.clone()
    positions, kth = topk_positions(scores, torch.tensor(lengths, dtype=torch.int32), k)
    assert torch.equal(scores.view(torch.int32), before.view(torch.int32))
    assert positions.dtype == torch.int32 and positions.shape == (len(rows), k) and kth.dtype == torch.float32
    for i, row in enumerate(scores.tolist()):
        chosen, threshold = expected(row, lengths[i], k)
        assert positions[i].tolist() == chosen
        assert kth[i].item() == threshold


def test_all_equal_takes_the_first() -> None:
    positions, kth = topk_positions(torch.zeros(2, 1000), torch.tensor([1000, 700], dtype=torch.int32), 600)
    assert torch.equal(positions, torch.arange(600, dtype=torch.int32).expand(2, -1))
    assert kth.tolist() == [0.0, 0.0]


def test_many_rows_are_cut_into_slices() -> None:
    """More elements than one slice: rows must not mix."""
    generator = torch.Generator().manual_seed(0)
    scores = torch.randn(300, 4000, generator=generator)
    lengths = torch.randint(1, 4001, (300,), generator=generator, dtype=torch.int32)
    positions, kth = topk_positions(scores, lengths, 64)
    for i in range(0, 300, 7):
        length = int(lengths[i])
        best = scores[i, :length].topk(min(64, length))
        assert sorted(best.indices.tolist()) == [p for p in positions[i].tolist() if p >= 0]
        if length >= 64:
            assert kth[i] == best.values[-1]


def test_rows_without_a_prediction_are_counted() -> None:
    count = torch.tensor([10], dtype=torch.int32)
    lengths = torch.tensor([10, 3, 4, 10, 10], dtype=torch.int32)
    predicted = torch.tensor([math.nan, math.nan, math.nan, 0.5, math.inf])
    topk_positions(torch.zeros(5, 12), lengths, 4, predicted, fallback_count=count)
    assert int(count) == 12, "two rows are longer than k and have none"
    topk_positions(torch.zeros(5, 12), lengths, 4, fallback_count=count)
    assert int(count) == 15
    topk_positions(torch.zeros(5, 4), lengths, 4, fallback_count=count)
    assert int(count) == 15, "scores end before the rows do"


def test_empty() -> None:
    positions, kth = topk_positions(torch.zeros(2, 0), torch.zeros(2, dtype=torch.int32), 3)
    assert positions.tolist() == [[-1] * 3] * 2 and kth.tolist() == [float("-inf")] * 2
    positions, _ = topk_positions(torch.zeros(0, 5), torch.zeros(0, dtype=torch.int32), 3)
    assert positions.shape == (0, 3)

"""The subset of whole bins against a sort."""

import torch

from tools.studies.histogram import NUM_BINS, bins, subset_by_histogram


def test_bins_are_in_the_order_of_the_scores():
    scores = torch.randn(1000).mul(torch.logspace(-6, 6, 1000)).sort().values
    found = bins(scores)
    assert bool((found.diff() >= 0).all()) and int(found[0]) >= 0 and int(found[-1]) < NUM_BINS


def test_takes_whole_bins_from_the_top_and_never_more_than_k():
    scores, k = torch.randn(16, 3000) * 3, 200
    shift = torch.randn(16)
    subset = subset_by_histogram(scores, shift, k)
    places = bins(scores - shift[:, None])
    for row in range(16):
        lowest = int(subset.lowest[row])
        assert int((places[row] >= lowest).sum()) == int(subset.taken[row]) <= k
        assert int((places[row] == lowest - 1).sum()) == int(subset.threshold_bin[row])
        # The next bin would have been too much.
        assert int(subset.taken[row] + subset.threshold_bin[row]) > k


def test_few_scores_are_all_taken():
    scores = torch.full((2, 50), -torch.inf)
    scores[0, :7] = torch.arange(7.0)
    subset = subset_by_histogram(scores, torch.zeros(2), 10)
    assert subset.taken.tolist() == [7, 0] and subset.threshold_bin.tolist() == [0, 0]


def test_a_good_prediction_makes_the_threshold_bin_small():
    scores, k = torch.randn(8, 20_000) + 40.0, 1000
    exact = scores.topk(k, dim=1).values[:, -1]
    plain, shifted = (subset_by_histogram(scores, s, k) for s in (torch.zeros(8), exact))
    assert int(shifted.threshold_bin.max()) < 100 < 10_000 < int(plain.threshold_bin.min())
    assert int(shifted.taken.min()) > 0.9 * k and int(plain.taken.max()) == 0

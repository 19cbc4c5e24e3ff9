"""Approximate top-k by a histogram of 256 bins, as a prefill kernel could afford it (the paper's inter-query prefetch).

A score's bin is the highest 8 bits of its order-preserving bit pattern: sign and 7 bits of exponent. Bins are therefore
finest around zero, and scores are shifted by a predicted k-th score so that the k-th score falls where bins are fine.
"""

from typing import NamedTuple

import torch
from torch import Tensor

NUM_BINS = 256


class Subset(NamedTuple):
    """Of each row int64 `[n]`: members of whole bins from the top that fit into k, and of the bin that did not."""

    taken: Tensor
    threshold_bin: Tensor
    lowest: Tensor
    """The lowest bin that was taken; NUM_BINS if none was."""


def ordered_bits(scores: Tensor) -> Tensor:
    """int64 in [0, 2**32) in the order of the fp32 `scores`."""
    bits = scores.float().contiguous().view(torch.int32).to(torch.int64)
    return torch.where(bits >= 0, bits + 2**31, -1 - bits)


def bins(scores: Tensor) -> Tensor:
    """int64 in [0, NUM_BINS), higher for higher scores."""
    return ordered_bits(scores) >> 24


def subset_by_histogram(scores: Tensor, shift: Tensor, k: int) -> Subset:
    """Take bins from the top of each row of `scores` fp32 `[n, L]` (-inf: no token) while they hold at most k in all.

    shift fp32 `[n]` is subtracted first. If a row has at most k scores, all are taken and its threshold bin is empty.
    """
    valid = torch.isfinite(scores)
    places = bins(torch.where(valid, scores - shift[:, None], 0.0))
    counts = torch.zeros(scores.shape[0], NUM_BINS, dtype=torch.int64)
    counts.scatter_add_(1, places, valid.to(torch.int64))
    from_top = counts.flip(1).cumsum(1)
    num_bins = (from_top <= k).sum(1)  # from the top, trailing empty bins included
    first = torch.zeros_like(num_bins)
    taken = torch.where(num_bins > 0, from_top.gather(1, (num_bins - 1).clamp(min=0)[:, None])[:, 0], first)
    at_threshold = counts.flip(1).gather(1, num_bins.clamp(max=NUM_BINS - 1)[:, None])[:, 0]
    return Subset(taken, torch.where(num_bins < NUM_BINS, at_threshold, first), NUM_BINS - num_bins)

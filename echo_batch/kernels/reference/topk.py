"""Reference selection: the exact top-k of index scores with a defined order of ties (spec section 3.3)."""

import torch
from torch import Tensor

_OUTSIDE = -(2**31)
_NAN = _OUTSIDE + 1


def _sortable(scores: Tensor) -> Tensor:
    """fp32 -> int32 of the same order; -0.0 equals 0.0, NaN comes below -inf."""
    bits = (scores + 0.0).view(torch.int32)
    keys = bits ^ ((bits >> 31) & 0x7FFFFFFF)
    return keys.masked_fill_(scores.isnan(), _NAN)


def topk_positions(scores: Tensor, lengths: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """The k candidates of each row that come first by (score descending, position ascending).

    scores fp32 [T, S], lengths int32 [T] (positions below it are candidates, -inf included) -> positions int32 [T, k]
    ascending, then -1; kth fp32 [T], the k-th largest score (-inf if there are fewer than k). A row with no more than
    k candidates selects all of them. NaN is chosen only when nothing else is left.
    """
    num_rows, width = scores.shape
    positions = torch.full((num_rows, k), -1, dtype=torch.int32, device=scores.device)
    kth = torch.full((num_rows,), float("-inf"), device=scores.device)
    if num_rows == 0 or width == 0:
        return positions, kth
    # Whatever stands past `lengths` (garbage, NaN) must not matter.
    outside = torch.arange(width, device=scores.device) >= lengths.unsqueeze(1)
    keys = _sortable(scores).masked_fill_(outside, _OUTSIDE)
    threshold = torch.topk(keys, min(k, width), sorted=False).values.amin(1, keepdim=True)
    chosen = keys > threshold
    equal = (keys == threshold) & (threshold > _OUTSIDE)
    wanted = k - chosen.sum(1, keepdim=True)
    surplus = (equal.sum(1, keepdim=True) > wanted).squeeze(1)
    if bool(surplus.any()):
        tied = equal[surplus]
        equal[surplus] = tied & (tied.cumsum(1) <= wanted[surplus])
    chosen |= equal
    rows, columns = chosen.nonzero(as_tuple=True)
    counts = chosen.sum(1)
    first = counts.cumsum(0) - counts
    positions[rows, torch.arange(rows.shape[0], device=rows.device) - first[rows]] = columns.to(torch.int32)
    if width >= k:
        score = threshold ^ ((threshold >> 31) & 0x7FFFFFFF)
        is_score = (threshold > _NAN).squeeze(1)
        kth = torch.where(is_score, score.view(torch.float32).squeeze(1), kth)
    return positions, kth

"""Reference selection: the exact top-k of index scores with a defined order of ties (spec section 3.3)."""

import torch
from torch import Tensor

from echo_batch.kernels.reference.slices import row_slices
from echo_batch.kernels.reference.slots import positions_to_slots

_OUTSIDE = -(2**31)
_NAN = _OUTSIDE + 1
"""Sort keys below that of any number: of positions that are no candidates, and of NaN scores."""
_PLUS_INF = 0x7F800000
_MINUS_INF = -0x7F800001
"""Sort keys of the infinities; NaNs lie outside of them before they are moved to _NAN."""


def topk_positions(
    scores: Tensor,
    lengths: Tensor,
    k: int,
    predicted: Tensor | None = None,
    *,
    update: bool = False,
    block_table: Tensor | None = None,
    fallback_count: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """The k candidates of each row that come first by (score descending, position ascending).

    scores fp32 [T, S], lengths int32 [T] (positions below it are candidates, -inf included) -> positions int32 [T, k]
    ascending, then -1; kth fp32 [T], the k-th largest score (-inf if there are fewer than k). A row with no more than
    k candidates selects all of them. NaN is chosen only when nothing else is left.

    predicted fp32 [T], the expected k-th score of each row (NaN: unknown), changes no result: fast versions are faster
    with a good one. With `update` it is updated in place for the next step (`update_prediction`). With `block_table`
    int32 [T, max_blocks] the first result holds the token slots of the positions (`positions_to_slots`).

    fallback_count int32 [1], if given: increased by the number of rows longer than k that the prediction did not serve.
    These are the rows without a finite one and, in fast versions, those whose prediction was too far off.
    """
    if fallback_count is not None:
        is_served = torch.zeros_like(lengths, dtype=torch.bool) if predicted is None else predicted.isfinite()
        fallback_count += (~is_served & (lengths.clamp(max=scores.shape[1]) > k)).sum()
    num_rows, width = scores.shape
    positions = torch.full((num_rows, k), -1, dtype=torch.int32, device=scores.device)
    kth = torch.full((num_rows,), float("-inf"), device=scores.device)
    for part in row_slices(num_rows, width, scores.device):
        longest = min(width, int(lengths[part].max()))
        if longest > 0:
            _select(scores[part, :longest], lengths[part], positions[part], kth[part])
    if update:
        assert predicted is not None
        update_prediction(predicted, kth, lengths, k)
    return positions if block_table is None else positions_to_slots(positions, block_table), kth


def update_prediction(predicted: Tensor, kth: Tensor, lengths: Tensor, k: int) -> None:
    """predicted fp32 [T] <- 0.5 * predicted + 0.5 * kth, in place, where lengths int32 [T] > k and kth is finite.

    NaN in `predicted` means unset: the first value initializes it (paper: intra-query prefetch, alpha = 0.5).
    """
    mean = torch.where(predicted.isnan(), kth, 0.5 * predicted + 0.5 * kth)
    predicted.copy_(torch.where((lengths > k) & kth.isfinite(), mean, predicted))


def _select(scores: Tensor, lengths: Tensor, positions: Tensor, kth: Tensor) -> None:
    """Fill positions [T, k] and kth [T], both prefilled with "none"."""
    num_rows, width = scores.shape
    k = positions.shape[1]
    keys = _sort_keys(scores)
    # Whatever stands past `lengths` (garbage, NaN) must not matter.
    shortest = max(0, int(lengths.min()))
    tail = torch.arange(shortest, width, device=scores.device)
    keys[:, shortest:].masked_fill_(tail >= lengths.unsqueeze(1), _OUTSIDE)
    best = torch.topk(keys, min(k, width), sorted=False).values
    threshold = best.amin(1, keepdim=True).clamp_(min=_NAN)
    chosen = keys >= threshold
    rows, columns = chosen.nonzero(as_tuple=True)
    counts = torch.bincount(rows, minlength=num_rows)
    crowded = counts > k
    if bool(crowded.any()):
        # Several scores equal the k-th: the first positions of these win.
        above = keys[crowded] > threshold[crowded]
        tied = chosen[crowded] & ~above
        free = k - above.sum(1, keepdim=True)
        chosen[crowded] = above | (tied & (tied.cumsum(1) <= free))
        rows, columns = chosen.nonzero(as_tuple=True)
        counts = counts.clamp(max=k)
    first = counts.cumsum(0) - counts
    rank = torch.arange(rows.shape[0], device=rows.device) - first[rows]
    positions[rows, rank] = columns.to(torch.int32)
    if width >= k:
        score = _flip(threshold).view(torch.float32).squeeze(1)
        kth.copy_(torch.where(threshold.squeeze(1) > _NAN, score, kth))


def _sort_keys(scores: Tensor) -> Tensor:
    """fp32 -> int32 of the same order; -0.0 equals 0.0, NaN comes below -inf."""
    keys = _flip((scores + 0.0).view(torch.int32))
    lowest, highest = torch.aminmax(keys)
    if highest > _PLUS_INF or lowest < _MINUS_INF:
        keys.masked_fill_((keys > _PLUS_INF) | (keys < _MINUS_INF), _NAN)
    return keys


def _flip(bits: Tensor) -> Tensor:
    """Sign-magnitude order of float bits to two's complement order, and back."""
    return (bits >> 31).bitwise_and_(0x7FFFFFFF).bitwise_xor_(bits)

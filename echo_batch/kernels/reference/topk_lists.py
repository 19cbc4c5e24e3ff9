"""Reference of the top-k over lists of likely scores, and of the lists themselves (kernels/score_lists.py)."""

import torch
from torch import Tensor

from echo_batch.kernels.reference.topk import topk_positions
from echo_batch.kernels.score_lists import (
    COUNT,
    FIRST_ROW,
    LAST_ROW,
    MAX_ENTRIES,
    MAX_ROWS,
    MAX_TOPK,
    POSITION_BITS,
    ScoreLists,
)

SMALLEST, LARGEST = torch.finfo(torch.float32).tiny, 1e30
"""Of margins."""


def fill_lists(scores: Tensor, lengths: Tensor, predicted: Tensor, margins: Tensor, lists: ScoreLists) -> None:
    """Write to `lists` every score below a row's length that is at least predicted - margin (fp32, none where NaN).

    scores fp32 [B, S], lengths int32 [B], predicted and margins fp32 [B]. Here list i holds a share of the rows.
    """
    num_lists, capacity, _ = lists.entries.shape
    num_rows, width = scores.shape
    assert num_rows <= MAX_ROWS and width <= 1 << POSITION_BITS, scores.shape
    lists.headers.zero_()
    positions = torch.arange(width, device=scores.device)
    likely = (positions < lengths[:, None]) & (scores >= (predicted - margins)[:, None])
    for i in range(num_lists):
        first, end = num_rows * i // num_lists, num_rows * (i + 1) // num_lists
        rows, columns = likely[first:end].nonzero(as_tuple=True)
        lists.headers[i] = torch.tensor([rows.numel(), first, end - 1, 0], dtype=torch.int32)
        rows, columns = rows[:capacity] + first, columns[:capacity]
        lists.entries[i, : rows.numel(), 0] = scores[rows, columns].view(torch.int32)
        lists.entries[i, : rows.numel(), 1] = (rows << POSITION_BITS | columns).to(torch.int32)


def topk_lists(
    scores: Tensor,
    lengths: Tensor,
    k: int,
    predicted: Tensor,
    margins: Tensor,
    lists: ScoreLists,
    *,
    block_table: Tensor | None = None,
    num_whole: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """As `topk.topk_positions` with update=True, which it equals whatever `predicted` and `margins` hold.

    `lists` were made from the same scores, lengths, `predicted` and `margins` (`fill_lists`); k up to MAX_TOPK. Fast
    versions select from them where a row's lists are complete and hold k of its scores, else from the scores.

    num_whole [1], if given: increased by the number of rows longer than k that are not. margins fp32 [B] are updated in
    place, so that the next lists hold about 2 k scores of a row: see `update_margins`.
    """
    assert 0 < k <= MAX_TOPK, k
    before = predicted.clone()
    result = topk_positions(scores, lengths, k, predicted, update=True, block_table=block_table)
    num_listed, complete = count_listed(lists, scores.shape[0])
    if num_whole is not None:
        num_whole += ((lengths.clamp(max=scores.shape[1]) > k) & ~(complete & (num_listed >= k))).sum()
    update_margins(margins, scores, lengths, k, result[1], before, num_listed, complete)
    return result


def count_listed(lists: ScoreLists, num_rows: int) -> tuple[Tensor, Tensor]:
    """int64 [B]: entries of each row; bool [B]: whether they are all there, and no more than a fast version takes."""
    capacity = lists.entries.shape[1]
    num_listed = torch.zeros(num_rows, dtype=torch.int64)
    complete = torch.ones(num_rows, dtype=torch.bool)
    taken = torch.zeros(num_rows, dtype=torch.int64)
    for entries, header in zip(lists.entries.cpu(), lists.headers.tolist(), strict=True):
        if header[COUNT] <= 0:
            continue
        may_hold = slice(header[FIRST_ROW], header[LAST_ROW] + 1)
        count = min(header[COUNT], capacity)
        taken[may_hold] += count
        complete[may_hold] &= header[COUNT] <= capacity
        num_listed += torch.bincount(entries[:count, 1] >> POSITION_BITS, minlength=num_rows)
    return num_listed.to(lists.entries.device), (complete & (taken <= MAX_ENTRIES)).to(lists.entries.device)


def update_margins(
    margins: Tensor,
    scores: Tensor,
    lengths: Tensor,
    k: int,
    kth: Tensor,
    predicted: Tensor,
    num_listed: Tensor,
    complete: Tensor,
) -> None:
    """margins fp32 [B] for the next step, in place, where lengths > k and the k-th score is finite.

    Unknown ones become a sixteenth of the distance from the k-th score to the largest, unless the row was selected from
    its lists (or that is not finite). The others move with the entries that the prediction and they have given: halved
    where the lists were not complete, doubled below k, up by a quarter below 1.5 k and down by an eighth above 3 k; not
    where the prediction was not finite. `predicted`: before its update.
    """
    for row in ((lengths > k) & kth.isfinite()).nonzero()[:, 0].tolist():
        count, margin = int(num_listed[row]), margins[row]
        if bool(margin.isnan()):
            values = scores[row, : int(lengths[row])]
            scale = (values[~values.isnan()].amax() + 0.0 - kth[row]) / 16
            if bool(scale.isfinite()) and not (bool(complete[row]) and count >= k):
                margins[row] = scale.clamp(min=SMALLEST)
        elif bool(predicted[row].isfinite()):
            if not complete[row]:
                factor = 0.5
            elif count < k:
                factor = 2.0
            elif count < k + k // 2:
                factor = 1.25
            else:
                factor = 0.875 if count > 3 * k else 1.0
            margins[row] = (margin * factor).clamp(SMALLEST, LARGEST)

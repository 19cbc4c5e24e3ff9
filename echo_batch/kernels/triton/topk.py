# mypy: allow-untyped-defs, allow-incomplete-defs
"""Exact top-k of index scores by a predicted threshold, in Triton: for GPUs without block clusters (kernels/cuda).

Two launches. The first compacts, chunk by chunk, the scores that pass a threshold a little below the predicted k-th
score. The second has one program a row: it bisects on the ordered bits of the candidates, or of the whole row if fewer
than k or too many have passed.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from echo_batch.kernels.triton.slots import positions_to_slots

_CHUNK = 2048
_MAX_CANDIDATES = 8192
_MARGIN = 1 << 20
"""Distance in ordered bits from the prediction to the threshold: an eighth of an octave."""


@triton.jit
def _sortable(scores, inside):
    """fp32 -> int32 of the same order: -0.0 equals 0.0, NaN is -2^31 + 1, outside the row -2^31."""
    bits = scores.to(tl.int32, bitcast=True)
    bits = tl.where(scores == 0.0, 0, bits)
    keys = bits ^ ((bits >> 31) & 0x7FFFFFFF)
    keys = tl.where(scores != scores, -2147483647, keys)
    return tl.where(inside, keys, -2147483648)


@triton.jit
def _compact_kernel(
    scores_ptr,
    row_stride,
    lengths_ptr,
    predicted_ptr,
    keys_ptr,
    positions_ptr,
    counts_ptr,
    k,
    num_chunks,
    MARGIN: tl.constexpr,
    CHUNK: tl.constexpr,
):
    chunk, row = tl.program_id(0), tl.program_id(1)
    length = tl.load(lengths_ptr + row)
    length = tl.where(length > k, length, 0)  # a row with no choice has no candidates
    predicted = tl.load(predicted_ptr + row)
    position = chunk * CHUNK + tl.arange(0, CHUNK)
    inside = position < length
    scores = tl.load(scores_ptr + row.to(tl.int64) * row_stride + position, mask=inside, other=0.0)
    keys = _sortable(scores, inside)
    center = _sortable(predicted, predicted == predicted).to(tl.int64)
    threshold = tl.maximum(center - MARGIN, -2147483647).to(tl.int32)
    passed = keys >= threshold
    rank = tl.cumsum(passed.to(tl.int32), 0) - 1
    start = (row.to(tl.int64) * num_chunks + chunk) * CHUNK
    tl.store(keys_ptr + start + rank, keys, mask=passed)
    tl.store(positions_ptr + start + rank, position, mask=passed)
    tl.store(counts_ptr + row * num_chunks + chunk, tl.sum(passed.to(tl.int32), 0))


@triton.jit
def _choose(keys, kth, num_equal_wanted, equal_before):
    """Mask of the chosen keys: all above kth and, in order, the first equals; and how many equals were seen."""
    equal = keys == kth
    equal_rank = equal_before + tl.cumsum(equal.to(tl.int32), 0)
    return (keys > kth) | (equal & (equal_rank <= num_equal_wanted)), tl.sum(equal.to(tl.int32), 0)


@triton.jit(do_not_specialize=["fallback_ptr"])
def _select_kernel(
    scores_ptr,
    row_stride,
    lengths_ptr,
    predicted_ptr,
    keys_ptr,
    positions_ptr,
    counts_ptr,
    out_ptr,
    kth_ptr,
    fallback_ptr,
    k,
    num_chunks,
    HAS_FALLBACK: tl.constexpr,
    CHUNK: tl.constexpr,
    CHUNKS_P2: tl.constexpr,
    MAX_CANDIDATES: tl.constexpr,
    TILE: tl.constexpr,
    K_P2: tl.constexpr,
):
    row = tl.program_id(0)
    length = tl.load(lengths_ptr + row)
    out_ptr += row.to(tl.int64) * k
    scores_ptr += row.to(tl.int64) * row_stride
    if length < k:
        slot = tl.arange(0, K_P2)
        tl.store(out_ptr + slot, tl.where(slot < length, slot, -1), mask=slot < k)
        tl.store(kth_ptr + row, float("-inf"))
    else:
        chunk = tl.arange(0, CHUNKS_P2)
        counts = tl.load(counts_ptr + row * num_chunks + chunk, mask=chunk < num_chunks, other=0)
        total = tl.sum(counts, 0)
        kth = tl.full((), -2147483648, tl.int32)
        low = tl.full((), -2147483647, tl.int64)  # at least k keys are >= low
        high = tl.full((), 2147483648, tl.int64)  # fewer than k keys are >= high
        is_served = (total >= k) & (total <= MAX_CANDIDATES)
        if HAS_FALLBACK:
            predicted = tl.load(predicted_ptr + row)
            if (length > k) & ((is_served == 0) | (predicted != predicted) | (tl.abs(predicted) == float("inf"))):
                tl.atomic_add(fallback_ptr, 1, sem="relaxed")
        if is_served:
            # Candidate i of the row lies behind all the padding of the chunks that end at or before i.
            candidate = tl.arange(0, MAX_CANDIDATES)
            address = (row.to(tl.int64) * num_chunks) * CHUNK + candidate
            end = tl.full((), 0, tl.int32)
            for c in range(num_chunks):
                count = tl.load(counts_ptr + row * num_chunks + c)
                end += count
                address += tl.where(candidate >= end, CHUNK - count, 0)
            keys = tl.load(keys_ptr + address, mask=candidate < total, other=-2147483648)
            position = tl.load(positions_ptr + address, mask=candidate < total, other=0)
            while high - low > 1:
                middle = low + (high - low) // 2
                count = tl.sum((keys >= middle.to(tl.int32)).to(tl.int32), 0)
                low = tl.where(count >= k, middle, low)
                high = tl.where(count == k, low + 1, tl.where(count >= k, high, middle))
            # Stopped early where exactly k keys are >= low: the k-th is the smallest of them.
            kth = tl.min(tl.where(keys >= low.to(tl.int32), keys, 2147483647), 0)
            num_larger = tl.sum((keys > kth).to(tl.int32), 0)
            chosen, _ = _choose(keys, kth, k - num_larger, 0)
            rank = tl.cumsum(chosen.to(tl.int32), 0) - 1
            tl.store(out_ptr + rank, position, mask=chosen)
        else:
            offset = tl.arange(0, TILE)
            while high - low > 1:
                quarter = (high - low + 3) // 4
                first = tl.minimum(low + quarter, high - 1)
                second = tl.minimum(first + quarter, high - 1)
                third = tl.minimum(second + quarter, high - 1)
                num_first = tl.full((), 0, tl.int32)
                num_second = tl.full((), 0, tl.int32)
                num_third = tl.full((), 0, tl.int32)
                for start in range(0, length, TILE):
                    inside = start + offset < length
                    keys = _sortable(tl.load(scores_ptr + start + offset, mask=inside, other=0.0), inside)
                    num_first += tl.sum((keys >= first.to(tl.int32)).to(tl.int32), 0)
                    num_second += tl.sum((keys >= second.to(tl.int32)).to(tl.int32), 0)
                    num_third += tl.sum((keys >= third.to(tl.int32)).to(tl.int32), 0)
                high = tl.where(
                    num_first < k, first, tl.where(num_second < k, second, tl.where(num_third < k, third, high))
                )
                low = tl.where(
                    num_third >= k, third, tl.where(num_second >= k, second, tl.where(num_first >= k, first, low))
                )
            kth = low.to(tl.int32)
            num_larger = tl.full((), 0, tl.int32)
            for start in range(0, length, TILE):
                inside = start + offset < length
                keys = _sortable(tl.load(scores_ptr + start + offset, mask=inside, other=0.0), inside)
                num_larger += tl.sum((keys > kth).to(tl.int32), 0)
            num_written = tl.full((), 0, tl.int32)
            num_equal = tl.full((), 0, tl.int32)
            for start in range(0, length, TILE):
                inside = start + offset < length
                keys = _sortable(tl.load(scores_ptr + start + offset, mask=inside, other=0.0), inside)
                chosen, equal = _choose(keys, kth, k - num_larger, num_equal)
                chosen = chosen & inside
                num_equal += equal
                rank = num_written + tl.cumsum(chosen.to(tl.int32), 0) - 1
                tl.store(out_ptr + rank, start + offset, mask=chosen)
                num_written += tl.sum(chosen.to(tl.int32), 0)
        bits = kth ^ ((kth >> 31) & 0x7FFFFFFF)
        score = bits.to(tl.float32, bitcast=True)
        tl.store(kth_ptr + row, tl.where(kth == -2147483647, float("-inf"), score))


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
    """As reference.topk.topk_positions, with an optional prediction that only makes it faster (design: top-k).

    scores fp32 [T, S] (unit stride in a row), lengths int32 [T], predicted fp32 [T]: the expected k-th score of each
    row, NaN where unknown. With `update`, predicted is updated in place as by `update_prediction`. Returns positions
    int32 [T, k] ascending, then -1 (their token slots with `block_table`); kth fp32 [T]. `fallback_count`: also counts
    rows that were searched as a whole.
    """
    num_rows, width = scores.shape
    assert scores.dtype == torch.float32 and lengths.dtype == torch.int32 and scores.stride(1) == 1
    assert k > 0 and (predicted is not None or not update)
    device = scores.device
    positions = torch.empty(num_rows, k, dtype=torch.int32, device=device)
    kth = torch.empty(num_rows, dtype=torch.float32, device=device)
    if num_rows == 0 or width == 0:
        return positions.fill_(-1), kth.fill_(float("-inf"))
    threshold = predicted
    if threshold is None:
        threshold = torch.full((num_rows,), float("nan"), device=device)
    num_chunks = triton.cdiv(width, _CHUNK)
    keys = torch.empty(2, num_rows, num_chunks * _CHUNK, dtype=torch.int32, device=device)
    counts = torch.empty(num_rows, num_chunks, dtype=torch.int32, device=device)
    _compact_kernel[(num_chunks, num_rows)](
        scores,
        scores.stride(0),
        lengths,
        threshold,
        keys[0],
        keys[1],
        counts,
        k,
        num_chunks,
        MARGIN=_MARGIN,
        CHUNK=_CHUNK,
        num_warps=8,
    )
    _select_kernel[(num_rows,)](
        scores,
        scores.stride(0),
        lengths,
        threshold,
        keys[0],
        keys[1],
        counts,
        positions,
        kth,
        counts if fallback_count is None else fallback_count,
        k,
        num_chunks,
        HAS_FALLBACK=fallback_count is not None,
        CHUNK=_CHUNK,
        CHUNKS_P2=triton.next_power_of_2(num_chunks),
        MAX_CANDIDATES=min(_MAX_CANDIDATES, triton.next_power_of_2(num_chunks * _CHUNK)),
        TILE=min(8192, triton.next_power_of_2(width)),
        K_P2=triton.next_power_of_2(k),
        num_warps=16,
    )
    if update and predicted is not None:
        update_prediction(predicted, kth, lengths, k)
    return positions if block_table is None else positions_to_slots(positions, block_table), kth


@triton.jit
def _update_kernel(predicted_ptr, kth_ptr, lengths_ptr, k, num_rows, BLOCK: tl.constexpr):
    row = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = row < num_rows
    predicted = tl.load(predicted_ptr + row, mask=inside)
    kth = tl.load(kth_ptr + row, mask=inside)
    length = tl.load(lengths_ptr + row, mask=inside, other=0)
    updated = tl.where(predicted == predicted, 0.5 * predicted + 0.5 * kth, kth)
    # An infinite k-th score (masked or NaN scores) would stay in the average for ever.
    finite = (kth > float("-inf")) & (kth < float("inf"))
    tl.store(predicted_ptr + row, updated, mask=inside & (length > k) & finite)


def update_prediction(predicted: Tensor, kth: Tensor, lengths: Tensor, k: int) -> None:
    """predicted fp32 [T] <- 0.5 * predicted + 0.5 * kth [T], in place, where lengths int32 [T] > k and kth is finite.

    NaN in `predicted` means unset: the first value initializes it (design: prefetch and top-k).
    """
    num_rows = predicted.shape[0]
    if num_rows:
        _update_kernel[(triton.cdiv(num_rows, 128),)](predicted, kth, lengths, k, num_rows, BLOCK=128)

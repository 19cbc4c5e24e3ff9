"""Lossless prefetch: rows that will probably be selected are copied to the GPU while the indexer is still scoring.

Torch reference (design: prefetch and top-k; ECHO paper, intra-query prefetch). The prediction decides only what moves
early. The exact top-k decides what is selected, and `resolve` brings what is missing then: no result ever changes.

In a step: `begin_step`, `append`, `set_aside` (for all groups together), then per group `index_scores_prefetch`, top-k
and `resolve`. Prefetch never evicts: it takes rows that `set_aside` has freed, as many as there are. It leaves out a
row's newest token, whose KV row is resident and may still be on its way to the host. Its rows get priority = step - 1:
`resolve` protects those that are selected, and the others may go first in the same step.

Which missing candidates get a row when there are fewer rows than candidates is free.
"""

import torch
from torch import Tensor

from echo_batch.kernels.cache_layout import EVICTED, FALLBACKS, FREE
from echo_batch.kernels.contracts import GroupMaps, Resolution
from echo_batch.kernels.formats import BLOCK_SIZE, IndexFormat
from echo_batch.kernels.prefetch_state import CANDIDATES, DROPPED, PREFETCHED, PrefetchState
from echo_batch.kernels.reference import indexer
from echo_batch.kernels.reference.cache_ops import copy_rows, resolve
from echo_batch.kernels.reference.topk_lists import fill_lists, topk_lists
from echo_batch.kernels.score_lists import ScoreLists


def set_aside(maps: GroupMaps, state: PrefetchState, step: Tensor, skip: int) -> None:
    """Free rows for prefetch, in every group: `state.rows` gets R free rows, or as many as can be had, then -1.

    Takes free rows, then the least recently used ones, which it evicts; never rows used in this step. Once a step,
    after `append`. The fast version takes them from the step's candidate list, of which `skip` entries (one per batch
    row) went to appended tokens: `resolve` should then start behind both.
    """
    num_rows = state.rows.shape[1]
    state.taken.zero_()
    state.slots.fill_(-1)
    state.rows.fill_(-1)
    for g in range(maps.priority.shape[0]):
        priority = maps.priority[g]
        order = torch.arange(priority.numel(), device=priority.device) + priority.to(torch.int64) * priority.numel()
        rows = torch.topk(order, min(num_rows, priority.numel()), largest=False, sorted=True).indices
        rows = rows[priority[rows] < int(step)]
        old = maps.gpu_to_host[g, rows]
        maps.host_to_gpu[g, old[old >= 0]] = -1
        maps.totals[g, EVICTED] += int((old >= 0).sum())
        maps.gpu_to_host[g, rows] = -1
        maps.priority[g, rows] = FREE
        state.rows[g, : rows.numel()] = rows.to(torch.int32)


def prefetch_rows(
    maps: GroupMaps,
    state: PrefetchState,
    scores: Tensor,
    block_table: Tensor,
    seq_lens: Tensor,
    predicted: Tensor,
    step: Tensor,
    host_rows: Tensor,
    gpu_rows: Tensor,
    *,
    first: int = 0,
    end: int | None = None,
) -> None:
    """Bring the missing ones among positions [first, end) that scored above the prediction, of one group.

    scores fp32 [B, S] (whatever is at and past seq_lens), block_table int32 [B, max_blocks], seq_lens int32 [B],
    predicted fp32 [B]: the k-th score each row is expected to have, NaN where unknown (nothing is prefetched then).
    Bytes are copied from `host_rows` [N_H, row_bytes] to `gpu_rows` [N_G, row_bytes], the group's first layer; with
    IndexShare the other layers' rows are not there yet. Changes maps, state and `gpu_rows` in place.
    """
    num_rows = state.rows.shape[1]
    new_slots: list[int] = []
    for row, (length, threshold) in enumerate(zip(seq_lens.tolist(), predicted.tolist(), strict=True)):
        last = min(length - 1, scores.shape[1] if end is None else end)
        if last <= first:
            continue
        positions = first + (scores[row, first:last] > threshold).nonzero()[:, 0]
        blocks = block_table[row, positions // BLOCK_SIZE]
        slots = (blocks * BLOCK_SIZE + positions % BLOCK_SIZE)[blocks >= 0]
        state.totals[0, CANDIDATES] += slots.numel()
        new_slots += slots[maps.host_to_gpu[0, slots] == -1].tolist()
    distinct = list(dict.fromkeys(new_slots))
    taken = int(state.taken[0, 0])
    rows = state.rows[0, taken : taken + len(distinct)]
    rows = rows[rows >= 0]
    fetched = torch.tensor(distinct[: rows.numel()], dtype=torch.int32, device=scores.device)
    state.taken[0, 0] = min(taken + len(distinct), num_rows)
    state.totals[0, PREFETCHED] += rows.numel()
    state.totals[0, DROPPED] += len(distinct) - rows.numel()
    maps.host_to_gpu[0, fetched] = rows
    maps.gpu_to_host[0, rows] = fetched
    maps.priority[0, rows] = int(step) - 1
    copy_rows(host_rows, fetched, gpu_rows, rows, None)


def index_scores_prefetch(
    query: Tensor,
    weights: Tensor,
    pages: Tensor,
    block_table: Tensor,
    seq_lens: Tensor,
    fmt: IndexFormat,
    *,
    predicted: Tensor,
    maps: GroupMaps,
    state: PrefetchState,
    step: Tensor,
    host_rows: Tensor,
    gpu_rows: Tensor,
    margins: Tensor | None = None,
    lists: ScoreLists | None = None,
    overlap: bool = False,
) -> Tensor:
    """`indexer.index_scores_paged` and `prefetch_rows` at once; returns the scores, the same bits as without prefetch.

    With `lists`, and `margins` fp32 [B], it also lists the scores that the top-k will probably need (`fill_lists`).
    `overlap`: what the launch before makes is `query` or `weights` and nothing else that is read here, so that a fast
    version may begin while that launch ends. Done when it returns (on a GPU: when its kernels have run), so that
    `resolve` can follow.
    """
    scores = indexer.index_scores_paged(query, weights, pages, block_table, seq_lens, fmt)
    if lists is not None:
        assert margins is not None
        fill_lists(scores, seq_lens, predicted, margins, lists)
    prefetch_rows(maps, state, scores, block_table, seq_lens, predicted, step, host_rows, gpu_rows)
    return scores


def resolve_topk_lists(
    maps: GroupMaps,
    scores: Tensor,
    lengths: Tensor,
    k: int,
    predicted: Tensor,
    margins: Tensor,
    lists: ScoreLists,
    block_table: Tensor,
    step: Tensor,
    host_rows: Tensor,
    gpu_rows: Tensor,
    *,
    skip: int | None = None,
) -> Resolution:
    """`topk_lists.topk_lists`, then `cache_ops.resolve` of the slots that it selects.

    Rows that are not selected from the lists count as fallbacks.
    """
    slots, _ = topk_lists(
        scores,
        lengths,
        k,
        predicted,
        margins,
        lists,
        block_table=block_table,
        num_whole=maps.totals[0, FALLBACKS : FALLBACKS + 1],
    )
    return resolve(maps, slots, step, host_rows, gpu_rows, skip=skip)

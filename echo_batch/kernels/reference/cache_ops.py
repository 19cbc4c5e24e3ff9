"""Cache management on the maps of one GPU: which rows are resident, which are evicted, and the copies of their bytes.

Torch reference of the cache ops (design: cache manager; ECHO paper, allocate, free and recall). Rows are opaque bytes.
Slots and rows are int32, -1 means none; `step` is an int32 tensor [1], the number of the current decode step.
The fast versions (kernels/triton) may pick other rows, and evict in an order that is only close to LRU.
"""

import torch
from torch import Tensor

from echo_batch.kernels.cache_layout import (
    EVICTED,
    FAILED,
    FALLBACKS,
    FREE,
    MISSING,
    OFFLOADED,
    POISON_BYTE,
    RECALLED,
    SELECTED,
)
from echo_batch.kernels.contracts import GroupMaps, Resolution
from echo_batch.kernels.formats import BLOCK_SIZE, IndexFormat
from echo_batch.kernels.prefetch_state import PrefetchState
from echo_batch.kernels.reference.rows import write_index_keys
from echo_batch.kernels.reference.topk import topk_positions


def begin_step(maps: GroupMaps, step: Tensor, *, num_reserved: int = 0) -> None:
    """Advance `step` by one: rows used before may be evicted from now on.

    `num_reserved`: rows per group that will be set aside for prefetch; a hint for versions that look for rows here.
    """
    step += 1


def append(maps: GroupMaps, slots: Tensor, step: Tensor) -> Tensor:
    """Give the step's new tokens `slots` [B] a GPU row each in every group of `maps`; returns rows [G, B].

    The slots are distinct and not resident. Slot -1 gives row -1 and touches nothing. At most once per step and group.
    """
    rows = torch.full((maps.priority.shape[0], slots.shape[0]), -1, dtype=torch.int32, device=slots.device)
    valid = slots >= 0
    for g in range(maps.priority.shape[0]):
        one = maps.group(g)
        new = slots[valid]
        assert bool((one.host_to_gpu[0, new] == -1).all()), "an appended slot is already resident"
        rows[g, valid] = _allocate(one, new, int(step))
        one.totals[0, OFFLOADED] += new.numel()
    return rows


def mark_and_claim(maps: GroupMaps, selected: Tensor, step: int) -> Tensor:
    """Boundary A of resolve: protect every hit with priority = step and return the missing slots, once each."""
    chosen = selected[selected >= 0]
    rows = maps.host_to_gpu[0, chosen]
    maps.priority[0, rows[rows >= 0]] = step
    maps.totals[0, SELECTED] += chosen.numel()
    maps.totals[0, MISSING] += int((rows < 0).sum())
    return torch.unique(chosen[rows < 0])


def resolve(
    maps: GroupMaps, selected: Tensor, step: Tensor, host_rows: Tensor, gpu_rows: Tensor, *, skip: int | None = None
) -> Resolution:
    """Make every selected slot of one group resident and protect it from eviction in this step.

    selected [B, k] holds token slots, -1 padded; a slot may be in several rows. Missing slots get free rows first, then
    the least recently used ones (ties by row), and their bytes are copied from `host_rows` [N_H, row_bytes] to
    `gpu_rows` [N_G, row_bytes] (the pools of the group's first layer). At most once per step and group.
    Asserts that enough rows are evictable: admission guarantees the minimum pool. `skip`: rows that others have taken
    from the head of the step's list, where a version has such a list; default one per batch row (appended tokens).
    """
    missing = mark_and_claim(maps, selected, int(step))
    new_rows = _allocate(maps, missing, int(step))
    maps.totals[0, RECALLED] += missing.numel()
    copy_rows(host_rows, missing, gpu_rows, new_rows, None)
    rows = torch.where(selected >= 0, maps.host_to_gpu[0, selected.clamp(min=0)], -1)
    return Resolution(rows, missing, new_rows)


def resolve_topk(
    maps: GroupMaps,
    scores: Tensor,
    lengths: Tensor,
    k: int,
    predicted: Tensor,
    block_table: Tensor,
    step: Tensor,
    host_rows: Tensor,
    gpu_rows: Tensor,
    *,
    skip: int | None = None,
    late: PrefetchState | None = None,
) -> Resolution:
    """`resolve` of the slots that `topk.topk_positions` selects, for versions that do both at once.

    scores fp32 [B, S], lengths int32 [B], block_table int32 [B, max_blocks]; predicted fp32 [B] is updated in place.
    late: the state (of one group) of a prefetch for the same scores, which versions may continue until rows are looked
    up: with its late candidates, and with what scored below the prediction and is selected all the same.
    """
    fallbacks = maps.totals[0, FALLBACKS : FALLBACKS + 1]
    selected, _ = topk_positions(
        scores, lengths, k, predicted, update=True, block_table=block_table, fallback_count=fallbacks
    )
    return resolve(maps, selected, step, host_rows, gpu_rows, skip=skip)


def warm(maps: GroupMaps, slots: Tensor, step: Tensor) -> Tensor:
    """Put `slots` [n] of one group into free rows, as far as these go; never evicts. Returns rows [n].

    -1 where a slot got no new row: it is -1, a duplicate, already resident, or no row was free. Not inside a step.
    """
    rows = torch.full_like(slots, -1)
    wanted = (slots >= 0) & (maps.host_to_gpu[0, slots.clamp(min=0)] == -1)
    first_seen: dict[int, int] = {}
    for position, slot in enumerate(torch.where(wanted, slots, -1).tolist()):
        if slot >= 0:
            first_seen.setdefault(slot, position)
    num_free = int((maps.priority[0] == FREE).sum())
    taken = torch.tensor(list(first_seen.values())[:num_free], dtype=torch.int64, device=slots.device)
    rows[taken] = _allocate(maps, slots[taken], int(step))
    return rows


def release(maps: GroupMaps, blocks: Tensor) -> None:
    """Forget all slots of `blocks` [n] (int32 block numbers) in every group, so that the slots can be reused."""
    offsets = torch.arange(BLOCK_SIZE, dtype=torch.int32, device=blocks.device)
    slots = (blocks[:, None] * BLOCK_SIZE + offsets).flatten()
    for g in range(maps.priority.shape[0]):
        rows = maps.host_to_gpu[g, slots]
        rows = rows[rows >= 0]
        maps.priority[g, rows] = FREE
        maps.gpu_to_host[g, rows] = -1
        maps.host_to_gpu[g, slots] = -1


VIOLATIONS = (
    "GPU rows whose slot maps elsewhere",
    "token slots whose row maps elsewhere",
    "rows that are neither free nor in use (priority and map disagree, or priority beyond the step)",
    "claims that a resolve left behind, or rows that it did not find",
)
"""What the columns of `violations` count."""


def violations(maps: GroupMaps, step: Tensor) -> Tensor:
    """Count broken rules of the maps: int32 [G, 4], columns as VIOLATIONS; all zero between two ops."""
    num_groups, num_rows = maps.priority.shape
    num_slots = maps.host_to_gpu.shape[1]
    device = maps.priority.device
    rows = torch.arange(num_rows, dtype=torch.int32, device=device).expand(num_groups, -1)
    slots = torch.arange(num_slots, dtype=torch.int32, device=device).expand(num_groups, -1)
    linked = (maps.gpu_to_host >= 0) & (maps.gpu_to_host < num_slots)
    back = maps.host_to_gpu.gather(1, torch.where(linked, maps.gpu_to_host, 0).to(torch.int64))
    wrong_rows = (maps.gpu_to_host != -1) & ~(linked & (back == rows))
    resident = (maps.host_to_gpu >= 0) & (maps.host_to_gpu < num_rows)
    forth = maps.gpu_to_host.gather(1, torch.where(resident, maps.host_to_gpu, 0).to(torch.int64))
    wrong_slots = (maps.host_to_gpu >= 0) & ~(resident & (forth == slots))
    used = (maps.priority >= 0) & (maps.priority <= step)
    wrong_state = torch.where(maps.gpu_to_host == -1, maps.priority != FREE, ~used)
    left_behind = (maps.host_to_gpu < -1).sum(1) + maps.counts[:, FAILED]
    return torch.stack([wrong_rows.sum(1), wrong_slots.sum(1), wrong_state.sum(1), left_behind], 1).to(torch.int32)


def copy_rows(
    source: Tensor, source_index: Tensor | None, target: Tensor, target_index: Tensor | None, count: Tensor | None
) -> None:
    """target[target_index[i]] = source[source_index[i]] for i < count, as bytes: uint8 [N, row_bytes] on both sides.

    An index of None counts 0, 1, 2, ...; an entry of -1 on either side is skipped. `count` (int32 [1]) None: all.
    """
    index = source_index if source_index is not None else target_index
    n = min(source.shape[0], target.shape[0]) if index is None else index.shape[0]
    if count is not None:
        n = min(n, int(count))
    everything = torch.arange(n, dtype=torch.int32, device=target.device)
    from_rows = everything if source_index is None else source_index[:n]
    to_rows = everything if target_index is None else target_index[:n]
    valid = (from_rows >= 0) & (to_rows >= 0)
    target[to_rows[valid]] = source[from_rows[valid]]


def write_rows(kv_rows: Tensor, gpu_rows: Tensor, rows: Tensor, host_rows: Tensor, slots: Tensor) -> None:
    """Write new KV rows [B, row_bytes] to the GPU pool at `rows` [B] and to the host pool at `slots` [B]; -1 skips."""
    copy_rows(kv_rows, None, gpu_rows, rows, None)
    copy_rows(kv_rows, None, host_rows, slots, None)


def write_tokens(
    kv_rows: Tensor,
    gpu_rows: Tensor,
    rows: Tensor,
    host_rows: Tensor | None,
    slots: Tensor,
    keys: Tensor,
    pages: Tensor,
    fmt: IndexFormat,
) -> None:
    """`write_rows` (without a host pool if `host_rows` is None) and `rows.write_index_keys` of the same tokens at once.

    keys uint8 [B, index row bytes] go to `slots` of pages uint8 [N_H / BLOCK_SIZE, page_bytes].
    """
    copy_rows(kv_rows, None, gpu_rows, rows, None)
    if host_rows is not None:
        copy_rows(kv_rows, None, host_rows, slots, None)
    write_index_keys(pages, slots, keys, fmt)


def fill_rows(target: Tensor, index: Tensor) -> None:
    """Fill the rows `index` [n] of `target` [N, row_bytes] with poison (NaN bytes); -1 skips."""
    target[index[index >= 0]] = POISON_BYTE


def _allocate(maps: GroupMaps, slots: Tensor, step: int) -> Tensor:
    """Link distinct slots [n] of one group to free rows, then to the least recently used ones; returns rows [n].

    Unlinks whatever the rows held. Rows used in this step are never taken.
    """
    n = slots.numel()
    if n == 0:
        return slots.to(torch.int32)
    priority = maps.priority[0]
    # Free rows have the lowest priority, so one order covers both: (priority, row).
    order = torch.arange(priority.numel(), device=priority.device) + priority.to(torch.int64) * priority.numel()
    rows = torch.topk(order, min(n, priority.numel()), largest=False, sorted=True).indices.to(torch.int32)
    assert rows.numel() == n and bool((priority[rows] < step).all()), (
        "no evictable row: the batch exceeds the GPU pool's minimum"
    )
    old = maps.gpu_to_host[0, rows]
    maps.host_to_gpu[0, old[old >= 0]] = -1
    maps.totals[0, EVICTED] += int((old >= 0).sum())
    maps.gpu_to_host[0, rows] = slots
    maps.host_to_gpu[0, slots] = rows
    maps.priority[0, rows] = step
    return rows

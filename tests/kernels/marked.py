"""Selections over maps, with hits, misses, shared slots and blocks that are not there; what a look-up makes of them."""

from typing import NamedTuple

import torch
from torch import Tensor

from echo_batch.kernels.cache_layout import FALLBACKS, MISSING, NUM_TOTALS, SELECTED
from echo_batch.kernels.contracts import GroupMaps, Marked, make_maps
from echo_batch.kernels.formats import BLOCK_SIZE
from echo_batch.kernels.reference.topk import topk_positions
from tests.kernels.triton.test_topk import scores_of

STEP = 9


class Selection(NamedTuple):
    """What is selected from, on the CPU: scores fp32 [B, S], lengths int32 [B], predicted fp32 [B], block_table int32
    [B, blocks], and the maps of one group that it is looked up in."""

    scores: Tensor
    lengths: Tensor
    k: int
    predicted: Tensor
    block_table: Tensor
    maps: GroupMaps

    def to(self, device: torch.device) -> "Selection":
        """A copy there."""
        maps = GroupMaps(*(field.to(device, copy=True) for field in self.maps))
        tensors = (self.scores, self.lengths, self.predicted, self.block_table)
        scores, lengths, predicted, table = (tensor.to(device, copy=True) for tensor in tensors)
        return Selection(scores, lengths, self.k, predicted, table, maps)


def make_selection(lengths: list[int], *, width: int, k: int, hit_rate: float, seed: int) -> Selection:
    """Rows 0 and 1 share all blocks but the last, so that they miss the same slots; row 2, if any, lacks a block."""
    generator = torch.Generator().manual_seed(seed)
    num_rows, num_blocks = len(lengths), -(-width // BLOCK_SIZE)
    scores = scores_of("normal", num_rows, width, seed)
    table = torch.randperm(num_rows * num_blocks, generator=generator).to(torch.int32).view(num_rows, num_blocks)
    table[1, :-1] = table[0, :-1]
    scores[1] = scores[0]
    table[2:3, 0] = -1
    host_tokens = num_rows * num_blocks * BLOCK_SIZE
    resident = torch.randperm(host_tokens, generator=generator)[: int(hit_rate * host_tokens)].to(torch.int32)
    maps = make_maps(
        1, gpu_tokens=host_tokens, host_tokens=host_tokens, num_candidates=host_tokens, device=torch.device("cpu")
    )
    rows = torch.randperm(host_tokens, generator=generator)[: resident.numel()].to(torch.int32)
    maps.host_to_gpu[0, resident] = rows
    maps.gpu_to_host[0, rows] = resident
    maps.priority[0, rows] = torch.randint(1, STEP, rows.shape, dtype=torch.int32, generator=generator)
    # Exact, near, absurd and none.
    _, kth = topk_positions(scores, torch.tensor(lengths, dtype=torch.int32), k)
    wrong = torch.tensor([0.0, 0.01, 1e30, float("nan")]).repeat(num_rows)[:num_rows]
    return Selection(scores, torch.tensor(lengths, dtype=torch.int32), k, kth + wrong, table, maps)


def check_marked(before: Selection, after: Selection, marked: Marked) -> None:
    """Everything that boundary A of a resolve promises, for `after` = `before` once `marked` was made from it."""
    maps = GroupMaps(*(field.cpu() for field in after.maps))
    rows, miss_slots, miss_entries = (field.cpu().flatten() for field in marked[:3])
    predicted = before.predicted.clone()
    selected, _ = topk_positions(
        before.scores, before.lengths, before.k, predicted, update=True, block_table=before.block_table
    )
    assert torch.equal(after.predicted.cpu().nan_to_num(nan=-1e9), predicted.nan_to_num(nan=-1e9))
    slots = selected.flatten()
    found = torch.where(slots >= 0, before.maps.host_to_gpu[0, slots.clamp(min=0)], -1)
    is_hit, is_missing = found >= 0, (slots >= 0) & (found < 0)
    num_missing = int(is_missing.sum())
    assert int(maps.counts[0, SELECTED]) == int((slots >= 0).sum()) and int(maps.counts[0, MISSING]) == num_missing
    assert torch.equal(rows[is_hit], found[is_hit]) and bool((rows[slots < 0] == -1).all())
    priority = before.maps.priority.clone()
    priority[0, found[is_hit]] = STEP
    assert torch.equal(maps.priority, priority) and torch.equal(maps.gpu_to_host, before.maps.gpu_to_host)
    # Each missing entry is listed once, the first of each slot with the slot.
    listed, entries = miss_slots[:num_missing], miss_entries[:num_missing].long()
    assert torch.equal(entries.sort().values, is_missing.nonzero()[:, 0])
    assert bool(((listed == -1) | (listed == slots[entries])).all())
    distinct = slots[is_missing].unique()
    assert torch.equal(listed[listed >= 0].sort().values, distinct)
    host_to_gpu = before.maps.host_to_gpu.clone()
    for slot, owner in zip(listed.tolist(), entries.tolist(), strict=True):
        if slot < 0:
            continue
        # From the head, which is in the map, the chain leads through all entries of the slot to its owner.
        host_to_gpu[0, slot] = maps.host_to_gpu[0, slot]
        chain = [-2 - int(maps.host_to_gpu[0, slot])]
        while chain[-1] != owner:
            chain.append(-2 - int(rows[chain[-1]]))
        assert sorted(chain) == (slots == slot).nonzero()[:, 0].tolist()
    assert torch.equal(maps.host_to_gpu, host_to_gpu)


def fallbacks(selection: Selection) -> int:
    """How many the maps have counted."""
    return int((selection.maps.counts[:, :NUM_TOTALS] + selection.maps.totals)[0, FALLBACKS])

"""Scores with lists of the likely ones, for the tests of all versions of the top-k over lists."""

import math

import torch
from torch import Tensor

from echo_batch.kernels.reference.topk import topk_positions
from echo_batch.kernels.reference.topk_lists import fill_lists
from echo_batch.kernels.score_lists import COUNT, FIRST_ROW, LAST_ROW, MAX_ENTRIES, POSITION_BITS, ScoreLists


def bounds(scores: Tensor, lengths: Tensor, k: int) -> dict[str, tuple[Tensor, Tensor]]:
    """Predictions and margins of all sorts, by what the lists then hold."""
    _, kth = topk_positions(scores, lengths, k)
    usable = torch.where(kth.isfinite(), kth, 1.0)
    near = (usable.abs() * 0.1).clamp(min=1e-3)
    rows = scores.shape[0]
    spread = torch.tensor([0.3, -0.2, 3.0, 0.0]).repeat(rows // 4 + 1)[:rows]
    unknown = torch.full((rows,), math.nan)
    mixed = torch.tensor([math.nan, 1e30, -1e30, 0.0]).repeat(rows // 4 + 1)[:rows]
    infinite = torch.tensor([math.inf, -math.inf, 1e-42, -0.0]).repeat(rows // 4 + 1)[:rows]
    return {
        "some more than k": (usable + 0.2 * near, near),
        "exactly k, or ties": (usable.clone(), torch.zeros(rows)),
        "too few": (usable + 2 * near, near),
        "no prediction": (unknown, near),
        "no margin": (usable.clone(), unknown),
        "uneven": (usable + spread * near, near),
        "all": (usable.clone(), torch.full((rows,), 1e30)),
        "mixed": (mixed, torch.full((rows,), 0.1)),
        "infinite": (infinite, torch.tensor([1.0, 0.5, math.inf, 0.0]).repeat(rows // 4 + 1)[:rows]),
    }


def shuffled(lists: ScoreLists, seed: int) -> ScoreLists:
    """The same lists, each in another order; what no entry was written to is filled with garbage."""
    entries, headers = lists.entries.clone(), lists.headers.clone()
    generator = torch.Generator().manual_seed(seed)
    for i, count in enumerate(headers[:, COUNT].clamp(max=entries.shape[1]).tolist()):
        entries[i, :count] = entries[i, torch.randperm(count, generator=generator)]
        entries[i, count:] = 0x7F000000
    order = torch.randperm(headers.shape[0], generator=generator)
    return ScoreLists(entries[order], headers[order])


def split_lists(
    scores: Tensor, lengths: Tensor, predicted: Tensor, margins: Tensor, *, num_lists: int, capacity: int, seed: int
) -> ScoreLists:
    """Lists as of a kernel that gives each of its blocks an equal share of all positions: they hold parts of rows."""
    rows, width = scores.shape
    whole = ScoreLists(torch.zeros(1, rows * width, 2, dtype=torch.int32), torch.zeros(1, 4, dtype=torch.int32))
    fill_lists(scores, lengths, predicted, margins, whole)
    entries = whole.entries[0, : int(whole.headers[0, COUNT])]
    place = (entries[:, 1] >> POSITION_BITS) * width + (entries[:, 1] & ((1 << POSITION_BITS) - 1))
    owner = place.to(torch.int64) * num_lists // (rows * width)
    lists = ScoreLists(
        torch.zeros(num_lists, capacity, 2, dtype=torch.int32), torch.zeros(num_lists, 4, dtype=torch.int32)
    )
    for i in range(num_lists):
        mine = entries[owner == i]
        lists.headers[i, COUNT] = mine.shape[0]
        lists.headers[i, FIRST_ROW] = i * rows * width // num_lists // width
        lists.headers[i, LAST_ROW] = min(rows - 1, (i + 1) * rows * width // num_lists // width)
        mine = mine[:capacity]
        lists.entries[i, : mine.shape[0]] = mine
    assert capacity <= MAX_ENTRIES
    return shuffled(lists, seed)

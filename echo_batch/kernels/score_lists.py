"""Lists of likely scores: what the scoring kernel leaves for the top-k, so that it need not read whole rows.

Shared by the torch reference and the fast versions (contracts: reference/prefetch.py, reference/topk_lists.py).
"""

from typing import NamedTuple

import torch
from torch import Tensor

COUNT, FIRST_ROW, LAST_ROW = range(3)
"""Columns of `ScoreLists.headers`."""

POSITION_BITS = 20
MAX_ROWS = 1 << (31 - POSITION_BITS)
"""Rows of a batch that an entry can name."""

MAX_ENTRIES = 8192
"""Entries that the lists of a row may hold together for the top-k to use them."""

MAX_TOPK = MAX_ENTRIES // 4
"""The largest k that lists are made for: the margin aims at 2 k entries, so that k to 4 k are served."""

CAPACITY = 4096
"""Entries of a list, by default. A kernel has one for each of its blocks, which score an equal share of the batch."""


class ScoreLists(NamedTuple):
    """N lists of (score, row, position). Allocated by whoever scores, written anew by each scoring.

    Every position below its row's length that scores at least the row's bound is in exactly one list, in any order and
    any list whose header names the row. A list that would have needed more entries than it has room for is incomplete.
    """

    entries: Tensor
    """int32 [N, C, 2]: the score's bits, row << POSITION_BITS | position."""
    headers: Tensor
    """int32 [N, 4]: entries that the list was to get (more than C: incomplete), the first and the last row that it may
    hold scores of, unused."""


def make_score_lists(num_lists: int, device: torch.device, capacity: int = CAPACITY) -> ScoreLists:
    """Lists with nothing written to them, not even their headers."""
    return ScoreLists(
        torch.empty((num_lists, capacity, 2), dtype=torch.int32, device=device),
        torch.empty((num_lists, 4), dtype=torch.int32, device=device),
    )


def make_margins(num_groups: int, num_rows: int, device: torch.device) -> Tensor:
    """Margins fp32 [G, B] of selection groups and batch rows, all unknown (NaN). A row's bound is predicted - margin.

    They change no result, so a row may inherit the margin of another request; `topk_lists` keeps them.
    """
    return torch.full((num_groups, num_rows), float("nan"), device=device)

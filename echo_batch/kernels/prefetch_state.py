"""State of lossless prefetch, shared by its torch reference and its fast versions (contract: reference/prefetch.py)."""

from typing import NamedTuple

import torch
from torch import Tensor

CANDIDATES, PREFETCHED, DROPPED, LATE = range(4)
"""Columns of `PrefetchState.totals`: positions that scored above the prediction (the newest token's not among them),
rows copied, missing slots for which no row was left or that did not fit a queue, candidates not looked at in time.
The rest of the candidates were resident, or another batch row had the same slot."""

NUM_TOTALS = 4
MAX_PARTS = 8
"""Ranges of the context that a step may be cut into (`PrefetchState.part`)."""


class PrefetchState(NamedTuple):
    """Rows of G selection groups that are set aside for prefetch, stacked. Allocated once, changed in place."""

    rows: Tensor
    """int32 [G, R]: free GPU rows that prefetch may take, in this order; -1: none."""
    taken: Tensor
    """int32 [G, MAX_PARTS]: how many entries of `rows` have been taken in this step, by part (versions that deal
    some of them out in advance count the others)."""
    slots: Tensor
    """int32 [G, R]: workspace, the slot for which an entry of `rows` has been taken (-1: nothing is to be copied)."""
    totals: Tensor
    """int64 [G, NUM_TOTALS]: counts since `reset`."""

    def group(self, group: int) -> "PrefetchState":
        """A view of one group, as a stack of one."""
        return PrefetchState(*(field[group : group + 1] for field in self))

    def part(self, part: int, num_parts: int) -> "PrefetchState":
        """The share of range `part` of `num_parts` ranges of the context in the rows: an equal one, with its own count.

        For versions that prefetch range by range beside the scoring of the next.
        """
        assert 0 <= part < num_parts <= MAX_PARTS, (part, num_parts)
        num_rows = self.rows.shape[1]
        own = slice(num_rows * part // num_parts, num_rows * (part + 1) // num_parts)
        return PrefetchState(self.rows[:, own], self.taken[:, part : part + 1], self.slots[:, own], self.totals)

    def reset(self) -> None:
        """No row set aside, all counts zero."""
        self.rows.fill_(-1)
        self.slots.fill_(-1)
        self.taken.zero_()
        self.totals.zero_()


def make_prefetch_state(num_groups: int, num_rows: int, device: torch.device) -> PrefetchState:
    """State for at most `num_rows` prefetched rows (R) a step and group: the cap, in proportion to the time that the
    indexer gives the link."""
    state = PrefetchState(
        rows=torch.empty((num_groups, num_rows), dtype=torch.int32, device=device),
        taken=torch.empty((num_groups, MAX_PARTS), dtype=torch.int32, device=device),
        slots=torch.empty((num_groups, num_rows), dtype=torch.int32, device=device),
        totals=torch.empty((num_groups, NUM_TOTALS), dtype=torch.int64, device=device),
    )
    state.reset()
    return state

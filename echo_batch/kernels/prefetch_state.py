"""State of lossless prefetch, shared by its torch reference and its fast versions (contract: reference/prefetch.py)."""

from typing import NamedTuple

import torch
from torch import Tensor

from echo_batch.kernels.cache_layout import CERTAIN_ENTRIES, LATE_ENTRIES, LATE_LISTS

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
    late: Tensor
    """int32 [G, lists, LATE_ENTRIES]: slots of candidates that were not looked at while the step's scoring went on (of
    versions that leave some), for `resolve_topk`; -1: none."""
    certain: Tensor
    """int32 [G, CERTAIN_ENTRIES], the same memory for all groups: workspace of a `resolve_topk` that goes on with the
    prefetch, zero between two of them; empty if `late` is."""

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
        return self._replace(rows=self.rows[:, own], taken=self.taken[:, part : part + 1], slots=self.slots[:, own])

    def reset(self) -> None:
        """No row set aside, all counts zero."""
        self.rows.fill_(-1)
        self.slots.fill_(-1)
        self.late.fill_(-1)
        self.certain[:1].zero_()
        self.taken.zero_()
        self.totals.zero_()


def make_prefetch_state(
    num_groups: int, num_rows: int, device: torch.device, *, num_late_lists: int = 0
) -> PrefetchState:
    """State for at most `num_rows` prefetched rows (R) a step and group: the cap, in proportion to the time that the
    indexer gives the link. `num_late_lists`: at most LATE_LISTS; 0 where nothing is left late."""
    assert num_late_lists <= LATE_LISTS, num_late_lists
    certain = torch.empty((1, CERTAIN_ENTRIES if num_late_lists > 0 else 0), dtype=torch.int32, device=device)
    state = PrefetchState(
        rows=torch.empty((num_groups, num_rows), dtype=torch.int32, device=device),
        taken=torch.empty((num_groups, MAX_PARTS), dtype=torch.int32, device=device),
        slots=torch.empty((num_groups, num_rows), dtype=torch.int32, device=device),
        totals=torch.empty((num_groups, NUM_TOTALS), dtype=torch.int64, device=device),
        late=torch.empty((num_groups, num_late_lists, LATE_ENTRIES), dtype=torch.int32, device=device),
        certain=certain.expand(num_groups, -1),
    )
    state.reset()
    return state

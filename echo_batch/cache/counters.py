"""What a cache counts: plain numbers, for the report."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class CacheCounters:
    """Rows per selection group since the last reset (a row of a group stands for one row in each of its layers)."""

    selected_rows: tuple[int, ...]
    hit_rows: tuple[int, ...]
    """Selected and resident already; two batch rows that select one slot count twice."""
    recalled_rows: tuple[int, ...]
    """Copied from the host; once each, even if several batch rows selected it."""
    evicted_rows: tuple[int, ...]
    offloaded_rows: tuple[int, ...]
    """New rows of decoded tokens, written to both pools."""
    fallback_rows: tuple[int, ...]
    """Of a batch: rows longer than k whose selection had to be searched for anew, because no k-th score was predicted
    (the step before and the prompt's end had at most k tokens) or one that was too far off."""

"""Numbers that the cache's metadata tensors are made of. No torch, so that the plan can count their bytes."""

FREE = -1
"""Priority of a free GPU row; in both maps: no partner."""

POISON_BYTE = 0xFF
"""Fills freed rows in debug runs: NaN in e4m3, bf16 and fp32."""

SELECTED, MISSING, RECALLED, EVICTED, OFFLOADED, FALLBACKS = range(6)
"""Columns of `GroupMaps.totals`, in rows: entries of all selections, those not resident, rows copied from the host
(a row that several entries miss once), resident rows given up, new rows that got a GPU row and went to the host; in
batch rows: selections that the predicted k-th score did not serve (`topk_positions`)."""

NUM_TOTALS = 6
NUM_LISTED, NUM_RETRIED, NUM_WARMED, HAND, FAILED, FIRST_BIN, LAST_BIN = range(6, 13)
"""Further columns of `GroupMaps.counts` (after the six above): length of the candidate list, candidates taken in place
of others that were in use, entries of a warm start, the clock hand, rows that could not be placed, the youngest and
the oldest bin of used rows that are listed."""

NUM_MARKED = 32
"""And one 128 bytes further, in a line of its own, which hundreds of programs ask again and again: blocks of a top-k
that have marked their selection."""

NUM_COUNTS = 64
AGE_BINS = 64
"""Bins of rows by age, four an octave; the last one holds free rows."""

LATE_LISTS, LATE_ENTRIES = 1152, 32
"""Lists of prefetch candidates that come too late, one a warp (eight on each of 144 multiprocessors); slots of one."""

CERTAIN_ROWS = 32
CERTAIN_ENTRIES = CERTAIN_ROWS * 8 * 1024
"""Batch rows that are selected from beside others who bring rows, at most, and threads that do so (cuda/topk.py)."""

"""How far a long pass over the input is. Passes are generators that yield these."""

from typing import NamedTuple


class ScanProgress(NamedTuple):
    """Rows and stored bytes that have been read."""

    num_rows: int
    bytes_done: int
    bytes_total: int

"""How many rows the references handle at once."""

from collections.abc import Iterator

import torch

_CPU_ELEMENTS = 1 << 20
"""4 MiB of fp32: temporaries stay in cache, and below the size from which malloc maps fresh pages each time."""
_CUDA_ELEMENTS = 1 << 26
"""256 MiB of fp32: few, large launches."""


def row_slices(num_rows: int, elements_per_row: int, device: torch.device) -> Iterator[slice]:
    """Consecutive slices that cover num_rows, each of a bounded number of temporary elements (at least one row)."""
    elements = _CPU_ELEMENTS if device.type == "cpu" else _CUDA_ELEMENTS
    step = max(1, elements // max(1, elements_per_row))
    for start in range(0, num_rows, step):
        yield slice(start, min(start + step, num_rows))

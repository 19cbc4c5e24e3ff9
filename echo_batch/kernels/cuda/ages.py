"""Which rows a decode step may take: how many there are of each age, and the oldest ones (kernels and method: ages.cu).

`prepare` of kernels/triton/cache_ops.py comes between the two; kernels/gpu_cache.py calls all three.
"""

import torch
from torch import Tensor

from echo_batch.kernels import cache_layout as layout
from echo_batch.kernels.contracts import GroupMaps
from echo_batch.kernels.cuda.runtime import INT32, POINTER, UINT32, Argument, launch, load_kernel

_THREADS = 256
_ROWS = 4096
"""Of a block."""
DEFINES = (
    ("THREADS", _THREADS),
    ("ROWS", _ROWS),
    ("AGE_BINS", layout.AGE_BINS),
    ("NUM_COUNTS", layout.NUM_COUNTS),
    ("FIRST_BIN", layout.FIRST_BIN),
    ("LAST_BIN", layout.LAST_BIN),
)
SHARED_BYTES = 48 << 10
"""Of a block: a counter for each bin and one for what is in none. The rest keeps a multiprocessor to four blocks, so
that the step's first kernels, which run beside these, find room at once."""


def count_ages(maps: GroupMaps, step: Tensor) -> None:
    """Add to `maps.age_bins[:, 0]` how many rows of every group have which age in the step after `step` (int32 [1])."""
    _launch("count_ages", maps, step, ((maps.age_bins, POINTER), (step, POINTER), (maps.priority.shape[1], UINT32)))


def list_candidates(maps: GroupMaps, step: Tensor, *, only_free: bool = False) -> None:
    """Write the rows of the listed bins (or the free ones alone) of every group to `maps.candidates`.

    The bins stand in FIRST_BIN and LAST_BIN of `maps.counts`, where their rows begin in `maps.age_bins[:, 1]`, which is
    where they end afterwards. `step` (int32 [1]) is the current one. Any order within a bin; rows beyond the end of
    `maps.candidates` are left out.
    """
    arguments = (
        (maps.candidates, POINTER),
        (maps.counts, POINTER),
        (maps.age_bins, POINTER),
        (step, POINTER),
        (maps.priority.shape[1], UINT32),
        (maps.candidates.shape[1], UINT32),
        (int(only_free), INT32),
    )
    _launch("list_candidates", maps, step, arguments)


def _launch(name: str, maps: GroupMaps, step: Tensor, arguments: tuple[tuple[Argument, type], ...]) -> None:
    num_groups, num_rows = maps.priority.shape
    for field in (maps.priority, maps.candidates, maps.age_bins, maps.counts, step):
        assert field.dtype == torch.int32 and field.is_contiguous(), (field.dtype, field.stride())
    assert maps.age_bins.shape == (num_groups, 2, layout.AGE_BINS), maps.age_bins.shape
    assert maps.counts.shape == (num_groups, layout.NUM_COUNTS), maps.counts.shape
    assert maps.candidates.shape[0] == num_groups < 1 << 16, (maps.candidates.shape, num_groups)
    kernel = load_kernel("ages.cu", name, DEFINES, SHARED_BYTES, maps.priority.device.index)
    launch(kernel, (-(-num_rows // _ROWS), num_groups, 1), _THREADS, ((maps.priority, POINTER), *arguments))

"""What of a loop may be under way at once: as much as a kernel is fastest with, if that fits shared memory."""

from functools import cache

import torch
import triton


def stages_that_fit(wanted: int, bytes_of_one: int, device: torch.device) -> int:
    """At most `wanted` stages of `bytes_of_one` bytes of shared memory each; at least two. (227 KB a block on Hopper,
    163 on an A100, 99 on GPUs made for workstations.)"""
    return max(2, min(wanted, _shared_bytes(device) // bytes_of_one))


def fits(num_bytes: int, device: torch.device) -> bool:
    """Whether a block may have so much shared memory."""
    return num_bytes <= _shared_bytes(device)


@cache
def _shared_bytes(device: torch.device) -> int:
    if device.type != "cuda":
        return 1 << 30
    index = torch.cuda.current_device() if device.index is None else device.index
    properties = triton.runtime.driver.active.utils.get_device_properties(index)
    # Some of it is for what a reduction or the epilogue exchanges.
    return int(properties["max_shared_mem"]) - 2048

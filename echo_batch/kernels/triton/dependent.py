# mypy: allow-untyped-defs, allow-incomplete-defs
"""Programmatic dependent launches (Hopper and later): a kernel's blocks come onto the multiprocessors while the kernel
before still runs and wait there for its end, instead of being launched after it. In a graph it saves about 0.5 us each.

A kernel that takes part has a parameter `DEPENDENT: tl.constexpr`, begins with `if DEPENDENT: wait_for_inputs()`, and
is launched with `**dependent(device)`. After the wait come all reads of what other kernels wrote, and all writes.
"""

from functools import cache

import torch
import triton
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait


@triton.jit
def wait_for_inputs():
    """The next kernel's blocks may come now; whatever was launched before this kernel has ended."""
    gdc_launch_dependents()
    gdc_wait()


@cache
def supported(device: torch.device) -> bool:
    """Whether kernels on this device are launched so."""
    return device.type == "cuda" and torch.version.hip is None and torch.cuda.get_device_capability(device) >= (9, 0)


def dependent(device: torch.device) -> dict[str, bool]:
    """Keywords of a launch on this device."""
    return {"DEPENDENT": True, "launch_pdl": True} if supported(device) else {"DEPENDENT": False}

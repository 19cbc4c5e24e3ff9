"""Which errors mean that the device, or its memory, failed under the engine: the job can be resumed, it has no bug."""

import torch

_SIGNS = (
    "CUDA error",
    "CUDA driver error",
    "CUDA out of memory",
    "CUBLAS_STATUS_",
    "CUDNN_STATUS_",
    "NCCL error",
    "Triton Error [CUDA]",
    "cudaError",
    "CUDA_ERROR_",
    "DefaultCPUAllocator",
)
"""Libraries below torch, and torch's CPU allocator, raise plain RuntimeErrors with these words."""


def device_loss(error: Exception) -> str | None:
    """One line on how the device failed, or None when `error` is something else."""
    text = next(iter(str(error).splitlines()), "") or type(error).__name__
    if isinstance(error, torch.OutOfMemoryError | torch.AcceleratorError | MemoryError):
        return text
    if isinstance(error, RuntimeError) and any(sign in str(error) for sign in _SIGNS):
        return text
    return None

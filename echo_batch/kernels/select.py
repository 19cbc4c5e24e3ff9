"""Which ops run on a device: references on the CPU, on an NVIDIA GPU the fastest that is there."""

import torch

from echo_batch.kernels.ops import Ops, reference_ops


def select_ops(device: torch.device) -> Ops:
    """The ops for `device`, chosen once; depends only on the device and on what is installed."""
    if device.type == "cpu":
        return reference_ops()
    # Triton and the libraries are only there, and only needed, on machines with a GPU.
    from echo_batch.kernels.gpu_ops import cuda_ops, find_libraries

    return cuda_ops(reference_ops(), find_libraries(device))

"""Compile the .cu files of this folder at run time (NVRTC, no nvcc or host compiler needed) and launch their kernels.

`cuda.bindings` and NVRTC come with torch's CUDA builds. Nothing here is imported on a machine without CUDA.
"""

import ctypes
import functools
import importlib.resources
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

Argument = Tensor | int | float | None

_SHARED_BYTES_BY_DEFAULT = 48 << 10
"""Dynamic shared memory that a kernel may have without asking for it."""
_SHARED_BYTES = 227 << 10
"""Of a block, at most, on Hopper and on Blackwell for servers: long rows and large vocabularies take it. GPUs for
workstations have 99 KB."""


class Kernel(NamedTuple):
    """A kernel loaded on one device."""

    function: Any
    shared_bytes: int
    """what `launch` gives each block; may be replaced by less than it was loaded for"""


def available(device: torch.device) -> bool:
    """Whether this folder's kernels run on `device`: block clusters (capability 9.0 or later), as much shared memory as
    Hopper's, and NVRTC at hand."""
    if device.type != "cuda" or torch.cuda.get_device_capability(device) < (9, 0):
        return False
    # Not every torch tells it.
    properties = torch.cuda.get_device_properties(device)
    if getattr(properties, "shared_memory_per_multiprocessor", _SHARED_BYTES) < _SHARED_BYTES:
        return False
    try:
        from cuda.bindings import nvrtc  # type: ignore[import-not-found]

        return _check(nvrtc.nvrtcVersion()) is not None
    except (ImportError, RuntimeError, OSError):
        return False


@functools.cache
def load_kernel(
    file_name: str, kernel_name: str, defines: tuple[tuple[str, int], ...], shared_bytes: int, device_index: int
) -> Kernel:
    """Compile `file_name` of this folder with -DNAME=VALUE and load one kernel; cached for the life of the process.

    Call it (or the op that uses it) once before a graph capture: loading a module is not capturable. RuntimeError with
    the compiler's log if it fails.
    """
    from cuda.bindings import driver, nvrtc

    folder = importlib.resources.files(__package__)
    headers = [file for file in folder.iterdir() if file.name.endswith(".cuh")]
    major, minor = torch.cuda.get_device_capability(device_index)
    options = [f"--gpu-architecture=sm_{major}{minor}a", "--std=c++17"]
    options += [f"-D{name}={value}" for name, value in defines]
    program = _check(
        nvrtc.nvrtcCreateProgram(
            folder.joinpath(file_name).read_bytes(),
            file_name.encode(),
            len(headers),
            [file.read_bytes() for file in headers],
            [file.name.encode() for file in headers],
        )
    )
    encoded = [option.encode() for option in options]
    (status,) = nvrtc.nvrtcCompileProgram(program, len(encoded), encoded)
    if status != nvrtc.nvrtcResult.NVRTC_SUCCESS:
        log = b" " * _check(nvrtc.nvrtcGetProgramLogSize(program))
        _check(nvrtc.nvrtcGetProgramLog(program, log))
        raise RuntimeError(f"{file_name}: {log.decode()}")
    binary = b" " * _check(nvrtc.nvrtcGetCUBINSize(program))
    _check(nvrtc.nvrtcGetCUBIN(program, binary))
    with torch.cuda.device(device_index):
        torch.cuda.current_stream().synchronize()  # makes torch's context current in this thread
        module = _check(driver.cuModuleLoadData(binary))
        function = _check(driver.cuModuleGetFunction(module, kernel_name.encode()))
        if shared_bytes > _SHARED_BYTES_BY_DEFAULT:
            attribute = driver.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
            _check(driver.cuFuncSetAttribute(function, attribute, shared_bytes))
    return Kernel(function, shared_bytes)


def launch(
    kernel: Kernel,
    grid: tuple[int, int, int],
    num_threads: int,
    arguments: Sequence[tuple[Argument, Any]],
    *,
    overlap: bool = False,
) -> None:
    """Launch on the current stream. `arguments`: (tensor, number or None for a null pointer; its ctypes type).

    With `overlap` its blocks may start as soon as all blocks of the kernel launched before allow it; then it must wait
    for that kernel (`wait_for_previous` of hopper.cuh) before it reads what that one writes, or writes what that one or
    those before it touch, but by atomics.
    """
    from cuda.bindings import driver

    values = tuple(value.data_ptr() if isinstance(value, Tensor) else value or 0 for value, _ in arguments)
    types = tuple(kind for _, kind in arguments)
    stream = torch.cuda.current_stream().cuda_stream
    if overlap:
        attribute, config = driver.CUlaunchAttribute(), driver.CUlaunchConfig()
        attribute.id = driver.CUlaunchAttributeID.CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION
        attribute.value.programmaticStreamSerializationAllowed = 1
        config.gridDimX, config.gridDimY, config.gridDimZ = grid
        config.blockDimX, config.blockDimY, config.blockDimZ = num_threads, 1, 1
        config.sharedMemBytes, config.hStream = kernel.shared_bytes, driver.CUstream(stream)
        config.attrs, config.numAttrs = [attribute], 1
        _check(driver.cuLaunchKernelEx(config, kernel.function, (values, types), 0))
        return
    _check(
        driver.cuLaunchKernel(
            kernel.function, *grid, num_threads, 1, 1, kernel.shared_bytes, stream, (values, types), 0
        )
    )


def max_clusters(kernel: Kernel, num_threads: int, cluster: int) -> int:
    """How many clusters of `cluster` blocks run at once on an idle device. Less than its multiprocessors could hold:
    those of a cluster are neighbours, and not every group of neighbours is complete."""
    from cuda.bindings import driver

    attribute, config = driver.CUlaunchAttribute(), driver.CUlaunchConfig()
    attribute.id = driver.CUlaunchAttributeID.CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION
    size = attribute.value.clusterDim
    size.x, size.y, size.z = cluster, 1, 1
    config.gridDimX, config.gridDimY, config.gridDimZ = cluster, 1, 1
    config.blockDimX, config.blockDimY, config.blockDimZ = num_threads, 1, 1
    config.sharedMemBytes = kernel.shared_bytes
    config.attrs, config.numAttrs = [attribute], 1
    return int(_check(driver.cuOccupancyMaxActiveClusters(kernel.function, config)))


POINTER = ctypes.c_void_p
INT32 = ctypes.c_int32
UINT32 = ctypes.c_uint32
INT64 = ctypes.c_int64


def _check(result: tuple[Any, ...]) -> Any:
    """The value of a cuda.bindings call, or RuntimeError."""
    status, *values = result
    if int(status) != 0:
        raise RuntimeError(f"CUDA: {status!r}")
    return values[0] if values else None

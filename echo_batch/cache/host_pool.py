"""The full copy of every active token's KV rows in host memory: pinned for CUDA, a plain tensor on the CPU."""

import contextlib
import ctypes
import mmap
import os
import weakref
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch
from torch import Tensor

from echo_batch.cache.host_limits import check_host_pool, drop_memlock_if_ignored, read_host_limits
from echo_batch.cache.spec import CacheSpec
from echo_batch.errors import ConfigError
from echo_batch.kernels.cache_layout import POISON_BYTE

TOUCH_BYTES = 256 << 20
"""What one thread touches at a time."""

TOUCH_THREADS = 16

SYS_MBIND_X86 = 237
MPOL_PREFERRED = 1


class HostPool:
    """uint8 `rows` [layers, N_H, row_bytes] in host memory; `close` gives the memory back (also done at exit)."""

    def __init__(self, spec: CacheSpec, device: torch.device, *, poison: bool = False) -> None:
        """Take the memory, or raise ConfigError before taking any of it if it would not fit."""
        shape = (spec.num_layers, spec.host_tokens, spec.row_format.row_bytes)
        limits = read_host_limits()
        if device.type == "cuda":
            limits = drop_memlock_if_ignored(spec.host_pool_bytes, limits, _can_pin)
        check_host_pool(
            spec.host_pool_bytes,
            limits,
            token_bytes=spec.num_layers * spec.row_format.row_bytes,
            pinned=device.type == "cuda",
        )
        self._unpin: weakref.finalize[[int, mmap.mmap], HostPool] | None = None
        if device.type == "cuda":
            byte = POISON_BYTE if poison else 0
            memory, flat = pinned_memory(spec.host_pool_bytes, numa_node_of(device), byte)
            # The finalizer keeps the mapping alive until the driver has let go of it, and runs at exit too.
            self._unpin = weakref.finalize(self, _unpin, flat.data_ptr(), memory)
            self.rows = flat.view(shape)
        else:
            self.rows = (
                torch.full(shape, POISON_BYTE, dtype=torch.uint8) if poison else torch.zeros(shape, dtype=torch.uint8)
            )

    def close(self) -> None:
        """Wait for the device, unpin and drop the memory; the pool cannot be used afterwards."""
        self.rows = torch.empty((0, 0, 0), dtype=torch.uint8)
        if self._unpin is not None:
            self._unpin()


def pinned_memory(num_bytes: int, numa_node: int | None, byte: int = 0) -> tuple[mmap.mmap, Tensor]:
    """Memory as the pool's, filled with `byte` and registered; uint8 [num_bytes]. ConfigError if it cannot be."""
    memory, flat = _mapped_memory(num_bytes, numa_node)
    _touch(flat, byte)
    _pin(flat)
    return memory, flat


def _mapped_memory(num_bytes: int, numa_node: int | None) -> tuple[mmap.mmap, Tensor]:
    """Anonymous memory in huge pages, on `numa_node` if given, that neither a fork nor a core dump copies."""
    memory = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    for advice in ("MADV_HUGEPAGE", "MADV_DONTFORK", "MADV_DONTDUMP"):
        if hasattr(mmap, advice):
            try:
                memory.madvise(getattr(mmap, advice))
            except OSError:  # a kernel without huge pages: slower, not wrong
                continue
    flat = torch.frombuffer(memory, dtype=torch.uint8)
    if numa_node is not None and os.uname().machine == "x86_64":
        # Preferred, not bound: a pool larger than the node must still fit.
        mask = ctypes.c_ulong(1 << numa_node)
        ctypes.CDLL(None, use_errno=True).syscall(
            SYS_MBIND_X86,
            ctypes.c_void_p(flat.data_ptr()),
            ctypes.c_ulong(num_bytes),
            ctypes.c_int(MPOL_PREFERRED),
            ctypes.byref(mask),
            ctypes.c_ulong(64),
            ctypes.c_uint(0),
        )
    return memory, flat


def _touch(flat: Tensor, byte: int) -> None:
    """Fill `flat` by several threads: the kernel hands out (and clears) pages to all of them at once."""
    start, end = flat.data_ptr(), flat.data_ptr() + flat.numel()

    def fill(address: int) -> None:
        ctypes.memset(address, byte, min(TOUCH_BYTES, end - address))

    with ThreadPoolExecutor(min(TOUCH_THREADS, os.cpu_count() or 1)) as threads:
        list(threads.map(fill, range(start, end, TOUCH_BYTES)))


def _pin(flat: Tensor) -> None:
    result = torch.cuda.cudart().cudaHostRegister(flat.data_ptr(), flat.numel(), 0)
    if int(result) != 0:
        raise ConfigError(
            f"pinning the host pool ({flat.numel() / 2**30:.1f} GiB) failed with CUDA error {int(result)}: "
            "use a smaller --host-pool, or raise the locked-memory limit (`ulimit -l unlimited`)"
        )


def _can_pin(num_bytes: int) -> bool:
    """Try to pin that much memory, and let go of it."""
    memory, flat = _mapped_memory(num_bytes, None)
    if int(torch.cuda.cudart().cudaHostRegister(flat.data_ptr(), num_bytes, 0)) != 0:
        return False
    address = flat.data_ptr()
    del flat
    _unpin(address, memory)
    return True


def _unpin(address: int, memory: mmap.mmap) -> None:
    with contextlib.suppress(RuntimeError):  # a broken device must not hide what broke it
        torch.cuda.synchronize()
    torch.cuda.cudart().cudaHostUnregister(address)
    try:
        memory.close()
    except BufferError:  # a view of the rows is still held somewhere; the memory goes with it
        return


def numa_node_of(device: torch.device) -> int | None:
    """NUMA node that the GPU hangs on; None if unknown or if there is only one."""
    properties = torch.cuda.get_device_properties(device)
    # Untyped in some torch versions.
    domain, bus, slot = (int(getattr(properties, f"pci_{part}_id")) for part in ("domain", "bus", "device"))
    name = f"{domain:04x}:{bus:02x}:{slot:02x}.0"
    path = Path("/sys/bus/pci/devices") / name / "numa_node"
    nodes = list(Path("/sys/devices/system/node").glob("node[0-9]*"))
    if len(nodes) < 2 or not path.exists():
        return None
    node = int(path.read_text())
    return node if node >= 0 else None

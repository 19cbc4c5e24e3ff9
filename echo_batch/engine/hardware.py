"""What a node has: GPUs and memory. From this machine (cgroup limits respected) or from a name such as "8xh200".

Imports torch only inside the CUDA detection.
"""

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import psutil

from echo_batch.errors import ConfigError

GB = 10**9


@dataclass(frozen=True, slots=True, kw_only=True)
class Hardware:
    """One node. `hbm_bytes` is the memory of each GPU, `hbm_free_bytes` what others leave of it (0 on CPU).

    `host_bytes` is the node's free host memory under its cgroup limit. `compute_capability` is (0, 0) on CPU.
    """

    kind: Literal["cpu", "cuda"]
    name: str
    num_devices: int
    host_bytes: int
    hbm_bytes: int = 0
    hbm_free_bytes: int = 0
    compute_capability: tuple[int, int] = (0, 0)

    @property
    def has_fp8(self) -> bool:
        """Hopper and newer: the fp8 KV cache kernels run."""
        return self.kind == "cuda" and self.compute_capability >= (9, 0)


@dataclass(frozen=True, slots=True)
class _Gpu:
    hbm_gb: int
    compute_capability: tuple[int, int]


# Memory as the vendor names it, in decimal GB: a little below what the driver reports, so plans err on the safe side.
_GPUS = {
    "a100": _Gpu(80, (8, 0)),
    "h20": _Gpu(96, (9, 0)),
    "h100": _Gpu(80, (9, 0)),
    "h100-94": _Gpu(94, (9, 0)),
    "h200": _Gpu(141, (9, 0)),
    "gh200": _Gpu(96, (9, 0)),
    "b200": _Gpu(180, (10, 0)),
    "gb200": _Gpu(186, (10, 0)),
    "b300": _Gpu(270, (10, 3)),
    "rtx-pro-6000": _Gpu(96, (12, 0)),
}


def parse_hardware(text: str, host_bytes: int | None) -> Hardware:
    """A machine that is not here: "8xh200", "h100" or "cpu", with `host_bytes` of free host memory.

    Raises ConfigError for an unknown name, and when the host memory is not given.
    """
    match = re.fullmatch(r"(?:(\d+)\s*[x*]\s*)?([a-z][a-z0-9-]*)", text.strip().lower())
    name = match[2] if match else ""
    if match is None or (name not in _GPUS and name != "cpu") or match[1] == "0":
        raise ConfigError(
            f"--hardware {text}: write a count and a name, such as 8xh200; known: cpu, {', '.join(_GPUS)}"
        )
    if host_bytes is None:
        raise ConfigError(f"--hardware {text} needs --host-memory, such as --host-memory 1.5TB")
    if name == "cpu":
        return Hardware(kind="cpu", name="cpu", num_devices=1, host_bytes=host_bytes)
    gpu = _GPUS[name]
    return Hardware(
        kind="cuda",
        name=name,
        num_devices=int(match[1] or 1),
        host_bytes=host_bytes,
        hbm_bytes=gpu.hbm_gb * GB,
        hbm_free_bytes=gpu.hbm_gb * GB,
        compute_capability=gpu.compute_capability,
    )


def detect_hardware(device: Literal["auto", "cpu", "cuda"], *, host_bytes: int | None = None) -> Hardware:
    """This machine, as the plan sees it; `host_bytes` replaces the measured free memory.

    Raises ConfigError when `device` is "cuda" and no usable GPU is there.
    """
    memory = free_host_bytes() if host_bytes is None else host_bytes
    if device != "cpu":
        gpus = _detect_cuda(memory)
        if gpus is not None:
            return gpus
        if device == "cuda":
            raise ConfigError("--device cuda: torch finds no usable NVIDIA GPU on this machine")
    return Hardware(kind="cpu", name="cpu", num_devices=1, host_bytes=memory)


def free_host_bytes(cgroup_root: Path = Path("/sys/fs/cgroup")) -> int:
    """Memory that a new process may take: what the kernel calls available, or less where a cgroup limits it."""
    available = int(psutil.virtual_memory().available)
    limits = [free for free in map(_cgroup_free_bytes, _cgroup_dirs(cgroup_root)) if free is not None]
    return min([available, *limits])


def _cgroup_dirs(root: Path) -> list[Path]:
    """Directories of this process's memory cgroup and its parents (v2, then v1); the tightest limit of all counts."""
    dirs = [root, root / "memory"]
    try:
        lines = Path("/proc/self/cgroup").read_text(encoding="utf-8").splitlines()
    except OSError:
        return dirs
    for line in lines:
        _, controllers, path = line.split(":", 2)
        base = root / "memory" if "memory" in controllers.split(",") else root if controllers == "" else None
        if base is not None:
            parts = Path(path.lstrip("/")).parts
            dirs += [base.joinpath(*parts[: n + 1]) for n in range(len(parts)) if ".." not in parts]
    return dirs


def _cgroup_free_bytes(directory: Path) -> int | None:
    """Limit minus use of one cgroup, page cache that can be dropped counted as free; None if there is no limit."""
    for limit_name, usage_name, cache_key in (
        ("memory.max", "memory.current", "inactive_file"),
        ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
    ):
        try:
            limit = int((directory / limit_name).read_text(encoding="utf-8"))
            usage = int((directory / usage_name).read_text(encoding="utf-8"))
            stat = (directory / "memory.stat").read_text(encoding="utf-8")
        except (OSError, ValueError):  # no such file, or "max"
            continue
        cache = next((int(line.split()[1]) for line in stat.splitlines() if line.split()[0] == cache_key), 0)
        return max(0, limit - (usage - cache))
    return None


def peak_device_bytes() -> int | None:
    """Most memory that this process has held on its current GPU, what torch keeps cached included; None without one."""
    import torch

    return torch.cuda.max_memory_reserved() if torch.cuda.is_available() else None


def _detect_cuda(host_bytes: int) -> Hardware | None:
    import torch

    if not torch.cuda.is_available():
        return None
    count = torch.cuda.device_count()
    properties = [torch.cuda.get_device_properties(i) for i in range(count)]
    free, _ = torch.cuda.mem_get_info(0)
    smallest = min(p.total_memory for p in properties)
    return Hardware(
        kind="cuda",
        name=properties[0].name,
        num_devices=count,
        host_bytes=host_bytes,
        hbm_bytes=smallest,
        hbm_free_bytes=min(free, smallest),
        compute_capability=min((p.major, p.minor) for p in properties),
    )

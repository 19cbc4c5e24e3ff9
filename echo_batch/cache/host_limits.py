"""Will this machine hold the host pool? A pure check of readings, and the readings. Imports no torch."""

import resource
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

from echo_batch.errors import ConfigError

CAP_IPC_LOCK_BIT = 14

PROBE_BYTES = 1 << 30
PROBE_MARGIN_BYTES = 2 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class HostLimits:
    """Readings of this machine, in bytes; None: no such limit."""

    available_bytes: int
    """Memory that can be taken without swapping."""
    cgroup_free_bytes: int | None
    """What the tightest memory cgroup still allows."""
    memlock_bytes: int | None
    """Memory that this process may lock (`ulimit -l`); None for unlimited or with CAP_IPC_LOCK."""


def check_host_pool(num_bytes: int, limits: HostLimits, *, token_bytes: int, pinned: bool) -> None:
    """Raise ConfigError if a host pool of `num_bytes` would not fit, naming what is short and the pool that would fit.

    `token_bytes` is the pool's size per token slot; `pinned` says that the pages will be locked (CUDA).
    """
    shortages = [(limits.available_bytes, "available memory")]
    if limits.cgroup_free_bytes is not None:
        shortages.append((limits.cgroup_free_bytes, "the memory limit of this cgroup (container)"))
    if pinned and limits.memlock_bytes is not None:
        shortages.append((limits.memlock_bytes, "the locked-memory limit (raise it with `ulimit -l unlimited`)"))
    room, name = min(shortages)
    if num_bytes > room:
        tokens = max(room, 0) // token_bytes // 64 * 64
        raise ConfigError(
            f"the host pool needs {num_bytes / 2**30:.1f} GiB, but {name} leaves {max(room, 0) / 2**30:.1f} GiB: "
            f"at most --host-pool {tokens} ({token_bytes} bytes a token)"
        )


def drop_memlock_if_ignored(num_bytes: int, limits: HostLimits, can_pin: Callable[[int], bool]) -> HostLimits:
    """The limits without the locked-memory limit if the GPU driver does not keep to it, as most do not.

    Found out by pinning a little more than the limit (`can_pin(bytes)`), where the pool exceeds it and it is small.
    """
    limit = limits.memlock_bytes
    if limit is None or num_bytes <= limit or limit > PROBE_BYTES or not can_pin(limit + PROBE_MARGIN_BYTES):
        return limits
    return replace(limits, memlock_bytes=None)


def read_host_limits(root: Path = Path("/")) -> HostLimits:
    """The readings of this process's machine; `root` stands for the file system (tests)."""
    fields = dict(line.split(":", 1) for line in (root / "proc/meminfo").read_text().splitlines())
    available, total = (int(fields[name].split()[0]) * 1024 for name in ("MemAvailable", "MemTotal"))
    free, limit = _cgroup_memory(root)
    if free is not None and limit is not None and limit > total:
        # Virtual machines with hot-added memory show little at first; their control group knows the whole.
        available = max(available, free)
    return HostLimits(available_bytes=available, cgroup_free_bytes=free, memlock_bytes=_memlock(root))


def _memlock(root: Path) -> int | None:
    soft = resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]
    if soft == resource.RLIM_INFINITY:
        return None
    for line in (root / "proc/self/status").read_text().splitlines():
        if line.startswith("CapEff:") and int(line.split()[1], 16) >> CAP_IPC_LOCK_BIT & 1:
            return None
    return soft


def _cgroup_memory(root: Path) -> tuple[int | None, int | None]:
    """Free bytes and limit of the tightest memory cgroup above this process (v2, then v1); None: unlimited."""
    membership = root / "proc/self/cgroup"
    lines = membership.read_text().splitlines() if membership.exists() else []
    best: tuple[int | None, int | None] = (None, None)
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            base, limit_name, usage_name = root / "sys/fs/cgroup", "memory.max", "memory.current"
        elif "memory" in controllers.split(","):
            base, limit_name, usage_name = (
                root / "sys/fs/cgroup/memory",
                "memory.limit_in_bytes",
                "memory.usage_in_bytes",
            )
        else:
            continue
        folder = base / path.lstrip("/")
        # Inside a container the path may be the host's; then only the mount's root is visible.
        for level in [folder, *folder.parents]:
            if base not in [level, *level.parents]:
                break
            limit = _read_int(level / limit_name)
            usage = _read_int(level / usage_name)
            if limit is None or limit >= 1 << 60 or usage is None:
                continue
            # Page cache counts as usage but gives way; without it a run after a download would be refused.
            free = limit - usage + _inactive_file(level / "memory.stat")
            if best[0] is None or free < best[0]:
                best = (free, limit)
    return best


def _read_int(path: Path) -> int | None:
    try:
        return int(path.read_text())
    except (OSError, ValueError):  # absent, or "max"
        return None


def _inactive_file(path: Path) -> int:
    try:
        fields = dict(line.split() for line in path.read_text().splitlines())
        return int(fields.get("inactive_file", 0))
    except (OSError, ValueError):
        return 0

from pathlib import Path

import pytest

from echo_batch.cache import host_limits
from echo_batch.cache.host_limits import HostLimits, check_host_pool, drop_memlock_if_ignored, read_host_limits
from echo_batch.errors import ConfigError

GIB = 1 << 30


def limits(available: int = 100 * GIB, cgroup: int | None = None, memlock: int | None = None) -> HostLimits:
    return HostLimits(available_bytes=available, cgroup_free_bytes=cgroup, memlock_bytes=memlock)


def check(num_bytes: int, readings: HostLimits, *, pinned: bool = True) -> None:
    check_host_pool(num_bytes, readings, token_bytes=40_000, pinned=pinned)


def test_a_pool_that_fits_passes() -> None:
    check(100 * GIB, limits())
    check(100 * GIB, limits(cgroup=100 * GIB, memlock=100 * GIB))
    check(2 * GIB, limits(memlock=GIB), pinned=False)


@pytest.mark.parametrize(
    ("readings", "message"),
    [
        (limits(available=10 * GIB), "available memory leaves 10.0 GiB"),
        (limits(cgroup=20 * GIB), r"cgroup \(container\) leaves 20.0 GiB"),
        (limits(memlock=30 * GIB), r"locked-memory limit .* leaves 30.0 GiB"),
        (limits(available=50 * GIB, cgroup=40 * GIB, memlock=5 * GIB), "locked-memory limit"),
        (limits(cgroup=-GIB), "leaves 0.0 GiB: at most --host-pool 0 "),
    ],
)
def test_the_tightest_limit_is_named(readings: HostLimits, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        check(60 * GIB, readings)


def test_the_largest_pool_that_fits_is_named_in_whole_blocks() -> None:
    with pytest.raises(ConfigError, match=r"at most --host-pool 26816 \(40000 bytes a token\)"):
        check(60 * GIB, limits(available=GIB))


class Machine:
    """A made-up file system with the files that are read."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.write("proc/meminfo", "MemTotal:       67108864 kB\nMemAvailable:   33554432 kB\nHugePages_Total: 0\n")
        self.write("proc/self/status", "Name:\tpython\nCapEff:\t0000000000000000\n")

    def write(self, path: str, text: str) -> None:
        (self.root / path).parent.mkdir(parents=True, exist_ok=True)
        (self.root / path).write_text(text)

    def read(self) -> HostLimits:
        return read_host_limits(self.root)


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    return Machine(tmp_path)


def test_plain_machine(machine: Machine) -> None:
    readings = machine.read()
    assert readings.available_bytes == 32 * GIB and readings.cgroup_free_bytes is None


def test_tightest_cgroup_on_the_way_up(machine: Machine) -> None:
    machine.write("proc/self/cgroup", "0::/a/b\n")
    machine.write("sys/fs/cgroup/a/memory.max", f"{10 * GIB}\n")
    machine.write("sys/fs/cgroup/a/memory.current", f"{4 * GIB}\n")
    machine.write("sys/fs/cgroup/a/memory.stat", f"anon 5\ninactive_file {GIB}\n")
    machine.write("sys/fs/cgroup/a/b/memory.max", "max\n")
    machine.write("sys/fs/cgroup/a/b/memory.current", f"{3 * GIB}\n")
    assert machine.read().cgroup_free_bytes == 7 * GIB


def test_cgroup_seen_from_inside_a_container(machine: Machine) -> None:
    machine.write("proc/self/cgroup", "0::/kubepods/pod1\n")
    machine.write("sys/fs/cgroup/memory.max", f"{16 * GIB}\n")
    machine.write("sys/fs/cgroup/memory.current", f"{GIB}\n")
    assert machine.read().cgroup_free_bytes == 15 * GIB


def test_cgroup_version_1(machine: Machine) -> None:
    machine.write("proc/self/cgroup", "5:cpu,memory:/job\n0::/\n")
    machine.write("sys/fs/cgroup/memory/job/memory.limit_in_bytes", f"{8 * GIB}\n")
    machine.write("sys/fs/cgroup/memory/job/memory.usage_in_bytes", f"{GIB}\n")
    machine.write("sys/fs/cgroup/memory/memory.limit_in_bytes", "9223372036854771712\n")
    machine.write("sys/fs/cgroup/memory/memory.usage_in_bytes", f"{GIB}\n")
    assert machine.read().cgroup_free_bytes == 7 * GIB


def test_memory_that_is_added_on_demand_counts(machine: Machine) -> None:
    machine.write("proc/self/cgroup", "0::/\n")
    machine.write("sys/fs/cgroup/memory.max", f"{128 * GIB}\n")
    machine.write("sys/fs/cgroup/memory.current", f"{8 * GIB}\n")
    assert machine.read().available_bytes == 120 * GIB


def test_memlock_counts_without_the_capability(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host_limits.resource, "getrlimit", lambda _: (8 << 20, 8 << 20))
    assert machine.read().memlock_bytes == 8 << 20
    machine.write("proc/self/status", "CapEff:\t0000000000004000\n")
    assert machine.read().memlock_bytes is None
    monkeypatch.setattr(host_limits.resource, "getrlimit", lambda _: (host_limits.resource.RLIM_INFINITY,) * 2)
    machine.write("proc/self/status", "CapEff:\t0000000000000000\n")
    assert machine.read().memlock_bytes is None


def test_memlock_that_the_driver_ignores_does_not_count() -> None:
    asked: list[int] = []

    def can_pin(num_bytes: int) -> bool:
        asked.append(num_bytes)
        return True

    small = limits(memlock=8 << 20)
    assert drop_memlock_if_ignored(60 * GIB, small, can_pin).memlock_bytes is None
    assert asked == [10 << 20], "a little more than the limit"
    assert drop_memlock_if_ignored(60 * GIB, small, lambda _: False) == small
    large = limits(memlock=50 * GIB)
    assert drop_memlock_if_ignored(60 * GIB, large, can_pin) == large, "too much to try"
    assert drop_memlock_if_ignored(1 << 20, small, can_pin) == small, "it fits anyway"
    assert len(asked) == 1


def test_this_machine_can_be_read() -> None:
    assert read_host_limits().available_bytes > 0

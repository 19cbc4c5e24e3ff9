"""Machines by name, and free memory under cgroup limits."""

import sys
from pathlib import Path

import psutil
import pytest

from echo_batch.engine.hardware import detect_hardware, free_host_bytes, parse_hardware
from echo_batch.errors import ConfigError


def test_named_machines() -> None:
    node = parse_hardware("8xH200", 1_500_000_000_000)
    assert (node.kind, node.num_devices, node.hbm_bytes, node.compute_capability) == ("cuda", 8, 141 * 10**9, (9, 0))
    assert node.hbm_free_bytes == node.hbm_bytes and node.has_fp8
    assert parse_hardware("h100", 1).num_devices == 1
    assert parse_hardware("4 x rtx-pro-6000", 1).hbm_bytes == 96 * 10**9
    assert not parse_hardware("a100", 1).has_fp8
    cpu = parse_hardware("cpu", 7)
    assert (cpu.kind, cpu.num_devices, cpu.host_bytes, cpu.has_fp8) == ("cpu", 1, 7, False)


@pytest.mark.parametrize("text", ["", "8x", "0xh200", "8xvoodoo", "h200x8", "-1xh100"])
def test_unknown_machines_name_the_known_ones(text: str) -> None:
    with pytest.raises(ConfigError, match="h200"):
        parse_hardware(text, 1)


def test_a_machine_elsewhere_needs_its_memory() -> None:
    with pytest.raises(ConfigError, match="--host-memory"):
        parse_hardware("8xh200", None)


def cgroup(directory: Path, limit: str, usage: int, inactive_file: int, *, version: int) -> None:
    directory.mkdir(parents=True, exist_ok=True)
    names = ("memory.max", "memory.current") if version == 2 else ("memory.limit_in_bytes", "memory.usage_in_bytes")
    (directory / names[0]).write_text(f"{limit}\n")
    (directory / names[1]).write_text(f"{usage}\n")
    key = "inactive_file" if version == 2 else "total_inactive_file"
    (directory / "memory.stat").write_text(f"anon 5\n{key} {inactive_file}\n")


@pytest.mark.parametrize("version", [1, 2])
def test_cgroup_limit_counts_and_page_cache_is_free(tmp_path: Path, version: int) -> None:
    cgroup(tmp_path / "memory" if version == 1 else tmp_path, "1000000", 300_000, 100_000, version=version)
    assert free_host_bytes(tmp_path) == 800_000


def test_no_limit_leaves_what_the_kernel_says(tmp_path: Path) -> None:
    cgroup(tmp_path, "max", 300_000, 0, version=2)
    available = psutil.virtual_memory().available
    assert free_host_bytes(tmp_path) == pytest.approx(available, rel=0.2)


def test_used_up_memory_is_zero_and_not_negative(tmp_path: Path) -> None:
    cgroup(tmp_path, "1000", 5_000, 0, version=2)
    assert free_host_bytes(tmp_path) == 0


def test_this_machine_as_a_cpu() -> None:
    here = detect_hardware("cpu")
    assert here.kind == "cpu" and here.host_bytes > 0 and here.hbm_bytes == 0
    assert detect_hardware("cpu", host_bytes=5).host_bytes == 5


def test_a_gpu_that_is_not_there_is_one_clear_error(monkeypatch: pytest.MonkeyPatch) -> None:
    import torch

    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(ConfigError, match="--device cuda"):
        detect_hardware("cuda")
    assert detect_hardware("auto").kind == "cpu"
    assert "torch" in sys.modules

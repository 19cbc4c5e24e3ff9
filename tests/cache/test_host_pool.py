import subprocess
import sys
import time

import pytest
import torch

from echo_batch.cache import host_pool
from echo_batch.cache.host_limits import HostLimits
from echo_batch.cache.host_pool import HostPool
from echo_batch.cache.spec import CacheSpec
from echo_batch.errors import ConfigError
from echo_batch.kernels.formats import IndexFormat, RowFormat
from tests.cache.driver import small_spec

GIB = 1 << 30


def test_plain_tensor_on_the_cpu() -> None:
    spec = small_spec()
    pool = HostPool(spec, torch.device("cpu"))
    assert pool.rows.shape == (4, 768, 32) and not pool.rows.any()
    assert (HostPool(spec, torch.device("cpu"), poison=True).rows == 0xFF).all()
    pool.close()
    assert pool.rows.numel() == 0


def test_refused_before_any_memory_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    little = HostLimits(available_bytes=1000, cgroup_free_bytes=None, memlock_bytes=None)
    monkeypatch.setattr(host_pool, "read_host_limits", lambda: little)
    with pytest.raises(ConfigError, match="host pool needs"):
        HostPool(small_spec(), torch.device("cpu"))


def test_mapped_memory_is_private_to_this_process_and_writable() -> None:
    memory, flat = host_pool._mapped_memory(4 << 20, None)
    host_pool._touch(flat, 7)
    assert flat.numel() == 4 << 20 and (flat == 7).all()
    with open("/proc/self/smaps") as smaps:
        flags = ""
        inside = False
        for line in smaps:
            if line.startswith(f"{flat.data_ptr():x}-"):
                inside = True
            if inside and line.startswith("VmFlags:"):
                flags = line
                break
    assert {"dc", "dd"} <= set(flags.split()), "neither copied by fork nor by a core dump"
    del flat
    memory.close()


def large_spec(num_bytes: int) -> CacheSpec:
    tokens = num_bytes // (4 * 656) // 64 * 64
    return CacheSpec(
        group_layers=((0,), (1,), (2,), (3,)),
        row_format=RowFormat("fp8"),
        index_format=IndexFormat("fp8"),
        index_topk=64,
        host_tokens=tokens,
        gpu_tokens=128,
    )


@pytest.mark.gpu
def test_pinned_fast_and_given_back() -> None:
    spec = large_spec(8 * GIB)
    torch.cuda.init()
    start = time.perf_counter()
    pool = HostPool(spec, torch.device("cuda"))
    seconds = time.perf_counter() - start
    print(f"pinned at {spec.host_pool_bytes / GIB / seconds:.1f} GiB/s")
    assert spec.host_pool_bytes / GIB / seconds > 2  # a page at a time: 0.5
    assert pool.rows.is_pinned() and pool.rows.shape == (4, spec.host_tokens, 656)
    pool.rows[3, -1] = 5
    assert (pool.rows[3, -1].to("cuda", non_blocking=True) == 5).all()
    pool.close()
    HostPool(spec, torch.device("cuda")).close()


@pytest.mark.gpu
def test_exit_without_close_is_clean() -> None:
    program = (
        "import torch\n"
        "from echo_batch.cache.host_pool import HostPool\n"
        "from tests.cache.driver import small_spec\n"
        "pool = HostPool(small_spec(), torch.device('cuda'))\n"
        "pool.rows[0].to('cuda')\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0 and done.stderr == "", done.stderr

from dataclasses import replace

import pytest
import torch

from echo_batch.cache.gpu_pool import make_gpu_pool
from echo_batch.cache.manager import make_cache
from echo_batch.cache.spec import MAX_PREFETCH_ROWS, CacheSpec, minimum_gpu_tokens
from echo_batch.kernels.cache_layout import LATE_LISTS
from echo_batch.kernels.formats import IndexFormat, RowFormat
from echo_batch.kernels.ops import reference_ops
from echo_batch.kernels.prefetch_state import make_prefetch_state
from tests.cache.driver import small_spec


def test_sizes_are_what_is_allocated() -> None:
    for offload, gpu_tokens in ((True, 64), (False, 768)):
        spec = small_spec(offload=offload, gpu_tokens=gpu_tokens)
        pool = make_gpu_pool(spec, torch.device("cpu"), poison=False)
        assert pool.rows.nbytes == spec.gpu_pool_bytes
        assert pool.index_pages.nbytes == spec.index_cache_bytes
        assert sum(field.nbytes for field in pool.maps or ()) == spec.metadata_bytes
    assert spec.host_pool_bytes == 0


@pytest.mark.gpu
def test_device_memory_is_what_the_spec_counts() -> None:
    spec = CacheSpec(
        group_layers=((0,), (1, 2)),
        row_format=RowFormat("fp8"),
        index_format=IndexFormat("fp8"),
        index_topk=2048,
        host_tokens=640_000,
        gpu_tokens=64_000,
    )
    device = torch.device("cuda")
    before = torch.cuda.memory_allocated(device)
    cache = make_cache(spec, device, reference_ops(), residency=True)
    taken = torch.cuda.memory_allocated(device) - before
    cache.close()
    counted = spec.gpu_pool_bytes + spec.index_cache_bytes + spec.metadata_bytes
    # Each tensor is rounded up to the allocator's step, 512 bytes or 2 MiB.
    assert counted <= taken <= counted + 9 * 2**21


def test_sizes_at_full_scale() -> None:
    spec = CacheSpec(
        group_layers=tuple((layer,) for layer in range(61)),
        row_format=RowFormat("fp8"),
        index_format=IndexFormat("fp8"),
        index_topk=2048,
        host_tokens=1_800_000,
        gpu_tokens=200_000,
    )
    assert spec.host_pool_bytes == 61 * 1_800_000 * 656
    assert spec.group_of_layer == tuple(range(61))
    # The paper's 4 N_H + 13 N_G bytes for each of 61 layers, and not more.
    assert spec.metadata_bytes < 61 * (4 * 1_800_000 + 13 * 200_000)


def test_prefetch_takes_few_rows_and_is_counted() -> None:
    plain = replace(small_spec(), host_tokens=1_800_000, gpu_tokens=64_000)
    spec = replace(plain, prefetch="fused")
    assert plain.prefetch_rows == 0 and spec.prefetch_rows == 2_000
    assert replace(spec, gpu_tokens=640_000).prefetch_rows == MAX_PREFETCH_ROWS
    state = make_prefetch_state(spec.num_groups, spec.prefetch_rows, torch.device("cpu"), num_late_lists=LATE_LISTS)
    own = sum(t.nbytes for t in state._replace(certain=state.certain[:1]))
    assert spec.metadata_bytes - plain.metadata_bytes == own + 8 * spec.num_groups, "and what was wasted"


def test_minimum_pool() -> None:
    assert minimum_gpu_tokens([], 2048) == 0
    assert minimum_gpu_tokens([1, 2048, 100_000], 2048) == 2 + 2049 + 2049

"""What the cache keeps on the device: KV rows, indexer keys and the maps of every selection group."""

from dataclasses import dataclass

import torch
from torch import Tensor

from echo_batch.cache.spec import NUM_CANDIDATES, CacheSpec
from echo_batch.kernels.cache_layout import POISON_BYTE
from echo_batch.kernels.contracts import GroupMaps, make_maps


@dataclass(frozen=True, slots=True)
class GpuPool:
    """Device memory of one worker's cache, allocated once."""

    rows: Tensor
    """uint8 [layers, N_G, row_bytes]."""
    index_pages: Tensor
    """uint8 [groups, N_H / BLOCK_SIZE, page_bytes]."""
    maps: GroupMaps | None
    """None without offloading: a row is then a token slot."""


def make_gpu_pool(spec: CacheSpec, device: torch.device, *, poison: bool) -> GpuPool:
    """Allocate the pool of `spec` on `device`; rows start as zeros, or as NaN with `poison`."""
    rows = torch.empty((spec.num_layers, spec.gpu_tokens, spec.row_format.row_bytes), dtype=torch.uint8, device=device)
    rows.fill_(POISON_BYTE if poison else 0)
    pages = torch.zeros(
        (spec.num_groups, spec.num_blocks, spec.index_format.page_bytes), dtype=torch.uint8, device=device
    )
    if not spec.offload:
        return GpuPool(rows, pages, None)
    maps = make_maps(
        spec.num_groups,
        gpu_tokens=spec.gpu_tokens,
        host_tokens=spec.host_tokens,
        num_candidates=NUM_CANDIDATES,
        device=device,
    )
    return GpuPool(rows, pages, maps)

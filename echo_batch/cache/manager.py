"""The KV cache behind one face, with offloading or without: which rows are on the GPU, and how they get there.

Knows no model. The order of calls in a step: cache/offloaded.py.
"""

import torch

from echo_batch.cache.counters import CacheCounters
from echo_batch.cache.offloaded import OffloadedCache
from echo_batch.cache.resident import ResidentCache
from echo_batch.cache.slots import slots_of_blocks
from echo_batch.cache.spec import CacheSpec
from echo_batch.kernels.cache_ops import CacheOps
from echo_batch.kernels.ops import Ops
from echo_batch.kernels.prefetch_ops import PrefetchOps

__all__ = ["CacheCounters", "KVCache", "OffloadedCache", "ResidentCache", "make_cache", "slots_of_blocks"]

KVCache = OffloadedCache | ResidentCache


def make_cache(
    spec: CacheSpec,
    device: torch.device,
    ops: Ops,
    *,
    poison: bool = False,
    cache_ops: CacheOps | None = None,
    residency: bool = False,
    prefetch_ops: PrefetchOps | None = None,
) -> KVCache:
    """The cache of `spec` on `device`; raises ConfigError if the host pool does not fit the machine.

    `poison` fills freed and evicted rows with NaN (debug). `cache_ops`, `prefetch_ops`: other than those of the device
    (tests).
    `residency`: with offloading, start resident (the caller then sees to leaving; see OffloadedCache).
    """
    if not spec.offload:
        return ResidentCache(spec, device, ops, poison=poison, cache_ops=cache_ops)
    return OffloadedCache(
        spec, device, ops, poison=poison, cache_ops=cache_ops, residency=residency, prefetch_ops=prefetch_ops
    )

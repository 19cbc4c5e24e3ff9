"""The cache ops on an NVIDIA GPU: Triton kernels; the look-up of a selection inside the CUDA top-k where that runs."""

import dataclasses

import torch
from torch import Tensor

from echo_batch.kernels.cache_ops import CacheOps, triton_cache_ops
from echo_batch.kernels.contracts import GroupMaps, Resolution
from echo_batch.kernels.cuda import runtime
from echo_batch.kernels.cuda.topk import Late, mark_topk
from echo_batch.kernels.prefetch_state import PrefetchState
from echo_batch.kernels.triton.cache_ops import place


def gpu_cache_ops(device: torch.device) -> CacheOps:
    """The fastest ops for `device`."""
    ops = triton_cache_ops()
    return dataclasses.replace(ops, resolve_topk=resolve_topk) if runtime.available(device) else ops


def resolve_topk(
    maps: GroupMaps,
    scores: Tensor,
    lengths: Tensor,
    k: int,
    predicted: Tensor,
    block_table: Tensor,
    step: Tensor,
    host_rows: Tensor,
    gpu_rows: Tensor,
    *,
    skip: int | None = None,
    late: PrefetchState | None = None,
    max_delay: int = 0,
) -> Resolution:
    """See the reference. Two launches: the top-k with boundary A of `resolve` inside, and boundary B.

    `max_delay` > 0 delays programs (tests of races).
    """
    rest = None if late is None else Late(late, host_rows, gpu_rows)
    marked = mark_topk(maps, scores, lengths, k, predicted, block_table, step, late=rest, max_delay=64 * max_delay)
    skip = scores.shape[0] if skip is None else skip
    return place(maps, marked, step, host_rows, gpu_rows, skip=skip, dependent=True, max_delay=max_delay)

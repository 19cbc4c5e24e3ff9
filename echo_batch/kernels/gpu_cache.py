"""The cache ops on an NVIDIA GPU: Triton kernels. Where CUDA kernels run, these begin a step, and look a selection up
inside the top-k."""

import dataclasses

import torch
from torch import Tensor

from echo_batch.kernels.cache_ops import CacheOps, triton_cache_ops
from echo_batch.kernels.contracts import GroupMaps, Resolution
from echo_batch.kernels.cuda import runtime
from echo_batch.kernels.cuda.ages import count_ages, list_candidates
from echo_batch.kernels.cuda.topk import Late, mark_topk
from echo_batch.kernels.prefetch_state import PrefetchState
from echo_batch.kernels.triton.cache_ops import place, prepare


def gpu_cache_ops(device: torch.device) -> CacheOps:
    """The fastest ops for `device`."""
    ops = triton_cache_ops()
    if not runtime.available(device):
        return ops
    return dataclasses.replace(ops, begin_step=begin_step, resolve_topk=resolve_topk)


def begin_step(maps: GroupMaps, step: Tensor, *, num_reserved: int = 0) -> None:
    """See the reference; also lists the rows that this step may take. Three launches for all groups together."""
    count_ages(maps, step)
    prepare(maps, step, num_reserved=num_reserved)
    list_candidates(maps, step)


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

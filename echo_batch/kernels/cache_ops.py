"""The cache ops that the cache manager calls, chosen once by device. Contracts: kernels/reference/cache_ops.py."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from echo_batch.kernels.contracts import GroupMaps, Resolution
from echo_batch.kernels.formats import IndexFormat
from echo_batch.kernels.prefetch_state import PrefetchState
from echo_batch.kernels.reference import cache_ops as reference


class BeginStepOp(Protocol):
    """`cache_ops.begin_step`."""

    def __call__(self, maps: GroupMaps, step: Tensor, *, num_reserved: int = 0) -> None: ...


class ResolveOp(Protocol):
    """`cache_ops.resolve`."""

    def __call__(
        self,
        maps: GroupMaps,
        selected: Tensor,
        step: Tensor,
        host_rows: Tensor,
        gpu_rows: Tensor,
        *,
        skip: int | None = None,
    ) -> Resolution: ...


class ResolveTopkOp(Protocol):
    """`cache_ops.resolve_topk`."""

    def __call__(
        self,
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
    ) -> Resolution: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheOps:
    """One callable per cache op, each with the signature of the reference function it is named after."""

    begin_step: BeginStepOp
    append: Callable[[GroupMaps, Tensor, Tensor], Tensor]
    resolve: ResolveOp
    warm: Callable[[GroupMaps, Tensor, Tensor], Tensor]
    release: Callable[[GroupMaps, Tensor], None]
    violations: Callable[[GroupMaps, Tensor], Tensor]
    copy_rows: Callable[[Tensor, Tensor | None, Tensor, Tensor | None, Tensor | None], None]
    write_rows: Callable[[Tensor, Tensor, Tensor, Tensor, Tensor], None]
    write_tokens: Callable[[Tensor, Tensor, Tensor, Tensor | None, Tensor, Tensor, Tensor, IndexFormat], None]
    fill_rows: Callable[[Tensor, Tensor], None]
    resolve_topk: ResolveTopkOp | None = None
    """None: nothing is faster than `ops.topk_positions` and `resolve` one after the other, which do the same."""


def reference_cache_ops() -> CacheOps:
    """The torch references: the CPU backend and the oracle of the fast versions."""
    return CacheOps(
        begin_step=reference.begin_step,
        append=reference.append,
        resolve=reference.resolve,
        warm=reference.warm,
        release=reference.release,
        violations=reference.violations,
        copy_rows=reference.copy_rows,
        write_rows=reference.write_rows,
        write_tokens=reference.write_tokens,
        fill_rows=reference.fill_rows,
    )


def triton_cache_ops() -> CacheOps:
    """Triton kernels: launches of fixed shape that a CUDA graph can hold."""
    # Imported here because a machine without a GPU may have no Triton.
    from echo_batch.kernels.triton import cache_ops, row_copy

    return CacheOps(
        begin_step=cache_ops.begin_step,
        append=cache_ops.append,
        resolve=cache_ops.resolve,
        warm=cache_ops.warm,
        release=cache_ops.release,
        violations=cache_ops.violations,
        copy_rows=row_copy.copy_rows,
        write_rows=row_copy.write_rows,
        write_tokens=row_copy.write_tokens,
        fill_rows=row_copy.fill_rows,
    )


def select_cache_ops(device: torch.device) -> CacheOps:
    """The cache ops for `device`."""
    assert device.type in ("cpu", "cuda"), device
    if device.type == "cpu":
        return reference_cache_ops()
    from echo_batch.kernels.gpu_cache import gpu_cache_ops

    return gpu_cache_ops(device)

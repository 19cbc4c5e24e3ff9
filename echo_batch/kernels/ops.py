"""The ops that models, caches and the engine call, chosen once by device. Contracts: the references' docstrings."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from echo_batch.kernels.formats import IndexFormat, RowFormat
from echo_batch.kernels.reference import attention, hadamard, indexer, linear, moe, norm, rope, rows, sampling, topk
from echo_batch.kernels.weights import Weight


class Sampler(Protocol):
    """`sampling.sample`."""

    def __call__(self, logits: Tensor, params: sampling.SamplingTensors, *, greedy_only: bool = False) -> Tensor: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Ops:
    """One callable per op, each with the signature of the reference function it is named after."""

    linear: Callable[[Tensor, Weight], Tensor]
    linear_fp32: Callable[[Tensor, Tensor], Tensor]
    rms_norm: Callable[[Tensor, Tensor, float], Tensor]
    add_rms_norm: Callable[[Tensor, Tensor | None, Tensor, float], tuple[Tensor, Tensor]]
    layer_norm: Callable[[Tensor, Tensor, Tensor, float], Tensor]
    rope_angles: Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]
    apply_rope: Callable[[Tensor, Tensor, Tensor, bool], Tensor]
    hadamard: Callable[[Tensor, Tensor], Tensor]
    route: Callable[[Tensor, Tensor, int, int, int, bool, float], tuple[Tensor, Tensor]]
    swiglu: Callable[[Tensor], Tensor]
    routed_experts: Callable[[Tensor, Tensor, Tensor, Weight, Weight], Tensor]
    pack_kv_rows: Callable[[Tensor, Tensor, RowFormat], Tensor]
    pack_index_keys: Callable[[Tensor, IndexFormat, bool], Tensor]
    quantize_index_query: Callable[[Tensor, bool], tuple[Tensor, Tensor]]
    write_index_keys: Callable[[Tensor, Tensor, Tensor, IndexFormat], None]
    read_index_keys: Callable[[Tensor, Tensor, IndexFormat], Tensor]
    index_scores_paged: Callable[[Tensor, Tensor, Tensor, Tensor, Tensor, IndexFormat], Tensor]
    index_scores_contiguous: Callable[[Tensor, Tensor, Tensor, Tensor, IndexFormat], Tensor]
    topk_positions: Callable[[Tensor, Tensor, int], tuple[Tensor, Tensor]]
    sparse_mla: Callable[[Tensor, Tensor, Tensor, float, RowFormat], Tensor]
    sample: Sampler
    token_logprobs: Callable[[Tensor, Tensor, int], tuple[Tensor, Tensor, Tensor]]


def reference_ops() -> Ops:
    """The torch references: the CPU backend and the oracle of every fast version."""
    return Ops(
        linear=linear.linear,
        linear_fp32=linear.linear_fp32,
        rms_norm=norm.rms_norm,
        add_rms_norm=norm.add_rms_norm,
        layer_norm=norm.layer_norm,
        rope_angles=rope.rope_angles,
        apply_rope=rope.apply_rope,
        hadamard=hadamard.hadamard,
        route=moe.route,
        swiglu=moe.swiglu,
        routed_experts=moe.routed_experts,
        pack_kv_rows=rows.pack_kv_rows,
        pack_index_keys=rows.pack_index_keys,
        quantize_index_query=rows.quantize_index_query,
        write_index_keys=rows.write_index_keys,
        read_index_keys=rows.read_index_keys,
        index_scores_paged=indexer.index_scores_paged,
        index_scores_contiguous=indexer.index_scores_contiguous,
        topk_positions=topk.topk_positions,
        sparse_mla=attention.sparse_mla,
        sample=sampling.sample,
        token_logprobs=sampling.token_logprobs,
    )


def select_ops(device: torch.device) -> Ops:
    """The ops for `device`: references on the CPU; on CUDA the fast versions that exist, else the references."""
    assert device.type in ("cpu", "cuda"), device
    return reference_ops()

"""The ops that models, caches and the engine call, chosen once by device. Contracts: the references' docstrings."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from echo_batch.kernels.activation import Activation
from echo_batch.kernels.formats import IndexFormat, RowFormat
from echo_batch.kernels.parts import Parts, Result
from echo_batch.kernels.reference import (
    attention,
    fused,
    indexer,
    linear,
    moe,
    parts,
    rope,
    rows,
    sampling,
    slots,
    topk,
    topk_rows,
)
from echo_batch.kernels.reference.fused import LatentInputs
from echo_batch.kernels.reference.sampling import SamplingTensors
from echo_batch.kernels.weights import Weight


class AdvanceOp(Protocol):
    """`sampling.advance_rows`."""

    def __call__(
        self,
        tokens: Tensor,
        finite: Tensor,
        has_block: Tensor,
        *,
        token_ids: Tensor,
        positions: Tensor,
        active: Tensor,
        stop_ids: Tensor,
        last_position: Tensor,
    ) -> tuple[Tensor, Tensor]: ...


class NormActivationOp(Protocol):
    """`fused.norm_activation`."""

    def __call__(
        self,
        hidden: Tensor,
        delta: Result | None,
        weight: Tensor,
        eps: float,
        ue8m0: bool | None,
        out: Activation | None = None,
    ) -> tuple[Tensor, Activation]: ...


class LatentInputsOp(Protocol):
    """`fused.latent_inputs`."""

    def __call__(
        self,
        a: Tensor | Parts,
        cos: Tensor,
        sin: Tensor,
        q_weight: Tensor,
        kv_weight: Tensor,
        key_weight: Tensor | None,
        key_bias: Tensor | None,
        *,
        eps: float,
        key_eps: float,
        interleaved: bool,
        index_interleaved: bool,
        row_format: RowFormat,
        index_format: IndexFormat,
        ue8m0: bool | None,
    ) -> LatentInputs: ...


class PagedScoresOp(Protocol):
    """`indexer.index_scores_paged`."""

    def __call__(
        self,
        query: Tensor,
        weights: Tensor,
        pages: Tensor,
        block_table: Tensor,
        seq_lens: Tensor,
        fmt: IndexFormat,
        schedule: Tensor | None = None,
    ) -> Tensor: ...


class TopkOp(Protocol):
    """`topk.topk_positions`."""

    def __call__(
        self,
        scores: Tensor,
        lengths: Tensor,
        k: int,
        predicted: Tensor | None = None,
        *,
        update: bool = False,
        block_table: Tensor | None = None,
        fallback_count: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]: ...


class TopkRowsOp(Protocol):
    """`topk_rows.topk_rows`."""

    def __call__(self, scores: Tensor, lengths: Tensor, out: Tensor, *, first: int = 0) -> Tensor: ...


class AttentionQueriesOp(Protocol):
    """`fused.attention_queries`."""

    def __call__(
        self,
        projected: Tensor,
        key_up: Tensor,
        cos: Tensor,
        sin: Tensor,
        head_logits: Tensor | None,
        *,
        num_index_heads: int,
        interleaved: bool,
        index_interleaved: bool,
        index_format: IndexFormat,
    ) -> tuple[Tensor, Tensor | None, Tensor | None]: ...


class IndexQueryOp(Protocol):
    """`fused.index_query`."""

    def __call__(
        self,
        query: Tensor,
        cos: Tensor,
        sin: Tensor,
        head_logits: Tensor,
        *,
        interleaved: bool,
        index_format: IndexFormat,
    ) -> tuple[Tensor, Tensor]: ...


class RouteOp(Protocol):
    """`moe.route`."""

    def __call__(
        self,
        logits: Tensor,
        bias: Tensor,
        n_group: int,
        topk_group: int,
        top_k: int,
        normalize: bool,
        scaling: float,
        *,
        held: range | None = None,
        valid: Tensor | None = None,
        num_shared: int = 0,
    ) -> tuple[Tensor, Tensor]: ...


class RoutedExpertsOp(Protocol):
    """`moe.routed_experts`."""

    def __call__(
        self,
        x: Activation,
        experts: Tensor,
        weights: Tensor,
        gate_up: Weight,
        down: Weight,
        *,
        addend: Tensor | None = None,
        dtype: torch.dtype = torch.float32,
    ) -> Result: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Ops:
    """One callable per op, each with the signature of the reference function it is named after."""

    linear: Callable[[Activation, Weight], Tensor]
    linear_parts: Callable[[Activation, Weight], Tensor | Parts]
    linear_pair: Callable[[Activation, Weight, Tensor], tuple[Tensor | Parts, Tensor]]
    linear_fp32: Callable[[Tensor, Tensor], Tensor]
    linear_fp32_parts: Callable[[Tensor, Tensor], Tensor]
    add_parts: Callable[[Result], Tensor]
    norm_activation: NormActivationOp
    rope_angles: Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]
    latent_inputs: LatentInputsOp
    attention_queries: AttentionQueriesOp
    index_query: IndexQueryOp
    head_values: Callable[[Tensor, Tensor, bool | None], Activation]
    route: RouteOp
    swiglu_activation: Callable[[Tensor, bool | None], Activation]
    routed_experts: RoutedExpertsOp
    pack_kv_rows: Callable[[Tensor, Tensor, RowFormat], Tensor]
    prefill_row_format: Callable[[RowFormat], RowFormat]
    convert_kv_rows: Callable[[Tensor, RowFormat, Tensor], None]
    pack_index_keys: Callable[[Tensor, IndexFormat, bool], Tensor]
    quantize_index_query: Callable[[Tensor, bool], tuple[Tensor, Tensor]]
    write_index_keys: Callable[[Tensor, Tensor, Tensor, IndexFormat], None]
    read_index_keys: Callable[[Tensor, Tensor, IndexFormat], Tensor]
    index_schedule: Callable[[Tensor], Tensor | None]
    index_scores_paged: PagedScoresOp
    index_scores_contiguous: Callable[[Tensor, Tensor, Tensor, Tensor, IndexFormat], Tensor]
    topk_positions: TopkOp
    topk_rows: TopkRowsOp
    positions_to_slots: Callable[[Tensor, Tensor], Tensor]
    sparse_mla: Callable[[Tensor, Tensor, Tensor, float, RowFormat], Tensor]
    sample: Callable[[Tensor, SamplingTensors], tuple[Tensor, Tensor]]
    greedy_sample: Callable[[Tensor], tuple[Tensor, Tensor]]
    advance_rows: AdvanceOp
    token_logprobs: Callable[[Tensor, Tensor, int], tuple[Tensor, Tensor, Tensor]]


def reference_ops() -> Ops:
    """The torch references: the CPU backend and the oracle of every fast version."""
    return Ops(
        linear=linear.linear,
        linear_parts=linear.linear_parts,
        linear_pair=linear.linear_pair,
        linear_fp32=linear.linear_fp32,
        linear_fp32_parts=linear.linear_fp32_parts,
        add_parts=parts.add_parts,
        norm_activation=fused.norm_activation,
        rope_angles=rope.rope_angles,
        latent_inputs=fused.latent_inputs,
        attention_queries=fused.attention_queries,
        index_query=fused.index_query,
        head_values=fused.head_values,
        route=moe.route,
        swiglu_activation=moe.swiglu_activation,
        routed_experts=moe.routed_experts,
        pack_kv_rows=rows.pack_kv_rows,
        prefill_row_format=rows.prefill_row_format,
        convert_kv_rows=rows.convert_kv_rows,
        pack_index_keys=rows.pack_index_keys,
        quantize_index_query=rows.quantize_index_query,
        write_index_keys=rows.write_index_keys,
        read_index_keys=rows.read_index_keys,
        index_schedule=indexer.index_schedule,
        index_scores_paged=indexer.index_scores_paged,
        index_scores_contiguous=indexer.index_scores_contiguous,
        topk_positions=topk.topk_positions,
        topk_rows=topk_rows.topk_rows,
        positions_to_slots=slots.positions_to_slots,
        sparse_mla=attention.sparse_mla,
        sample=sampling.sample,
        greedy_sample=sampling.greedy_sample,
        advance_rows=sampling.advance_rows,
        token_logprobs=sampling.token_logprobs,
    )

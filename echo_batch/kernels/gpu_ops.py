"""The ops on an NVIDIA GPU: libraries where they are installed and fit, CUDA and Triton kernels for the rest."""

import dataclasses

import torch
from torch import Tensor

from echo_batch.kernels.activation import Activation
from echo_batch.kernels.cuda import indexer as cuda_indexer
from echo_batch.kernels.cuda import runtime
from echo_batch.kernels.cuda import sampling as cuda_sampling
from echo_batch.kernels.cuda import topk as cuda_topk
from echo_batch.kernels.cuda import topk_rows as cuda_topk_rows
from echo_batch.kernels.formats import IndexFormat, RowFormat
from echo_batch.kernels.libs.deep_gemm import DeepGemm, load_deep_gemm
from echo_batch.kernels.libs.flash_mla import FlashMla, load_flash_mla
from echo_batch.kernels.ops import Ops
from echo_batch.kernels.parts import Parts, Result
from echo_batch.kernels.reference import sampling as reference_sampling
from echo_batch.kernels.reference.sampling import SamplingTensors
from echo_batch.kernels.triton import (
    attention,
    fused,
    indexer,
    linear,
    moe,
    norm_rope,
    parts,
    queries,
    rows,
    sampling,
    slots,
    topk,
)
from echo_batch.kernels.weights import QuantizedWeight, Weight

_TRITON_EXPERT_TOKENS = 160
"""Up to here the routed experts only read weights, which Triton does 6 to 8 % faster than DeepGEMM (H200)."""
_TRITON_BF16_TOKENS = 8
"""Up to here FlashMLA, which has no decode kernel for bf16 rows, is slower than Triton (57 against 21 us for one)."""


@dataclasses.dataclass(frozen=True, slots=True)
class GpuLibraries:
    """What was found on this machine for one device; None: not there, or of no use on this GPU."""

    deep_gemm: DeepGemm | None
    flash_mla: FlashMla | None
    cuda_kernels: bool
    """whether kernels/cuda can be compiled and run"""
    cuda_indexer: bool = False
    """whether its indexer can, too"""


def find_libraries(device: torch.device) -> GpuLibraries:
    """Look for the optional libraries; imports what is there."""
    return GpuLibraries(
        load_deep_gemm(device), load_flash_mla(device), runtime.available(device), cuda_indexer.available(device)
    )


def cuda_ops(reference: Ops, libraries: GpuLibraries) -> Ops:
    """The fastest ops that these libraries allow; `reference` fills what has no fast version.

    Scores that DeepGEMM leaves undefined past a row's length are never looked at by `topk_positions`.
    """
    found = _Dispatch(libraries)
    return dataclasses.replace(
        reference,
        linear=found.linear,
        linear_parts=found.linear_parts,
        linear_pair=found.linear_pair,
        linear_fp32=linear.linear_fp32,
        linear_fp32_parts=linear.linear_fp32_parts,
        add_parts=parts.add_parts,
        norm_activation=norm_rope.norm_activation,
        rope_angles=norm_rope.rope_angles,
        latent_inputs=fused.latent_inputs,
        attention_queries=queries.attention_queries,
        index_query=queries.index_query,
        head_values=queries.head_values,
        route=moe.route,
        swiglu_activation=moe.swiglu_activation,
        routed_experts=found.routed_experts,
        pack_kv_rows=rows.pack_kv_rows,
        prefill_row_format=found.prefill_row_format,
        convert_kv_rows=rows.convert_kv_rows,
        pack_index_keys=rows.pack_index_keys,
        quantize_index_query=rows.quantize_index_query,
        write_index_keys=rows.write_index_keys,
        read_index_keys=rows.read_index_keys,
        index_schedule=found.index_schedule,
        index_scores_paged=found.index_scores_paged,
        index_scores_contiguous=found.index_scores_contiguous,
        topk_positions=cuda_topk.topk_positions if libraries.cuda_kernels else topk.topk_positions,
        topk_rows=found.topk_rows,
        positions_to_slots=slots.positions_to_slots,
        sparse_mla=found.sparse_mla,
        sample=found.sample,
        greedy_sample=sampling.greedy_sample,
        advance_rows=sampling.advance_rows,
    )


@dataclasses.dataclass(frozen=True, slots=True)
class _Dispatch:
    """Library or Triton, by what the arguments are: a library serves fewer shapes and formats."""

    libraries: GpuLibraries

    def linear(self, x: Activation, weight: Weight) -> Tensor:
        return parts.add_parts(self.linear_parts(x, weight))

    def linear_parts(self, x: Activation, weight: Weight) -> Tensor | Parts:
        out = self._library_linear(x, weight)
        return linear.linear_parts(x, weight) if out is None else out

    def linear_pair(self, x: Activation, weight: Weight, small: Tensor) -> tuple[Tensor | Parts, Tensor]:
        out = self._library_linear(x, weight)
        if out is None:
            return linear.linear_pair(x, weight, small)
        return out, linear.linear_fp32_parts(x.values, small)

    def _library_linear(self, x: Activation, weight: Weight) -> Tensor | None:
        """By the library, where there is one that is faster."""
        library = self.libraries.deep_gemm
        if (
            library is not None
            and isinstance(weight, QuantizedWeight)
            and library.supports(weight, x.values.dtype)
            and not linear.suits_few_rows(x.values.shape[0], *weight.shape)
        ):
            return library.linear(x, weight)
        return None

    def routed_experts(
        self,
        x: Activation,
        experts: Tensor,
        weights: Tensor,
        gate_up: Weight,
        down: Weight,
        *,
        addend: Tensor | None = None,
        dtype: torch.dtype = torch.float32,
    ) -> Result:
        library = self.libraries.deep_gemm
        if (
            library is not None
            and x.values.shape[0] > _TRITON_EXPERT_TOKENS
            and isinstance(gate_up, QuantizedWeight)
            and isinstance(down, QuantizedWeight)
            and library.supports(gate_up, x.values.dtype)
            and library.supports(down, x.values.dtype)
        ):
            return library.routed_experts(x, experts, weights, gate_up, down, addend=addend, dtype=dtype)
        return moe.routed_experts(x, experts, weights, gate_up, down, addend=addend, dtype=dtype)

    def sample(self, logits: Tensor, params: SamplingTensors) -> tuple[Tensor, Tensor]:
        if self.libraries.cuda_kernels and logits.shape[1] <= cuda_sampling.MAX_VOCAB:
            return cuda_sampling.sample(logits, params)
        return reference_sampling.sample(logits, params)

    def index_schedule(self, seq_lens: Tensor) -> Tensor | None:
        library = self.libraries.deep_gemm
        return None if library is None else library.index_schedule(seq_lens)

    def index_scores_paged(
        self,
        query: Tensor,
        weights: Tensor,
        pages: Tensor,
        block_table: Tensor,
        seq_lens: Tensor,
        fmt: IndexFormat,
        schedule: Tensor | None = None,
    ) -> Tensor:
        library = self.libraries.deep_gemm
        if library is not None and fmt.kind == "fp8" and query.shape[1] in (32, 64):
            return library.index_scores_paged(query, weights, pages, block_table, seq_lens, fmt, schedule)
        # What scores in fused prefetch, which has the library's bits but not Triton's: prefetch must change none.
        if self.libraries.cuda_indexer and cuda_indexer.supports(query.shape[1], fmt):
            return cuda_indexer.index_scores_paged(query, weights, pages, block_table, seq_lens, fmt)
        return indexer.index_scores_paged(query, weights, pages, block_table, seq_lens, fmt)

    def index_scores_contiguous(
        self, query: Tensor, weights: Tensor, keys: Tensor, row_ends: Tensor, fmt: IndexFormat
    ) -> Tensor:
        library = self.libraries.deep_gemm
        if library is not None and fmt.kind == "fp8" and query.shape[1] in (32, 64):
            return library.index_scores_contiguous(query, weights, keys, row_ends, fmt)
        return indexer.index_scores_contiguous(query, weights, keys, row_ends, fmt)

    def topk_rows(self, scores: Tensor, lengths: Tensor, out: Tensor, *, first: int = 0) -> Tensor:
        has_kernel = scores.shape[1] <= cuda_topk_rows.MAX_WIDTH and out.shape[1] <= cuda_topk_rows.MAX_TOPK
        if self.libraries.cuda_kernels and has_kernel:
            return cuda_topk_rows.topk_rows(scores, lengths, out, first=first)
        positions, kth = topk.topk_positions(scores, lengths, out.shape[1])
        out.copy_(positions if first == 0 else torch.where(positions >= 0, positions + first, -1))
        return kth

    def prefill_row_format(self, fmt: RowFormat) -> RowFormat:
        # FlashMLA's kernel for many tokens reads bf16 rows: unpacked once, not once a chunk.
        if fmt.kind != "fp8" or self.libraries.flash_mla is None:
            return fmt
        return dataclasses.replace(fmt, kind="bf16")

    def sparse_mla(self, query: Tensor, rows: Tensor, indices: Tensor, softmax_scale: float, fmt: RowFormat) -> Tensor:
        library = self.libraries.flash_mla
        is_slower = fmt.kind == "bf16" and query.shape[0] <= _TRITON_BF16_TOKENS
        if library is not None and library.supports(query, fmt) and not is_slower:
            return library.sparse_mla(query, rows, indices, softmax_scale, fmt)
        return attention.sparse_mla(query, rows, indices, softmax_scale, fmt)

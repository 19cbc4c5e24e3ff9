"""DeepGEMM (fp8 GEMMs, indexer scores) behind the contracts of the references; the one file that knows its API.

Two generations: 0.1.x (`fp8_paged_mqa_logits`, `clean_logits`) and 0.2.x (`fp8_fp4_paged_mqa_logits`, no cleaning).
Kernels are compiled at first use (nvcc): run every shape once before a graph capture. Nothing here changes DeepGEMM's
process-global settings.
"""

import importlib
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from echo_batch.kernels.activation import Activation
from echo_batch.kernels.formats import BLOCK_SIZE, IndexFormat
from echo_batch.kernels.parts import ExpertParts, Result
from echo_batch.kernels.triton.moe_layout import dispatch, dispatch_masked, expert_rows, swiglu_quantize_rows
from echo_batch.kernels.triton.quant import quantized
from echo_batch.kernels.weights import QUANT_BLOCK, QuantizedWeight, Weight

_ROWS_PER_BLOCK = 128
"""Largest row block of its kernels. A masked GEMM stores whole blocks: an expert's rows must be a multiple of it."""
MAX_MASKED_TOKENS = 256
"""Up to here experts get fixed row counts (masked layout); beyond, rows are packed (contiguous layout)."""


def load_deep_gemm(device: torch.device) -> "DeepGemm | None":
    """DeepGEMM if it is installed, loads and knows this GPU (Hopper or later), else None."""
    if device.type != "cuda" or torch.cuda.get_device_capability(device)[0] not in (9, 10):
        return None
    try:
        module = importlib.import_module("deep_gemm")
    except (ImportError, OSError, RuntimeError, AssertionError):
        return None
    return DeepGemm(module) if hasattr(module, "fp8_gemm_nt") else None


@dataclass(frozen=True, slots=True)
class DeepGemm:
    """Ops by the loaded module. Each method has the signature of the reference function of its name."""

    module: Any

    def index_schedule(self, seq_lens: Tensor) -> Tensor:
        """How `index_scores_paged` splits contexts seq_lens int32 [B] over multiprocessors; the same for all layers.

        Once a step, inside the graph.
        """
        return self.module.get_paged_mqa_logits_metadata(seq_lens.view(-1, 1), BLOCK_SIZE, self.module.get_num_sms())

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
        """As reference.indexer.index_scores_paged, but scores at and past seq_lens are undefined.

        query e4m3 [B, Hi, 128], weights fp32 [B, Hi], pages uint8 [num_blocks, page_bytes], block_table int32
        [B, max_blocks], seq_lens int32 [B], schedule of `index_schedule` -> fp32 [B, max_blocks * 64].
        """
        assert fmt.kind == "fp8" and query.dtype == torch.float8_e4m3fn
        max_length = block_table.shape[1] * BLOCK_SIZE
        if schedule is None:
            schedule = self.index_schedule(seq_lens)
        arguments = (
            pages.view(-1, BLOCK_SIZE, 1, fmt.row_bytes),
            weights,
            seq_lens.view(-1, 1),
            block_table,
            schedule,
            max_length,
        )
        if hasattr(self.module, "fp8_paged_mqa_logits"):
            scores: Tensor = self.module.fp8_paged_mqa_logits(query.unsqueeze(1), *arguments, clean_logits=False)
        else:
            scores = self.module.fp8_fp4_paged_mqa_logits((query.unsqueeze(1), None), *arguments)
        return scores[:, :max_length]

    def index_scores_contiguous(
        self, query: Tensor, weights: Tensor, keys: Tensor, row_ends: Tensor, fmt: IndexFormat
    ) -> Tensor:
        """As reference.indexer.index_scores_contiguous, but scores at and past row_ends are undefined.

        query e4m3 [T, Hi, 128], weights fp32 [T, Hi], keys uint8 [S, 132], row_ends int32 [T] -> fp32 [T, S].
        """
        assert fmt.kind == "fp8" and query.dtype == torch.float8_e4m3fn
        values = keys[:, : fmt.head_dim].contiguous().view(torch.float8_e4m3fn)
        scale = keys[:, fmt.head_dim :].contiguous().view(torch.float32).squeeze(1)
        starts = torch.zeros_like(row_ends)
        if hasattr(self.module, "fp8_mqa_logits"):
            scores: Tensor = self.module.fp8_mqa_logits(
                query, (values, scale), weights, starts, row_ends, clean_logits=False
            )
        else:
            scores = self.module.fp8_fp4_mqa_logits((query, None), (values, scale), weights, starts, row_ends, 0)
        return scores[:, : keys.shape[0]]

    def supports(self, weight: Weight, dtype: torch.dtype) -> bool:
        """Whether its GEMMs take this weight (2-D, or a stack of experts) with activations of this compute dtype."""
        return (
            isinstance(weight, QuantizedWeight)
            and dtype == torch.bfloat16
            and weight.data.shape[-2] % 64 == 0
            and weight.data.shape[-1] % QUANT_BLOCK == 0
        )

    def fp8_linear(self, values: Tensor, scale: Tensor, weight: QuantizedWeight, dtype: torch.dtype) -> Tensor:
        """As triton.linear.fp8_linear: quantized x (`quantize_groups`) times weight [out, in] -> [T, out] in dtype."""
        out = torch.empty(values.shape[0], weight.data.shape[0], dtype=dtype, device=values.device)
        if values.shape[0]:
            self.module.fp8_gemm_nt((values, scale), (weight.data, weight.scale), out)
        return out

    def linear(self, x: Activation, weight: QuantizedWeight) -> Tensor:
        """As reference.linear.linear for weights that it `supports`."""
        return self.fp8_linear(*quantized(x, weight.ue8m0), weight, x.values.dtype)

    def routed_experts(
        self,
        x: Activation,
        experts: Tensor,
        weights: Tensor,
        gate_up: QuantizedWeight,
        down: QuantizedWeight,
        *,
        addend: Tensor | None = None,
        dtype: torch.dtype = torch.float32,
    ) -> Result:
        """As reference.moe.routed_experts for weights that it `supports`; not added up."""
        num_tokens, width = x.values.shape
        device = x.values.device
        if num_tokens == 0:
            return torch.zeros(0, width, dtype=dtype, device=device)
        num_experts, inner = gate_up.shape[0], down.shape[2]
        masked = num_tokens <= MAX_MASKED_TOKENS
        per_expert = -(-num_tokens // _ROWS_PER_BLOCK) * _ROWS_PER_BLOCK if masked else 0
        values, scale = quantized(x, gate_up.ue8m0)
        if masked:
            rows, values, scale = dispatch_masked(values, scale, experts.contiguous(), num_experts, per_expert)
        else:
            alignment = self.module.get_mk_alignment_for_contiguous_layout()
            rows = expert_rows(experts.contiguous(), num_experts, alignment=alignment)
            values, scale = dispatch(values, scale, rows)
        # A constant for the shape: the launch must not depend on the routing.
        expected = max(1, min(num_tokens, experts.numel() // num_experts))
        hidden = torch.empty(rows.num_rows, 2 * inner, dtype=x.values.dtype, device=device)
        self._grouped(values, scale, gate_up, hidden, rows.experts_of_rows, per_expert, expected)
        values, scale = swiglu_quantize_rows(hidden, rows, per_expert, ue8m0=down.ue8m0)
        del hidden  # with many tokens the two largest tensors should not be there at once
        partials = torch.empty(rows.num_rows, width, dtype=x.values.dtype, device=device)
        self._grouped(values, scale, down, partials, rows.experts_of_rows, per_expert, expected)
        addend = None if addend is None else addend.contiguous()
        return ExpertParts(partials, rows.row_of_pair.view_as(experts), weights.contiguous(), addend, dtype)

    def _grouped(
        self,
        values: Tensor,
        scale: Tensor,
        weight: QuantizedWeight,
        out: Tensor,
        experts_of_rows: Tensor,
        per_expert: int,
        expected: int,
    ) -> None:
        """out [num_rows, N] = values [num_rows, K] times each row's expert's matrix [N, K] transposed."""
        stack = (weight.data, weight.scale)
        if per_expert == 0:
            self.module.m_grouped_fp8_gemm_nt_contiguous((values, scale), stack, out, experts_of_rows)
            return
        self.module.fp8_m_grouped_gemm_nt_masked(
            (values.unflatten(0, (-1, per_expert)), scale),
            stack,
            out.unflatten(0, (-1, per_expert)),
            experts_of_rows,
            expected,
        )

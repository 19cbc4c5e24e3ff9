# mypy: allow-untyped-defs, allow-incomplete-defs
"""Rows of (token, slot) pairs grouped by expert, for libraries' grouped GEMMs: where each pair goes, and the moves.

Two layouts. Masked: every expert has `rows_per_expert` rows, the first `counts[e]` of them in use. Contiguous: an
expert's rows follow the previous expert's, from a multiple of `alignment`; `layout` names the expert of every row, -1
where a row is unused. Pairs of one expert keep their order, so results do not depend on the order of execution.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from echo_batch.kernels.triton.quant import quantize_last
from echo_batch.kernels.weights import QUANT_BLOCK


class ExpertRows(NamedTuple):
    """Where the pairs go."""

    row_of_pair: Tensor
    """int32 [T * k]; -1: no expert"""
    experts_of_rows: Tensor
    """masked: counts int32 [E]; contiguous: layout int32 [num_rows]"""
    num_rows: int


@triton.jit
def _expert_rows_kernel(
    experts_ptr,
    row_of_pair_ptr,
    layout_ptr,
    num_pairs,
    num_experts,
    num_rows,
    ALIGNMENT: tl.constexpr,
    EXPERTS_P2: tl.constexpr,
    CHUNK: tl.constexpr,
):
    """Program e places the pairs of expert e."""
    expert = tl.program_id(0)
    lane = tl.arange(0, CHUNK)
    bins = tl.arange(0, EXPERTS_P2)
    counts = tl.zeros((EXPERTS_P2,), tl.int32)
    for start in range(0, num_pairs, CHUNK):
        chosen = tl.load(experts_ptr + start + lane, mask=start + lane < num_pairs, other=-1)
        counts += tl.histogram(tl.maximum(chosen, 0), EXPERTS_P2, mask=chosen >= 0)
    padded = (counts + ALIGNMENT - 1) // ALIGNMENT * ALIGNMENT
    first = tl.sum(tl.where(bins < expert, padded, 0), 0)
    position = first
    for start in range(0, num_pairs, CHUNK):
        inside = start + lane < num_pairs
        chosen = tl.load(experts_ptr + start + lane, mask=inside, other=-2)
        mine = chosen == expert
        rank = tl.cumsum(mine.to(tl.int32), 0) - 1
        tl.store(row_of_pair_ptr + start + lane, position + rank, mask=mine)
        # Pairs without expert are the last program's to mark.
        unused = chosen == tl.where(expert == num_experts - 1, -1, -3)
        tl.store(row_of_pair_ptr + start + lane, tl.full((CHUNK,), -1, tl.int32), mask=unused)
        position += tl.sum(mine.to(tl.int32), 0)
    end = first + (position - first + ALIGNMENT - 1) // ALIGNMENT * ALIGNMENT
    # The last expert also marks everything behind its rows.
    end = tl.where(expert == num_experts - 1, num_rows, end)
    for start in range(first, end, CHUNK):
        row = start + lane
        tl.store(layout_ptr + row, tl.where(row < position, expert, -1), mask=row < end)


def expert_rows(experts: Tensor, num_experts: int, *, alignment: int) -> ExpertRows:
    """experts int32 [T, k] (-1 = none) -> the contiguous layout."""
    assert experts.is_contiguous()
    num_pairs = experts.numel()
    # Every expert with a pair may waste all but one row of a block.
    num_rows = triton.cdiv(num_pairs + min(num_pairs, num_experts) * (alignment - 1), alignment) * alignment
    row_of_pair = torch.empty(num_pairs, dtype=torch.int32, device=experts.device)
    layout = torch.empty(num_rows, dtype=torch.int32, device=experts.device)
    _expert_rows_kernel[(num_experts,)](
        experts,
        row_of_pair,
        layout,
        num_pairs,
        num_experts,
        num_rows,
        ALIGNMENT=alignment,
        EXPERTS_P2=max(32, triton.next_power_of_2(num_experts)),
        CHUNK=_chunk(num_pairs),
        num_warps=4,
    )
    return ExpertRows(row_of_pair, layout, num_rows)


def _chunk(num_pairs: int) -> int:
    return min(1024, max(128, triton.next_power_of_2(num_pairs)))


def empty_row_scales(num_rows: int, num_groups: int, rows_per_expert: int, device: torch.device) -> Tensor:
    """Scales of grouped rows as DeepGEMM's TMA reads them: group-major over all rows, or over each expert's rows.

    fp32 [num_rows, num_groups], or [E, rows_per_expert, num_groups] if rows_per_expert > 0 (masked).
    """
    if rows_per_expert == 0:
        assert num_rows % 4 == 0
        return torch.empty(num_groups, num_rows, dtype=torch.float32, device=device).T
    num_experts = num_rows // rows_per_expert
    return torch.empty(num_experts, num_groups, rows_per_expert, dtype=torch.float32, device=device).transpose(1, 2)


@triton.jit
def _scale_address(row, group, rows_per_expert, num_groups, num_rows, MASKED: tl.constexpr):
    if MASKED:
        return ((row // rows_per_expert) * num_groups + group) * rows_per_expert + row % rows_per_expert
    return group * num_rows + row


@triton.jit
def _dispatch_kernel(
    values_ptr,
    scale_ptr,
    row_of_pair_ptr,
    out_ptr,
    out_scale_ptr,
    num_slots,
    width,
    num_groups,
    scale_row_stride,
    scale_group_stride,
    num_rows,
    GROUPS: tl.constexpr,
    GROUP: tl.constexpr,
):
    pair = tl.program_id(0)
    token = (pair // num_slots).to(tl.int64)
    row = tl.load(row_of_pair_ptr + pair).to(tl.int64)
    if row >= 0:
        group = tl.program_id(1) * GROUPS + tl.arange(0, GROUPS)
        inside = group < num_groups
        column = group[:, None] * GROUP + tl.arange(0, GROUP)[None, :]
        values = tl.load(values_ptr + token * width + column, mask=inside[:, None])
        scale = tl.load(scale_ptr + token * scale_row_stride + group * scale_group_stride, mask=inside)
        tl.store(out_ptr + row * width + column, values, mask=inside[:, None])
        tl.store(out_scale_ptr + _scale_address(row, group, 0, num_groups, num_rows, False), scale, mask=inside)


def dispatch(values: Tensor, scale: Tensor, rows: ExpertRows) -> tuple[Tensor, Tensor]:
    """Copy quantized tokens to their experts' rows in the contiguous layout.

    values e4m3 [T, D], scale fp32 [T, D / 128] (any strides) -> e4m3 [num_rows, D] and its scales
    (`empty_row_scales`); unused rows are not written.
    """
    num_tokens, width = values.shape
    num_groups, num_pairs = width // QUANT_BLOCK, rows.row_of_pair.shape[0]
    out = torch.empty(rows.num_rows, width, dtype=torch.uint8, device=values.device)
    out_scale = empty_row_scales(rows.num_rows, num_groups, 0, values.device)
    _dispatch_kernel[(num_pairs, triton.cdiv(num_groups, 32))](
        values.view(torch.uint8),
        scale,
        rows.row_of_pair,
        out,
        out_scale,
        num_pairs // num_tokens,
        width,
        num_groups,
        scale.stride(0),
        scale.stride(1),
        rows.num_rows,
        GROUPS=32,
        GROUP=QUANT_BLOCK,
        num_warps=4,
    )
    return out.view(torch.float8_e4m3fn), out_scale


@triton.jit
def _dispatch_masked_kernel(
    values_ptr,
    scale_ptr,
    experts_ptr,
    row_of_pair_ptr,
    counts_ptr,
    out_ptr,
    out_scale_ptr,
    num_pairs,
    num_slots,
    width,
    num_groups,
    scale_row_stride,
    scale_group_stride,
    rows_per_expert,
    GROUPS: tl.constexpr,
    GROUP: tl.constexpr,
    CHUNK: tl.constexpr,
):
    """A program for each pair, and behind them one for each expert, which counts its pairs."""
    program = tl.program_id(0)
    is_pair = program < num_pairs
    expert = tl.load(experts_ptr + program, mask=is_pair, other=0)
    expert = tl.where(is_pair, expert, program - num_pairs)
    token = (program // num_slots).to(tl.int64)
    group = tl.arange(0, GROUPS)
    # What is copied is under way while the pair looks for its place.
    inside = group < tl.where(is_pair & (expert >= 0), num_groups, 0)
    column = group[:, None] * GROUP + tl.arange(0, GROUP)[None, :]
    values = tl.load(values_ptr + token * width + column, mask=inside[:, None])
    scale = tl.load(scale_ptr + token * scale_row_stride + group * scale_group_stride, mask=inside)
    lane = tl.arange(0, CHUNK)
    end = tl.minimum(program, num_pairs)
    before = tl.zeros((CHUNK,), tl.int32)
    for start in range(0, end, CHUNK):
        chosen = tl.load(experts_ptr + start + lane, mask=start + lane < end, other=-1)
        before += (chosen == expert).to(tl.int32)
    rank = tl.sum(before, 0)
    row = expert.to(tl.int64) * rows_per_expert + rank
    tl.store(row_of_pair_ptr + program, tl.where(expert >= 0, row, -1).to(tl.int32), mask=is_pair)
    tl.store(counts_ptr + program - num_pairs, rank, mask=program >= num_pairs)
    tl.store(out_ptr + row * width + column, values, mask=inside[:, None])
    at = _scale_address(row, group, rows_per_expert, num_groups, 0, True)
    tl.store(out_scale_ptr + at, scale, mask=inside)


def dispatch_masked(
    values: Tensor, scale: Tensor, experts: Tensor, num_experts: int, rows_per_expert: int
) -> tuple[ExpertRows, Tensor, Tensor]:
    """The masked layout of experts int32 [T, k] (-1 = none), and the quantized tokens in it, as `dispatch`. One launch.

    rows_per_expert is at least T: no token has an expert twice. Every pair counts those before it, so with thousands of
    them a launch that only places them (`expert_rows`) is better.
    """
    (num_tokens, width), num_pairs = values.shape, experts.numel()
    assert rows_per_expert >= num_tokens > 0 and experts.is_contiguous()
    num_groups, num_rows, device = width // QUANT_BLOCK, num_experts * rows_per_expert, values.device
    row_of_pair = torch.empty(num_pairs, dtype=torch.int32, device=device)
    counts = torch.empty(num_experts, dtype=torch.int32, device=device)
    out = torch.empty(num_rows, width, dtype=torch.uint8, device=device)
    out_scale = empty_row_scales(num_rows, num_groups, rows_per_expert, device)
    _dispatch_masked_kernel[(num_pairs + num_experts,)](
        values.view(torch.uint8),
        scale,
        experts,
        row_of_pair,
        counts,
        out,
        out_scale,
        num_pairs,
        num_pairs // num_tokens,
        width,
        num_groups,
        scale.stride(0),
        scale.stride(1),
        rows_per_expert,
        GROUPS=triton.next_power_of_2(num_groups),
        GROUP=QUANT_BLOCK,
        CHUNK=_chunk(num_pairs),
        num_warps=4,
    )
    return ExpertRows(row_of_pair, counts, num_rows), out.view(torch.float8_e4m3fn), out_scale


@triton.jit
def _swiglu_rows_kernel(
    x_ptr,
    row_of_pair_ptr,
    out_ptr,
    out_scale_ptr,
    width,
    num_groups,
    rows_per_expert,
    num_rows,
    UE8M0: tl.constexpr,
    MASKED: tl.constexpr,
    GROUPS: tl.constexpr,
    GROUP: tl.constexpr,
):
    row = tl.load(row_of_pair_ptr + tl.program_id(0)).to(tl.int64)
    if row >= 0:
        group = tl.program_id(1) * GROUPS + tl.arange(0, GROUPS)
        inside = group < num_groups
        column = group[:, None] * GROUP + tl.arange(0, GROUP)[None, :]
        gate = tl.load(x_ptr + row * 2 * width + column, mask=inside[:, None], other=0.0).to(tl.float32)
        up = tl.load(x_ptr + row * 2 * width + width + column, mask=inside[:, None], other=0.0).to(tl.float32)
        values, scale = quantize_last(gate * tl.sigmoid(gate) * up, UE8M0)
        tl.store(out_ptr + row * width + column, values, mask=inside[:, None])
        at = _scale_address(row, group, rows_per_expert, num_groups, num_rows, MASKED)
        tl.store(out_scale_ptr + at, scale, mask=inside)


def swiglu_quantize_rows(
    gate_up: Tensor, rows: ExpertRows, rows_per_expert: int, *, ue8m0: bool
) -> tuple[Tensor, Tensor]:
    """gate_up [num_rows, 2I] -> silu(gate) * up quantized: e4m3 [num_rows, I] and its scales, for the rows in use."""
    width = gate_up.shape[1] // 2
    num_groups = width // QUANT_BLOCK
    out = torch.empty(rows.num_rows, width, dtype=torch.float8_e4m3fn, device=gate_up.device)
    out_scale = empty_row_scales(rows.num_rows, num_groups, rows_per_expert, gate_up.device)
    _swiglu_rows_kernel[(rows.row_of_pair.shape[0], triton.cdiv(num_groups, 8))](
        gate_up,
        rows.row_of_pair,
        out,
        out_scale,
        width,
        num_groups,
        rows_per_expert,
        rows.num_rows,
        UE8M0=ue8m0,
        MASKED=rows_per_expert > 0,
        GROUPS=8,
        GROUP=QUANT_BLOCK,
        num_warps=4,
    )
    return out, out_scale

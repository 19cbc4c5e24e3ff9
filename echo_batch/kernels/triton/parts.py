# mypy: allow-untyped-defs, allow-incomplete-defs
"""Results in parts: how kernels that read them add them up, and a launch that does only that."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from echo_batch.kernels.parts import ExpertParts, Parts, Result


@triton.jit
def load_sum(ptrs, part_stride, mask, NUM_PARTS: tl.constexpr):
    """The sum, in order and in fp32, of NUM_PARTS parts (1: of a result as it is). `ptrs`: into the first one."""
    total = tl.load(ptrs, mask=mask, other=0.0).to(tl.float32)
    for part in tl.static_range(1, NUM_PARTS):
        total += tl.load(ptrs + part * part_stride, mask=mask, other=0.0)
    return total


@triton.jit
def load_expert_sum(
    values_ptr,
    rows_ptr,
    weights_ptr,
    addend_ptr,
    token,
    column,
    width,
    HAS_ADDEND: tl.constexpr,
    NUM_SLOTS: tl.constexpr,
):
    """Some columns of a token (int64) of ExpertParts, added up in fp32."""
    total = tl.zeros(column.shape, tl.float32)
    for slot in tl.static_range(NUM_SLOTS):
        pair = token * NUM_SLOTS + slot
        # Nothing was computed for a pair without expert: whatever lies there must not be read.
        row = tl.load(rows_ptr + pair).to(tl.int64)
        weight = tl.load(weights_ptr + pair)
        inside = column < tl.where(row >= 0, width, 0)
        value = tl.load(values_ptr + row * width + column, mask=inside, other=0.0).to(tl.float32)
        total += tl.where(row >= 0, weight, 0.0) * value
    if HAS_ADDEND:
        total += tl.load(addend_ptr + token * width + column, mask=column < width, other=0.0).to(tl.float32)
    return total


@triton.jit
def _add_parts_kernel(
    parts_ptr,
    out_ptr,
    width,
    row_stride,
    part_stride,
    NUM_PARTS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    total = load_sum(parts_ptr + row * row_stride + column, part_stride, column < width, NUM_PARTS)
    tl.store(out_ptr + row * width + column, total.to(out_ptr.dtype.element_ty), mask=column < width)


@triton.jit
def _combine_kernel(
    values_ptr,
    rows_ptr,
    weights_ptr,
    addend_ptr,
    out_ptr,
    width,
    HAS_ADDEND: tl.constexpr,
    NUM_SLOTS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    total = load_expert_sum(values_ptr, rows_ptr, weights_ptr, addend_ptr, token, column, width, HAS_ADDEND, NUM_SLOTS)
    tl.store(out_ptr + token * width + column, total.to(out_ptr.dtype.element_ty), mask=column < width)


def add_parts(result: Result) -> Tensor:
    """The result [T, D] added up; as reference.parts.add_parts."""
    if isinstance(result, Tensor):
        return result
    values, block = result.values, 1024
    if isinstance(result, Parts):
        num_tokens, width = values.shape[1:]
        out = torch.empty(num_tokens, width, dtype=result.dtype, device=values.device)
        assert values.stride(2) == 1
        if num_tokens:
            _add_parts_kernel[(num_tokens, triton.cdiv(width, block))](
                values,
                out,
                width,
                values.stride(1),
                values.stride(0),
                NUM_PARTS=values.shape[0],
                BLOCK=block,
                num_warps=4,
            )
        return out
    num_tokens, num_slots = result.rows.shape
    width = values.shape[1]
    out = torch.empty(num_tokens, width, dtype=result.dtype, device=values.device)
    if num_tokens:
        rows, weights, addend = expert_tensors(result)
        _combine_kernel[(num_tokens, triton.cdiv(width, block))](
            values,
            rows,
            weights,
            out if addend is None else addend,
            out,
            width,
            HAS_ADDEND=addend is not None,
            NUM_SLOTS=num_slots,
            BLOCK=block,
            num_warps=4,
        )
    return out


def expert_tensors(parts: ExpertParts) -> tuple[Tensor, Tensor, Tensor | None]:
    """Rows, weights and addend, which kernels read without strides."""
    assert parts.values.is_contiguous() and parts.rows.is_contiguous() and parts.weights.is_contiguous()
    assert parts.addend is None or parts.addend.is_contiguous()
    return parts.rows, parts.weights, parts.addend

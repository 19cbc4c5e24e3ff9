# mypy: allow-untyped-defs, allow-incomplete-defs
"""Block-scaled fp8 linear layers in Triton (spec section 4): a scale per 1 x 128 activations and 128 x 128 weights.

For GPUs or installs without DeepGEMM. Products of one 128-wide block of the inner dimension are summed by the tensor
cores, blocks are scaled and summed in fp32. Few rows leave most of the GPU idle, so the inner dimension is then split
over programs; the partial sums are added in a fixed order.
"""

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor

from echo_batch.kernels.activation import Activation
from echo_batch.kernels.triton.quant import quantized
from echo_batch.kernels.weights import QUANT_BLOCK, QuantizedWeight, Weight

_TARGET_PROGRAMS = 264
"""Two programs for each of an H200's 132 multiprocessors."""


@triton.jit
def _fp8_linear_kernel(
    x_ptr,
    x_scale_ptr,
    weight_ptr,
    weight_scale_ptr,
    out_ptr,
    num_rows,
    num_columns,
    inner,
    x_scale_row_stride,
    x_scale_group_stride,
    blocks_per_split,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    GROUP: tl.constexpr,
):
    row = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    column = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    split = tl.program_id(2)
    k = tl.arange(0, GROUP)
    num_blocks = inner // GROUP
    row_inside = row < num_rows
    column_inside = column < num_columns
    x_ptrs = x_ptr + row.to(tl.int64)[:, None] * inner + k[None, :]
    weight_ptrs = weight_ptr + column.to(tl.int64)[None, :] * inner + k[:, None]
    x_scale_ptrs = x_scale_ptr + row.to(tl.int64) * x_scale_row_stride
    weight_scale_ptr += ((tl.program_id(1) * BLOCK_N) // GROUP) * num_blocks
    total = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for block in range(split * blocks_per_split, tl.minimum((split + 1) * blocks_per_split, num_blocks)):
        x = tl.load(x_ptrs + block * GROUP, mask=row_inside[:, None], other=0.0)
        weight = tl.load(weight_ptrs + block * GROUP, mask=column_inside[None, :], other=0.0)
        x_scale = tl.load(x_scale_ptrs + block * x_scale_group_stride, mask=row_inside, other=0.0)
        scale = x_scale * tl.load(weight_scale_ptr + block)
        total += tl.dot(x, weight) * scale[:, None]
    out_ptr += split.to(tl.int64) * num_rows * num_columns
    at = row.to(tl.int64)[:, None] * num_columns + column[None, :]
    tl.store(out_ptr + at, total.to(out_ptr.dtype.element_ty), mask=row_inside[:, None] & column_inside[None, :])


@triton.jit
def _add_splits_kernel(parts_ptr, out_ptr, size, NUM_SPLITS: tl.constexpr, BLOCK: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    total = tl.zeros((BLOCK,), tl.float32)
    for split in tl.static_range(NUM_SPLITS):
        total += tl.load(parts_ptr + split * size + at, mask=at < size, other=0.0)
    tl.store(out_ptr + at, total.to(out_ptr.dtype.element_ty), mask=at < size)


def num_splits(num_rows: int, num_columns: int, inner: int, block_m: int, block_n: int) -> int:
    """Parts that the inner dimension is cut into, so that enough programs run; a pure function of the shape."""
    programs = triton.cdiv(num_rows, block_m) * triton.cdiv(num_columns, block_n)
    return max(1, min(_TARGET_PROGRAMS // programs, inner // QUANT_BLOCK // 4, 16))


def fp8_linear(values: Tensor, scale: Tensor, weight: QuantizedWeight, dtype: torch.dtype) -> Tensor:
    """Quantized x (e4m3 [T, in], fp32 scales [T, in / 128] in any strides) times weight [out, in] -> [T, out]."""
    num_rows, inner = values.shape
    num_columns = weight.data.shape[0]
    assert values.is_contiguous() and weight.data.is_contiguous() and weight.scale.is_contiguous()
    assert weight.data.shape[1] == inner and inner % QUANT_BLOCK == 0
    out = torch.empty(num_rows, num_columns, dtype=dtype, device=values.device)
    if num_rows == 0:
        return out
    block_m = 16 if num_rows <= 16 else 32 if num_rows <= 32 else 64 if num_rows <= 512 else 128
    block_n = 64 if num_rows <= 64 else 128
    splits = num_splits(num_rows, num_columns, inner, block_m, block_n)
    blocks = inner // QUANT_BLOCK
    target = out
    if splits > 1:
        target = torch.empty(splits, num_rows, num_columns, dtype=torch.float32, device=values.device)
    _fp8_linear_kernel[(triton.cdiv(num_rows, block_m), triton.cdiv(num_columns, block_n), splits)](
        values,
        scale,
        weight.data,
        weight.scale,
        target,
        num_rows,
        num_columns,
        inner,
        scale.stride(0),
        scale.stride(1),
        triton.cdiv(blocks, splits),
        BLOCK_M=block_m,
        BLOCK_N=block_n,
        GROUP=QUANT_BLOCK,
        num_warps=8 if block_m == 128 else 4,
        num_stages=4,
    )
    if splits > 1:
        size = num_rows * num_columns
        _add_splits_kernel[(triton.cdiv(size, 1024),)](target, out, size, NUM_SPLITS=splits, BLOCK=1024, num_warps=4)
    return out


def linear(x: Activation, weight: Weight) -> Tensor:
    """x [T, in] times weight [out, in] transposed -> [T, out] in the compute dtype; as reference.linear.linear."""
    if isinstance(weight, QuantizedWeight):
        return fp8_linear(*quantized(x, weight.ue8m0), weight, x.values.dtype)
    return F.linear(x.values, weight)


def linear_fp32(x: Tensor, weight: Tensor) -> Tensor:
    """x [T, in] (fp32 or bf16), weight [out, in] (fp32 or bf16) -> fp32 [T, out], exact products summed in fp32."""
    if x.is_cuda and x.dtype == weight.dtype == torch.bfloat16:
        return torch.mm(x, weight.T, out_dtype=torch.float32)
    return F.linear(x.float(), weight.float())

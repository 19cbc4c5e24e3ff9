# mypy: allow-untyped-defs, allow-incomplete-defs
"""Linear layers in Triton: block-scaled fp8 (spec section 4), and small bf16 ones with fp32 results.

fp8: a scale per 1 x 128 activations and 128 x 128 weights. Products of one 128-wide block of the inner dimension are
summed by the tensor cores, blocks are scaled and summed in fp32. Few rows leave most of the GPU idle, so the inner
dimension is then split over programs; the partial sums are added in a fixed order, by whoever reads them
(`linear_parts`) or by a launch of its own. For GPUs or installs without DeepGEMM, and for few rows where it beats
DeepGEMM (`suits_few_rows`).
"""

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor

from echo_batch.kernels.activation import Activation
from echo_batch.kernels.parts import Parts
from echo_batch.kernels.triton.parts import add_parts
from echo_batch.kernels.triton.quant import dot_type, quantized
from echo_batch.kernels.triton.stages import stages_that_fit
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
def _few_rows_part(
    column_block,
    split,
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
    STAGES: tl.constexpr,
):
    """All rows in one program, the weight as the left operand: that is the side of which tensor cores want 64 rows.

    Without masks on what is loaded (which would cost a pass through registers): places outside read the last row or
    column again, and are not stored.
    """
    column = column_block * BLOCK_N + tl.arange(0, BLOCK_N)
    row = tl.arange(0, BLOCK_M)
    k = tl.arange(0, GROUP)
    num_blocks = inner // GROUP
    read_row = tl.minimum(row, num_rows - 1)
    read_column = tl.minimum(column, num_columns - 1).to(tl.int64)
    x_ptrs = x_ptr + read_row[None, :] * inner + k[:, None]
    weight_ptrs = weight_ptr + read_column[:, None] * inner + k[None, :]
    x_scale_ptrs = x_scale_ptr + read_row * x_scale_row_stride
    weight_scale_ptr += ((column_block * BLOCK_N) // GROUP) * num_blocks
    total = tl.zeros((BLOCK_N, BLOCK_M), tl.float32)
    first = split * blocks_per_split
    # Stages of this loop, not of the launch: so the loads of the scales are pipelined too (10.2 against 10.9 us for
    # 2240 x 7168, 16.7 against 19.4 for 32768 x 1536 on an H200).
    for block in tl.range(first, tl.minimum(first + blocks_per_split, num_blocks), num_stages=STAGES):
        weight = tl.load(weight_ptrs + block * GROUP)
        x = tl.load(x_ptrs + block * GROUP)
        scale = tl.load(x_scale_ptrs + block * x_scale_group_stride) * tl.load(weight_scale_ptr + block)
        total += tl.dot(weight, x) * scale[None, :]
    out_ptr += split.to(tl.int64) * num_rows * num_columns
    at = row.to(tl.int64)[None, :] * num_columns + column[:, None]
    inside = (row < num_rows)[None, :] & (column < num_columns)[:, None]
    tl.store(out_ptr + at, total.to(out_ptr.dtype.element_ty), mask=inside)


@triton.jit
def _few_rows_kernel(
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
    STAGES: tl.constexpr,
):
    _few_rows_part(
        tl.program_id(0),
        tl.program_id(1),
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
        BLOCK_M,
        BLOCK_N,
        GROUP,
        STAGES,
    )


@triton.jit
def _fp32_part(
    column_block,
    part,
    row_block,
    x_ptr,
    weight_ptr,
    out_ptr,
    num_rows,
    num_columns,
    inner,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCKS: tl.constexpr,
    COMPUTE: tl.constexpr,
):
    """Rows and columns of one program of `linear_fp32_parts`, for BLOCKS blocks of the inner dimension."""
    column = column_block * BLOCK_N + tl.arange(0, BLOCK_N)
    row = row_block * BLOCK_M + tl.arange(0, BLOCK_M)
    read_row = tl.minimum(row, num_rows - 1).to(tl.int64)
    read_column = tl.minimum(column, num_columns - 1)
    total = tl.zeros((BLOCK_N, BLOCK_M), tl.float32)
    for block in range(BLOCKS):
        k = (part * BLOCKS + block) * BLOCK_K + tl.arange(0, BLOCK_K)
        inside = k < inner
        weight = tl.load(weight_ptr + read_column[:, None] * inner + k[None, :], mask=inside[None, :], other=0.0)
        x = tl.load(x_ptr + read_row[None, :] * inner + k[:, None], mask=inside[:, None], other=0.0)
        total += tl.dot(weight.to(COMPUTE), x.to(COMPUTE), input_precision="ieee")
    at = (part * num_rows + row.to(tl.int64))[None, :] * num_columns + column[:, None]
    tl.store(out_ptr + at, total, mask=(row < num_rows)[None, :] & (column < num_columns)[:, None])


@triton.jit
def _parts_kernel(
    x_ptr,
    weight_ptr,
    out_ptr,
    num_rows,
    num_columns,
    inner,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCKS: tl.constexpr,
    COMPUTE: tl.constexpr,
):
    _fp32_part(
        tl.program_id(0),
        tl.program_id(1),
        tl.program_id(2),
        x_ptr,
        weight_ptr,
        out_ptr,
        num_rows,
        num_columns,
        inner,
        BLOCK_M,
        BLOCK_N,
        BLOCK_K,
        BLOCKS,
        COMPUTE,
    )


@triton.jit
def _pair_kernel(
    x_ptr,
    x_scale_ptr,
    weight_ptr,
    weight_scale_ptr,
    out_ptr,
    values_ptr,
    small_ptr,
    small_out_ptr,
    num_rows,
    num_columns,
    inner,
    x_scale_row_stride,
    x_scale_group_stride,
    blocks_per_split,
    column_blocks,
    num_first,
    num_small,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    GROUP: tl.constexpr,
    STAGES: tl.constexpr,
    SMALL_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCKS: tl.constexpr,
    COMPUTE: tl.constexpr,
):
    """The first `num_first` programs: the fp8 linear; the others: the one with fp32 results."""
    program = tl.program_id(0)
    if program < num_first:
        _few_rows_part(
            program % column_blocks,
            program // column_blocks,
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
            BLOCK_M,
            BLOCK_N,
            GROUP,
            STAGES,
        )
    else:
        small_blocks = tl.cdiv(num_small, SMALL_N)
        _fp32_part(
            (program - num_first) % small_blocks,
            (program - num_first) // small_blocks,
            0,
            values_ptr,
            small_ptr,
            small_out_ptr,
            num_rows,
            num_small,
            inner,
            BLOCK_M,
            SMALL_N,
            BLOCK_K,
            BLOCKS,
            COMPUTE,
        )


def num_splits(num_rows: int, num_columns: int, inner: int, block_m: int, block_n: int) -> int:
    """Parts that the inner dimension is cut into, so that enough programs run; a pure function of the shape."""
    programs = triton.cdiv(num_rows, block_m) * triton.cdiv(num_columns, block_n)
    return max(1, min(_TARGET_PROGRAMS // programs, inner // QUANT_BLOCK // 4, 16))


FEW_ROWS = 32
"""Up to here all rows of a linear fit into one program."""


def suits_few_rows(num_rows: int, num_columns: int, inner: int) -> bool:
    """Whether the kernel for few rows is faster than DeepGEMM's at this shape (measured on an H200).

    Not where the weight is so small that its splitting over programs does not pay, nor so large that both only wait
    for memory.
    """
    blocks = triton.cdiv(num_columns, 128)
    return num_rows <= FEW_ROWS and num_columns * inner <= 140_000_000 and (blocks >= 192 or inner >= 4096)


def few_rows_splits(num_columns: int, inner: int) -> int:
    """Parts that the inner dimension is cut into by the kernel for few rows."""
    blocks = triton.cdiv(num_columns, 128)
    if blocks >= 120 or inner < 1024:
        return 1
    return 4 if inner >= 4096 else 2


def _stages(splits: int, block_m: int, device: torch.device) -> int:
    """Blocks of the inner dimension under way at once in a program of few rows; programs of split sums stay longer in
    their loop (2240 x 7168 on an H200: 7.6 us with six, 9.5 with four)."""
    return stages_that_fit(6 if splits > 1 else 4, (128 + block_m) * QUANT_BLOCK, device)


def fp8_linear(values: Tensor, scale: Tensor, weight: QuantizedWeight, dtype: torch.dtype) -> Tensor:
    """Quantized x (e4m3 [T, in], fp32 scales [T, in / 128] in any strides) times weight [out, in] -> [T, out]."""
    out = fp8_linear_parts(values, scale, weight, dtype)
    return add_parts(out) if isinstance(out, Parts) else out


def fp8_linear_parts(values: Tensor, scale: Tensor, weight: QuantizedWeight, dtype: torch.dtype) -> Tensor | Parts:
    """As `fp8_linear`, in one launch: parts where the inner dimension is split."""
    num_rows, inner = values.shape
    num_columns = weight.data.shape[0]
    assert values.is_contiguous() and weight.data.is_contiguous() and weight.scale.is_contiguous()
    assert weight.data.shape[1] == inner and inner % QUANT_BLOCK == 0
    few = num_rows <= FEW_ROWS
    block_m = (16 if num_rows <= 16 else FEW_ROWS) if few else 64 if num_rows <= 512 else 128
    block_n = 64 if not few and num_rows <= 64 else 128
    blocks = inner // QUANT_BLOCK
    splits = few_rows_splits(num_columns, inner) if few else num_splits(num_rows, num_columns, inner, block_m, block_n)
    if splits > 1:
        out = torch.empty(splits, num_rows, num_columns, dtype=torch.float32, device=values.device)
    else:
        out = torch.empty(num_rows, num_columns, dtype=dtype, device=values.device)
    sizes = (num_rows, num_columns, inner, scale.stride(0), scale.stride(1), triton.cdiv(blocks, splits))
    if few and num_rows:
        _few_rows_kernel[(triton.cdiv(num_columns, block_n), splits)](
            values,
            scale,
            weight.data,
            weight.scale,
            out,
            *sizes,
            BLOCK_M=block_m,
            BLOCK_N=block_n,
            GROUP=QUANT_BLOCK,
            STAGES=_stages(splits, block_m, values.device),
            num_warps=4,
        )
    elif num_rows:
        _fp8_linear_kernel[(triton.cdiv(num_rows, block_m), triton.cdiv(num_columns, block_n), splits)](
            values,
            scale,
            weight.data,
            weight.scale,
            out,
            *sizes,
            BLOCK_M=block_m,
            BLOCK_N=block_n,
            GROUP=QUANT_BLOCK,
            num_warps=8 if block_m == 128 else 4,
            num_stages=4,
        )
    return Parts(out, dtype) if splits > 1 else out


MAX_PARTS = 4
"""So many parts of a row a reader has room for in its registers, all loads under way at once."""


def linear(x: Activation, weight: Weight) -> Tensor:
    """x [T, in] times weight [out, in] transposed -> [T, out] in the compute dtype; as reference.linear.linear."""
    if isinstance(weight, QuantizedWeight):
        return fp8_linear(*quantized(x, weight.ue8m0), weight, x.values.dtype)
    return F.linear(x.values, weight)


def linear_parts(x: Activation, weight: Weight) -> Tensor | Parts:
    """As `linear`, in one launch for few rows; as reference.linear.linear_parts."""
    if not isinstance(weight, QuantizedWeight):
        return F.linear(x.values, weight)
    out = fp8_linear_parts(*quantized(x, weight.ue8m0), weight, x.values.dtype)
    return add_parts(out) if isinstance(out, Parts) and out.values.shape[0] > MAX_PARTS else out


def linear_fp32(x: Tensor, weight: Tensor) -> Tensor:
    """x [T, in] (fp32 or bf16), weight [out, in] (fp32 or bf16) -> fp32 [T, out], exact products summed in fp32."""
    if x.is_cuda and x.dtype == weight.dtype == torch.bfloat16:
        return torch.mm(x, weight.T, out_dtype=torch.float32)
    return F.linear(x.float(), weight.float())


PARTS_ROWS = 256
"""Up to here `linear_fp32_parts` splits the inner dimension; more rows fill the GPU without."""
_PART_N, _PART_K, _PART_BLOCKS = 64, 128, 2
"""Of one program: 112 programs for a router of 256 experts and an inner dimension of 7,168."""


def _empty_fp32_parts(x: Tensor, weight: Tensor) -> Tensor | None:
    """Where the parts of `linear_fp32_parts` go; None if there are none."""
    (num_rows, inner), num_columns = x.shape, weight.shape[0]
    if not 0 < num_rows <= PARTS_ROWS or num_columns > 512 or not x.dtype == weight.dtype == torch.bfloat16:
        return None
    assert x.is_contiguous() and weight.is_contiguous()
    num_parts = triton.cdiv(inner, _PART_K * _PART_BLOCKS)
    return torch.empty(num_parts, num_rows, num_columns, dtype=torch.float32, device=x.device)


def linear_fp32_parts(x: Tensor, weight: Tensor) -> Tensor:
    """As reference.linear.linear_fp32_parts: x [T, in], weight [out, in] -> fp32 [S, T, out].

    One launch for few rows.
    """
    out = _empty_fp32_parts(x, weight)
    if out is None:
        return linear_fp32(x, weight).unsqueeze(0)
    num_parts, num_rows, num_columns = out.shape
    block_m = 16 if num_rows <= 16 else 32 if num_rows <= 32 else 64
    _parts_kernel[(triton.cdiv(num_columns, _PART_N), num_parts, triton.cdiv(num_rows, block_m))](
        x,
        weight,
        out,
        num_rows,
        num_columns,
        x.shape[1],
        BLOCK_M=block_m,
        BLOCK_N=_PART_N,
        BLOCK_K=_PART_K,
        BLOCKS=_PART_BLOCKS,
        COMPUTE=dot_type(x),
        num_warps=4,
        num_stages=3,
    )
    return out


def linear_pair(x: Activation, weight: Weight, small: Tensor) -> tuple[Tensor | Parts, Tensor]:
    """As reference.linear.linear_pair: `linear_parts` and `linear_fp32_parts`; one launch for few rows and fp8.

    Where `weight` alone leaves multiprocessors idle, `small` then costs no time of its own.
    """
    small_out = _empty_fp32_parts(x.values, small)
    if small_out is None or x.values.shape[0] > FEW_ROWS or not isinstance(weight, QuantizedWeight):
        return linear_parts(x, weight), linear_fp32_parts(x.values, small)
    values, scale = quantized(x, weight.ue8m0)
    assert values.is_contiguous() and weight.data.is_contiguous() and weight.scale.is_contiguous()
    (num_rows, inner), num_columns = values.shape, weight.shape[0]
    splits = few_rows_splits(num_columns, inner)
    shape, dtype = (num_rows, num_columns), x.values.dtype
    if splits > 1:
        out = torch.empty(splits, *shape, dtype=torch.float32, device=values.device)
    else:
        out = torch.empty(shape, dtype=dtype, device=values.device)
    column_blocks, block_m = triton.cdiv(num_columns, 128), 16 if num_rows <= 16 else FEW_ROWS
    num_first = column_blocks * splits
    _pair_kernel[(num_first + triton.cdiv(small.shape[0], _PART_N) * small_out.shape[0],)](
        values,
        scale,
        weight.data,
        weight.scale,
        out,
        x.values,
        small,
        small_out,
        num_rows,
        num_columns,
        inner,
        scale.stride(0),
        scale.stride(1),
        triton.cdiv(inner // QUANT_BLOCK, splits),
        column_blocks,
        num_first,
        small.shape[0],
        BLOCK_M=block_m,
        BLOCK_N=128,
        GROUP=QUANT_BLOCK,
        STAGES=_stages(splits, block_m, values.device),
        SMALL_N=_PART_N,
        BLOCK_K=_PART_K,
        BLOCKS=_PART_BLOCKS,
        COMPUTE=dot_type(x.values),
        num_warps=4,
        num_stages=3,
    )
    return Parts(out, dtype) if splits > 1 else out, small_out

# mypy: allow-untyped-defs, allow-incomplete-defs
"""Norm, rotary embedding and Hadamard rotation in Triton: fp32 arithmetic, one rounding, as the references."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from echo_batch.kernels.activation import Activation
from echo_batch.kernels.parts import ExpertParts, Parts, Result
from echo_batch.kernels.triton.parts import expert_tensors, load_expert_sum, load_sum
from echo_batch.kernels.triton.quant import empty_scales, group_scale, to_fp8
from echo_batch.kernels.weights import QUANT_BLOCK


@triton.jit
def _rms_norm_kernel(
    hidden_ptr,
    delta_ptr,
    delta_rows_ptr,
    delta_weights_ptr,
    addend_ptr,
    weight_ptr,
    sum_ptr,
    normed_ptr,
    values_ptr,
    scale_ptr,
    width,
    hidden_stride,
    delta_stride,
    delta_part_stride,
    scale_row_stride,
    scale_group_stride,
    eps,
    NUM_PARTS: tl.constexpr,
    NUM_SLOTS: tl.constexpr,
    HAS_ADDEND: tl.constexpr,
    QUANTIZE: tl.constexpr,
    UE8M0: tl.constexpr,
    WIDTH_P2: tl.constexpr,
    GROUP: tl.constexpr,
):
    """One row a program. What is added: NUM_PARTS parts, or NUM_SLOTS experts' results; nothing if both are 0."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, WIDTH_P2)
    inside = column < width
    dtype = hidden_ptr.dtype.element_ty
    # All loads first: none is moved over a store or the barriers of a reduction.
    weight = tl.load(weight_ptr + column, mask=inside, other=0.0).to(tl.float32)
    x = tl.load(hidden_ptr + row * hidden_stride + column, mask=inside, other=0.0).to(tl.float32)
    if NUM_PARTS > 0:
        delta = load_sum(delta_ptr + row * delta_stride + column, delta_part_stride, inside, NUM_PARTS)
        x += delta.to(dtype).to(tl.float32)
    if NUM_SLOTS > 0:
        delta = load_expert_sum(
            delta_ptr, delta_rows_ptr, delta_weights_ptr, addend_ptr, row, column, width, HAS_ADDEND, NUM_SLOTS
        )
        x += delta.to(dtype).to(tl.float32)
    if NUM_PARTS + NUM_SLOTS > 0:
        tl.store(sum_ptr + row * width + column, x.to(dtype), mask=inside)
    mean_square = tl.math.div_rn(tl.sum(x * x, 0), width.to(tl.float32))
    normed = (weight * (x * tl.math.rsqrt(mean_square + eps))).to(normed_ptr.dtype.element_ty)
    tl.store(normed_ptr + row * width + column, normed, mask=inside)
    if QUANTIZE:
        # Of the rounded norm: a separate quantization of the result gives the same bits.
        grouped = tl.reshape(normed.to(tl.float32), (WIDTH_P2 // GROUP, GROUP))
        scale = group_scale(tl.max(tl.abs(grouped), 1), UE8M0)
        values = to_fp8(grouped, tl.broadcast_to(scale[:, None], grouped.shape), UE8M0)
        tl.store(values_ptr + row * width + column, tl.reshape(values, (WIDTH_P2,)), mask=inside)
        group = tl.arange(0, WIDTH_P2 // GROUP)
        at = row * scale_row_stride + group.to(tl.int64) * scale_group_stride
        tl.store(scale_ptr + at, scale, mask=group * GROUP < width)


def norm_activation(
    hidden: Tensor,
    delta: Result | None,
    weight: Tensor,
    eps: float,
    ue8m0: bool | None,
    out: Activation | None = None,
) -> tuple[Tensor, Activation]:
    """(hidden [T, D], delta [T, D] | None, weight fp32 [D]) -> (their sum rounded, norm of the fp32 sum). One launch.

    With `ue8m0` not None the norm is quantized too. `out` [T, D] (contiguous values) receives the norm.
    """
    num_rows, width = hidden.shape
    assert hidden.stride(1) == 1
    total = hidden if delta is None else torch.empty(hidden.shape, dtype=hidden.dtype, device=hidden.device)
    addends, sizes = _addends(hidden, delta)
    values = scale = None
    if out is not None:
        normed, values, scale = out
        assert normed.shape == hidden.shape and normed.is_contiguous() and (values is None or values.is_contiguous())
        assert (values is None) == (scale is None) == (ue8m0 is None)
    else:
        normed = torch.empty(num_rows, width, dtype=hidden.dtype, device=hidden.device)
    if ue8m0 is not None and out is None:
        assert width % QUANT_BLOCK == 0, width
        values = torch.empty(num_rows, width, dtype=torch.float8_e4m3fn, device=hidden.device)
        scale = empty_scales(num_rows, width // QUANT_BLOCK, hidden.device)
    if num_rows:
        width_p2 = max(QUANT_BLOCK, triton.next_power_of_2(width))
        _rms_norm_kernel[(num_rows,)](
            hidden,
            *addends,
            weight,
            total,
            normed,
            normed if values is None else values,
            weight if scale is None else scale,
            width,
            hidden.stride(0),
            scale_row_stride=0 if scale is None else scale.stride(0),
            scale_group_stride=0 if scale is None else scale.stride(1),
            eps=eps,
            **sizes,
            QUANTIZE=ue8m0 is not None,
            UE8M0=bool(ue8m0),
            WIDTH_P2=width_p2,
            GROUP=QUANT_BLOCK,
            num_warps=min(16, max(1, width_p2 // 512)),
        )
    return total, Activation(normed, values, scale)


def _addends(hidden: Tensor, delta: Result | None) -> tuple[tuple[Tensor, ...], dict[str, int | bool]]:
    """The norm kernel's arguments for what is added: values, rows, weights, addend; and how they are laid out."""
    sizes = dict(delta_stride=0, delta_part_stride=0, NUM_PARTS=0, NUM_SLOTS=0, HAS_ADDEND=False)
    if delta is None:
        return (hidden,) * 4, sizes
    if isinstance(delta, ExpertParts):
        assert delta.dtype == hidden.dtype and delta.rows.shape[0] == hidden.shape[0]
        rows, weights, addend = expert_tensors(delta)
        sizes |= dict(NUM_SLOTS=rows.shape[1], HAS_ADDEND=addend is not None)
        return (delta.values, rows, weights, hidden if addend is None else addend), sizes
    values = delta.values if isinstance(delta, Parts) else delta.unsqueeze(0)
    assert values.stride(2) == 1 and values.shape[1:] == hidden.shape
    assert (delta.dtype if isinstance(delta, Parts) else values.dtype) == hidden.dtype
    sizes |= dict(delta_stride=values.stride(1), delta_part_stride=values.stride(0), NUM_PARTS=values.shape[0])
    return (values, hidden, hidden, hidden), sizes


@triton.jit
def _angles_kernel(positions_ptr, frequencies_ptr, cos_ptr, sin_ptr, half, HALF_P2: tl.constexpr):
    row = tl.program_id(0)
    lane = tl.arange(0, HALF_P2)
    inside = lane < half
    position = tl.load(positions_ptr + row).to(tl.float32)
    angle = position * tl.load(frequencies_ptr + lane, mask=inside, other=0.0)
    at = row.to(tl.int64) * half + lane
    tl.store(cos_ptr + at, tl.cos(angle), mask=inside)
    tl.store(sin_ptr + at, tl.sin(angle), mask=inside)


def rope_angles(positions: Tensor, inverse_frequencies: Tensor) -> tuple[Tensor, Tensor]:
    """positions int [T], inverse_frequencies fp32 [d/2] -> cos, sin fp32 [T, d/2]."""
    num_rows, half = positions.shape[0], inverse_frequencies.shape[0]
    cos = torch.empty(num_rows, half, dtype=torch.float32, device=positions.device)
    sin = torch.empty_like(cos)
    if num_rows:
        _angles_kernel[(num_rows,)](
            positions, inverse_frequencies, cos, sin, half, HALF_P2=triton.next_power_of_2(half), num_warps=1
        )
    return cos, sin


@triton.jit
def rotate(x, cos, sin, INTERLEAVED: tl.constexpr, ROWS: tl.constexpr, HALF: tl.constexpr):
    """Rotate fp32 x [ROWS, 2 * HALF] by cos, sin [ROWS, HALF]; pairs (2j, 2j + 1), or (j, j + HALF)."""
    if INTERLEAVED:
        first, second = tl.split(tl.reshape(x, (ROWS, HALF, 2)))
        return tl.reshape(tl.join(first * cos - second * sin, second * cos + first * sin), (ROWS, 2 * HALF))
    first, second = tl.split(tl.permute(tl.reshape(x, (ROWS, 2, HALF)), (0, 2, 1)))
    rotated = tl.join(first * cos - second * sin, second * cos + first * sin)
    return tl.reshape(tl.permute(rotated, (0, 2, 1)), (ROWS, 2 * HALF))


@triton.jit
def _rope_kernel(
    x_ptr,
    cos_ptr,
    sin_ptr,
    out_ptr,
    num_heads,
    x_token_stride,
    x_head_stride,
    out_token_stride,
    out_head_stride,
    INTERLEAVED: tl.constexpr,
    HEADS: tl.constexpr,
    HALF: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * HEADS + tl.arange(0, HEADS)
    column = tl.arange(0, 2 * HALF)
    inside = (head < num_heads)[:, None]
    half = tl.arange(0, HALF)
    cos = tl.load(cos_ptr + token * HALF + half)[None, :]
    sin = tl.load(sin_ptr + token * HALF + half)[None, :]
    at = token * x_token_stride + head[:, None] * x_head_stride + column[None, :]
    x = tl.load(x_ptr + at, mask=inside, other=0.0).to(tl.float32)
    rotated = rotate(x, cos, sin, INTERLEAVED, HEADS, HALF)
    at = token * out_token_stride + head[:, None] * out_head_stride + column[None, :]
    tl.store(out_ptr + at, rotated.to(out_ptr.dtype.element_ty), mask=inside)


def apply_rope(x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool, out: Tensor | None = None) -> Tensor:
    """Rotate x [T, d] or [T, H, d] by cos, sin fp32 [T, d/2]; computed in fp32, returned in x's dtype.

    d is a power of two. `interleaved` rotates pairs (2j, 2j+1), otherwise pairs (j, j + d/2). `out` (same shape, unit
    stride in d; may be x itself) receives the result, for writing into a slice of a larger tensor.
    """
    assert x.stride(-1) == 1 and cos.is_contiguous() and sin.is_contiguous()
    if out is None:
        out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    assert out.stride(-1) == 1 and out.shape == x.shape
    if x.numel() == 0:
        return out
    heads = x.shape[1] if x.dim() == 3 else 1
    block = min(16, triton.next_power_of_2(heads))
    _rope_kernel[(x.shape[0], triton.cdiv(heads, block))](
        x,
        cos,
        sin,
        out,
        heads,
        x.stride(0),
        x.stride(1) if x.dim() == 3 else 0,
        out.stride(0),
        out.stride(1) if out.dim() == 3 else 0,
        INTERLEAVED=interleaved,
        HEADS=block,
        HALF=x.shape[-1] // 2,
        num_warps=1 if block == 1 else 4,
    )
    return out


@triton.jit
def hadamard_dot(x, COMPUTE: tl.constexpr, SIZE: tl.constexpr):
    """x [R, n] times Sylvester's matrix of +-1 [n, n] in fp32; exact products if COMPUTE holds x's values.

    Entry (i, j) is -1 where i and j share an odd number of bits: cheaper to compute than to load.
    """
    index = tl.arange(0, SIZE)
    shared = index[:, None] & index[None, :]
    shared ^= shared >> 8
    shared ^= shared >> 4
    shared ^= shared >> 2
    shared ^= shared >> 1
    matrix = (1 - 2 * (shared & 1)).to(tl.float32).to(COMPUTE)
    return tl.dot(x.to(COMPUTE), matrix, input_precision="ieee")

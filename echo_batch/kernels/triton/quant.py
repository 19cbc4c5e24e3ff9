# mypy: allow-untyped-defs, allow-incomplete-defs
"""fp8 quantization of activations in Triton, bitwise equal to reference.quant: one fp32 scale per 128 values."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from echo_batch.kernels.activation import Activation
from echo_batch.kernels.weights import QUANT_BLOCK


@triton.jit
def group_scale(amax, UE8M0: tl.constexpr):
    """Scale of a group by its largest magnitude (fp32): amax / 448, rounded up to a power of two if UE8M0."""
    # div_rn: Triton's plain fp32 division is not exactly rounded on GPUs.
    scale = tl.math.div_rn(tl.maximum(amax, 1e-4), tl.full(amax.shape, 448.0, tl.float32))
    if UE8M0:
        bits = scale.to(tl.int32, bitcast=True)
        scale = (((bits + 0x7FFFFF) >> 23) << 23).to(tl.float32, bitcast=True)
    return scale


@triton.jit
def to_fp8(values, scale, UE8M0: tl.constexpr):
    """fp32 values over their scale (same shape; a power of two if UE8M0) as e4m3, clipped to +-448."""
    if UE8M0:
        # Its reciprocal is exact, and a product is much cheaper than an exactly rounded quotient.
        scaled = values * ((254 << 23) - scale.to(tl.int32, bitcast=True)).to(tl.float32, bitcast=True)
    else:
        scaled = tl.math.div_rn(values, scale)
    bits = scaled.to(tl.int32, bitcast=True)
    magnitude = tl.minimum(tl.abs(scaled), 448.0)
    # Rounded to e4m3's grid before the cast, which is then exact: Triton's interpreter does not round as GPUs do.
    # Adding 1.5 * 2^23 steps leaves no bits below a step; steps are 2^-3 of a power of two, at least of 2^-6.
    exponent = tl.maximum(magnitude.to(tl.int32, bitcast=True) >> 23, 127 - 6)
    steps = (((exponent + 20) << 23) | 0x400000).to(tl.float32, bitcast=True)
    rounded = ((magnitude + steps) - steps).to(tl.int32, bitcast=True)
    return (rounded | (bits & -2147483648)).to(tl.float32, bitcast=True).to(tl.float8e4nv)


@triton.jit
def quantize_last(values, UE8M0: tl.constexpr):
    """fp32 [R, G] -> (e4m3 [R, G], fp32 [R]): one scale for each row of G values."""
    scale = group_scale(tl.max(tl.abs(values), 1), UE8M0)
    return to_fp8(values, tl.broadcast_to(scale[:, None], values.shape), UE8M0), scale


@triton.jit
def _quantize_kernel(
    x_ptr,
    product_ptr,
    values_ptr,
    scale_ptr,
    num_rows,
    width,
    x_stride,
    scale_row_stride,
    scale_group_stride,
    UE8M0: tl.constexpr,
    SWIGLU: tl.constexpr,
    ROWS: tl.constexpr,
    GROUP: tl.constexpr,
):
    """One program: ROWS rows of one group. With SWIGLU a row of x is [gate | up], 2 * width wide."""
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    group = tl.program_id(1)
    column = group * GROUP + tl.arange(0, GROUP)
    inside = (row < num_rows)[:, None]
    at = row.to(tl.int64)[:, None] * x_stride + column[None, :]
    x = tl.load(x_ptr + at, mask=inside, other=0.0).to(tl.float32)
    if SWIGLU:
        up = tl.load(x_ptr + at + width, mask=inside, other=0.0).to(tl.float32)
        x = x * tl.sigmoid(x) * up
        product_ptrs = product_ptr + row.to(tl.int64)[:, None] * width + column[None, :]
        tl.store(product_ptrs, x.to(product_ptr.dtype.element_ty), mask=inside)
    values, scale = quantize_last(x, UE8M0)
    tl.store(values_ptr + row.to(tl.int64)[:, None] * width + column[None, :], values, mask=inside)
    tl.store(
        scale_ptr + row.to(tl.int64) * scale_row_stride + group.to(tl.int64) * scale_group_stride,
        scale,
        mask=row < num_rows,
    )


def dot_type(x: Tensor) -> tl.dtype:
    """Operand type of matrix products of x: its own, but fp32 in the interpreter, which has no bf16 products."""
    return tl.bfloat16 if x.is_cuda and x.dtype == torch.bfloat16 else tl.float32


def empty_scales(num_rows: int, num_groups: int, device: torch.device) -> Tensor:
    """fp32 [num_rows, num_groups] stored group-major, rows padded to 16 bytes: the layout that DeepGEMM's TMA reads."""
    padded = -(-num_rows // 4) * 4
    return torch.empty(num_groups, padded, dtype=torch.float32, device=device).T[:num_rows]


def _quantize(x: Tensor, width: int, ue8m0: bool, product: Tensor | None) -> tuple[Tensor, Tensor]:
    assert x.dim() == 2 and x.stride(1) == 1 and width % QUANT_BLOCK == 0, (x.shape, x.stride())
    num_rows, num_groups = x.shape[0], width // QUANT_BLOCK
    values = torch.empty(num_rows, width, dtype=torch.float8_e4m3fn, device=x.device)
    scale = empty_scales(num_rows, num_groups, x.device)
    if num_rows == 0:
        return values, scale
    rows = 1 if num_rows < 64 else 16
    _quantize_kernel[(triton.cdiv(num_rows, rows), num_groups)](
        x,
        x if product is None else product,
        values,
        scale,
        num_rows,
        width,
        x.stride(0),
        scale.stride(0),
        scale.stride(1),
        UE8M0=ue8m0,
        SWIGLU=product is not None,
        ROWS=rows,
        GROUP=QUANT_BLOCK,
        num_warps=1 if rows == 1 else 4,
    )
    return values, scale


def quantize_groups(x: Tensor, *, ue8m0: bool) -> tuple[Tensor, Tensor]:
    """x [T, n * 128] (fp32 or bf16) -> (e4m3 [T, n * 128], fp32 scales [T, n] stored group-major)."""
    return _quantize(x, x.shape[1], ue8m0, None)


def quantized(x: Activation, ue8m0: bool) -> tuple[Tensor, Tensor]:
    """The quantized form of x and its scales: its producer's if there is one, else made here."""
    if x.quantized is not None and x.scale is not None:
        return x.quantized, x.scale
    return quantize_groups(x.values, ue8m0=ue8m0)


def swiglu_quantized(gate_up: Tensor, *, ue8m0: bool) -> Activation:
    """gate_up [T, 2I] (gate, then up) -> silu(gate) * up [T, I], rounded to gate_up's dtype, and quantized.

    What is quantized is the fp32 product, not the rounded one.
    """
    width = gate_up.shape[1] // 2
    product = torch.empty(gate_up.shape[0], width, dtype=gate_up.dtype, device=gate_up.device)
    return Activation(product, *_quantize(gate_up, width, ue8m0, product))

# mypy: allow-untyped-defs, allow-incomplete-defs
"""What follows a layer's first projections, in one launch; contract of reference.fused (queries: queries.py).

Every intermediate that the reference rounds to the compute dtype is rounded here too.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from echo_batch.kernels.activation import Activation
from echo_batch.kernels.formats import IndexFormat, RowFormat
from echo_batch.kernels.parts import Parts
from echo_batch.kernels.reference.fused import LatentInputs
from echo_batch.kernels.triton.norm_rope import hadamard_dot, rotate
from echo_batch.kernels.triton.parts import load_sum
from echo_batch.kernels.triton.quant import dot_type, empty_scales, group_scale, quantize_last, to_fp8
from echo_batch.kernels.triton.rows import store_kv_row
from echo_batch.kernels.weights import QUANT_BLOCK


@triton.jit
def _rms(x, weight, width, eps):
    return weight * (x * tl.math.rsqrt(tl.math.div_rn(tl.sum(x * x, 0), width) + eps))


@triton.jit
def rotate_first(x, cos, sin, INTERLEAVED: tl.constexpr, ROWS: tl.constexpr, ROPE: tl.constexpr, DIM: tl.constexpr):
    """Rotate the first ROPE of DIM = 2 * ROPE columns of x [ROWS, DIM]; the rest passes."""
    tl.static_assert(DIM == 2 * ROPE)
    first, rest = tl.split(tl.permute(tl.reshape(x, (ROWS, 2, ROPE)), (0, 2, 1)))
    first = rotate(first, cos, sin, INTERLEAVED, ROWS, ROPE // 2)
    return tl.reshape(tl.permute(tl.join(first, rest), (0, 2, 1)), (ROWS, DIM))


@triton.jit
def _load_rounded(ptrs, part_stride, mask, dtype: tl.constexpr, NUM_PARTS: tl.constexpr):
    """Values of the projection in fp32, added up from its parts and rounded to dtype."""
    return load_sum(ptrs, part_stride, mask, NUM_PARTS).to(dtype).to(tl.float32)


@triton.jit
def _query_part(
    x_ptr,
    part_stride,
    weight_ptr,
    normed_ptr,
    values_ptr,
    scale_ptr,
    scale_group_stride,
    width,
    eps,
    NUM_PARTS: tl.constexpr,
    QUANTIZE: tl.constexpr,
    UE8M0: tl.constexpr,
    WIDTH_P2: tl.constexpr,
    GROUP: tl.constexpr,
):
    """Norm and quantization of one token's query rank."""
    column = tl.arange(0, WIDTH_P2)
    inside = column < width
    dtype: tl.constexpr = normed_ptr.dtype.element_ty
    x = _load_rounded(x_ptr + column, part_stride, inside, dtype, NUM_PARTS)
    weight = tl.load(weight_ptr + column, mask=inside, other=0.0).to(tl.float32)
    normed = _rms(x, weight, width.to(tl.float32), eps).to(dtype)
    tl.store(normed_ptr + column, normed, mask=inside)
    if QUANTIZE:
        grouped = tl.reshape(normed.to(tl.float32), (WIDTH_P2 // GROUP, GROUP))
        scale = group_scale(tl.max(tl.abs(grouped), 1), UE8M0)
        values = to_fp8(grouped, tl.broadcast_to(scale[:, None], grouped.shape), UE8M0)
        tl.store(values_ptr + column, tl.reshape(values, (WIDTH_P2,)), mask=inside)
        group = tl.arange(0, WIDTH_P2 // GROUP)
        tl.store(scale_ptr + group * scale_group_stride, scale, mask=group * GROUP < width)


@triton.jit
def _kv_part(
    x_ptr,
    part_stride,
    weight_ptr,
    cos_ptr,
    sin_ptr,
    row_ptr,
    eps,
    dtype: tl.constexpr,
    NUM_PARTS: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    FORMAT: tl.constexpr,
    LATENT: tl.constexpr,
    ROPE: tl.constexpr,
):
    """Norm of the latent, rotation of the rope part, packing of one token's KV row."""
    column = tl.arange(0, LATENT)
    lane = tl.arange(0, ROPE)
    half = tl.arange(0, ROPE // 2)
    # All loads first: none is moved over the barriers of a reduction.
    x = _load_rounded(x_ptr + column, part_stride, column < LATENT, dtype, NUM_PARTS)
    rope = _load_rounded(x_ptr + LATENT + lane, part_stride, lane < ROPE, dtype, NUM_PARTS)
    weight = tl.load(weight_ptr + column).to(tl.float32)
    cos, sin = tl.load(cos_ptr + half)[None, :], tl.load(sin_ptr + half)[None, :]
    latent = _rms(x, weight, tl.full((), LATENT, tl.float32), eps).to(dtype).to(tl.float32)
    rope = rotate(tl.reshape(rope, (1, ROPE)), cos, sin, INTERLEAVED, 1, ROPE // 2)
    rope = tl.reshape(rope, (ROPE,)).to(dtype).to(tl.float32)
    store_kv_row(row_ptr, latent, rope, True, FORMAT, LATENT, ROPE)


@triton.jit
def _key_part(
    x_ptr,
    part_stride,
    weight_ptr,
    bias_ptr,
    cos_ptr,
    sin_ptr,
    row_ptr,
    eps,
    hadamard_factor,
    dtype: tl.constexpr,
    NUM_PARTS: tl.constexpr,
    FP8: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    ROPE: tl.constexpr,
    DIM: tl.constexpr,
    COMPUTE: tl.constexpr,
):
    """LayerNorm, rotation, Hadamard (fp8 only) and packing of one token's index key."""
    column = tl.arange(0, DIM)
    half = tl.arange(0, ROPE // 2)
    # All loads first, as in `_kv_part`.
    x = _load_rounded(x_ptr + column, part_stride, column < DIM, dtype, NUM_PARTS)
    weight, bias = tl.load(weight_ptr + column), tl.load(bias_ptr + column)
    cos, sin = tl.load(cos_ptr + half)[None, :], tl.load(sin_ptr + half)[None, :]
    count = tl.full((), DIM, tl.float32)
    centered = x - tl.math.div_rn(tl.sum(x, 0), count)
    variance = tl.math.div_rn(tl.sum(centered * centered, 0), count)
    normed = (centered * tl.math.rsqrt(variance + eps) * weight + bias).to(dtype).to(tl.float32)
    # Rows of the tile beyond the first are copies: tl.dot wants at least 16.
    tile = tl.broadcast_to(normed[None, :], (16, DIM))
    tile = rotate_first(tile, cos, sin, INTERLEAVED, 16, ROPE, DIM).to(dtype)
    row = tl.arange(0, 16)
    is_first = (row == 0)[:, None]
    if FP8:
        key = (hadamard_dot(tile, COMPUTE, DIM) * hadamard_factor).to(dtype).to(tl.float32)
        values, scale = quantize_last(key, True)
        tl.store(row_ptr + row[:, None] * 0 + column[None, :], values.to(tl.uint8, bitcast=True), mask=is_first)
        tl.store((row_ptr + DIM).to(tl.pointer_type(tl.float32)) + row, scale, mask=row == 0)
    else:
        typed_ptr = row_ptr.to(tl.pointer_type(tl.float32))
        tl.store(typed_ptr + row[:, None] * 0 + column[None, :], tile.to(tl.float32), mask=is_first)


@triton.jit
def _latent_kernel(
    a_ptr,
    q_weight_ptr,
    kv_weight_ptr,
    key_weight_ptr,
    key_bias_ptr,
    cos_ptr,
    sin_ptr,
    q_normed_ptr,
    q_values_ptr,
    q_scale_ptr,
    kv_row_ptr,
    key_row_ptr,
    a_stride,
    part_stride,
    scale_row_stride,
    scale_group_stride,
    q_rank,
    index_dim,
    kv_row_bytes,
    key_row_bytes,
    eps,
    key_eps,
    hadamard_factor,
    NUM_PARTS: tl.constexpr,
    HAS_INDEXER: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    INDEX_INTERLEAVED: tl.constexpr,
    ROW_FORMAT: tl.constexpr,
    INDEX_FP8: tl.constexpr,
    QUANTIZE: tl.constexpr,
    UE8M0: tl.constexpr,
    Q_P2: tl.constexpr,
    LATENT: tl.constexpr,
    ROPE: tl.constexpr,
    INDEX_DIM: tl.constexpr,
    GROUP: tl.constexpr,
    COMPUTE: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    part = tl.program_id(1)
    dtype: tl.constexpr = q_normed_ptr.dtype.element_ty
    a_ptr += token * a_stride
    cos_ptr += token * (ROPE // 2)
    sin_ptr += token * (ROPE // 2)
    if part == 0:
        q_normed_ptr += token * q_rank
        q_values_ptr += token * q_rank
        q_scale_ptr += token * scale_row_stride
        _query_part(
            a_ptr,
            part_stride,
            q_weight_ptr,
            q_normed_ptr,
            q_values_ptr,
            q_scale_ptr,
            scale_group_stride,
            q_rank,
            eps,
            NUM_PARTS,
            QUANTIZE,
            UE8M0,
            Q_P2,
            GROUP,
        )
    elif part == 1:
        kv_ptr = a_ptr + q_rank + index_dim
        kv_row_ptr += token * kv_row_bytes
        _kv_part(
            kv_ptr,
            part_stride,
            kv_weight_ptr,
            cos_ptr,
            sin_ptr,
            kv_row_ptr,
            eps,
            dtype,
            NUM_PARTS,
            INTERLEAVED,
            ROW_FORMAT,
            LATENT,
            ROPE,
        )
    elif HAS_INDEXER:
        key_row_ptr += token * key_row_bytes
        _key_part(
            a_ptr + q_rank,
            part_stride,
            key_weight_ptr,
            key_bias_ptr,
            cos_ptr,
            sin_ptr,
            key_row_ptr,
            key_eps,
            hadamard_factor,
            dtype,
            NUM_PARTS,
            INDEX_FP8,
            INDEX_INTERLEAVED,
            ROPE,
            INDEX_DIM,
            COMPUTE,
        )


def latent_inputs(
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
) -> LatentInputs:
    """After the first projection: norms, rotation, quantization and packing; as reference.fused.latent_inputs.

    a [T, q_rank + (128 with an indexer) + 512 + 64]: q_a, index key, latent, rope part. cos, sin fp32 [T, 32];
    q_weight fp32 [q_rank], kv_weight fp32 [512]; key_weight, key_bias fp32 [128] of the index key's LayerNorm, None
    without an indexer. With ue8m0 not None q_rank must be a multiple of 128.
    """
    parts = a.values if isinstance(a, Parts) else a.unsqueeze(0)
    num_parts, num_tokens, width = parts.shape
    assert parts.stride(2) == 1 and cos.is_contiguous() and sin.is_contiguous()
    latent, rope = row_format.latent_dim, row_format.rope_dim
    has_indexer = key_weight is not None
    index_dim = index_format.head_dim if has_indexer else 0
    q_rank = width - index_dim - latent - rope
    assert q_weight.shape[0] == q_rank and (ue8m0 is None or q_rank % QUANT_BLOCK == 0), (q_weight.shape, q_rank)
    device = parts.device
    q_normed = torch.empty(num_tokens, q_rank, dtype=a.dtype, device=device)
    query = Activation(q_normed)
    if ue8m0 is not None:
        q_values = torch.empty(num_tokens, q_rank, dtype=torch.float8_e4m3fn, device=device)
        query = Activation(q_normed, q_values, empty_scales(num_tokens, q_rank // QUANT_BLOCK, device))
    kv_row = torch.empty(num_tokens, row_format.row_bytes, dtype=torch.uint8, device=device)
    index_key = torch.empty(num_tokens, index_format.row_bytes, dtype=torch.uint8, device=device)
    if num_tokens:
        _latent_kernel[(num_tokens, 3 if has_indexer else 2)](
            parts,
            q_weight,
            kv_weight,
            q_weight if key_weight is None else key_weight,
            q_weight if key_bias is None else key_bias,
            cos,
            sin,
            q_normed,
            q_normed if query.quantized is None else query.quantized,
            q_weight if query.scale is None else query.scale,
            kv_row,
            index_key,
            parts.stride(1),
            parts.stride(0),
            0 if query.scale is None else query.scale.stride(0),
            0 if query.scale is None else query.scale.stride(1),
            q_rank,
            index_dim,
            row_format.row_bytes,
            index_format.row_bytes,
            eps,
            key_eps,
            index_format.head_dim**-0.5,
            NUM_PARTS=num_parts,
            HAS_INDEXER=has_indexer,
            INTERLEAVED=interleaved,
            INDEX_INTERLEAVED=index_interleaved,
            ROW_FORMAT=row_format.kind,
            INDEX_FP8=index_format.kind == "fp8",
            QUANTIZE=ue8m0 is not None,
            UE8M0=bool(ue8m0),
            Q_P2=max(QUANT_BLOCK, triton.next_power_of_2(q_rank)),
            LATENT=latent,
            ROPE=rope,
            INDEX_DIM=index_format.head_dim,
            GROUP=QUANT_BLOCK,
            COMPUTE=dot_type(q_normed),
            num_warps=4,
        )
    return LatentInputs(query, kv_row, index_key if has_indexer else None)

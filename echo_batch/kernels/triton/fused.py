# mypy: allow-untyped-defs, allow-incomplete-defs
"""A layer's small steps between its GEMMs, each group in one launch; contracts of reference.fused.

Every intermediate that the reference rounds to the compute dtype is rounded here too.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from echo_batch.kernels.activation import Activation
from echo_batch.kernels.formats import IndexFormat, RowFormat
from echo_batch.kernels.reference.fused import LatentInputs
from echo_batch.kernels.triton.norm_rope import apply_rope, hadamard_dot, rotate
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
def _query_part(
    x_ptr,
    weight_ptr,
    normed_ptr,
    values_ptr,
    scale_ptr,
    scale_group_stride,
    width,
    eps,
    QUANTIZE: tl.constexpr,
    UE8M0: tl.constexpr,
    WIDTH_P2: tl.constexpr,
    GROUP: tl.constexpr,
):
    """Norm and quantization of one token's query rank."""
    column = tl.arange(0, WIDTH_P2)
    inside = column < width
    x = tl.load(x_ptr + column, mask=inside, other=0.0).to(tl.float32)
    weight = tl.load(weight_ptr + column, mask=inside, other=0.0).to(tl.float32)
    normed = _rms(x, weight, width.to(tl.float32), eps).to(normed_ptr.dtype.element_ty)
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
    weight_ptr,
    cos_ptr,
    sin_ptr,
    row_ptr,
    eps,
    INTERLEAVED: tl.constexpr,
    FORMAT: tl.constexpr,
    LATENT: tl.constexpr,
    ROPE: tl.constexpr,
):
    """Norm of the latent, rotation of the rope part, packing of one token's KV row."""
    dtype = x_ptr.dtype.element_ty
    column = tl.arange(0, LATENT)
    half = tl.arange(0, ROPE // 2)
    x = tl.load(x_ptr + column).to(tl.float32)
    weight = tl.load(weight_ptr + column).to(tl.float32)
    latent = _rms(x, weight, tl.full((), LATENT, tl.float32), eps).to(dtype).to(tl.float32)
    rope = tl.load(x_ptr + LATENT + tl.arange(0, ROPE)).to(tl.float32)
    cos, sin = tl.load(cos_ptr + half)[None, :], tl.load(sin_ptr + half)[None, :]
    rope = rotate(tl.reshape(rope, (1, ROPE)), cos, sin, INTERLEAVED, 1, ROPE // 2)
    rope = tl.reshape(rope, (ROPE,)).to(dtype).to(tl.float32)
    store_kv_row(row_ptr, latent, rope, True, FORMAT, LATENT, ROPE)


@triton.jit
def _key_part(
    x_ptr,
    weight_ptr,
    bias_ptr,
    cos_ptr,
    sin_ptr,
    row_ptr,
    eps,
    hadamard_factor,
    FP8: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    ROPE: tl.constexpr,
    DIM: tl.constexpr,
    COMPUTE: tl.constexpr,
):
    """LayerNorm, rotation, Hadamard (fp8 only) and packing of one token's index key."""
    dtype = x_ptr.dtype.element_ty
    column = tl.arange(0, DIM)
    half = tl.arange(0, ROPE // 2)
    x = tl.load(x_ptr + column).to(tl.float32)
    count = tl.full((), DIM, tl.float32)
    centered = x - tl.math.div_rn(tl.sum(x, 0), count)
    variance = tl.math.div_rn(tl.sum(centered * centered, 0), count)
    normed = centered * tl.math.rsqrt(variance + eps) * tl.load(weight_ptr + column)
    normed = (normed + tl.load(bias_ptr + column)).to(dtype).to(tl.float32)
    # Rows of the tile beyond the first are copies: tl.dot wants at least 16.
    tile = tl.broadcast_to(normed[None, :], (16, DIM))
    cos, sin = tl.load(cos_ptr + half)[None, :], tl.load(sin_ptr + half)[None, :]
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
    scale_row_stride,
    scale_group_stride,
    q_rank,
    index_dim,
    kv_row_bytes,
    key_row_bytes,
    eps,
    key_eps,
    hadamard_factor,
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
    a_ptr += token * a_stride
    cos_ptr += token * (ROPE // 2)
    sin_ptr += token * (ROPE // 2)
    if part == 0:
        q_normed_ptr += token * q_rank
        q_values_ptr += token * q_rank
        q_scale_ptr += token * scale_row_stride
        _query_part(
            a_ptr,
            q_weight_ptr,
            q_normed_ptr,
            q_values_ptr,
            q_scale_ptr,
            scale_group_stride,
            q_rank,
            eps,
            QUANTIZE,
            UE8M0,
            Q_P2,
            GROUP,
        )
    elif part == 1:
        kv_ptr = a_ptr + q_rank + index_dim
        kv_row_ptr += token * kv_row_bytes
        _kv_part(kv_ptr, kv_weight_ptr, cos_ptr, sin_ptr, kv_row_ptr, eps, INTERLEAVED, ROW_FORMAT, LATENT, ROPE)
    elif HAS_INDEXER:
        key_row_ptr += token * key_row_bytes
        _key_part(
            a_ptr + q_rank,
            key_weight_ptr,
            key_bias_ptr,
            cos_ptr,
            sin_ptr,
            key_row_ptr,
            key_eps,
            hadamard_factor,
            INDEX_FP8,
            INDEX_INTERLEAVED,
            ROPE,
            INDEX_DIM,
            COMPUTE,
        )


def latent_inputs(
    a: Tensor,
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
    num_tokens, width = a.shape
    assert a.stride(1) == 1 and cos.is_contiguous() and sin.is_contiguous()
    latent, rope = row_format.latent_dim, row_format.rope_dim
    has_indexer = key_weight is not None
    index_dim = index_format.head_dim if has_indexer else 0
    q_rank = width - index_dim - latent - rope
    assert q_weight.shape[0] == q_rank and (ue8m0 is None or q_rank % QUANT_BLOCK == 0), (q_weight.shape, q_rank)
    device = a.device
    q_normed = torch.empty(num_tokens, q_rank, dtype=a.dtype, device=device)
    query = Activation(q_normed)
    if ue8m0 is not None:
        q_values = torch.empty(num_tokens, q_rank, dtype=torch.float8_e4m3fn, device=device)
        query = Activation(q_normed, q_values, empty_scales(num_tokens, q_rank // QUANT_BLOCK, device))
    kv_row = torch.empty(num_tokens, row_format.row_bytes, dtype=torch.uint8, device=device)
    index_key = torch.empty(num_tokens, index_format.row_bytes, dtype=torch.uint8, device=device)
    if num_tokens:
        _latent_kernel[(num_tokens, 3 if has_indexer else 2)](
            a,
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
            a.stride(0),
            0 if query.scale is None else query.scale.stride(0),
            0 if query.scale is None else query.scale.stride(1),
            q_rank,
            index_dim,
            row_format.row_bytes,
            index_format.row_bytes,
            eps,
            key_eps,
            index_format.head_dim**-0.5,
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
            COMPUTE=dot_type(a),
            num_warps=4,
        )
    return LatentInputs(query, kv_row, index_key if has_indexer else None)


@triton.jit
def _index_query_part(
    token,
    first_head,
    query_ptr,
    cos_ptr,
    sin_ptr,
    logits_ptr,
    values_ptr,
    weights_ptr,
    num_tokens,
    num_heads,
    token_stride,
    head_stride,
    factor,
    hadamard_factor,
    NUM_PARTS: tl.constexpr,
    FP8: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    HEADS: tl.constexpr,
    ROPE: tl.constexpr,
    DIM: tl.constexpr,
    COMPUTE: tl.constexpr,
):
    """HEADS heads of one token's index query."""
    head = first_head + tl.arange(0, HEADS)
    column = tl.arange(0, DIM)
    half = tl.arange(0, ROPE // 2)
    inside = (head < num_heads)[:, None]
    dtype = query_ptr.dtype.element_ty
    at = token * token_stride + head[:, None] * head_stride + column[None, :]
    x = tl.load(query_ptr + at, mask=inside, other=0.0).to(tl.float32)
    cos = tl.load(cos_ptr + token * (ROPE // 2) + half)[None, :]
    sin = tl.load(sin_ptr + token * (ROPE // 2) + half)[None, :]
    x = rotate_first(x, cos, sin, INTERLEAVED, HEADS, ROPE, DIM).to(dtype)
    flat = token * num_heads + head
    logits = tl.load(logits_ptr + flat, mask=head < num_heads, other=0.0)
    for part in tl.static_range(1, NUM_PARTS):
        place = (part * num_tokens + token) * num_heads + head
        logits += tl.load(logits_ptr + place, mask=head < num_heads, other=0.0)
    weights = logits * factor
    value_ptrs = values_ptr + flat[:, None] * DIM + column[None, :]
    if FP8:
        x = (hadamard_dot(x, COMPUTE, DIM) * hadamard_factor).to(dtype).to(tl.float32)
        values, scale = quantize_last(x, True)
        weights *= scale
        tl.store(value_ptrs, values, mask=inside)
    else:
        tl.store(value_ptrs, x.to(tl.float32), mask=inside)
    tl.store(weights_ptr + flat, weights, mask=head < num_heads)


@triton.jit
def _index_query_kernel(
    query_ptr,
    cos_ptr,
    sin_ptr,
    logits_ptr,
    values_ptr,
    weights_ptr,
    num_tokens,
    num_heads,
    token_stride,
    head_stride,
    factor,
    hadamard_factor,
    NUM_PARTS: tl.constexpr,
    FP8: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    HEADS: tl.constexpr,
    ROPE: tl.constexpr,
    DIM: tl.constexpr,
    COMPUTE: tl.constexpr,
):
    _index_query_part(
        tl.program_id(0).to(tl.int64),
        tl.program_id(1) * HEADS,
        query_ptr,
        cos_ptr,
        sin_ptr,
        logits_ptr,
        values_ptr,
        weights_ptr,
        num_tokens,
        num_heads,
        token_stride,
        head_stride,
        factor,
        hadamard_factor,
        NUM_PARTS,
        FP8,
        INTERLEAVED,
        HEADS,
        ROPE,
        DIM,
        COMPUTE,
    )


def index_query(
    query: Tensor, cos: Tensor, sin: Tensor, head_logits: Tensor, *, interleaved: bool, index_format: IndexFormat
) -> tuple[Tensor, Tensor]:
    """Indexer query (rotation of its first half, Hadamard, ue8m0 quantization) and head weights (spec section 3.3).

    query [T, Hi, 128] (unit stride in the last dimension), cos, sin fp32 [T, 32], head_logits fp32 [T, Hi] or parts
    [S, T, Hi] -> (e4m3, or fp32 with an fp32 index format, [T, Hi, 128]; fp32 [T, Hi] with both constants and the
    query's scale folded in).
    """
    num_tokens, num_heads, dim = query.shape
    assert query.stride(2) == 1 and head_logits.is_contiguous()
    fp8 = index_format.kind == "fp8"
    values = torch.empty(query.shape, dtype=torch.float8_e4m3fn if fp8 else torch.float32, device=query.device)
    weights = torch.empty(num_tokens, num_heads, dtype=torch.float32, device=query.device)
    if num_tokens:
        _index_query_kernel[(num_tokens, triton.cdiv(num_heads, 16))](
            query,
            cos,
            sin,
            head_logits,
            values,
            weights,
            num_tokens,
            num_heads,
            query.stride(0),
            query.stride(1),
            num_heads**-0.5 * dim**-0.5,
            dim**-0.5,
            NUM_PARTS=1 if head_logits.dim() == 2 else head_logits.shape[0],
            FP8=fp8,
            INTERLEAVED=interleaved,
            HEADS=16,
            ROPE=2 * cos.shape[1],
            DIM=dim,
            COMPUTE=dot_type(query),
            num_warps=4,
        )
    return values, weights


def absorbed_query(query: Tensor, key_up: Tensor, cos: Tensor, sin: Tensor, interleaved: bool) -> Tensor:
    """query [T, H, nope + rope], key_up [H, nope, 512] -> [T, H, 512 + rope], as in a KV row (spec section 3.5)."""
    num_tokens, num_heads, width = query.shape
    nope, latent = key_up.shape[1:]
    out = torch.empty(num_tokens, num_heads, latent + width - nope, dtype=query.dtype, device=query.device)
    if num_tokens:
        # Both parts are written in place; joining them would copy the larger one.
        torch.bmm(query[..., :nope].transpose(0, 1), key_up, out=out[..., :latent].transpose(0, 1))
        apply_rope(query[..., nope:], cos, sin, interleaved, out=out[..., latent:])
    return out


FEW_TOKENS = 64
"""Up to here the per-head products only read weights, and one launch with what surrounds them is faster than cuBLAS."""


@triton.jit
def _queries_kernel(
    projected_ptr,
    key_up_ptr,
    cos_ptr,
    sin_ptr,
    logits_ptr,
    absorbed_ptr,
    values_ptr,
    weights_ptr,
    num_tokens,
    num_index_heads,
    token_stride,
    num_absorbing,
    index_start,
    factor,
    hadamard_factor,
    NUM_PARTS: tl.constexpr,
    HAS_INDEXER: tl.constexpr,
    FP8: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    INDEX_INTERLEAVED: tl.constexpr,
    NOPE: tl.constexpr,
    ROPE: tl.constexpr,
    LATENT: tl.constexpr,
    TOKENS: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    INDEX_HEADS: tl.constexpr,
    INDEX_DIM: tl.constexpr,
    COMPUTE: tl.constexpr,
):
    """The first `num_absorbing` programs: a head and some columns of the latent; the others: an index query's heads."""
    program = tl.program_id(0)
    if program < num_absorbing:
        blocks = LATENT // BLOCK_N
        head = (program // blocks).to(tl.int64)
        column = (program % blocks) * BLOCK_N + tl.arange(0, BLOCK_N)
        token = tl.arange(0, TOKENS).to(tl.int64)
        inside = (token < num_tokens)[:, None]
        k = tl.arange(0, BLOCK_K)
        query_ptrs = projected_ptr + token[:, None] * token_stride + head * (NOPE + ROPE)
        total = tl.zeros((TOKENS, BLOCK_N), tl.float32)
        for block in tl.static_range(NOPE // BLOCK_K):
            x = tl.load(query_ptrs + block * BLOCK_K + k[None, :], mask=inside, other=0.0)
            at = (head * NOPE + block * BLOCK_K + k)[:, None] * LATENT + column[None, :]
            total += tl.dot(x.to(COMPUTE), tl.load(key_up_ptr + at).to(COMPUTE), input_precision="ieee")
        num_heads = num_absorbing // blocks
        out_ptrs = absorbed_ptr + (token * num_heads + head)[:, None] * (LATENT + ROPE)
        tl.store(out_ptrs + column[None, :], total.to(absorbed_ptr.dtype.element_ty), mask=inside)
        if program % blocks == 0:
            lane = tl.arange(0, ROPE)
            half = tl.arange(0, ROPE // 2)
            rope = tl.load(query_ptrs + NOPE + lane[None, :], mask=inside, other=0.0).to(tl.float32)
            angle = token[:, None] * (ROPE // 2) + half[None, :]
            cos = tl.load(cos_ptr + angle, mask=inside, other=0.0)
            sin = tl.load(sin_ptr + angle, mask=inside, other=0.0)
            rotated = rotate(rope, cos, sin, INTERLEAVED, TOKENS, ROPE // 2)
            tl.store(out_ptrs + LATENT + lane[None, :], rotated.to(absorbed_ptr.dtype.element_ty), mask=inside)
    elif HAS_INDEXER:
        parts = tl.cdiv(num_index_heads, INDEX_HEADS)
        _index_query_part(
            ((program - num_absorbing) // parts).to(tl.int64),
            (program - num_absorbing) % parts * INDEX_HEADS,
            projected_ptr + index_start,
            cos_ptr,
            sin_ptr,
            logits_ptr,
            values_ptr,
            weights_ptr,
            num_tokens,
            num_index_heads,
            token_stride,
            INDEX_DIM,
            factor,
            hadamard_factor,
            NUM_PARTS,
            FP8,
            INDEX_INTERLEAVED,
            INDEX_HEADS,
            ROPE,
            INDEX_DIM,
            COMPUTE,
        )


def attention_queries(
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
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """As reference.fused.attention_queries; one launch for few tokens."""
    num_tokens = projected.shape[0]
    num_heads, nope, latent = key_up.shape
    rope, dim = 2 * cos.shape[1], index_format.head_dim
    split = num_heads * (nope + rope)
    if not 0 < num_tokens <= FEW_TOKENS or nope % 64 or latent % 128:
        query = projected[:, :split].unflatten(1, (num_heads, -1))
        absorbed = absorbed_query(query, key_up, cos, sin, interleaved)
        if head_logits is None:
            return absorbed, None, None
        query = projected[:, split:].unflatten(1, (num_index_heads, dim))
        options = dict(interleaved=index_interleaved, index_format=index_format)
        return absorbed, *index_query(query, cos, sin, head_logits, **options)  # type: ignore[arg-type]
    assert projected.stride(1) == 1 and key_up.is_contiguous() and cos.is_contiguous() and sin.is_contiguous()
    device, fp8 = projected.device, index_format.kind == "fp8"
    absorbed = torch.empty(num_tokens, num_heads, latent + rope, dtype=projected.dtype, device=device)
    values = weights = None
    num_programs = num_absorbing = num_heads * (latent // 128)
    if head_logits is not None:
        assert head_logits.is_contiguous()
        values_type = torch.float8_e4m3fn if fp8 else torch.float32
        values = torch.empty(num_tokens, num_index_heads, dim, dtype=values_type, device=device)
        weights = torch.empty(num_tokens, num_index_heads, dtype=torch.float32, device=device)
        num_programs += num_tokens * triton.cdiv(num_index_heads, 16)
    _queries_kernel[(num_programs,)](
        projected,
        key_up,
        cos,
        sin,
        cos if head_logits is None else head_logits,
        absorbed,
        absorbed if values is None else values,
        cos if weights is None else weights,
        num_tokens,
        num_index_heads,
        projected.stride(0),
        num_absorbing,
        split,
        num_index_heads**-0.5 * dim**-0.5,
        dim**-0.5,
        NUM_PARTS=1 if head_logits is None or head_logits.dim() == 2 else head_logits.shape[0],
        HAS_INDEXER=head_logits is not None,
        FP8=fp8,
        INTERLEAVED=interleaved,
        INDEX_INTERLEAVED=index_interleaved,
        NOPE=nope,
        ROPE=rope,
        LATENT=latent,
        TOKENS=16 if num_tokens <= 16 else 32 if num_tokens <= 32 else 64,
        BLOCK_N=128,
        BLOCK_K=64,
        INDEX_HEADS=16,
        INDEX_DIM=dim,
        COMPUTE=dot_type(projected),
        num_warps=4,
    )
    return absorbed, values, weights


@triton.jit
def _head_values_kernel(
    latent_ptr,
    value_up_ptr,
    out_ptr,
    quantized_ptr,
    scale_ptr,
    num_tokens,
    num_heads,
    num_values,
    scale_row_stride,
    scale_group_stride,
    QUANTIZE: tl.constexpr,
    UE8M0: tl.constexpr,
    TOKENS: tl.constexpr,
    LATENT: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    COMPUTE: tl.constexpr,
):
    """One program: BLOCK_N values of a head (a quantization group), of all tokens."""
    head = tl.program_id(0).to(tl.int64)
    block = tl.program_id(1)
    token = tl.arange(0, TOKENS).to(tl.int64)
    inside = (token < num_tokens)[:, None]
    read_token = tl.minimum(token, num_tokens - 1)
    value = block * BLOCK_N + tl.arange(0, BLOCK_N)
    k = tl.arange(0, BLOCK_K)
    latent_ptrs = latent_ptr + (read_token * num_heads + head)[:, None] * LATENT + k[None, :]
    weight_ptrs = value_up_ptr + (head * num_values + value)[None, :] * LATENT + k[:, None]
    total = tl.zeros((TOKENS, BLOCK_N), tl.float32)
    for start in range(0, LATENT, BLOCK_K):
        x = tl.load(latent_ptrs + start)
        weight = tl.load(weight_ptrs + start)
        total += tl.dot(x.to(COMPUTE), weight.to(COMPUTE), input_precision="ieee")
    rounded = total.to(out_ptr.dtype.element_ty)
    at = token[:, None] * (num_heads * num_values) + head * num_values + value[None, :]
    tl.store(out_ptr + at, rounded, mask=inside)
    if QUANTIZE:
        quantized, scale = quantize_last(rounded.to(tl.float32), UE8M0)
        tl.store(quantized_ptr + at, quantized, mask=inside)
        group = (head * num_values) // BLOCK_N + block
        tl.store(scale_ptr + token * scale_row_stride + group * scale_group_stride, scale, mask=token < num_tokens)


def head_values(latent: Tensor, value_up: Tensor, ue8m0: bool | None) -> Activation:
    """As reference.fused.head_values; one launch for few tokens. With many the consumer quantizes."""
    num_tokens, num_heads, width = latent.shape
    num_values = value_up.shape[1]
    device = latent.device
    out = torch.empty(num_tokens, num_heads * num_values, dtype=latent.dtype, device=device)
    if not 0 < num_tokens <= FEW_TOKENS or num_values % QUANT_BLOCK or width % 128:
        # Written where the output projection reads it: heads side by side.
        target = out.view(num_tokens, num_heads, num_values).transpose(0, 1)
        torch.bmm(latent.transpose(0, 1), value_up.transpose(1, 2), out=target)
        return Activation(out)
    assert latent.is_contiguous() and value_up.is_contiguous()
    quantized = scale = None
    if ue8m0 is not None:
        quantized = torch.empty(out.shape, dtype=torch.float8_e4m3fn, device=device)
        scale = empty_scales(num_tokens, out.shape[1] // QUANT_BLOCK, device)
    _head_values_kernel[(num_heads, num_values // QUANT_BLOCK)](
        latent,
        value_up,
        out,
        out if quantized is None else quantized,
        value_up if scale is None else scale,
        num_tokens,
        num_heads,
        num_values,
        0 if scale is None else scale.stride(0),
        0 if scale is None else scale.stride(1),
        QUANTIZE=ue8m0 is not None,
        UE8M0=bool(ue8m0),
        TOKENS=16 if num_tokens <= 16 else 32 if num_tokens <= 32 else 64,
        LATENT=width,
        BLOCK_N=QUANT_BLOCK,
        BLOCK_K=64 if latent.dtype == torch.float32 else 128,
        COMPUTE=dot_type(latent),
        num_warps=4,
        num_stages=4 if latent.dtype != torch.float32 else 2,
    )
    return Activation(out, quantized, scale)

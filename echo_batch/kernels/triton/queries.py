# mypy: allow-untyped-defs, allow-incomplete-defs
"""Attention's and the indexer's queries, and attention's output, around the large GEMMs; contracts of reference.fused.

Every intermediate that the reference rounds to the compute dtype is rounded here too.
"""

from functools import cache

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents

from echo_batch.kernels.activation import Activation
from echo_batch.kernels.formats import IndexFormat
from echo_batch.kernels.triton.fused import rotate_first
from echo_batch.kernels.triton.norm_rope import apply_rope, hadamard_dot, rotate
from echo_batch.kernels.triton.quant import dot_type, empty_scales, quantize_last
from echo_batch.kernels.triton.stages import stages_that_fit
from echo_batch.kernels.weights import QUANT_BLOCK


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
    LETS_NEXT_START: tl.constexpr,
):
    if LETS_NEXT_START:
        gdc_launch_dependents()
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
            LETS_NEXT_START=_has_dependent_launches(query.device),
            num_warps=4,
        )
    return values, weights


@cache
def _has_dependent_launches(device: torch.device) -> bool:
    """Whether a launch may begin while the one before it ends (the scoring does, cuda/indexer.py)."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= (9, 0)


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
    is_wide = latent.dtype == torch.float32
    tokens, block_k = 16 if num_tokens <= 16 else 32 if num_tokens <= 32 else 64, 64 if is_wide else 128
    stage_bytes = (tokens + QUANT_BLOCK) * block_k * latent.element_size()
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
        TOKENS=tokens,
        LATENT=width,
        BLOCK_N=QUANT_BLOCK,
        BLOCK_K=block_k,
        COMPUTE=dot_type(latent),
        num_warps=4,
        num_stages=stages_that_fit(2 if is_wide else 4, stage_bytes, device),
    )
    return Activation(out, quantized, scale)

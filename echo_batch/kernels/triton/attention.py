# mypy: allow-untyped-defs, allow-incomplete-defs
"""Sparse multi-latent attention in its absorbed form, in Triton: any head count and row format (spec section 3.5).

For GPUs, installs or formats that FlashMLA does not serve. A program has one token, up to 64 heads and a part of the
token's list; parts are merged by their softmax statistics in a second launch, in order.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from echo_batch.kernels.formats import RowFormat
from echo_batch.kernels.triton.stages import fits

_TARGET_PROGRAMS = 132
"""Multiprocessors of an H200."""
_BLOCK_N = 32
_SHARED_BYTES = 144_000
"""What a program of 64 heads takes (fp8 rows, two stages); where that does not fit, a program has 16 heads."""


@triton.jit
def _attention_kernel(
    query_ptr,
    rows_ptr,
    indices_ptr,
    out_ptr,
    max_ptr,
    sum_ptr,
    num_heads,
    num_selected,
    query_token_stride,
    query_head_stride,
    row_stride,
    indices_stride,
    scale_log2,
    columns_per_split,
    NUM_SPLITS: tl.constexpr,
    FORMAT: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK_N: tl.constexpr,
    LATENT: tl.constexpr,
    ROPE: tl.constexpr,
    ELEMENT: tl.constexpr,
    COMPUTE: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * BLOCK_H + tl.arange(0, BLOCK_H)
    split = tl.program_id(2)
    head_inside = head < num_heads
    dim = tl.arange(0, LATENT)
    rope_dim = tl.arange(0, ROPE)
    query_ptrs = query_ptr + token * query_token_stride + head.to(tl.int64)[:, None] * query_head_stride
    query_latent = tl.load(query_ptrs + dim[None, :], mask=head_inside[:, None], other=0.0).to(COMPUTE)
    query_rope = tl.load(query_ptrs + LATENT + rope_dim[None, :], mask=head_inside[:, None], other=0.0).to(COMPUTE)
    largest = tl.full((BLOCK_H,), float("-inf"), tl.float32)
    total = tl.zeros((BLOCK_H,), tl.float32)
    acc = tl.zeros((BLOCK_H, LATENT), tl.float32)
    end = tl.minimum((split + 1) * columns_per_split, num_selected)
    for start in range(split * columns_per_split, end, BLOCK_N):
        column = start + tl.arange(0, BLOCK_N)
        index = tl.load(indices_ptr + token * indices_stride + column, mask=column < end, other=-1)
        valid = index != -1
        row_ptrs = rows_ptr + tl.where(valid, index, 0).to(tl.int64) * row_stride
        # Masked loads: a row that is not selected is never read, so its NaN cannot leak.
        if FORMAT == "fp8":
            values_ptrs = row_ptrs.to(tl.pointer_type(tl.float8e4nv))[:, None] + dim[None, :]
            values = tl.load(values_ptrs, mask=valid[:, None], other=0.0).to(tl.float32)
            scale_ptrs = (row_ptrs + LATENT).to(tl.pointer_type(tl.float32))[:, None]
            scale = tl.load(scale_ptrs + tl.arange(0, LATENT // 128)[None, :], mask=valid[:, None], other=0.0)
            latent = tl.reshape(values, (BLOCK_N, LATENT // 128, 128)) * scale[:, :, None]
            latent = tl.reshape(latent, (BLOCK_N, LATENT)).to(COMPUTE)
            rope_ptrs = (row_ptrs + LATENT + 4 * (LATENT // 128)).to(tl.pointer_type(tl.bfloat16))
            rope = tl.load(rope_ptrs[:, None] + rope_dim[None, :], mask=valid[:, None], other=0.0)
        else:
            typed_ptrs = row_ptrs.to(tl.pointer_type(ELEMENT))[:, None]
            latent = tl.load(typed_ptrs + dim[None, :], mask=valid[:, None], other=0.0).to(COMPUTE)
            rope = tl.load(typed_ptrs + LATENT + rope_dim[None, :], mask=valid[:, None], other=0.0)
        rope = rope.to(COMPUTE)
        scores = tl.dot(query_latent, tl.trans(latent), input_precision="ieee")
        scores = tl.dot(query_rope, tl.trans(rope), scores, input_precision="ieee") * scale_log2
        scores = tl.where(valid[None, :], scores, float("-inf"))
        new_largest = tl.maximum(largest, tl.max(scores, 1))
        # No valid entry so far: subtract 0, not -inf, and every weight is 0.
        shift = tl.where(new_largest == float("-inf"), 0.0, new_largest)
        weights = tl.exp2(scores - shift[:, None])
        keep = tl.exp2(largest - shift)
        total = total * keep + tl.sum(weights, 1)
        acc = tl.dot(weights.to(COMPUTE), latent, acc * keep[:, None], input_precision="ieee")
        largest = new_largest
    at = token * num_heads + head
    if NUM_SPLITS == 1:
        acc = acc / tl.where(total == 0.0, 1.0, total)[:, None]
        tl.store(
            out_ptr + at[:, None] * LATENT + dim[None, :],
            acc.to(out_ptr.dtype.element_ty),
            mask=head_inside[:, None],
        )
    else:
        at = at * NUM_SPLITS + split
        tl.store(out_ptr + at[:, None] * LATENT + dim[None, :], acc, mask=head_inside[:, None])
        tl.store(max_ptr + at, largest, mask=head_inside)
        tl.store(sum_ptr + at, total, mask=head_inside)


@triton.jit
def _merge_kernel(parts_ptr, max_ptr, sum_ptr, out_ptr, NUM_SPLITS: tl.constexpr, LATENT: tl.constexpr):
    pair = tl.program_id(0).to(tl.int64)
    dim = tl.arange(0, LATENT)
    largest = tl.full((), float("-inf"), tl.float32)
    for split in tl.static_range(NUM_SPLITS):
        largest = tl.maximum(largest, tl.load(max_ptr + pair * NUM_SPLITS + split))
    largest = tl.where(largest == float("-inf"), 0.0, largest)
    total = tl.full((), 0.0, tl.float32)
    acc = tl.zeros((LATENT,), tl.float32)
    for split in tl.static_range(NUM_SPLITS):
        part = pair * NUM_SPLITS + split
        weight = tl.exp2(tl.load(max_ptr + part) - largest)
        total += weight * tl.load(sum_ptr + part)
        acc += weight * tl.load(parts_ptr + part * LATENT + dim)
    acc = acc / tl.where(total == 0.0, 1.0, total)
    tl.store(out_ptr + pair * LATENT + dim, acc.to(out_ptr.dtype.element_ty))


def num_splits(num_tokens: int, num_heads: int, num_selected: int, block_h: int) -> int:
    """Parts of a token's list, so that enough programs run; a pure function of the shape."""
    programs = num_tokens * triton.cdiv(num_heads, block_h)
    return max(1, min(_TARGET_PROGRAMS // programs, num_selected // (4 * _BLOCK_N), 16))


def sparse_mla(query: Tensor, rows: Tensor, indices: Tensor, softmax_scale: float, fmt: RowFormat) -> Tensor:
    """Attention of each token over its own list of KV rows; as reference.attention.sparse_mla.

    query [T, H, 576], rows uint8 [N, row_bytes], indices int32 [T, k] (-1 = none) -> [T, H, 512] in query's dtype. A
    token with no valid index gets zeros.
    """
    num_tokens, num_heads, _ = query.shape
    num_selected = indices.shape[1]
    assert query.stride(2) == 1 and rows.stride(1) == 1 and indices.stride(1) == 1
    out = torch.empty(num_tokens, num_heads, fmt.latent_dim, dtype=query.dtype, device=query.device)
    if num_tokens == 0:
        return out
    is_small = fmt.kind == "fp32" or not fits(_SHARED_BYTES, query.device)
    block_h = 16 if is_small else min(64, max(16, triton.next_power_of_2(num_heads)))
    splits = num_splits(num_tokens, num_heads, num_selected, block_h)
    target, largest, total = out, out, out
    if splits > 1:
        shape = (num_tokens, num_heads, splits)
        target = torch.empty(*shape, fmt.latent_dim, dtype=torch.float32, device=query.device)
        largest = torch.empty(shape, dtype=torch.float32, device=query.device)
        total = torch.empty_like(largest)
    columns = triton.cdiv(triton.cdiv(num_selected, splits), _BLOCK_N) * _BLOCK_N
    _attention_kernel[(num_tokens, triton.cdiv(num_heads, block_h), splits)](
        query,
        rows,
        indices,
        target,
        largest,
        total,
        num_heads,
        num_selected,
        query.stride(0),
        query.stride(1),
        rows.stride(0),
        indices.stride(0),
        softmax_scale * 1.4426950408889634,
        columns,
        NUM_SPLITS=splits,
        FORMAT=fmt.kind,
        BLOCK_H=block_h,
        BLOCK_N=16 if fmt.kind == "fp32" else _BLOCK_N,
        LATENT=fmt.latent_dim,
        ROPE=fmt.rope_dim,
        ELEMENT=tl.float32 if fmt.kind == "fp32" else tl.bfloat16,
        # The interpreter has no bf16 products.
        COMPUTE=tl.bfloat16 if fmt.kind != "fp32" and rows.is_cuda else tl.float32,
        num_warps=8 if block_h == 64 else 4,
        num_stages=2,
    )
    if splits > 1:
        _merge_kernel[(num_tokens * num_heads,)](
            target, largest, total, out, NUM_SPLITS=splits, LATENT=fmt.latent_dim, num_warps=4
        )
    return out

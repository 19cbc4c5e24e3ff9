# mypy: allow-untyped-defs, allow-incomplete-defs
"""Indexer scores in Triton: I[t, u] = key_scale[u] * sum_h weight[t, h] * relu(query[t, h] . key[u]) (spec 3.3).

For GPUs or installs without DeepGEMM; there decode steps on Hopper are scored by kernels/cuda/indexer.cu.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from echo_batch.kernels.formats import BLOCK_SIZE, IndexFormat


@triton.jit
def _weighted_relu_sum(query, keys, weights, PRECISION: tl.constexpr):
    """query [H, D], keys [D, N], weights [H] -> fp32 [N]."""
    dots = tl.maximum(tl.dot(query, keys, input_precision=PRECISION), 0.0)
    return tl.sum(dots * weights[:, None], 0)


@triton.jit
def _paged_kernel(
    query_ptr,
    weights_ptr,
    pages_ptr,
    block_table_ptr,
    seq_lens_ptr,
    out_ptr,
    num_heads,
    max_blocks,
    page_bytes,
    table_stride,
    out_stride,
    FP8: tl.constexpr,
    HEADS_P2: tl.constexpr,
    DIM: tl.constexpr,
    BLOCK: tl.constexpr,
    PAGES: tl.constexpr,
):
    row = tl.program_id(1)
    first = tl.program_id(0) * PAGES
    length = tl.load(seq_lens_ptr + row)
    out_ptr += row.to(tl.int64) * out_stride
    offset = tl.arange(0, BLOCK)
    if first * BLOCK >= length:
        for i in range(PAGES):
            column = (first + i) * BLOCK + offset
            tl.store(out_ptr + column, tl.full((BLOCK,), float("-inf"), tl.float32), mask=column < max_blocks * BLOCK)
    else:
        head = tl.arange(0, HEADS_P2)
        dim = tl.arange(0, DIM)
        at = (row.to(tl.int64) * num_heads + head)[:, None] * DIM + dim[None, :]
        query = tl.load(query_ptr + at, mask=(head < num_heads)[:, None], other=0.0)
        weights = tl.load(weights_ptr + row * num_heads + head, mask=head < num_heads, other=0.0)
        for i in range(PAGES):
            column = (first + i) * BLOCK + offset
            page = tl.load(
                block_table_ptr + row.to(tl.int64) * table_stride + first + i, mask=first + i < max_blocks, other=-1
            )
            # A page that holds no token of the row is not read.
            inside = column < tl.where(page >= 0, length, 0)
            page_ptr = pages_ptr + tl.maximum(page, 0).to(tl.int64) * page_bytes
            if FP8:
                values_ptr = page_ptr.to(tl.pointer_type(tl.float8e4nv))
                keys = tl.load(values_ptr + offset[None, :] * DIM + dim[:, None], mask=inside[None, :], other=0.0)
                scale_ptr = (page_ptr + BLOCK * DIM).to(tl.pointer_type(tl.float32))
                scale = tl.load(scale_ptr + offset, mask=inside, other=0.0)
                scores = _weighted_relu_sum(query, keys, weights, "tf32") * scale
            else:
                values_ptr = page_ptr.to(tl.pointer_type(tl.float32))
                keys = tl.load(values_ptr + offset[None, :] * DIM + dim[:, None], mask=inside[None, :], other=0.0)
                scores = _weighted_relu_sum(query.to(tl.float32), keys, weights, "ieee")
            tl.store(out_ptr + column, tl.where(inside, scores, float("-inf")), mask=column < max_blocks * BLOCK)


def index_scores_paged(
    query: Tensor,
    weights: Tensor,
    pages: Tensor,
    block_table: Tensor,
    seq_lens: Tensor,
    fmt: IndexFormat,
    schedule: Tensor | None = None,
) -> Tensor:
    """Decode: score every cached token of each row; as reference.indexer.index_scores_paged.

    query [B, Hi, 128] (fp32, or e4m3 with its scale folded into weights), weights fp32 [B, Hi], pages uint8
    [num_blocks, page_bytes], block_table int32 [B, max_blocks] (-1 padded), seq_lens int32 [B] -> fp32
    [B, max_blocks * 64], -inf at and past seq_lens.
    """
    num_rows, num_heads, dim = query.shape
    max_blocks = block_table.shape[1]
    assert (query.dtype == torch.float8_e4m3fn) == (fmt.kind == "fp8"), query.dtype
    assert query.is_contiguous() and weights.is_contiguous() and block_table.stride(1) == 1 and pages.stride(1) == 1
    scores = torch.empty(num_rows, max_blocks * BLOCK_SIZE, dtype=torch.float32, device=query.device)
    if num_rows == 0 or max_blocks == 0:
        return scores
    pages_per_program = min(8, triton.next_power_of_2(max_blocks))
    _paged_kernel[(triton.cdiv(max_blocks, pages_per_program), num_rows)](
        query,
        weights,
        pages,
        block_table,
        seq_lens,
        scores,
        num_heads,
        max_blocks,
        pages.stride(0),
        block_table.stride(0),
        scores.stride(0),
        FP8=fmt.kind == "fp8",
        HEADS_P2=max(16, triton.next_power_of_2(num_heads)),
        DIM=dim,
        BLOCK=BLOCK_SIZE,
        PAGES=pages_per_program,
        num_warps=4,
        num_stages=3,
    )
    return scores


@triton.jit
def _contiguous_kernel(
    query_ptr,
    weights_ptr,
    keys_ptr,
    row_ends_ptr,
    out_ptr,
    num_tokens,
    num_heads,
    num_keys,
    key_bytes,
    out_stride,
    FP8: tl.constexpr,
    HEADS_P2: tl.constexpr,
    DIM: tl.constexpr,
    BLOCK: tl.constexpr,
    TOKENS: tl.constexpr,
):
    column = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    first = tl.program_id(1) * TOKENS
    token_lane = first + tl.arange(0, TOKENS)
    last_end = tl.max(tl.load(row_ends_ptr + token_lane, mask=token_lane < num_tokens, other=0), 0)
    # Keys past every end are never looked at: they may be unwritten.
    readable = column < tl.minimum(last_end, num_keys)
    head = tl.arange(0, HEADS_P2)
    dim = tl.arange(0, DIM)
    row_ptr = keys_ptr + column.to(tl.int64) * key_bytes
    if FP8:
        values_ptr = row_ptr.to(tl.pointer_type(tl.float8e4nv))
        scale = tl.load((row_ptr + DIM).to(tl.pointer_type(tl.float32)), mask=readable, other=0.0)
    else:
        values_ptr = row_ptr.to(tl.pointer_type(tl.float32))
        scale = tl.full((BLOCK,), 1.0, tl.float32)
    keys = tl.load(values_ptr[None, :] + dim[:, None], mask=readable[None, :], other=0.0)
    query_ptr += first.to(tl.int64) * num_heads * DIM
    weights_ptr += first.to(tl.int64) * num_heads
    out_ptr += first.to(tl.int64) * out_stride
    for i in range(tl.minimum(TOKENS, num_tokens - first)):
        end = tl.load(row_ends_ptr + first + i)
        inside = column < end
        scores = tl.full((BLOCK,), float("-inf"), tl.float32)
        if tl.program_id(0) * BLOCK < end:
            at = head[:, None] * DIM + dim[None, :]
            query = tl.load(query_ptr + at, mask=(head < num_heads)[:, None], other=0.0)
            weights = tl.load(weights_ptr + head, mask=head < num_heads, other=0.0)
            if FP8:
                scored = _weighted_relu_sum(query, keys, weights, "tf32") * scale
            else:
                scored = _weighted_relu_sum(query.to(tl.float32), keys, weights, "ieee")
            scores = tl.where(inside, scored, scores)
        tl.store(out_ptr + column, scores, mask=column < num_keys)
        query_ptr += num_heads * DIM
        weights_ptr += num_heads
        out_ptr += out_stride


def index_scores_contiguous(query: Tensor, weights: Tensor, keys: Tensor, row_ends: Tensor, fmt: IndexFormat) -> Tensor:
    """Prefill: score the keys before row_ends[t] for each token t; as reference.indexer.index_scores_contiguous.

    query [T, Hi, 128] (fp32, or e4m3 with its scale folded into weights), weights fp32 [T, Hi], keys uint8
    [S, row_bytes], row_ends int32 [T] -> fp32 [T, S], -inf at and past row_ends.
    """
    num_tokens, num_heads, dim = query.shape
    num_keys = keys.shape[0]
    assert (query.dtype == torch.float8_e4m3fn) == (fmt.kind == "fp8"), query.dtype
    assert query.is_contiguous() and weights.is_contiguous() and keys.stride(1) == 1
    scores = torch.empty(num_tokens, num_keys, dtype=torch.float32, device=query.device)
    if num_tokens == 0 or num_keys == 0:
        return scores
    block = 128 if fmt.kind == "fp8" else 64
    _contiguous_kernel[(triton.cdiv(num_keys, block), triton.cdiv(num_tokens, 32))](
        query,
        weights,
        keys,
        row_ends,
        scores,
        num_tokens,
        num_heads,
        num_keys,
        keys.stride(0),
        scores.stride(0),
        FP8=fmt.kind == "fp8",
        HEADS_P2=max(16, triton.next_power_of_2(num_heads)),
        DIM=dim,
        BLOCK=block,
        TOKENS=32,
        num_warps=4,
        num_stages=2,
    )
    return scores

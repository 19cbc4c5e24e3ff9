"""Index scores of a long sequence in one Triton kernel: selection on a GPU without [n, heads, L] in memory."""

import torch
import triton
import triton.language as tl
from torch import Tensor

_BLOCK = 64


@triton.jit
def _scores_kernel(  # type: ignore[no-untyped-def]
    query, key, weights, out, num_queries, num_keys, first,
    HEADS: tl.constexpr, DIM: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    col = tl.program_id(1) * COLS + tl.arange(0, COLS)
    dim = tl.arange(0, DIM)
    allowed = (col[None, :] <= first + row[:, None]) & (col[None, :] < num_keys)
    total = tl.zeros((ROWS, COLS), tl.float32)
    if tl.program_id(1) * COLS <= first + tl.program_id(0) * ROWS + ROWS - 1:
        keys = tl.load(key + col[None, :] * DIM + dim[:, None], mask=col[None, :] < num_keys, other=0.0)
        for head in range(HEADS):
            at = row[:, None] * (HEADS * DIM) + head * DIM + dim[None, :]
            queries = tl.load(query + at, mask=row[:, None] < num_queries, other=0.0)
            weight = tl.load(weights + row * HEADS + head, mask=row < num_queries, other=0.0)
            total += weight[:, None] * tl.maximum(tl.dot(queries, keys), 0.0)
    total = tl.where(allowed, total, float("-inf"))
    place = row[:, None].to(tl.int64) * num_keys + col[None, :]
    tl.store(out + place, total, mask=(row[:, None] < num_queries) & (col[None, :] < num_keys))


def causal_index_scores(query: Tensor, key: Tensor, weights: Tensor, first: int) -> Tensor:
    """Index scores fp32 [n, L] of queries at positions first ... first + n - 1, -inf past each query's own position.

    query bf16 [n, Hi, d], key bf16 [L, d], weights fp32 [n, Hi] on a GPU; d a power of two.
    """
    n, heads, dim = query.shape
    num_keys = key.shape[0]
    out = torch.empty(n, num_keys, dtype=torch.float32, device=query.device)
    grid = (triton.cdiv(n, _BLOCK), triton.cdiv(num_keys, 2 * _BLOCK))
    _scores_kernel[grid](
        query.contiguous(), key.contiguous(), weights.contiguous(), out, n, num_keys, first,
        HEADS=heads, DIM=dim, ROWS=_BLOCK, COLS=2 * _BLOCK, num_warps=4, num_stages=2,
    )  # fmt: skip
    return out

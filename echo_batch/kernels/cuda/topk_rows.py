"""Exact top-k of the index scores of many rows, a block each (kernel and method: topk_rows.cu)."""

import torch
from torch import Tensor

from echo_batch.kernels.cuda.runtime import INT32, INT64, POINTER, UINT32, launch, load_kernel

_THREADS = 512
_MIN_BLOCKS = 3
_MAX_LIST = 4096
_FIXED_SHARED_BYTES = 4 * 2048 + 8 * _MAX_LIST + 256
"""At least sizeof(Shared) of topk_rows.cu."""
MAX_TOPK = 2048
"""A longer list than this leaves too little room for what a sample cannot know: every row would be read many times."""
MAX_WIDTH = 1 << 20
"""Positions have 20 bits in the kernel's keys."""


def _shared_bytes(width: int) -> int:
    """And a bit for each position, in chunks of 128."""
    return _FIXED_SHARED_BYTES + 16 * -(-width // 128)


def topk_rows(scores: Tensor, lengths: Tensor, out: Tensor, *, first: int = 0) -> Tensor:
    """As reference.topk_rows.topk_rows.

    scores fp32 [T, S] (S up to 2^20, unit stride in a row), lengths int32 [T], out int32 [T, k] (k up to 2,048, unit
    stride in a row) -> kth fp32 [T].
    """
    (num_rows, width), k = scores.shape, out.shape[1]
    assert scores.dtype == torch.float32 and lengths.dtype == torch.int32 and lengths.is_contiguous()
    assert scores.stride(1) == 1 and width <= MAX_WIDTH, (scores.stride(), width)
    assert out.dtype == torch.int32 and out.stride(1) == 1 and out.shape[0] == num_rows and 0 < k <= MAX_TOPK, out.shape
    kth = torch.empty(num_rows, dtype=torch.float32, device=scores.device)
    if num_rows == 0:
        return kth
    aligned = scores.stride(0) % 4 == 0 and scores.data_ptr() % 16 == 0
    kernel = load_kernel(
        "topk_rows.cu",
        "topk_rows",
        (("THREADS", _THREADS), ("MIN_BLOCKS", _MIN_BLOCKS), ("MAX_LIST", _MAX_LIST), ("ALIGNED", int(aligned))),
        _shared_bytes(MAX_WIDTH),
        scores.device.index,
    )
    launch(
        kernel._replace(shared_bytes=_shared_bytes(width)),
        (num_rows, 1, 1),
        _THREADS,
        (
            (scores, POINTER),
            (scores.stride(0), INT64),
            (width, UINT32),
            (lengths, POINTER),
            (k, UINT32),
            (first, INT32),
            (out, POINTER),
            (out.stride(0), INT64),
            (kth, POINTER),
        ),
    )
    return kth

"""Sampling with temperature, top-k, top-p and min-p in one launch (kernel and method: sampling.cu)."""

import torch
from torch import Tensor

from echo_batch.kernels.cuda.runtime import INT64, POINTER, UINT32, launch, load_kernel
from echo_batch.kernels.reference.sampling import SamplingTensors

_CLUSTER = 8
_THREADS = 512
_OTHER_BYTES = 32768
"""Shared memory besides the scores: SCORES_OFFSET of sampling.cu."""
_SHARED_BYTES = 227 << 10
"""Shared memory that a block may have at most (capability 9.0)."""
MAX_VOCAB = (_SHARED_BYTES - _OTHER_BYTES) // 4 * _CLUSTER
"""A row is held in the shared memory of its blocks."""


def sample(logits: Tensor, params: SamplingTensors) -> tuple[Tensor, Tensor]:
    """As reference.sampling.sample: logits fp32 [B, V] -> tokens int64 [B], all finite bool [B]."""
    num_rows, vocab = logits.shape
    assert logits.dtype == torch.float32 and logits.stride(1) == 1 and 0 < vocab <= MAX_VOCAB, logits.shape
    tokens = torch.empty(num_rows, dtype=torch.int64, device=logits.device)
    finite = torch.empty(num_rows, dtype=torch.bool, device=logits.device)
    if num_rows == 0:
        return tokens, finite
    part = -(-vocab // (4 * _CLUSTER)) * 4
    shared_bytes = _OTHER_BYTES + 4 * part
    aligned = vocab % 4 == 0 and logits.stride(0) % 4 == 0 and logits.data_ptr() % 16 == 0
    kernel = load_kernel(
        "sampling.cu",
        "sample_tokens",
        (
            ("CLUSTER", _CLUSTER),
            ("THREADS", _THREADS),
            # 32 rows at once on an H200 if two blocks fit a multiprocessor.
            ("MIN_BLOCKS", 2 if 2 * (shared_bytes + 1024) <= 228 << 10 else 1),
            ("ALIGNED", int(aligned)),
        ),
        shared_bytes,
        logits.device.index,
    )
    for field, dtype in zip(params, _TYPES, strict=True):
        assert field.dtype == dtype and field.is_contiguous() and field.shape == (num_rows,), (field.dtype, field.shape)
    launch(
        kernel,
        (_CLUSTER, num_rows, 1),
        _THREADS,
        (
            (logits, POINTER),
            (logits.stride(0), INT64),
            (vocab, UINT32),
            (part, UINT32),
            *((field, POINTER) for field in params),
            (tokens, POINTER),
            (finite, POINTER),
        ),
    )
    return tokens, finite


_TYPES = (torch.float32, torch.float32, torch.int32, torch.float32, torch.int64, torch.int64, torch.int32)
"""Of the fields of SamplingTensors."""

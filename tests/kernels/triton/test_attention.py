import math

import pytest
import torch

from echo_batch.kernels.formats import RowFormat
from echo_batch.kernels.reference.attention import sparse_mla as reference
from echo_batch.kernels.reference.rows import pack_kv_rows
from echo_batch.kernels.triton.attention import sparse_mla
from tests.kernels.triton.common import DEVICE, difference, randn

SCALE = 0.135
BF16_COMPUTE = 3e-5
"""bf16 rows, weights and result."""


def selection(num_tokens: int, k: int, num_rows: int, seed: int) -> torch.Tensor:
    """Ascending distinct rows, then -1: all valid, none, one, some; row 0 is never selected."""
    generator = torch.Generator().manual_seed(seed)
    indices = torch.full((num_tokens, k), -1, dtype=torch.int32)
    for token, count in enumerate([k, 0, 1, k // 2 + 1] * (num_tokens // 4 + 1)):
        if token < num_tokens:
            chosen = torch.randperm(num_rows - 1, generator=generator)[:count] + 1
            indices[token, :count] = chosen.sort().values.to(torch.int32)
    return indices.to(DEVICE)


def poisoned_rows(num_rows: int, fmt: RowFormat, indices: torch.Tensor) -> torch.Tensor:
    """Packed random rows; NaN in every row that is not selected."""
    rows = pack_kv_rows(randn(num_rows, 512, seed=5), randn(num_rows, 64, seed=6), fmt)
    keep = torch.zeros(num_rows + 1, dtype=torch.bool, device=DEVICE)
    keep[indices.long().flatten()] = True
    rows[~keep[:-1]] = 255
    return rows


@pytest.mark.parametrize(
    ("kind", "dtype", "num_heads", "limit"),
    [
        ("fp8", torch.bfloat16, 20, BF16_COMPUTE),
        ("bf16", torch.bfloat16, 4, BF16_COMPUTE),
        ("fp32", torch.float32, 20, 1e-11),
    ],
)
@pytest.mark.parametrize("k", [48, 300])
def test_same_as_reference(kind: str, dtype: torch.dtype, num_heads: int, limit: float, k: int) -> None:
    fmt = RowFormat(kind)
    indices = selection(4, k, 400, seed=k)
    rows = poisoned_rows(400, fmt, indices)
    query = randn(4, num_heads, 576, seed=1, dtype=dtype)
    got = sparse_mla(query, rows, indices, SCALE, fmt)
    assert difference(got, reference(query, rows, indices, SCALE, fmt)) < limit
    assert not got[1].any()


def test_invalid_entries_anywhere() -> None:
    fmt = RowFormat("fp32")
    indices = torch.tensor([[-1] * 20 + [5, -1, 7] + [-1] * 40], dtype=torch.int32, device=DEVICE)
    rows = poisoned_rows(9, fmt, indices)
    query = randn(1, 3, 576, seed=2)
    assert difference(sparse_mla(query, rows, indices, SCALE, fmt), reference(query, rows, indices, SCALE, fmt)) < 1e-11
    rows[5] = torch.full((576,), math.nan, device=DEVICE).view(torch.uint8)
    assert sparse_mla(query, rows, indices, SCALE, fmt).isnan().any()


@pytest.mark.gpu
@pytest.mark.parametrize("kind", ["fp8", "bf16"])
@pytest.mark.parametrize("num_tokens", [1, 13, 64])
def test_real_shapes(kind: str, num_tokens: int) -> None:
    fmt = RowFormat(kind)
    indices = selection(num_tokens, 2048, 50000, seed=num_tokens)
    rows = poisoned_rows(50000, fmt, indices)
    query = randn(num_tokens, 128, 576, seed=1, dtype=torch.bfloat16)
    got = sparse_mla(query, rows, indices, SCALE, fmt)
    assert difference(got, reference(query, rows, indices, SCALE, fmt)) < BF16_COMPUTE

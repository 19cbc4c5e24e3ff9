"""sparse_mla against a per-token loop, and its promises about padding and foreign rows."""

import pytest
import torch
from torch import Tensor

from echo_batch.kernels.formats import RowFormat
from echo_batch.kernels.reference.attention import sparse_mla
from echo_batch.kernels.reference.rows import pack_kv_rows, unpack_kv_rows

SCALE = 0.1352
FORMATS = [RowFormat("fp8"), RowFormat("bf16"), RowFormat("fp32")]


def randn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def rows_of(count: int, fmt: RowFormat) -> Tensor:
    return pack_kv_rows(randn(count, 512, seed=1), randn(count, 64, seed=2), fmt)


def random_lists(num_tokens: int, width: int, num_rows: int, seed: int = 3) -> Tensor:
    """A mix of full, partly padded and empty lists, padding also in the middle."""
    generator = torch.Generator().manual_seed(seed)
    lists = torch.stack([torch.randperm(num_rows, generator=generator)[:width] for _ in range(num_tokens)])
    padded = torch.rand(lists.shape, generator=generator) < torch.rand(num_tokens, 1, generator=generator)
    lists[padded] = -1
    lists[0] = -1
    return lists.to(torch.int32)


def naive(query: Tensor, rows: Tensor, indices: Tensor, fmt: RowFormat) -> Tensor:
    latent, rope = unpack_kv_rows(rows, fmt)
    out = torch.zeros(*query.shape[:2], 512, dtype=torch.float64)
    for token in range(query.shape[0]):
        picked = [i for i in indices[token].tolist() if i != -1]
        if not picked:
            continue
        c, k = latent[picked].double(), rope[picked].double()
        q = query[token].double()
        out[token] = ((q[:, :512] @ c.T + q[:, 512:] @ k.T) * SCALE).softmax(-1) @ c
    return out


@pytest.mark.parametrize("fmt", FORMATS, ids=lambda fmt: fmt.kind)
@pytest.mark.parametrize("num_rows", [40, 5000])
def test_against_a_loop(fmt: RowFormat, num_rows: int) -> None:
    """Few rows and many reads, many rows and few reads: both ways of unpacking."""
    rows, query = rows_of(num_rows, fmt), randn(50, 3, 576)
    indices = random_lists(50, 24, num_rows)
    out = sparse_mla(query, rows, indices, SCALE, fmt)
    assert out.dtype == torch.float32
    torch.testing.assert_close(out.double(), naive(query, rows, indices, fmt), atol=2e-5, rtol=1e-4)
    assert (out[0] == 0).all()


def test_bf16_query_gives_bf16() -> None:
    fmt = RowFormat("bf16")
    rows, query, indices = rows_of(40, fmt), randn(6, 3, 576).to(torch.bfloat16), random_lists(6, 8, 40)
    out = sparse_mla(query, rows, indices, SCALE, fmt)
    assert out.dtype == torch.bfloat16
    torch.testing.assert_close(out.double(), naive(query, rows, indices, fmt), atol=1e-3, rtol=2**-8)


@pytest.mark.parametrize("fmt", FORMATS, ids=lambda fmt: fmt.kind)
@pytest.mark.parametrize("num_rows", [30, 5000])
def test_nan_in_rows_that_are_not_selected_never_leaks(fmt: RowFormat, num_rows: int) -> None:
    query = randn(20, 2, 576)
    clean = rows_of(num_rows, fmt)
    indices = random_lists(20, 10, num_rows - 1) + 1  # row 0 is selected by nobody; padding must not read it
    indices[indices == 0] = -1
    poisoned = torch.full_like(clean, 255)
    used = indices[indices >= 0].unique().long()
    poisoned[used] = clean[used]
    latent, _ = unpack_kv_rows(poisoned[:1], fmt)
    assert latent.isnan().all()
    expected = sparse_mla(query, clean, indices, SCALE, fmt)
    assert torch.equal(sparse_mla(query, poisoned, indices, SCALE, fmt), expected)


def test_a_selected_nan_shows() -> None:
    fmt = RowFormat("fp32")
    rows = rows_of(8, fmt)
    rows[3] = 255
    out = sparse_mla(randn(2, 2, 576), rows, torch.tensor([[1, 3], [1, 2]], dtype=torch.int32), SCALE, fmt)
    assert out[0].isnan().all() and out[1].isfinite().all()


def test_more_tokens_than_a_slice() -> None:
    fmt = RowFormat("fp32")
    rows, query = rows_of(64, fmt), randn(70, 2, 576)
    indices = random_lists(70, 60, 64)
    out = sparse_mla(query, rows, indices, SCALE, fmt)
    torch.testing.assert_close(out.double(), naive(query, rows, indices, fmt), atol=2e-5, rtol=1e-4)


def test_nothing_selected() -> None:
    out = sparse_mla(
        randn(2, 2, 576), rows_of(4, FORMATS[2]), torch.full((2, 3), -1, dtype=torch.int32), SCALE, FORMATS[2]
    )
    assert out.shape == (2, 2, 512) and (out == 0).all()

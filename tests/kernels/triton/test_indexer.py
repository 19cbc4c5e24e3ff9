import pytest
import torch

from echo_batch.kernels.formats import BLOCK_SIZE, IndexFormat
from echo_batch.kernels.reference import indexer as reference
from echo_batch.kernels.reference import rows
from echo_batch.kernels.triton import indexer
from tests.kernels.triton.common import DEVICE, difference, randn

LIMIT = 1e-7
"""fp8 products are summed with fewer bits than fp32 on tensor cores."""


def inputs(kind: str, num_tokens: int, num_heads: int) -> tuple[torch.Tensor, torch.Tensor]:
    query = randn(num_tokens, num_heads, 128, seed=1)
    if kind == "fp8":
        query, _ = rows.quantize_index_query(query, True)
    return query, randn(num_tokens, num_heads, seed=2)


def filled_pages(fmt: IndexFormat, num_blocks: int) -> torch.Tensor:
    """Pages of random keys; what lies in them beyond the tests' lengths must not matter."""
    pages = torch.zeros(num_blocks, fmt.page_bytes, dtype=torch.uint8, device=DEVICE)
    slots = torch.arange(num_blocks * BLOCK_SIZE, dtype=torch.int32, device=DEVICE)
    rows.write_index_keys(pages, slots, rows.pack_index_keys(randn(slots.shape[0], 128, seed=3), fmt, True), fmt)
    return pages


@pytest.mark.parametrize("kind", ["fp8", "fp32"])
@pytest.mark.parametrize("num_heads", [32, 20])
def test_paged(kind: str, num_heads: int) -> None:
    fmt = IndexFormat(kind)
    pages = filled_pages(fmt, 6)
    pages[5] = 255  # NaN: of no row
    lengths = torch.tensor([130, 0, 1, 192], dtype=torch.int32, device=DEVICE)
    table = torch.tensor([[4, 0, 2, -1], [-1] * 4, [3, -1, 5, 5], [1, 2, 3, 5]], dtype=torch.int32, device=DEVICE)
    query, weights = inputs(kind, 4, num_heads)
    got = indexer.index_scores_paged(query, weights, pages, table, lengths, fmt)
    expected = reference.index_scores_paged(query, weights, pages, table, lengths, fmt)
    assert difference(got, expected) < LIMIT


@pytest.mark.parametrize("kind", ["fp8", "fp32"])
def test_contiguous(kind: str) -> None:
    fmt = IndexFormat(kind)
    keys = rows.pack_index_keys(randn(150, 128, seed=3), fmt, True)
    keys[140:] = 255
    ends = torch.tensor([140, 0, 1, 128, 64], dtype=torch.int32, device=DEVICE)
    query, weights = inputs(kind, 5, 32)
    got = indexer.index_scores_contiguous(query, weights, keys, ends, fmt)
    expected = reference.index_scores_contiguous(query, weights, keys, ends, fmt)
    assert difference(got, expected) < LIMIT


@pytest.mark.gpu
def test_real_shapes() -> None:
    fmt = IndexFormat("fp8")
    pages = filled_pages(fmt, 1200)
    lengths = torch.tensor([30000, 2049, 38400], dtype=torch.int32, device=DEVICE)
    table = torch.stack([torch.randperm(1200, device=DEVICE)[:600] for _ in range(3)]).to(torch.int32)
    query, weights = inputs("fp8", 3, 64)
    got = indexer.index_scores_paged(query, weights, pages, table, lengths, fmt)
    assert difference(got, reference.index_scores_paged(query, weights, pages, table, lengths, fmt)) < LIMIT
    keys = rows.pack_index_keys(randn(20000, 128, seed=3), fmt, True)
    query, weights = inputs("fp8", 100, 64)
    ends = torch.arange(19901, 20001, dtype=torch.int32, device=DEVICE)
    got = indexer.index_scores_contiguous(query, weights, keys, ends, fmt)
    assert difference(got, reference.index_scores_contiguous(query, weights, keys, ends, fmt)) < LIMIT

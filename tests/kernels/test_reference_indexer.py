"""Index scores against the formula written out, through pages and through contiguous keys."""

import pytest
import torch
from torch import Tensor

from echo_batch.kernels.formats import BLOCK_SIZE, IndexFormat
from echo_batch.kernels.reference.indexer import index_scores_contiguous, index_scores_paged
from echo_batch.kernels.reference.rows import (
    pack_index_keys,
    quantize_index_query,
    unpack_index_keys,
    write_index_keys,
)

FORMATS = [IndexFormat("fp8"), IndexFormat("fp32")]


def randn(*shape: int, seed: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def inputs(num_tokens: int, num_keys: int, fmt: IndexFormat) -> tuple[Tensor, Tensor, Tensor]:
    """Query and weights (of both signs) as the model passes them, and packed keys."""
    query, weights = randn(num_tokens, 8, 128, seed=0), randn(num_tokens, 8, seed=1)
    keys = pack_index_keys(randn(num_keys, 128, seed=2) * 3, fmt, True)
    if fmt.kind == "fp8":
        query, scale = quantize_index_query(query, True)
        weights = weights * scale
    return query, weights, keys


def formula(query: Tensor, weights: Tensor, keys: Tensor, fmt: IndexFormat) -> Tensor:
    values, scale = unpack_index_keys(keys, fmt)
    dots = torch.einsum("thd,sd->ths", query.double(), values.double()).relu()
    scores = torch.einsum("th,ths->ts", weights.double(), dots)
    return scores if scale is None else scores * scale.double()


@pytest.mark.parametrize("fmt", FORMATS, ids=lambda fmt: fmt.kind)
def test_contiguous(fmt: IndexFormat) -> None:
    query, weights, keys = inputs(40, 2500, fmt)  # several tiles of keys, several slices of tokens
    ends = torch.linspace(0, 2500, 40).to(torch.int32)
    scores = index_scores_contiguous(query, weights, keys, ends, fmt)
    assert scores.shape == (40, 2500) and scores.dtype == torch.float32
    outside = torch.arange(2500) >= ends[:, None]
    expected = formula(query, weights, keys, fmt).masked_fill(outside, float("-inf"))
    torch.testing.assert_close(scores.double(), expected, atol=2e-3, rtol=1e-5)


@pytest.mark.parametrize("fmt", FORMATS, ids=lambda fmt: fmt.kind)
def test_garbage_past_the_end_is_not_seen(fmt: IndexFormat) -> None:
    query, weights, keys = inputs(3, 50, fmt)
    ends = torch.tensor([10, 0, 20], dtype=torch.int32)
    expected = index_scores_contiguous(query, weights, keys, ends, fmt)
    keys[20:] = 255
    assert torch.equal(index_scores_contiguous(query, weights, keys, ends, fmt), expected)
    assert (expected[1] == float("-inf")).all()


@pytest.mark.parametrize("fmt", FORMATS, ids=lambda fmt: fmt.kind)
def test_paged(fmt: IndexFormat) -> None:
    lengths = [0, 1, 64, 65, 200]
    query, weights, keys = inputs(len(lengths), 200, fmt)
    table = torch.randperm(24, generator=torch.Generator().manual_seed(3))[:20].view(5, 4).to(torch.int32)
    pages = torch.full((24, fmt.page_bytes), 255, dtype=torch.uint8)
    for row, length in enumerate(lengths):
        positions = torch.arange(length)
        slots = table[row, positions // BLOCK_SIZE] * BLOCK_SIZE + positions % BLOCK_SIZE
        write_index_keys(pages, slots.to(torch.int32), keys[:length], fmt)
        table[row, -(-length // BLOCK_SIZE) :] = -1
    seq_lens = torch.tensor(lengths, dtype=torch.int32)
    scores = index_scores_paged(query, weights, pages, table, seq_lens, fmt)
    assert scores.shape == (5, 256)
    expected = formula(query, weights, keys, fmt)
    for row, length in enumerate(lengths):
        torch.testing.assert_close(scores[row, :length].double(), expected[row, :length], atol=2e-3, rtol=1e-5)
        assert (scores[row, length:] == float("-inf")).all()
        alone = slice(row, row + 1)
        one = index_scores_paged(query[alone], weights[alone], pages, table[alone], seq_lens[alone], fmt)
        assert torch.equal(one[0], scores[row])


def test_relu_comes_before_the_weights() -> None:
    """A key that is opposite to the query scores 0, not its negative times the weight."""
    fmt = IndexFormat("fp32")
    key = torch.ones(1, 128)
    query = torch.stack((torch.ones(2, 128), -torch.ones(2, 128)))
    weights = torch.tensor([[1.0, -0.5], [1.0, -0.5]])
    scores = index_scores_contiguous(query, weights, pack_index_keys(key, fmt, True), torch.tensor([1, 1]), fmt)
    assert scores.tolist() == [[64.0], [0.0]]

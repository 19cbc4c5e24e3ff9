"""The CUDA top-k for many rows selects exactly what the reference selects."""

import importlib.resources

import pytest
import torch
from torch import Tensor

from echo_batch.kernels.cuda.topk_rows import topk_rows
from echo_batch.kernels.reference.topk_rows import topk_rows as reference
from tests.kernels.triton.test_topk import KINDS, dirtied, scores_of


def check(scores: Tensor, lengths: Tensor, k: int, first: int = 0) -> None:
    expected = torch.empty((scores.shape[0], k), dtype=torch.int32, device="cuda")
    dirty, lengths = dirtied(scores, lengths), lengths.cuda()
    kth = reference(dirty.clone(), lengths, expected, first=first)
    # Into columns of a wider tensor whose other columns must stay as they are.
    wide = torch.full((scores.shape[0], k + 7), -5, dtype=torch.int32, device="cuda")
    got_kth = topk_rows(dirty, lengths, wide[:, 3 : 3 + k], first=first)
    assert torch.equal(wide[:, 3 : 3 + k], expected)
    assert torch.equal(got_kth, kth)
    assert bool((wide[:, :3] == -5).all()) and bool((wide[:, 3 + k :] == -5).all())


def test_the_source_is_part_of_the_package() -> None:
    assert "topk_rows" in importlib.resources.files("echo_batch.kernels.cuda").joinpath("topk_rows.cu").read_text()


@pytest.mark.gpu
@pytest.mark.parametrize("kind", KINDS)
def test_same_as_reference(kind: str) -> None:
    for width, k in ((98304, 2048), (20003, 2048), (2500, 64), (131072, 2048), (4096, 2048), (300, 32)):
        scores = scores_of(kind, 6, width, seed=width)
        lengths = torch.tensor([width, k, k - 1, width - 1, k + 1, 0], dtype=torch.int32)
        check(scores, lengths, k, first=width % 3)


@pytest.mark.gpu
def test_every_length_in_one_launch() -> None:
    lengths = torch.cat((torch.arange(0, 6000, 7), torch.tensor([2047, 2048, 2049, 90000]))).to(torch.int32)
    check(scores_of("ties", lengths.shape[0], 90000, seed=3), lengths, 2048, first=64)


@pytest.mark.gpu
@pytest.mark.parametrize("where", ["sampled", "not sampled", "first half"])
def test_a_sample_that_misleads(where: str) -> None:
    """All large scores where the sample looks, or none: too many or too few pass, and the row is read again."""
    scores = torch.randn(3, 98304, generator=torch.Generator().manual_seed(5))
    quads = scores.view(3, -1, 4)
    sampled = torch.zeros(24576, dtype=torch.bool)
    sampled[torch.arange(1024) * 24576 // 1024] = True
    if where == "first half":
        scores[:, :49152] += 10.0
    else:
        quads[:, sampled if where == "sampled" else ~sampled] += 10.0
    check(scores, torch.full((3,), 98304, dtype=torch.int32), 2048)


@pytest.mark.gpu
def test_a_million_positions() -> None:
    check(scores_of("normal", 2, 1 << 20, seed=9), torch.tensor([1 << 20, 1000001], dtype=torch.int32), 2048)

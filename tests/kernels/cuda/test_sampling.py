"""The sampling kernel chooses the reference's tokens."""

import importlib.resources

import pytest
import torch
from torch import Tensor

from echo_batch.kernels.reference import sampling as reference
from echo_batch.kernels.reference.sampling import SamplingTensors


def mixed_params(num_rows: int, seed: int) -> SamplingTensors:
    """Every combination of filters somewhere, greedy rows among them."""
    generator = torch.Generator().manual_seed(seed)

    def pick(values: list[float], dtype: torch.dtype) -> Tensor:
        return torch.tensor(values)[torch.randint(len(values), (num_rows,), generator=generator)].to(dtype)

    return SamplingTensors(
        temperature=pick([0.0, 0.3, 0.7, 1.0, 1.0, 2.0, 50.0], torch.float32),
        top_p=pick([1.0, 1.0, 0.95, 0.8, 0.3, 1e-6], torch.float32),
        top_k=pick([0, 0, 1, 2, 20, 50, 1000, 10**7], torch.int32),
        min_p=pick([0.0, 0.0, 0.0, 0.05, 0.5, 1.0], torch.float32),
        seed=torch.randint(-(2**62), 2**62, (num_rows,), generator=generator),
        row_id=torch.randint(0, 2**40, (num_rows,), generator=generator),
        position=torch.randint(0, 160_000, (num_rows,), generator=generator).to(torch.int32),
    )


def logits_of(kind: str, num_rows: int, vocab: int) -> Tensor:
    logits = torch.randn(num_rows, vocab, generator=torch.Generator().manual_seed(vocab))
    match kind:
        case "peaked":
            return logits * 8
        case "ties":
            return (logits * 2).round()
        case "equal":
            return torch.zeros_like(logits)
        case "wide":
            return logits * 1e30
    return logits * 3


@pytest.mark.gpu
@pytest.mark.parametrize("kind", ["normal", "peaked", "ties", "equal", "wide"])
@pytest.mark.parametrize(("num_rows", "vocab"), [(96, 129280), (64, 151552), (33, 1001), (7, 3), (2, 1), (2, 300_000)])
def test_same_tokens_as_the_reference(kind: str, num_rows: int, vocab: int) -> None:
    from echo_batch.kernels.cuda.sampling import sample

    logits, params = logits_of(kind, num_rows, vocab).cuda(), mixed_params(num_rows, vocab)
    params = SamplingTensors(*(field.cuda() for field in params))
    if num_rows > 4:
        logits[1, vocab // 2] = float("nan")
        logits[2, vocab - 1] = float("-inf")
    tokens, finite = sample(logits, params)
    expected, expected_finite = reference.sample(logits, params)
    assert torch.equal(finite, expected_finite)
    assert torch.equal(tokens[finite], expected[finite])
    assert ((tokens >= 0) & (tokens < vocab)).all()
    # One row alone, and not aligned to 16 bytes, gives the same token.
    alone = torch.zeros(1, vocab + 1, device="cuda")
    alone[:, 1:] = logits[:1]
    assert torch.equal(sample(alone[:, 1:], SamplingTensors(*(field[:1] for field in params)))[0], tokens[:1])


@pytest.mark.gpu
def test_kept_tokens_are_those_of_the_reference() -> None:
    """With many draws from one distribution every kept token comes up, and no other."""
    from echo_batch.kernels.cuda.sampling import sample

    draws = 20_000
    logits = logits_of("normal", 1, 40).cuda().expand(draws, -1).contiguous()

    def filled(value: float, dtype: torch.dtype) -> Tensor:
        return torch.full((draws,), value, dtype=dtype, device="cuda")

    position = torch.arange(draws, dtype=torch.int32, device="cuda")
    params = SamplingTensors(
        temperature=filled(4.0, torch.float32),
        top_p=filled(0.9, torch.float32),
        top_k=filled(25, torch.int32),
        min_p=filled(0.08, torch.float32),
        seed=filled(3, torch.int64),
        row_id=filled(9, torch.int64),
        position=position,
    )
    kept = reference.filter_logits(logits[:1], SamplingTensors(*(field[:1] for field in params)))[0]
    share = torch.bincount(sample(logits, params)[0], minlength=40) / draws
    assert torch.equal(share > 0, kept.isfinite())
    assert torch.allclose(share, kept.softmax(0), atol=0.02)


@pytest.mark.gpu
def test_in_a_graph() -> None:
    from echo_batch.kernels.cuda.sampling import sample

    logits = logits_of("normal", 8, 5000).cuda()
    params = SamplingTensors(*(field.cuda() for field in mixed_params(8, 1)))
    sample(logits, params)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        tokens, _ = sample(logits, params)
    for _ in range(3):
        params.position.add_(1)
        graph.replay()
        assert torch.equal(tokens, reference.sample(logits, params)[0])


def test_the_sources_are_part_of_the_package() -> None:
    folder = importlib.resources.files("echo_batch.kernels.cuda")
    assert "sample_tokens" in folder.joinpath("sampling.cu").read_text()
    assert "cluster_sync" in folder.joinpath("cluster.cuh").read_text()

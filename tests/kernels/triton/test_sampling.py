"""Greedy sampling and row advance against the reference, bit by bit; interpreted where there is no GPU."""

import pytest
import torch

from echo_batch.kernels.reference import sampling as reference
from echo_batch.kernels.triton import sampling as fast

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")


@pytest.mark.parametrize(("rows", "vocab"), [(1, 1), (3, 512), (2, 4096), (4, 10_001)])
def test_greedy_sample(rows: int, vocab: int) -> None:
    generator = torch.Generator().manual_seed(rows + vocab)
    # Few distinct values: many ties.
    logits = torch.randint(-20, 20, (rows, vocab), generator=generator).float()
    if rows > 1 and vocab > 100:
        logits[1, 77] = float("nan")
    if rows > 3:
        logits[2, vocab - 1] = float("inf")
        logits[3, 5] = float("-inf")
    tokens, finite = fast.greedy_sample(logits.to(DEVICE))
    expected_tokens, expected_finite = reference.greedy_sample(logits)
    assert torch.equal(finite.cpu(), expected_finite)
    assert torch.equal(tokens.cpu()[expected_finite], expected_tokens[expected_finite])
    assert ((tokens >= 0) & (tokens < vocab)).all()


def test_advance_rows() -> None:
    generator = torch.Generator().manual_seed(5)
    rows = 64

    def flags(share: float) -> torch.Tensor:
        return torch.rand(rows, generator=generator) < share

    def numbers(high: int, dtype: torch.dtype, *shape: int) -> torch.Tensor:
        return torch.randint(0, high, (rows, *shape), generator=generator).to(dtype)

    arguments = [numbers(20, torch.int64), flags(0.9), flags(0.9)]
    state = dict(token_ids=numbers(20, torch.int64), positions=numbers(9, torch.int32), active=flags(0.7))
    constants = dict(stop_ids=numbers(20, torch.int64, 5), last_position=numbers(12, torch.int32))
    ours = {name: value.clone().to(DEVICE) for name, value in state.items()}
    told = fast.advance_rows(
        *(a.to(DEVICE) for a in arguments), **ours, **{name: value.to(DEVICE) for name, value in constants.items()}
    )
    expected = reference.advance_rows(*arguments, **state, **constants)
    for got, want in zip(told, expected, strict=True):
        assert torch.equal(got.cpu(), want) and got.dtype == want.dtype
    assert set(expected[1].tolist()) == {0, 1, 2, 3, 4}
    for name, value in state.items():
        assert torch.equal(ours[name].cpu(), value), name

"""Norms in fp32 with one rounding."""

import torch

from echo_batch.kernels.reference.norm import add_rms_norm, layer_norm, rms_norm

WEIGHT = torch.linspace(0.5, 1.5, 64)


def exact_rms(x: torch.Tensor, eps: float) -> torch.Tensor:
    x = x.double()
    return WEIGHT.double() * x / (x.square().mean(-1, keepdim=True) + eps).sqrt()


def test_rms_norm() -> None:
    x = torch.randn(5, 64, generator=torch.Generator().manual_seed(0))
    torch.testing.assert_close(rms_norm(x, WEIGHT, 0.1).double(), exact_rms(x, 0.1), atol=1e-6, rtol=1e-6)
    half = x.to(torch.bfloat16)
    assert torch.equal(rms_norm(half, WEIGHT, 0.1), exact_rms(half, 0.1).to(torch.bfloat16))


def test_add_rms_norm() -> None:
    generator = torch.Generator().manual_seed(0)
    hidden, delta = torch.randn(2, 5, 64, generator=generator).to(torch.bfloat16)
    total, normed = add_rms_norm(hidden, delta, WEIGHT, 1e-6)
    exact = hidden.double() + delta.double()
    assert torch.equal(total, exact.to(torch.bfloat16))
    assert torch.equal(normed, exact_rms(exact, 1e-6).to(torch.bfloat16))
    same, normed = add_rms_norm(hidden, None, WEIGHT, 1e-6)
    assert same is hidden and torch.equal(normed, rms_norm(hidden, WEIGHT, 1e-6))


def test_layer_norm() -> None:
    x = torch.randn(5, 64, generator=torch.Generator().manual_seed(0)) * 3 + 2
    bias = torch.linspace(-1, 1, 64)
    centred = x.double() - x.double().mean(-1, keepdim=True)
    expected = centred / (centred.square().mean(-1, keepdim=True) + 1e-6).sqrt() * WEIGHT + bias
    torch.testing.assert_close(layer_norm(x, WEIGHT, bias, 1e-6).double(), expected, atol=1e-5, rtol=1e-5)

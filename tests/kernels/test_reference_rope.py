"""Rotations as complex products, in both pairings."""

import pytest
import torch

from echo_batch.kernels.reference.rope import apply_rope, rope_angles

FREQUENCIES = 10000.0 ** -(torch.arange(0, 64, 2) / 64)


def pairs_of(x: torch.Tensor, interleaved: bool) -> torch.Tensor:
    """[..., 64] -> complex [..., 32]."""
    first, second = (x[..., 0::2], x[..., 1::2]) if interleaved else (x[..., :32], x[..., 32:])
    return torch.complex(first.double(), second.double())


@pytest.mark.parametrize("interleaved", [True, False])
@pytest.mark.parametrize("shape", [(4, 64), (4, 3, 64)])
def test_is_a_complex_rotation(interleaved: bool, shape: tuple[int, ...]) -> None:
    x = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    positions = torch.tensor([0, 1, 17, 4095], dtype=torch.int32)
    out = apply_rope(x, *rope_angles(positions, FREQUENCIES), interleaved)
    angle = positions.double()[:, None] * FREQUENCIES.double()
    rotation = torch.polar(torch.ones_like(angle), angle).view(4, *[1] * (len(shape) - 2), 32)
    expected = pairs_of(x, interleaved) * rotation
    torch.testing.assert_close(pairs_of(out, interleaved), expected, atol=2e-3, rtol=0)
    assert torch.equal(out[0], x[0])


def test_bf16_is_rounded_once() -> None:
    x = torch.randn(4, 64, generator=torch.Generator().manual_seed(0)).to(torch.bfloat16)
    cos, sin = rope_angles(torch.arange(4), FREQUENCIES)
    assert cos.dtype == torch.float32 and cos.shape == (4, 32)
    out = apply_rope(x, cos, sin, True)
    assert torch.equal(out, apply_rope(x.float(), cos, sin, True).to(torch.bfloat16))


def test_large_positions_keep_their_angle() -> None:
    cos, sin = rope_angles(torch.tensor([1_000_003], dtype=torch.int32), torch.tensor([1.0]))
    assert cos.item() == pytest.approx(torch.tensor(1_000_003.0, dtype=torch.float64).cos().item(), abs=1e-5)
    assert sin.item() == pytest.approx(torch.tensor(1_000_003.0, dtype=torch.float64).sin().item(), abs=1e-5)

"""fp8 groups and power-of-two scales."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from echo_batch.kernels.reference.quant import dequantize_groups, quantize_groups, round_up_to_power_of_two


@settings(max_examples=200, deadline=None)
@given(st.floats(2.0**-100, 2.0**100, width=32))
def test_round_up_is_the_next_power_of_two(value: float) -> None:
    got = round_up_to_power_of_two(torch.tensor([value])).item()
    mantissa, _ = math.frexp(got)
    assert mantissa == 0.5
    assert value <= got < 2 * value


def test_powers_of_two_stay() -> None:
    powers = torch.tensor([2.0**e for e in range(-100, 100)])
    assert torch.equal(round_up_to_power_of_two(powers), powers)
    above = torch.nextafter(powers, torch.tensor(math.inf))
    assert torch.equal(round_up_to_power_of_two(above), 2 * powers)


@pytest.mark.parametrize("ue8m0", [False, True])
def test_groups_are_scaled_apart(ue8m0: bool) -> None:
    x = torch.randn(5, 256, generator=torch.Generator().manual_seed(0))
    x[:, 128:] *= 1000
    values, scale = quantize_groups(x, ue8m0=ue8m0)
    assert values.dtype == torch.float8_e4m3fn and scale.shape == (5, 2)
    exact = x.unflatten(-1, (2, 128)).abs().amax(-1) / 448
    ratio = scale / exact
    if ue8m0:
        assert ((ratio >= 1) & (ratio < 2)).all() and torch.equal(round_up_to_power_of_two(scale), scale)
    else:
        assert torch.equal(scale, exact)
        assert (values.float().unflatten(-1, (2, 128)).abs().amax(-1) == 448).all()
    torch.testing.assert_close(dequantize_groups(values, scale), x, rtol=1 / 16, atol=2.0 * scale.max().item() / 512)


def test_zero_group_is_zero() -> None:
    values, scale = quantize_groups(torch.zeros(2, 128))
    assert (scale == torch.tensor(1e-4) / 448).all()
    assert (dequantize_groups(values, scale) == 0).all()

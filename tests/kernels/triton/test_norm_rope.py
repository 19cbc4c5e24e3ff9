import pytest
import torch

from echo_batch.kernels.activation import Activation
from echo_batch.kernels.reference import fused as reference_fused
from echo_batch.kernels.reference import norm as reference_norm
from echo_batch.kernels.reference import rope as reference_rope
from echo_batch.kernels.reference.quant import quantize_groups
from echo_batch.kernels.triton import norm_rope
from tests.kernels.triton.common import BF16_LIMIT, DEVICE, difference, randn

DTYPES = [torch.float32, torch.bfloat16]
LIMIT = {torch.float32: 1e-12, torch.bfloat16: BF16_LIMIT}


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("with_delta", [False, True])
@pytest.mark.parametrize("width", [96, 384])
def test_norm_activation(dtype: torch.dtype, with_delta: bool, width: int) -> None:
    hidden, weight = randn(5, width + 64, seed=1, dtype=dtype)[:, 32:-32], 1 + 0.1 * randn(width, seed=2)
    delta = randn(5, width, seed=3, dtype=dtype) if with_delta else None
    expected_sum, expected = reference_norm.add_rms_norm(hidden, delta, weight, 1e-5)
    total, plain = norm_rope.norm_activation(hidden, delta, weight, 1e-5, None)
    assert difference(total, expected_sum) < LIMIT[dtype]
    assert difference(plain.values, expected) < LIMIT[dtype]
    assert plain.quantized is None and plain.scale is None
    if width % 128:
        return
    total, activation = norm_rope.norm_activation(hidden, delta, weight, 1e-5, True)
    assert difference(total, expected_sum) < LIMIT[dtype]
    assert difference(activation.values, expected) < LIMIT[dtype]
    expected_values, expected_scale = quantize_groups(activation.values, ue8m0=True)
    assert activation.quantized is not None and activation.scale is not None
    assert torch.equal(activation.quantized.view(torch.uint8), expected_values.view(torch.uint8))
    assert torch.equal(activation.scale, expected_scale)
    # Into the first rows of a larger batch.
    parts = (torch.zeros_like(activation.values), torch.zeros_like(activation.quantized), activation.scale)
    rows = Activation(*(torch.cat((part.float(), part.float() * 0)).to(part.dtype) for part in parts))
    out = Activation(rows.values[:5], rows.quantized[:5], rows.scale[:5])
    _, same = norm_rope.norm_activation(hidden, delta, weight, 1e-5, True, out)
    assert same.values is out.values and torch.equal(rows.values[:5], activation.values) and not rows.values[5:].any()
    assert torch.equal(rows.quantized[:5].view(torch.uint8), expected_values.view(torch.uint8))
    assert torch.equal(rows.scale[:5], expected_scale) and not rows.scale[5:].any()
    reference_rows = Activation(*(part.clone() for part in out))
    assert reference_fused.norm_activation(hidden, delta, weight, 1e-5, True, reference_rows)[1] is reference_rows
    assert difference(reference_rows.values, activation.values) < LIMIT[dtype]


def test_rope_angles() -> None:
    positions = torch.tensor([0, 1, 77, 160_000], device=DEVICE)
    frequencies = 10000.0 ** (-torch.arange(32, device=DEVICE) / 32.0)
    for got, expected in zip(
        norm_rope.rope_angles(positions, frequencies), reference_rope.rope_angles(positions, frequencies)
    ):
        assert torch.allclose(got, expected, atol=1e-5, rtol=0)


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
def test_apply_rope(interleaved: bool, dtype: torch.dtype) -> None:
    cos, sin = reference_rope.rope_angles(torch.arange(3, device=DEVICE) * 50, torch.rand(32, device=DEVICE))
    for x in (randn(3, 64, seed=1, dtype=dtype), randn(3, 20, 96, seed=2, dtype=dtype)[..., 32:]):
        expected = reference_rope.apply_rope(x, cos, sin, interleaved)
        assert difference(norm_rope.apply_rope(x, cos, sin, interleaved), expected) < LIMIT[dtype]
    out = torch.zeros(3, 20, 80, dtype=dtype, device=DEVICE)
    norm_rope.apply_rope(x, cos, sin, interleaved, out=out[..., 16:])
    assert difference(out[..., 16:], expected) < LIMIT[dtype]
    assert not out[..., :16].any()

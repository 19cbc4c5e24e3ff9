import pytest
import torch

from echo_batch.kernels.activation import Activation
from echo_batch.kernels.reference.moe import swiglu, swiglu_activation
from echo_batch.kernels.reference.quant import dequantize_groups
from echo_batch.kernels.reference.quant import quantize_groups as reference
from echo_batch.kernels.triton.quant import quantize_groups, quantized, swiglu_quantized
from tests.kernels.triton.common import BF16_LIMIT, DEVICE, difference, randn


@pytest.mark.parametrize("ue8m0", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_quantize_groups_is_bitwise_the_reference(ue8m0: bool, dtype: torch.dtype) -> None:
    x = randn(5, 384, seed=1) * torch.logspace(-6, 4, 384, device=DEVICE)
    x[1] = 0.0
    x[2, 128:256] = torch.tensor(448.0)
    x = x.to(dtype)
    values, scale = quantize_groups(x, ue8m0=ue8m0)
    # On the CPU: torch divides by a constant inexactly on GPUs.
    expected_values, expected_scale = reference(x.cpu(), ue8m0=ue8m0)
    assert torch.equal(scale.cpu(), expected_scale)
    assert torch.equal(values.cpu().view(torch.uint8), expected_values.view(torch.uint8))
    # DeepGEMM reads scales group after group, rows padded to 16 bytes.
    assert scale.stride() == (1, 8)


def test_many_rows() -> None:
    x = randn(70, 256, seed=2, dtype=torch.bfloat16)
    values, scale = quantize_groups(x, ue8m0=True)
    expected_values, expected_scale = reference(x, ue8m0=True)
    assert torch.equal(scale, expected_scale)
    assert torch.equal(values.view(torch.uint8), expected_values.view(torch.uint8))


@pytest.mark.parametrize("num_rows", [0, 1, 66])
def test_swiglu_quantized(num_rows: int) -> None:
    x = randn(num_rows, 512, seed=3, dtype=torch.bfloat16)
    got, expected = swiglu_quantized(x, ue8m0=True), swiglu_activation(x, True)
    assert got.quantized is not None and got.scale is not None and expected.scale is not None
    assert got.values.shape == (num_rows, 256) and got.scale.shape == (num_rows, 2)
    assert difference(got.values, expected.values) < BF16_LIMIT
    assert torch.equal(got.scale, expected.scale)
    assert difference(dequantize_groups(got.quantized, got.scale), swiglu(x.float())) < 1e-3


def test_a_producer_s_quantization_is_taken() -> None:
    x = randn(3, 128, seed=4)
    made = quantize_groups(x, ue8m0=False)
    assert quantized(Activation(x, *made), True)[0] is made[0]
    assert torch.equal(quantized(Activation(x), True)[1], quantize_groups(x, ue8m0=True)[1])

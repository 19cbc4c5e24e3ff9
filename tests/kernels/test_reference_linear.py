"""Plain and block-scaled linear layers."""

import torch

from echo_batch.kernels.activation import Activation
from echo_batch.kernels.reference.linear import linear, linear_fp32
from echo_batch.kernels.weights import QuantizedWeight, block_shape, dequantize


def test_plain() -> None:
    x, weight = torch.randn(3, 8), torch.randn(5, 8)
    torch.testing.assert_close(linear(Activation(x), weight), x @ weight.T)


def test_fp32_result_of_bf16_operands_is_not_rounded() -> None:
    x = torch.full((1, 64), 1.0, dtype=torch.bfloat16)
    weight = torch.full((1, 64), 1.0, dtype=torch.bfloat16)
    weight[0, 0] = 2.0**-7  # the sum 63.0078125 needs more than bf16's 8 bits
    out = linear_fp32(x, weight)
    assert out.dtype == torch.float32 and out.item() == 63.0078125


def test_dequantize_partial_blocks() -> None:
    """Rows and columns that are no whole number of blocks, as in kv_a (576 rows)."""
    data = torch.ones(192, 200).to(torch.float8_e4m3fn)
    scale = torch.tensor([[1.0, 2.0], [4.0, 8.0]])
    assert block_shape((192, 200)) == (2, 2)
    out = dequantize(QuantizedWeight(data, scale, False), torch.float32)
    assert (out[:128, :128] == 1).all() and (out[:128, 128:] == 2).all()
    assert (out[128:, :128] == 4).all() and (out[128:, 128:] == 8).all()


def test_quantized_output_has_the_dtype_of_its_input() -> None:
    weight = QuantizedWeight(torch.ones(128, 128).to(torch.float8_e4m3fn), torch.ones(1, 1), True)
    assert linear(Activation(torch.ones(2, 128, dtype=torch.bfloat16)), weight).dtype == torch.bfloat16
    assert (linear(Activation(torch.ones(2, 128)), weight) == 128).all()

"""Reference linear layers."""

import torch.nn.functional as F
from torch import Tensor

from echo_batch.kernels.activation import Activation
from echo_batch.kernels.parts import Parts
from echo_batch.kernels.reference.quant import dequantize_groups, quantize_groups
from echo_batch.kernels.weights import QUANT_BLOCK, QuantizedWeight, Weight, dequantize


def linear(x: Activation, weight: Weight) -> Tensor:
    """x [T, in] times weight [out, in] transposed -> [T, out] in the compute dtype.

    With a QuantizedWeight the quantized form of x counts; if its producer made none, x is quantized per group of 128
    here (as DeepSeek's fp8 GEMM does). Products are summed in fp32 and rounded once.
    """
    if not isinstance(weight, QuantizedWeight):
        return F.linear(x.values, weight)
    if x.quantized is None or x.scale is None:
        assert x.values.shape[-1] % QUANT_BLOCK == 0, x.values.shape
        x = Activation(x.values, *quantize_groups(x.values, ue8m0=weight.ue8m0))
    assert x.quantized is not None and x.scale is not None
    rounded = dequantize_groups(x.quantized, x.scale)
    return F.linear(rounded, dequantize(weight, rounded.dtype)).to(x.values.dtype)


def linear_parts(x: Activation, weight: Weight) -> Tensor | Parts:
    """`linear` whose reader adds up parts of it, if the inner dimension is cut over programs: a launch less."""
    return linear(x, weight)


def linear_fp32(x: Tensor, weight: Tensor) -> Tensor:
    """x [T, in] (fp32 or bf16), weight [out, in] (fp32 or bf16) -> fp32 [T, out], exact products summed in fp32.

    For the router, the indexer's head weights and the logits (spec section 4).
    """
    return F.linear(x.float(), weight.float())


def linear_fp32_parts(x: Tensor, weight: Tensor) -> Tensor:
    """`linear_fp32` as parts fp32 [S, T, out] that whoever reads them adds up in order (`sum_parts`).

    For small weights (router, indexer head weights): their inner dimension is cut over programs, and a launch that only
    adds the parts is saved.
    """
    return linear_fp32(x, weight).unsqueeze(0)


def linear_pair(x: Activation, weight: Weight, small: Tensor) -> tuple[Tensor | Parts, Tensor]:
    """`linear_parts` with one weight and `linear_fp32_parts` with another, of the same input."""
    return linear_parts(x, weight), linear_fp32_parts(x.values, small)

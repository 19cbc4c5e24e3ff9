"""Reference linear layers."""

import torch.nn.functional as F
from torch import Tensor

from echo_batch.kernels.reference.quant import dequantize_groups, quantize_groups
from echo_batch.kernels.weights import QUANT_BLOCK, QuantizedWeight, Weight, dequantize


def linear(x: Tensor, weight: Weight) -> Tensor:
    """x [T, in] times weight [out, in] transposed -> [T, out] in x's dtype.

    With a QuantizedWeight, x is quantized per group of 128 first (as DeepSeek's fp8 GEMM does) and `in` must be a
    multiple of 128; products are summed in fp32 and rounded once.
    """
    if isinstance(weight, QuantizedWeight):
        assert x.shape[-1] % QUANT_BLOCK == 0, x.shape
        x_rounded = dequantize_groups(*quantize_groups(x, ue8m0=weight.ue8m0))
        return F.linear(x_rounded, dequantize(weight, x_rounded.dtype)).to(x.dtype)
    return F.linear(x, weight)


def linear_fp32(x: Tensor, weight: Tensor) -> Tensor:
    """x [T, in] (fp32 or bf16), weight [out, in] (fp32 or bf16) -> fp32 [T, out], exact products summed in fp32.

    For the router, the indexer's head weights and the logits (spec section 4).
    """
    return F.linear(x.float(), weight.float())

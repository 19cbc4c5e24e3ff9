"""What linears take: values, and where their producer quantized them already, the fp8 form too."""

from typing import NamedTuple

from torch import Tensor

from echo_batch.kernels.weights import QuantizedWeight, Weight


class Activation(NamedTuple):
    """One input of linears. `quantized` and `scale` are there when it will meet fp8 weights (spec section 4)."""

    values: Tensor
    """[T, D] in the compute dtype"""
    quantized: Tensor | None = None
    """e4m3 [T, D]"""
    scale: Tensor | None = None
    """fp32 [T, D / 128], in any strides"""


def quantization_for(weight: Weight) -> bool | None:
    """How an input of `weight` is to be quantized: None not at all, else whether scales are powers of two (ue8m0)."""
    return weight.ue8m0 if isinstance(weight, QuantizedWeight) else None

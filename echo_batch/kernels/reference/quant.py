"""Reference fp8 quantization of activations: e4m3 values, one fp32 scale per group of the last dimension."""

import torch
from torch import Tensor

FP8_MAX = 448.0
AMAX_FLOOR = 1e-4
"""Smallest magnitude a group is scaled for: an all-zero group must not divide by zero (spec sections 3.3, 5)."""


def round_up_to_power_of_two(scale: Tensor) -> Tensor:
    """Each positive normal fp32 value rounded up to a power of two (ue8m0), on exponent bits; same shape."""
    bits = scale.view(torch.int32)
    # Adding the mantissa mask carries into the exponent unless the mantissa is zero already.
    return (((bits + 0x7FFFFF) >> 23) << 23).view(torch.float32)


def quantize_groups(x: Tensor, *, group: int = 128, ue8m0: bool = False) -> tuple[Tensor, Tensor]:
    """x [..., n * group] -> (e4m3 [..., n * group], fp32 scales [..., n]); `x ~ value * scale` (spec section 3.3)."""
    grouped = x.float().unflatten(-1, (-1, group))
    scale = grouped.abs().amax(-1).clamp_(min=AMAX_FLOOR) / FP8_MAX
    if ue8m0:
        scale = round_up_to_power_of_two(scale)
    values = (grouped / scale.unsqueeze(-1)).clamp_(-FP8_MAX, FP8_MAX)
    return values.flatten(-2).to(torch.float8_e4m3fn), scale


def dequantize_groups(values: Tensor, scale: Tensor, *, group: int = 128) -> Tensor:
    """Inverse of `quantize_groups`: (e4m3 [..., n * group], fp32 [..., n]) -> fp32 [..., n * group]."""
    return (values.float().unflatten(-1, (-1, group)) * scale.unsqueeze(-1)).flatten(-2)

"""Weights as the kernels take them: a plain tensor, or fp8 values with one fp32 scale per 128 x 128 block."""

from dataclasses import dataclass

import torch
from torch import Tensor

QUANT_BLOCK = 128
"""Side of a weight block, and length of an activation group, that share one scale."""


@dataclass(frozen=True, slots=True)
class QuantizedWeight:
    """Block-scaled fp8 weight: `value = data * scale of its block` (spec section 2).

    data e4m3 [..., out, in]; scale fp32 [..., ceil(out/128), ceil(in/128)]; a leading dimension stacks experts.
    `ue8m0` rounds the scales of the *activations* that meet this weight up to powers of two.
    """

    data: Tensor
    scale: Tensor
    ue8m0: bool

    @property
    def shape(self) -> torch.Size:
        return self.data.shape

    @property
    def device(self) -> torch.device:
        return self.data.device

    def expert(self, index: int) -> "QuantizedWeight":
        """One matrix of a stack [E, out, in]."""
        return QuantizedWeight(self.data[index], self.scale[index], self.ue8m0)


Weight = Tensor | QuantizedWeight


def expert_of(stack: Weight, index: int) -> Weight:
    """Matrix `index` of a stack [E, out, in]."""
    return stack.expert(index) if isinstance(stack, QuantizedWeight) else stack[index]


def rows_of(weight: Weight, start: int, end: int) -> Weight:
    """Outputs start..end of a matrix [out, in], as a view. Quantized: multiples of 128, or `end` the last."""
    if not isinstance(weight, QuantizedWeight):
        return weight[start:end]
    assert start % QUANT_BLOCK == 0 and (end % QUANT_BLOCK == 0 or end == weight.shape[0]), (start, end)
    blocks = slice(start // QUANT_BLOCK, -(-end // QUANT_BLOCK))
    return QuantizedWeight(weight.data[start:end], weight.scale[blocks], weight.ue8m0)


def block_shape(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Shape of the scales of a weight of this shape: the last two dimensions counted in blocks, rounded up."""
    return (*shape[:-2], -(-shape[-2] // QUANT_BLOCK), -(-shape[-1] // QUANT_BLOCK))


def dequantize(weight: Weight, dtype: torch.dtype) -> Tensor:
    """The weight in `dtype`: fp32 product of value and block scale, rounded once. A plain tensor is only cast."""
    if not isinstance(weight, QuantizedWeight):
        return weight.to(dtype)
    rows, cols = weight.data.shape[-2:]
    scale = weight.scale.repeat_interleave(QUANT_BLOCK, -2)[..., :rows, :]
    scale = scale.repeat_interleave(QUANT_BLOCK, -1)[..., :cols]
    return weight.data.float().mul_(scale).to(dtype)

"""Reference rotary embedding."""

import torch
from torch import Tensor


def rope_angles(positions: Tensor, inverse_frequencies: Tensor) -> tuple[Tensor, Tensor]:
    """positions int [T], inverse_frequencies fp32 [d/2] -> cos, sin fp32 [T, d/2]."""
    angles = positions.float().unsqueeze(-1) * inverse_frequencies
    return angles.cos(), angles.sin()


def apply_rope(x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool) -> Tensor:
    """Rotate x [T, d] or [T, H, d] by cos, sin fp32 [T, d/2]; computed in fp32, returned in x's dtype.

    `interleaved` rotates pairs (2j, 2j+1), otherwise pairs (j, j + d/2); either way the order of dimensions is kept.
    """
    if x.dim() == 3:
        cos, sin = cos.unsqueeze(1), sin.unsqueeze(1)
    x32 = x.float()
    first, second = (x32[..., 0::2], x32[..., 1::2]) if interleaved else x32.chunk(2, -1)
    rotated_first = first * cos - second * sin
    rotated_second = second * cos + first * sin
    if interleaved:
        return torch.stack((rotated_first, rotated_second), -1).flatten(-2).to(x.dtype)
    return torch.cat((rotated_first, rotated_second), -1).to(x.dtype)

"""Reference normalizations: all arithmetic in fp32, one rounding at the end."""

import torch
import torch.nn.functional as F
from torch import Tensor


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x [..., D] -> w * x * rsqrt(mean(x^2) + eps) in x's dtype; weight fp32 [D]."""
    x32 = x.float()
    return (weight * (x32 * torch.rsqrt(x32.square().mean(-1, keepdim=True) + eps))).to(x.dtype)


def add_rms_norm(hidden: Tensor, delta: Tensor | None, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """Residual add, then norm: (hidden [T, D], delta [T, D] | None, weight fp32 [D]) -> (hidden + delta, normed).

    The norm sees the fp32 sum; the returned residual is rounded to hidden's dtype (spec section 4).
    """
    if delta is None:
        return hidden, rms_norm(hidden, weight, eps)
    total = hidden.float() + delta.float()
    normed = weight * (total * torch.rsqrt(total.square().mean(-1, keepdim=True) + eps))
    return total.to(hidden.dtype), normed.to(hidden.dtype)


def layer_norm(x: Tensor, weight: Tensor, bias: Tensor, eps: float) -> Tensor:
    """LayerNorm over the last dimension: x [..., D], weight and bias fp32 [D] -> [..., D] in x's dtype."""
    return F.layer_norm(x.float(), (x.shape[-1],), weight, bias, eps).to(x.dtype)

"""Reference of adding up what comes in parts."""

import torch
from torch import Tensor

from echo_batch.kernels.parts import Parts, Result


def sum_parts(parts: Tensor) -> Tensor:
    """Parts fp32 [S, T, out], or their sum [T, out] -> the sum, in order."""
    if parts.dim() == 2:
        return parts
    total = parts[0]
    for part in parts[1:]:
        total = total + part
    return total


def add_parts(result: Result) -> Tensor:
    """A result [T, D], added up if it is not: in fp32, parts in order, rounded once."""
    if isinstance(result, Tensor):
        return result
    if isinstance(result, Parts):
        return sum_parts(result.values).to(result.dtype)
    values, rows = result.values, result.rows.long()
    out = torch.zeros(rows.shape[0], values.shape[1], dtype=torch.float32, device=values.device)
    for slot in range(rows.shape[1]):
        term = result.weights[:, slot, None] * values[rows[:, slot].clamp(min=0)].float()
        out += term.masked_fill(rows[:, slot, None] < 0, 0.0)
    return (out if result.addend is None else out + result.addend.float()).to(result.dtype)

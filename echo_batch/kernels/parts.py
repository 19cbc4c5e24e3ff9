"""Results that their reader adds up, so that no launch has to do only that, nor to write the sum and read it again.

What a reader makes of one is bitwise what it would make of `add_parts` (the op): parts are added in order in fp32 and
rounded once.
"""

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class Parts:
    """[T, D]: parts over the inner dimension of a linear, which add up to it."""

    values: Tensor
    """fp32 [S, T, D], unit stride in D"""
    dtype: torch.dtype
    """what the sum is rounded to"""


@dataclass(frozen=True, slots=True)
class ExpertParts:
    """[T, D]: each token's experts' results, of which it is the weighted sum in slot order, and `addend` last."""

    values: Tensor
    """[R, D], contiguous"""
    rows: Tensor
    """int32 [T, k], contiguous: where each slot's result is; -1: there is none"""
    weights: Tensor
    """fp32 [T, k], contiguous; counts only where there is a result"""
    addend: Tensor | None
    """[T, D], contiguous"""
    dtype: torch.dtype
    """what the sum is rounded to"""


Result = Tensor | Parts | ExpertParts
"""[T, D] in the compute dtype, added up already or not."""


def slice_rows(result: Result, start: int, end: int) -> Result:
    """Tokens start..end of a result (views)."""
    if isinstance(result, Tensor):
        return result[start:end]
    if isinstance(result, Parts):
        return Parts(result.values[:, start:end], result.dtype)
    addend = None if result.addend is None else result.addend[start:end]
    return ExpertParts(result.values, result.rows[start:end], result.weights[start:end], addend, result.dtype)

"""Reference Hadamard rotation of indexer queries and keys: it spreads outliers before fp8 (spec section 3.3)."""

import torch
from torch import Tensor


def hadamard_matrix(size: int, device: torch.device) -> Tensor:
    """Sylvester's matrix of +1 and -1, fp32 [size, size]; `size` a power of two. Make it once and pass it in."""
    assert size > 0 and size & (size - 1) == 0, size
    matrix = torch.ones(1, 1, device=device)
    while matrix.shape[0] < size:
        top = torch.cat((matrix, matrix), 1)
        matrix = torch.cat((top, torch.cat((matrix, -matrix), 1)), 0)
    return matrix


def hadamard(x: Tensor, matrix: Tensor) -> Tensor:
    """x [..., n] times matrix [n, n] / sqrt(n), in fp32, returned in x's dtype."""
    return ((x.float() @ matrix) * matrix.shape[0] ** -0.5).to(x.dtype)

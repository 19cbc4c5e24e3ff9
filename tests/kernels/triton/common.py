"""What the kernel tests share: the device they run on, and how floats are judged."""

import torch
from torch import Tensor

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")

BF16_LIMIT = 1e-6 if DEVICE.type == "cuda" else 3e-5
"""Allowed difference of results rounded to bf16 once: Triton's interpreter truncates where a GPU rounds to nearest."""


def difference(got: Tensor, expected: Tensor) -> float:
    """1 - 2 x.y / (x.x + y.y) in float64, after checking that both are non-finite at the same places; 0 is equal."""
    x, y = got.detach().cpu().double(), expected.detach().cpu().double()
    assert x.shape == y.shape, (x.shape, y.shape)
    finite = torch.isfinite(y)
    assert torch.equal(torch.isfinite(x), finite)
    assert torch.equal(x[~finite & ~y.isnan()], y[~finite & ~y.isnan()])
    x, y = x[finite], y[finite]
    scale = float((x * x + y * y).sum())
    return 0.0 if scale == 0.0 else 1.0 - 2.0 * float((x * y).sum()) / scale


def randn(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    """Normal values on DEVICE, the same on every device."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype).to(DEVICE)

"""Token slots of blocks."""

import torch
from torch import Tensor

from echo_batch.kernels.formats import BLOCK_SIZE


def slots_of_blocks(blocks: Tensor) -> Tensor:
    """Token slots of block numbers (int32 [n]): int32 [n * BLOCK_SIZE]."""
    offsets = torch.arange(BLOCK_SIZE, dtype=torch.int32, device=blocks.device)
    return (blocks[:, None] * BLOCK_SIZE + offsets).flatten()

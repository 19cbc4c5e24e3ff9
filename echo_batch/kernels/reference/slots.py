"""Reference translation of positions in a context to token slots of the host pool."""

import torch
from torch import Tensor

from echo_batch.kernels.formats import BLOCK_SIZE


def positions_to_slots(positions: Tensor, block_table: Tensor) -> Tensor:
    """Token slots of logical positions: int32 [B, n], -1 stays -1, by block_table int32 [B, max_blocks].

    A position whose block is -1 (not allocated) gives -1.
    """
    blocks = block_table.gather(1, (positions.clamp(min=0) // BLOCK_SIZE).to(torch.int64))
    slots = blocks * BLOCK_SIZE + positions.clamp(min=0) % BLOCK_SIZE
    return torch.where((positions >= 0) & (blocks >= 0), slots, -1).to(torch.int32)

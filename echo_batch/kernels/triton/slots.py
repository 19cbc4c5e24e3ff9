"""Translation of positions in a context to token slots. Contract: reference/slots.py."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from echo_batch.kernels.formats import BLOCK_SIZE


@triton.jit(do_not_specialize=["width"])
def _positions_to_slots_kernel(
    positions_ptr, table_ptr, out_ptr, width, table_stride, PAGE: tl.constexpr, BLOCK: tl.constexpr
):
    row = tl.program_id(0)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < width
    position = tl.load(positions_ptr + row * width + column, mask=inside, other=-1)
    block = tl.load(table_ptr + row * table_stride + position // PAGE, mask=position >= 0, other=-1)
    slot = tl.where(block >= 0, block * PAGE + position % PAGE, -1)
    tl.store(out_ptr + row * width + column, slot, mask=inside)


def positions_to_slots(positions: Tensor, block_table: Tensor) -> Tensor:
    """positions int32 [B, n], block_table int32 [B, max_blocks] -> slots int32 [B, n]; as the reference."""
    positions = positions.contiguous()
    num_rows, width = positions.shape
    out = torch.empty_like(positions)
    if num_rows and width:
        _positions_to_slots_kernel[(num_rows, triton.cdiv(width, 1024))](
            positions, block_table, out, width, block_table.stride(0), PAGE=BLOCK_SIZE, BLOCK=1024
        )
    return out

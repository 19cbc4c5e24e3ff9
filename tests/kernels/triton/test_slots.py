import pytest
import torch

from echo_batch.kernels.reference import slots as reference
from echo_batch.kernels.triton import slots as fast


@pytest.mark.parametrize(("rows", "width", "blocks"), [(1, 1, 1), (3, 70, 5), (2, 1500, 40), (2, 0, 3)])
def test_positions_to_slots(rows: int, width: int, blocks: int) -> None:
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    generator = torch.Generator().manual_seed(rows * width)
    table = torch.randint(-1, 1000, (rows, blocks + 3), generator=generator, dtype=torch.int32)[:, :blocks]
    positions = torch.randint(-1, blocks * 64, (rows, width), generator=generator, dtype=torch.int32)
    expected = reference.positions_to_slots(positions, table)
    out = fast.positions_to_slots(positions.to(device), table.to(device))
    assert torch.equal(out.cpu(), expected)
    assert ((expected == -1) == ((positions < 0) | (table.gather(1, positions.clamp(min=0).long() // 64) < 0))).all()

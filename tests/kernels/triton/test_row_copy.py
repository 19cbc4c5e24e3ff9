from typing import Literal

import pytest
import torch
from torch import Tensor

from echo_batch.kernels.formats import IndexFormat, RowFormat
from echo_batch.kernels.reference import cache_ops as reference
from echo_batch.kernels.triton import row_copy

DEVICES = [
    pytest.param("cpu", marks=pytest.mark.skipif(torch.cuda.is_available(), reason="the interpreter is off")),
    pytest.param("cuda", marks=pytest.mark.gpu),
]
ROW_BYTES = [RowFormat("fp8").row_bytes, RowFormat("bf16").row_bytes, RowFormat("fp32").row_bytes]


def rows(n: int, row_bytes: int) -> Tensor:
    return torch.randint(0, 256, (n, row_bytes), dtype=torch.uint8, generator=torch.Generator().manual_seed(n))


def pinned(tensor: Tensor, device: str) -> Tensor:
    return tensor.pin_memory() if device == "cuda" else tensor.clone()


def ints(*values: int) -> Tensor:
    return torch.tensor(values, dtype=torch.int32)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("row_bytes", ROW_BYTES)
def test_copies_like_the_reference(device: str, row_bytes: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(row_copy, "COPY_PROGRAMS", 2)
    monkeypatch.setattr(row_copy, "COPY_ROWS", 2)
    host, gpu = rows(20, row_bytes), rows(12, row_bytes)
    for source_index, target_index, count in (
        (ints(19, -1, 5, 7, 0), ints(0, 1, -1, 11, 4), None),
        (ints(19, 3, 5, 7, 0), ints(0, 1, 2, 11, 4), ints(3)),
        (ints(6, 6, 7), None, None),
        (None, ints(5, -1, 2), ints(9)),
        (None, None, ints(4)),
        (ints(), ints(), None),
    ):
        expected = gpu.clone()
        reference.copy_rows(host, source_index, expected, target_index, count)
        got = gpu.to(device).clone()
        arguments = [None if x is None else x.to(device) for x in (source_index, target_index, count)]
        row_copy.copy_rows(pinned(host, device), arguments[0], got, arguments[1], arguments[2])
        assert torch.equal(got.cpu(), expected)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("row_bytes", ROW_BYTES)
def test_writes_both_pools(device: str, row_bytes: int) -> None:
    new, gpu, host = rows(4, row_bytes), rows(12, row_bytes), rows(20, row_bytes)
    at_rows, at_slots = ints(3, -1, 0, 11), ints(-1, 19, 4, 0)
    got_gpu, got_host = gpu.to(device).clone(), pinned(host, device)
    row_copy.write_rows(new.to(device), got_gpu, at_rows.to(device), got_host, at_slots.to(device))
    reference.write_rows(new, gpu, at_rows, host, at_slots)
    assert torch.equal(got_gpu.cpu(), gpu) and torch.equal(got_host, host)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("has_host", [True, False])
@pytest.mark.parametrize("kind", ["fp8", "fp32"])
def test_writes_rows_and_keys_of_new_tokens(device: str, has_host: bool, kind: Literal["fp8", "fp32"]) -> None:
    fmt = IndexFormat(kind)
    new, gpu, host = rows(4, 656), rows(12, 656), rows(192, 656)
    keys, pages = rows(4, fmt.row_bytes), rows(3, fmt.page_bytes)
    at_rows, at_slots = ints(3, -1, 0, 11), ints(-1, 191, 4, 64)
    got_gpu, got_host, got_pages = gpu.to(device).clone(), pinned(host, device), pages.to(device).clone()
    row_copy.write_tokens(
        new.to(device),
        got_gpu,
        at_rows.to(device),
        got_host if has_host else None,
        at_slots.to(device),
        keys.to(device),
        got_pages,
        fmt,
    )
    before = pages.clone()
    reference.write_tokens(new, gpu, at_rows, host if has_host else None, at_slots, keys, pages, fmt)
    assert torch.equal(got_gpu.cpu(), gpu) and torch.equal(got_host, host) and torch.equal(got_pages.cpu(), pages)
    assert not torch.equal(pages, before)


@pytest.mark.parametrize("device", DEVICES)
def test_fills_with_poison(device: str) -> None:
    pool = rows(12, 656)
    got = pool.to(device).clone()
    index = ints(3, -1, 11)
    row_copy.fill_rows(got, index.to(device))
    reference.fill_rows(pool, index)
    assert torch.equal(got.cpu(), pool) and (pool[3] == 0xFF).all()


@pytest.mark.gpu
def test_rows_beyond_two_to_the_31_words() -> None:
    """int32 addresses would overflow at 3.3 million rows in bytes and at 13.1 million in words."""
    pool = torch.empty((13_200_000, 656), dtype=torch.uint8, device="cuda")
    far = ints(13_199_999, 3_300_001, 5).cuda()
    new = rows(3, 656).cuda()
    row_copy.copy_rows(new, None, pool, far, None)
    assert torch.equal(pool[far.long()], new)
    back = torch.zeros_like(new)
    row_copy.copy_rows(pool, far, back, None, None)
    assert torch.equal(back, new)
    row_copy.fill_rows(pool, far[:1])
    assert (pool[-1] == 0xFF).all() and torch.equal(pool[5], new[2])

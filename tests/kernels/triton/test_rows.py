import pytest
import torch

from echo_batch.kernels.formats import BLOCK_SIZE, IndexFormat, RowFormat
from echo_batch.kernels.reference import rows as reference
from echo_batch.kernels.triton import rows
from tests.kernels.triton.common import BF16_LIMIT, DEVICE, difference, randn


@pytest.mark.parametrize("kind", ["fp8", "bf16", "fp32"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_pack_kv_rows_is_bitwise_the_reference(kind: str, dtype: torch.dtype) -> None:
    fmt = RowFormat(kind)
    a = randn(5, 700, seed=1, dtype=dtype)
    a[1] = 0.0
    latent, rope = a[:, 100:612], a[:, 612:676]
    # The reference on the CPU: torch divides by a constant inexactly on GPUs.
    got, expected = rows.pack_kv_rows(latent, rope, fmt).cpu(), reference.pack_kv_rows(latent.cpu(), rope.cpu(), fmt)
    if dtype == torch.bfloat16 or kind == "fp32" or DEVICE.type == "cuda":
        assert torch.equal(got, expected)
    for got_part, part in zip(reference.unpack_kv_rows(got, fmt), reference.unpack_kv_rows(expected, fmt)):
        assert difference(got_part, part) <= BF16_LIMIT


@pytest.mark.parametrize("kind", ["fp8", "fp32"])
@pytest.mark.parametrize("ue8m0", [False, True])
def test_pack_index_keys_is_bitwise_the_reference(kind: str, ue8m0: bool) -> None:
    fmt = IndexFormat(kind)
    key = randn(7, 128, seed=2, dtype=torch.bfloat16) * 3
    got, expected = rows.pack_index_keys(key, fmt, ue8m0).cpu(), reference.pack_index_keys(key.cpu(), fmt, ue8m0)
    assert torch.equal(got, expected)


def test_quantize_index_query_is_bitwise_the_reference() -> None:
    query = randn(3, 10, 128, seed=3, dtype=torch.bfloat16)
    values, scale = rows.quantize_index_query(query, True)
    expected_values, expected_scale = reference.quantize_index_query(query, True)
    assert torch.equal(values.view(torch.uint8), expected_values.view(torch.uint8))
    assert torch.equal(scale, expected_scale)


@pytest.mark.parametrize("kind", ["fp8", "fp32"])
def test_index_keys_to_pages_and_back(kind: str) -> None:
    fmt = IndexFormat(kind)
    keys = reference.pack_index_keys(randn(6, 128, seed=4), fmt, True)
    slots = torch.tensor([0, 63, -1, 64, 191, 100], dtype=torch.int32, device=DEVICE)
    pages = torch.full((3, fmt.page_bytes), 7, dtype=torch.uint8, device=DEVICE)
    expected = pages.clone()
    rows.write_index_keys(pages, slots, keys, fmt)
    reference.write_index_keys(expected, slots, keys, fmt)
    assert torch.equal(pages, expected)
    kept = slots[slots >= 0]
    assert torch.equal(rows.read_index_keys(pages, kept, fmt), keys[slots >= 0])
    assert pages.shape[0] * BLOCK_SIZE == 192


def test_dequantize_kv_rows() -> None:
    fmt = RowFormat("fp8")
    packed = reference.pack_kv_rows(randn(11, 512, seed=1), randn(11, 64, seed=2), fmt)
    expected = torch.cat(reference.unpack_kv_rows(packed, fmt), -1)
    assert difference(rows.dequantize_kv_rows(packed, fmt), expected) < max(BF16_LIMIT, 3e-6)

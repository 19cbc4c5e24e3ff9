"""Cache rows byte by byte: what is where in a KV row, in an index key, in a page."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from echo_batch.kernels.formats import BLOCK_SIZE, IndexFormat, RowFormat
from echo_batch.kernels.reference.rows import (
    pack_index_keys,
    pack_kv_rows,
    quantize_index_query,
    read_index_keys,
    unpack_index_keys,
    unpack_kv_rows,
    write_index_keys,
)

FP8_ROW, BF16_ROW, FP32_ROW = RowFormat("fp8"), RowFormat("bf16"), RowFormat("fp32")
FP8_KEY, FP32_KEY = IndexFormat("fp8"), IndexFormat("fp32")


def values(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def test_fp8_row_layout() -> None:
    latent, rope = values(3, 512), values(3, 64, seed=1)
    rows = pack_kv_rows(latent, rope, FP8_ROW)
    assert rows.dtype == torch.uint8 and rows.shape == (3, 656)
    for token in range(3):
        scales = rows[token, 512:528].view(torch.float32)
        for group in range(4):
            part = latent[token, 128 * group : 128 * (group + 1)]
            assert scales[group] == part.abs().max() / 448
            stored = rows[token, 128 * group : 128 * (group + 1)].view(torch.float8_e4m3fn)
            assert torch.equal(stored.float(), (part / scales[group]).to(torch.float8_e4m3fn).float())
        assert torch.equal(rows[token, 528:].view(torch.bfloat16), rope[token].to(torch.bfloat16))


@pytest.mark.parametrize("fmt", [BF16_ROW, FP32_ROW])
def test_plain_row_layout(fmt: RowFormat) -> None:
    latent, rope = values(3, 512), values(3, 64, seed=1)
    rows = pack_kv_rows(latent, rope, fmt)
    dtype = torch.bfloat16 if fmt.kind == "bf16" else torch.float32
    assert rows.shape == (3, fmt.row_bytes)
    assert torch.equal(rows.view(dtype), torch.cat((latent, rope), -1).to(dtype))


@pytest.mark.parametrize(("fmt", "tolerance"), [(FP8_ROW, 0.07), (BF16_ROW, 0.008), (FP32_ROW, 0.0)])
def test_rows_unpack_to_what_was_packed(fmt: RowFormat, tolerance: float) -> None:
    latent, rope = values(5, 512), values(5, 64, seed=1)
    rows = pack_kv_rows(latent, rope, fmt)
    got_latent, got_rope = unpack_kv_rows(rows, fmt)
    assert got_latent.dtype == got_rope.dtype == torch.float32
    assert ((got_latent - latent).abs() <= tolerance * latent.abs() + tolerance * 0.01).all()
    assert ((got_rope - rope).abs() <= tolerance * rope.abs()).all()
    # Packing is idempotent: decode sees what prefill saw.
    if fmt.kind != "fp8":
        assert torch.equal(pack_kv_rows(got_latent, got_rope, fmt), rows)


def test_extreme_latents_stay_finite() -> None:
    latent = torch.zeros(2, 512)
    latent[1, 0] = 1e30
    rows = pack_kv_rows(latent, torch.zeros(2, 64), FP8_ROW)
    got, _ = unpack_kv_rows(rows, FP8_ROW)
    assert (got[0] == 0).all()
    assert got[1, 0] == pytest.approx(1e30) and got.isfinite().all()


@pytest.mark.parametrize("ue8m0", [False, True])
def test_fp8_index_key_layout(ue8m0: bool) -> None:
    key = values(4, 128)
    rows = pack_index_keys(key, FP8_KEY, ue8m0)
    assert rows.shape == (4, 132)
    stored, scale = unpack_index_keys(rows, FP8_KEY)
    assert scale is not None
    for token in range(4):
        assert rows[token, 128:].view(torch.float32)[0] == scale[token]
        exact = (key[token].abs().max() / 448).item()
        if ue8m0:
            assert scale[token].item() == 2.0 ** torch.tensor(exact).log2().ceil().item()
        else:
            assert scale[token].item() == pytest.approx(exact, rel=1e-6)
    torch.testing.assert_close(stored * scale[:, None], key, atol=0.02, rtol=0.07)


def test_fp32_index_key_is_the_key() -> None:
    key = values(4, 128)
    stored, scale = unpack_index_keys(pack_index_keys(key, FP32_KEY, True), FP32_KEY)
    assert scale is None and torch.equal(stored, key)


def test_index_query_has_a_scale_per_head() -> None:
    query = values(3, 5, 128) * torch.tensor([1.0, 10.0, 100.0, 1e-3, 0.0])[:, None]
    stored, scale = quantize_index_query(query, True)
    assert stored.dtype == torch.float8_e4m3fn and scale.shape == (3, 5)
    torch.testing.assert_close(stored.float() * scale[..., None], query, atol=1e-5, rtol=0.07)
    assert (scale[:, 2] > scale[:, 0]).all()


def test_page_layout_keeps_values_before_scales() -> None:
    pages = torch.zeros(2, FP8_KEY.page_bytes, dtype=torch.uint8)
    keys = pack_index_keys(values(1, 128), FP8_KEY, True)
    write_index_keys(pages, torch.tensor([BLOCK_SIZE + 3], dtype=torch.int32), keys, FP8_KEY)
    assert torch.equal(pages[1, 3 * 128 : 4 * 128], keys[0, :128])
    scales_start = BLOCK_SIZE * 128
    assert torch.equal(pages[1, scales_start + 3 * 4 : scales_start + 4 * 4], keys[0, 128:])
    assert pages.count_nonzero() <= 132 and pages[0].count_nonzero() == 0


@pytest.mark.parametrize("fmt", [FP8_KEY, FP32_KEY])
@settings(max_examples=30, deadline=None)
@given(st.permutations(range(3 * BLOCK_SIZE)), st.integers(1, 40))
def test_pages_return_what_was_written(fmt: IndexFormat, slots: list[int], count: int) -> None:
    pages = torch.full((3, fmt.page_bytes), 255, dtype=torch.uint8)
    before = pages.clone()
    keys = pack_index_keys(values(count, 128), fmt, True)
    chosen = torch.tensor(slots[:count], dtype=torch.int32)
    chosen[::5] = -1
    write_index_keys(pages, chosen, keys, fmt)
    kept = chosen >= 0
    assert torch.equal(read_index_keys(pages, chosen[kept], fmt), keys[kept])
    others = torch.tensor(sorted(set(range(3 * BLOCK_SIZE)) - set(chosen.tolist())), dtype=torch.int32)
    assert torch.equal(read_index_keys(pages, others, fmt), read_index_keys(before, others, fmt))

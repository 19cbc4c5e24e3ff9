"""The fused steps give what the references give."""

import pytest
import torch

from echo_batch.kernels.formats import IndexFormat, RowFormat
from echo_batch.kernels.reference import fused as reference
from echo_batch.kernels.reference import quant, rope, rows
from echo_batch.kernels.triton import fused, queries
from tests.kernels.triton.common import BF16_LIMIT, DEVICE, difference, randn

FP8_LIMIT = 1e-4 if DEVICE.type == "cuda" else 1e-3
"""A last bit of bf16 before the quantization can be a step of e4m3 after it."""


def angles(num_tokens: int) -> tuple[torch.Tensor, torch.Tensor]:
    frequencies = 10000.0 ** (-torch.arange(32, device=DEVICE) / 32.0)
    return rope.rope_angles(torch.arange(num_tokens, device=DEVICE) * 1000, frequencies)


@pytest.mark.parametrize(
    ("kind", "index_kind", "dtype", "ue8m0"),
    [
        ("fp8", "fp8", torch.bfloat16, True),
        ("bf16", "fp8", torch.bfloat16, None),
        ("fp32", "fp32", torch.float32, None),
        ("fp8", None, torch.bfloat16, False),
    ],
)
def test_latent_inputs(kind: str, index_kind: str | None, dtype: torch.dtype, ue8m0: bool | None) -> None:
    row_format, index_format = RowFormat(kind), IndexFormat(index_kind or "fp8")
    a = randn(3, 256 + (0 if index_kind is None else 128) + 576, seed=1, dtype=dtype)
    key_weight, key_bias = 1 + 0.1 * randn(128, seed=4), 0.1 * randn(128, seed=5)
    arguments = (
        a,
        *angles(3),
        1 + 0.1 * randn(256, seed=2),
        1 + 0.1 * randn(512, seed=3),
        None if index_kind is None else key_weight,
        None if index_kind is None else key_bias,
    )
    options = dict(
        eps=1e-6,
        key_eps=1e-6,
        interleaved=True,
        index_interleaved=False,
        row_format=row_format,
        index_format=index_format,
        ue8m0=ue8m0,
    )
    got, expected = fused.latent_inputs(*arguments, **options), reference.latent_inputs(*arguments, **options)
    limit = 1e-12 if dtype == torch.float32 else BF16_LIMIT
    assert difference(got.query.values, expected.query.values) < limit
    if ue8m0 is None:
        assert got.query.quantized is None
    else:
        values, scale = quant.quantize_groups(got.query.values.cpu(), ue8m0=ue8m0)
        assert torch.equal(got.query.quantized.cpu().view(torch.uint8), values.view(torch.uint8))
        assert torch.equal(got.query.scale.cpu(), scale)
    limit = FP8_LIMIT if kind == "fp8" else limit
    for part, expected_part in zip(
        rows.unpack_kv_rows(got.kv_row, row_format), rows.unpack_kv_rows(expected.kv_row, row_format)
    ):
        assert difference(part, expected_part) < limit
    if index_kind is None:
        assert got.index_key is None
        return
    values, scale = rows.unpack_index_keys(got.index_key, index_format)
    expected_values, expected_scale = rows.unpack_index_keys(expected.index_key, index_format)
    assert (scale is None) == (expected_scale is None) and (scale is None or torch.equal(scale, expected_scale))
    assert difference(values, expected_values) < (1e-12 if index_kind == "fp32" else FP8_LIMIT)


@pytest.mark.parametrize("interleaved", [True, False])
@pytest.mark.parametrize(("index_kind", "dtype"), [("fp8", torch.bfloat16), ("fp32", torch.float32)])
def test_index_query(interleaved: bool, index_kind: str, dtype: torch.dtype) -> None:
    query = randn(3, 20 * 128, seed=1, dtype=dtype).view(3, 20, 128)
    arguments = (query, *angles(3), randn(3, 20, seed=2))
    options = dict(interleaved=interleaved, index_format=IndexFormat(index_kind))
    values, weights = queries.index_query(*arguments, **options)
    expected_values, expected_weights = reference.index_query(*arguments, **options)
    assert values.dtype == expected_values.dtype
    assert difference(values.float(), expected_values.float()) < (FP8_LIMIT if index_kind == "fp8" else 1e-12)
    assert difference(weights, expected_weights) < 1e-12


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("nope", [128, 192])
def test_absorbed_query(dtype: torch.dtype, nope: int) -> None:
    query = randn(5, 6 * (nope + 64), seed=1, dtype=dtype).unflatten(1, (6, -1))
    key_up = randn(6, nope, 512, seed=2, dtype=dtype)
    got = queries.absorbed_query(query, key_up, *angles(5), True)
    expected = reference.absorbed_query(query, key_up, *angles(5), True)
    assert difference(got, expected) < (1e-12 if dtype == torch.float32 else BF16_LIMIT)


def check_index_query(got: tuple, expected: tuple, limit: float) -> None:
    """Values and head weights share the scale: where a last bit makes it twice as large, their product is the same."""
    assert got[0].dtype == expected[0].dtype
    products = [values.float() * weights[:, :, None] for values, weights in (got, expected)]
    assert difference(*products) < limit


@pytest.mark.parametrize(
    ("num_tokens", "nope", "index_kind", "dtype"),
    [
        (3, 128, "fp8", torch.bfloat16),
        (17, 192, "fp8", torch.bfloat16),
        (2, 64, "fp32", torch.float32),
        (2, 96, "fp32", torch.float32),  # as separate ops
        (3, 64, None, torch.bfloat16),
    ],
)
def test_attention_queries(num_tokens: int, nope: int, index_kind: str | None, dtype: torch.dtype) -> None:
    heads, index_heads = 3, 20
    width = heads * (nope + 64) + (0 if index_kind is None else index_heads * 128)
    key_up = randn(heads, nope, 512, seed=2, dtype=dtype)
    logits = None if index_kind is None else randn(2, num_tokens, index_heads, seed=3)
    arguments = (randn(num_tokens, width, seed=1, dtype=dtype), key_up, *angles(num_tokens), logits)
    options = dict(
        num_index_heads=index_heads,
        interleaved=True,
        index_interleaved=False,
        index_format=IndexFormat(index_kind or "fp8"),
    )
    got = queries.attention_queries(*arguments, **options)
    expected = reference.attention_queries(*arguments, **options)
    limit = 1e-12 if dtype == torch.float32 else 2 * BF16_LIMIT
    assert got[0].dtype == dtype and difference(got[0], expected[0]) < limit
    if index_kind is None:
        assert got[1] is None and got[2] is None
        return
    check_index_query(got[1:], expected[1:], FP8_LIMIT if index_kind == "fp8" else limit)


@pytest.mark.parametrize(
    ("num_tokens", "num_values", "dtype", "ue8m0"),
    [
        (3, 128, torch.bfloat16, True),
        (17, 256, torch.bfloat16, False),
        (2, 128, torch.float32, None),
        (2, 96, torch.bfloat16, True),  # the consumer quantizes
    ],
)
def test_head_values(num_tokens: int, num_values: int, dtype: torch.dtype, ue8m0: bool | None) -> None:
    latent, value_up = randn(num_tokens, 3, 512, seed=1, dtype=dtype), randn(3, num_values, 512, seed=2, dtype=dtype)
    got = queries.head_values(latent, value_up, ue8m0)
    expected = reference.head_values(latent, value_up, None)
    assert got.values.dtype == dtype
    assert difference(got.values, expected.values) < (1e-12 if dtype == torch.float32 else BF16_LIMIT)
    assert (got.quantized is None) == (ue8m0 is None or num_values % 128 != 0)
    if got.quantized is not None:
        values, scale = quant.quantize_groups(got.values.cpu(), ue8m0=ue8m0)
        assert torch.equal(got.quantized.cpu().view(torch.uint8), values.view(torch.uint8))
        assert torch.equal(got.scale.cpu(), scale)


@pytest.mark.gpu
@pytest.mark.parametrize("num_tokens", [1, 13, 19, 33, 64])
def test_real_shapes(num_tokens: int) -> None:
    key_up = randn(128, 128, 512, seed=2, dtype=torch.bfloat16)
    projected = randn(num_tokens, 32768, seed=1, dtype=torch.bfloat16)
    arguments = (projected, key_up, *angles(num_tokens), randn(28, num_tokens, 64, seed=3))
    options = dict(num_index_heads=64, interleaved=True, index_interleaved=False, index_format=IndexFormat("fp8"))
    got = queries.attention_queries(*arguments, **options)
    expected = reference.attention_queries(*arguments, **options)
    assert difference(got[0], expected[0]) < 1e-5
    check_index_query(got[1:], expected[1:], FP8_LIMIT)
    latent = randn(num_tokens, 128, 512, seed=4, dtype=torch.bfloat16)
    values = queries.head_values(latent, key_up, True)
    assert difference(values.values, reference.head_values(latent, key_up, None).values) < 1e-5
    quantized, scale = quant.quantize_groups(values.values, ue8m0=True)
    assert torch.equal(values.quantized.view(torch.uint8), quantized.view(torch.uint8))
    assert torch.equal(values.scale, scale)

"""The fused steps give what the references give."""

import pytest
import torch

from echo_batch.kernels.formats import IndexFormat, RowFormat
from echo_batch.kernels.reference import fused as reference
from echo_batch.kernels.reference import quant, rope, rows
from echo_batch.kernels.triton import fused
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
    values, weights = fused.index_query(*arguments, **options)
    expected_values, expected_weights = reference.index_query(*arguments, **options)
    assert values.dtype == expected_values.dtype
    assert difference(values.float(), expected_values.float()) < (FP8_LIMIT if index_kind == "fp8" else 1e-12)
    assert difference(weights, expected_weights) < 1e-12


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("nope", [128, 192])
def test_absorbed_query(dtype: torch.dtype, nope: int) -> None:
    query = randn(5, 6 * (nope + 64), seed=1, dtype=dtype).unflatten(1, (6, -1))
    key_up = randn(6, nope, 512, seed=2, dtype=dtype)
    got = fused.absorbed_query(query, key_up, *angles(5), True)
    expected = reference.absorbed_query(query, key_up, *angles(5), True)
    assert difference(got, expected) < (1e-12 if dtype == torch.float32 else BF16_LIMIT)

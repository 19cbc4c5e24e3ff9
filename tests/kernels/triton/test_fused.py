"""The fused steps give what the single ops give one after the other."""

import pytest
import torch

from echo_batch.kernels.formats import IndexFormat, RowFormat
from echo_batch.kernels.reference import hadamard, norm, quant, rope, rows
from echo_batch.kernels.triton.fused import index_query, latent_inputs
from tests.kernels.triton.common import BF16_LIMIT, DEVICE, difference, randn

FP8_KEY = IndexFormat("fp8")
FP8_LIMIT = 1e-4 if DEVICE.type == "cuda" else 1e-3
"""A last bit of bf16 before the quantization can be a step of e4m3 after it."""


def angles(num_tokens: int) -> tuple[torch.Tensor, torch.Tensor]:
    frequencies = 10000.0 ** (-torch.arange(32, device=DEVICE) / 32.0)
    return rope.rope_angles(torch.arange(num_tokens, device=DEVICE) * 1000, frequencies)


@pytest.mark.parametrize("kind", ["fp8", "bf16"])
@pytest.mark.parametrize("with_indexer", [True, False])
def test_latent_inputs(kind: str, with_indexer: bool) -> None:
    fmt = RowFormat(kind)
    index_dim = 128 if with_indexer else 0
    a = randn(3, 256 + index_dim + 576, seed=1, dtype=torch.bfloat16)
    cos, sin = angles(3)
    q_weight, kv_weight = 1 + 0.1 * randn(256, seed=2), 1 + 0.1 * randn(512, seed=3)
    key_weight, key_bias = 1 + 0.1 * randn(128, seed=4), 0.1 * randn(128, seed=5)
    matrix = hadamard.hadamard_matrix(128, DEVICE)
    got = latent_inputs(
        a,
        cos,
        sin,
        q_weight,
        kv_weight,
        key_weight if with_indexer else None,
        key_bias if with_indexer else None,
        eps=1e-6,
        key_eps=1e-6,
        interleaved=True,
        index_interleaved=False,
        row_format=fmt,
        index_format=FP8_KEY,
        q_ue8m0=True,
    )
    q_a, key, latent, k_rope = a.split((256, index_dim, 512, 64), dim=-1)
    q_normed = norm.rms_norm(q_a, q_weight, 1e-6)
    assert difference(got.q_normed, q_normed) < BF16_LIMIT
    values, scale = quant.quantize_groups(got.q_normed, ue8m0=True)
    assert torch.equal(got.q_values.view(torch.uint8), values.view(torch.uint8))
    assert torch.equal(got.q_scale, scale)
    latent = norm.rms_norm(latent, kv_weight, 1e-6)
    expected = rows.pack_kv_rows(latent, rope.apply_rope(k_rope, cos, sin, True), fmt)
    for got_part, expected_part in zip(rows.unpack_kv_rows(got.kv_row, fmt), rows.unpack_kv_rows(expected, fmt)):
        assert difference(got_part, expected_part) < FP8_LIMIT
    if not with_indexer:
        assert got.index_key is None
        return
    assert got.index_key is not None
    key = norm.layer_norm(key, key_weight, key_bias, 1e-6)
    key = torch.cat((rope.apply_rope(key[:, :64], cos, sin, False), key[:, 64:]), -1)
    expected = rows.pack_index_keys(hadamard.hadamard(key, matrix), FP8_KEY, True)
    got_values, got_scale = rows.unpack_index_keys(got.index_key, FP8_KEY)
    values, scale = rows.unpack_index_keys(expected, FP8_KEY)
    assert torch.equal(got_scale, scale)
    assert difference(got_values, values) < FP8_LIMIT


@pytest.mark.parametrize("interleaved", [True, False])
def test_index_query(interleaved: bool) -> None:
    query = randn(3, 20 * 128, seed=1, dtype=torch.bfloat16).view(3, 20, 128)
    logits = randn(3, 20, seed=2)
    cos, sin = angles(3)
    matrix = hadamard.hadamard_matrix(128, DEVICE)
    values, weights = index_query(query, cos, sin, logits, interleaved=interleaved)
    rotated = torch.cat((rope.apply_rope(query[..., :64], cos, sin, interleaved), query[..., 64:]), -1)
    expected, scale = rows.quantize_index_query(hadamard.hadamard(rotated, matrix), True)
    assert difference(values.float(), expected.float()) < FP8_LIMIT
    assert difference(weights, logits * (20**-0.5 * 128**-0.5) * scale) < 1e-12

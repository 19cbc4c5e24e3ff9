"""Bytes of weights and of one token, against numbers worked out by hand."""

import json
import os
import subprocess
import sys

import pytest

from echo_batch.engine.memory import chunk_bytes, group_token_bytes, token_bytes, weight_bytes
from echo_batch.kernels.formats import IndexFormat, RowFormat
from echo_batch.models.config import ModelConfig
from tests.engine.prefill_memory import CASES, CONFIGS
from tests.geometries import GLM5, GLM52, TINY, V32

FP8, BF16 = RowFormat("fp8"), RowFormat("bf16")
INDEX = IndexFormat("fp8")


@pytest.mark.parametrize(
    ("config", "row", "expected"),
    [
        (V32, FP8, 48_068),  # 61 * (656 + 132)
        (V32, BF16, 78_324),  # 61 * (1152 + 132)
        (GLM5, FP8, 61_464),  # 78 * 788
        (GLM52, FP8, 53_940),  # 78 * 656 + 21 * 132: the indexer cache has one copy per selection group
    ],
)
def test_bytes_per_token(config: dict[str, object], row: RowFormat, expected: int) -> None:
    tokens = token_bytes(ModelConfig.from_hf_dict(config), row, INDEX, offload=True)
    assert tokens.gpu_row + tokens.index == expected
    assert tokens.host_row == tokens.gpu_row


def test_metadata_per_token_and_none_without_offload() -> None:
    model = ModelConfig.from_hf_dict(GLM52)
    tokens = token_bytes(model, FP8, INDEX, offload=True)
    assert (tokens.host_map, tokens.gpu_map) == (21 * 4, 21 * 8)
    resident = token_bytes(model, FP8, INDEX, offload=False)
    assert (resident.host_row, resident.host_map, resident.gpu_map) == (0, 0, 0)
    assert resident.gpu_row == tokens.gpu_row


def test_v32_experts_in_fp8() -> None:
    weights = weight_bytes(ModelConfig.from_hf_dict(V32), dtype="bfloat16", keep_fp8=True)
    matrix = 7168 * 2048 + 4 * (7168 // 128) * (2048 // 128)
    assert weights.experts == 58 * 256 * 3 * matrix
    # Attention, dense layers, shared experts, embedding and head: about 21 GB, by the official 671B - 654B of experts.
    assert 19e9 < weights.replicated < 23e9


def test_float32_weights_are_four_bytes_each() -> None:
    model = ModelConfig.from_hf_dict(TINY)
    single = weight_bytes(model, dtype="float32", keep_fp8=False)
    half = weight_bytes(model, dtype="bfloat16", keep_fp8=False)
    assert single.experts == 2 * half.experts == 4 * 3 * 16 * 3 * 256 * 128
    assert single.experts + single.replicated > half.experts + half.replicated


@pytest.mark.parametrize(("workers", "share"), [(1, 256), (8, 32), (3, 86), (256, 1), (512, 1)])
def test_experts_are_spread_and_the_rest_is_not(workers: int, share: int) -> None:
    weights = weight_bytes(ModelConfig.from_hf_dict(V32), dtype="bfloat16", keep_fp8=True)
    assert weights.per_worker(workers) == weights.replicated + weights.experts * share // 256


def test_a_prefill_takes_no_more_than_estimated() -> None:
    """Every allocation of the GPU's code at full size, on tensors without data."""
    result = subprocess.run(
        [sys.executable, "-m", "tests.engine.prefill_memory"],
        env={name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert result.returncode == 0, result.stderr[-2000:]
    for (name, chunk, lengths), peak in zip(CASES, json.loads(result.stdout), strict=True):
        model = ModelConfig.from_hf_dict(CONFIGS[name])
        inside = chunk_bytes(model, dtype="bfloat16", kind="cuda", chunk_tokens=chunk, context=max(lengths))
        estimate = inside + sum(lengths) * group_token_bytes(model, dtype="bfloat16", row=FP8, index=INDEX)
        assert 0.7 * estimate < peak <= estimate, (name, chunk, lengths, peak, estimate)

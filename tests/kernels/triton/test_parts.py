"""Who reads a result in parts makes of it, bit for bit, what he makes of it added up."""

from typing import Any

import pytest
import torch
from torch import Tensor

from echo_batch.kernels.activation import Activation
from echo_batch.kernels.formats import IndexFormat, RowFormat
from echo_batch.kernels.parts import ExpertParts, Parts, Result, slice_rows
from echo_batch.kernels.reference import fused as reference_fused
from echo_batch.kernels.reference.parts import add_parts as reference_add_parts
from echo_batch.kernels.triton import fused, linear, norm_rope
from echo_batch.kernels.triton.parts import add_parts
from tests.kernels.triton.common import BF16_LIMIT, DEVICE, difference, randn
from tests.kernels.triton.test_fused import angles
from tests.kernels.triton.test_linear import quantized

BF16 = torch.bfloat16


def linear_parts(num_parts: int, num_tokens: int, width: int, dtype: torch.dtype = BF16) -> Parts:
    """A slice of more tokens, so that the strides are those of no tensor of its own."""
    return slice_rows(Parts(randn(num_parts, num_tokens + 3, width, seed=4), dtype), 2, 2 + num_tokens)  # type: ignore[return-value]


def expert_parts(num_tokens: int, width: int, *, addend: bool, dtype: torch.dtype = BF16) -> ExpertParts:
    """Of three slots, with a token that reached no expert and unused rows that must not be read."""
    rows = torch.randperm(4 * num_tokens, generator=torch.Generator().manual_seed(1))[: 3 * num_tokens].to(torch.int32)
    rows = rows.view(num_tokens, 3).to(DEVICE)
    rows[num_tokens // 2] = -1
    rows[-1, 1] = -1
    weights = randn(num_tokens, 3, seed=2)
    weights[rows < 0] = float("nan")
    values = torch.full((4 * num_tokens, width), float("nan"), dtype=dtype, device=DEVICE)
    used = rows[rows >= 0].long()
    values[used] = randn(used.shape[0], width, seed=3, dtype=dtype)
    return ExpertParts(values, rows, weights, randn(num_tokens, width, seed=5, dtype=dtype) if addend else None, dtype)


def results(num_tokens: int, width: int, dtype: torch.dtype = BF16) -> list[Result]:
    parts: list[Result] = [linear_parts(num, num_tokens, width, dtype) for num in (1, 2, 4)]
    return parts + [expert_parts(num_tokens, width, addend=addend, dtype=dtype) for addend in (False, True)]


def assert_same(got: tuple[Tensor | None, ...], expected: tuple[Tensor | None, ...]) -> None:
    """The same bits."""
    for one, other in zip(got, expected, strict=True):
        if one is None or other is None:
            assert one is other
        else:
            assert one.dtype == other.dtype
            assert torch.equal(one.contiguous().view(torch.uint8), other.contiguous().view(torch.uint8))


@pytest.mark.parametrize("dtype", [torch.float32, BF16])
def test_add_parts(dtype: torch.dtype) -> None:
    for result in results(5, 1100, dtype):
        got, expected = add_parts(result), reference_add_parts(result)
        assert got.dtype == expected.dtype == dtype and torch.isfinite(got).all()
        assert difference(got, expected) < (1e-12 if dtype == torch.float32 else BF16_LIMIT)
        if isinstance(result, ExpertParts) and result.addend is None:
            assert not got[2].any()
        part = slice_rows(result, 1, 4)
        assert torch.equal(add_parts(part), got[1:4])
    assert add_parts(got) is got and torch.equal(slice_rows(got, 1, 2), got[1:2])


def check_norm(num_tokens: int, width: int, ue8m0: bool | None) -> None:
    hidden, weight = randn(num_tokens, width, seed=1, dtype=BF16), 1 + 0.1 * randn(width, seed=2)
    for delta in results(num_tokens, width):
        total, activation = norm_rope.norm_activation(hidden, delta, weight, 1e-6, ue8m0)
        added = add_parts(delta)
        expected_total, expected = norm_rope.norm_activation(hidden, added, weight, 1e-6, ue8m0)
        assert_same((total, *activation), (expected_total, *expected))
        plain = reference_fused.norm_activation(hidden, delta, weight, 1e-6, None)
        assert difference(total, plain[0]) < 2 * BF16_LIMIT
        assert difference(activation.values, plain[1].values) < 2 * BF16_LIMIT


@pytest.mark.parametrize("num_tokens", [1, 3, 18])
def test_norm(num_tokens: int) -> None:
    check_norm(num_tokens, 384, True)


def test_norm_of_any_width() -> None:
    check_norm(2, 96, None)


def check_latent_inputs(
    num_tokens: int, num_parts: int, q_rank: int, index_kind: str | None, ue8m0: bool | None
) -> None:
    width = q_rank + (0 if index_kind is None else 128) + 576
    options: dict[str, Any] = dict(
        eps=1e-6,
        key_eps=1e-6,
        interleaved=True,
        index_interleaved=False,
        row_format=RowFormat("fp8"),
        index_format=IndexFormat(index_kind or "fp8"),
        ue8m0=ue8m0,
    )
    key = (None, None) if index_kind is None else (1 + 0.1 * randn(128, seed=6), 0.1 * randn(128, seed=7))
    rest = (*angles(num_tokens), 1 + 0.1 * randn(q_rank, seed=2), 1 + 0.1 * randn(512, seed=3), *key)
    a = linear_parts(num_parts, num_tokens, width)
    got = fused.latent_inputs(a, *rest, **options)
    expected = fused.latent_inputs(add_parts(a), *rest, **options)
    assert_same((*got.query, got.kv_row, got.index_key), (*expected.query, expected.kv_row, expected.index_key))
    plain = reference_fused.latent_inputs(a, *rest, **options)
    assert difference(got.query.values, plain.query.values) < 2 * BF16_LIMIT


@pytest.mark.parametrize(("num_tokens", "num_parts"), [(1, 1), (3, 2), (18, 4)])
def test_latent_inputs(num_tokens: int, num_parts: int) -> None:
    check_latent_inputs(num_tokens, num_parts, 256, "fp8", True)


@pytest.mark.parametrize(("index_kind", "ue8m0"), [(None, True), ("fp32", None)])
def test_latent_inputs_of_other_formats(index_kind: str | None, ue8m0: bool | None) -> None:
    check_latent_inputs(2, 4, 200 if ue8m0 is None else 256, index_kind, ue8m0)


@pytest.mark.parametrize(("num_rows", "inner", "splits"), [(1, 4096, 4), (18, 896, 1), (40, 1024, 2)])
def test_a_linear_in_parts(num_rows: int, inner: int, splits: int) -> None:
    x, weight = Activation(randn(num_rows, inner, seed=1, dtype=BF16)), quantized(40, inner, seed=2)
    parts, whole = linear.linear_parts(x, weight), linear.linear(x, weight)
    assert (parts.values.shape[0] if isinstance(parts, Parts) else 1) == splits
    assert parts.dtype == BF16 and torch.equal(add_parts(parts), whole)


def test_more_parts_than_a_reader_takes_are_added_up(monkeypatch: pytest.MonkeyPatch) -> None:
    x, weight = Activation(randn(1, 4096, seed=1, dtype=BF16)), quantized(40, 4096, seed=2)
    parts = linear.linear_parts(x, weight)
    monkeypatch.setattr(linear, "MAX_PARTS", 1)
    added = linear.linear_parts(x, weight)
    assert isinstance(parts, Parts) and isinstance(added, Tensor) and torch.equal(added, add_parts(parts))


@pytest.mark.parametrize(
    ("num_rows", "inner", "kind"), [(18, 512, "fp8"), (3, 1024, "fp8"), (3, 600, "bf16"), (40, 256, "fp8")]
)
def test_two_linears_of_one_input(num_rows: int, inner: int, kind: str) -> None:
    x, small = Activation(randn(num_rows, inner, seed=1, dtype=BF16)), randn(70, inner, seed=3, dtype=BF16)
    weight = quantized(200, inner, seed=2) if kind == "fp8" else randn(200, inner, seed=2, dtype=BF16)
    first, second = linear.linear_pair(x, weight, small)
    assert torch.equal(add_parts(first), linear.linear(x, weight))
    assert torch.equal(second, linear.linear_fp32_parts(x.values, small))
    _, second = linear.linear_pair(x, weight, small.float())
    assert torch.equal(second, linear.linear_fp32_parts(x.values, small.float()))


@pytest.mark.gpu
@pytest.mark.parametrize("num_tokens", [1, 3, 18, 32])
def test_real_shapes(num_tokens: int) -> None:
    check_norm(num_tokens, 7168, True)
    check_latent_inputs(num_tokens, 4, 1536, "fp8", True)
    x, small = randn(num_tokens, 7168, seed=1, dtype=BF16), randn(64, 7168, seed=2, dtype=BF16)
    weight = quantized(2240, 7168, seed=3)
    first, second = linear.linear_pair(Activation(x), weight, small)
    assert isinstance(first, Parts) and torch.equal(add_parts(first), linear.linear(Activation(x), weight))
    assert torch.equal(second, linear.linear_fp32_parts(x, small))

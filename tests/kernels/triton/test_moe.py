import pytest
import torch

from echo_batch.kernels.activation import Activation
from echo_batch.kernels.reference import moe as reference
from echo_batch.kernels.triton import moe
from echo_batch.kernels.triton.parts import add_parts
from echo_batch.kernels.weights import QuantizedWeight, block_shape
from tests.kernels.triton.common import BF16_LIMIT, DEVICE, difference, randn


@pytest.mark.parametrize(
    ("num_experts", "n_group", "topk_group", "top_k"), [(256, 8, 4, 8), (16, 4, 2, 4), (16, 1, 1, 4), (8, 4, 1, 4)]
)
@pytest.mark.parametrize("normalize", [True, False])
def test_route(num_experts: int, n_group: int, topk_group: int, top_k: int, normalize: bool) -> None:
    logits, bias = randn(6, num_experts, seed=1), 0.1 * randn(num_experts, seed=2)
    logits[0], bias[: num_experts // 2] = 0.0, bias[0]  # ties
    arguments = (logits, bias, n_group, topk_group, top_k, normalize, 2.5)
    weights, experts = moe.route(*arguments)
    expected_weights, expected_experts = reference.route(*arguments)
    assert torch.equal(experts, expected_experts)
    assert torch.allclose(weights, expected_weights, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("num_shared", [0, 4])
@pytest.mark.parametrize("held", [None, range(4, 12)])
def test_route_for_the_experts_held_here(held: range | None, num_shared: int) -> None:
    parts, bias = randn(3, 6, 16, seed=1), 0.1 * randn(16, seed=2)
    valid = torch.tensor([True, False, True, True, True, True], device=DEVICE)
    for options in (dict(), dict(valid=valid)):
        options |= dict(held=held, num_shared=num_shared)
        weights, experts = moe.route(parts, bias, 4, 2, 4, True, 2.5, **options)
        expected_weights, expected_experts = reference.route(parts, bias, 4, 2, 4, True, 2.5, **options)
        assert torch.equal(experts, expected_experts)
        assert torch.allclose(weights, expected_weights, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_swiglu(dtype: torch.dtype) -> None:
    x = randn(3, 400, seed=1, dtype=dtype)
    assert difference(moe.swiglu(x), reference.swiglu(x)) < (1e-12 if dtype == torch.float32 else BF16_LIMIT)


def stack(num_experts: int, rows: int, columns: int, seed: int, kind: str) -> torch.Tensor | QuantizedWeight:
    values = randn(num_experts, rows, columns, seed=seed)
    if kind != "fp8":
        return (values * columns**-0.5).to(torch.float32 if kind == "fp32" else torch.bfloat16)
    scale = torch.rand(block_shape(tuple(values.shape)), generator=torch.Generator().manual_seed(seed)) + 0.5
    return QuantizedWeight((values * 50).to(torch.float8_e4m3fn), (scale * 0.02 * columns**-0.5).to(DEVICE), True)


def check_experts(
    num_tokens: int, num_experts: int, top_k: int, width: int, inner: int, kind: str, limit: float
) -> None:
    generator = torch.Generator().manual_seed(num_tokens)
    chosen = [torch.randperm(num_experts, generator=generator)[:top_k] for _ in range(num_tokens)]
    experts = torch.stack(chosen).to(torch.int32)
    experts[0] = -1  # a padded row
    experts[-1, 1] = -1
    experts = experts.to(DEVICE)
    x = randn(num_tokens, width, seed=1, dtype=torch.float32 if kind == "fp32" else torch.bfloat16)
    weights = torch.rand(num_tokens, top_k, generator=generator).to(DEVICE)
    gate_up = stack(num_experts, 2 * inner, width, 3, kind)
    down = stack(num_experts, width, inner, 4, kind)
    got = add_parts(moe.routed_experts(Activation(x), experts, weights, gate_up, down))
    expected = reference.routed_experts(Activation(x), experts, weights, gate_up, down)
    assert got.dtype == torch.float32 and not got[0].any()
    addend = randn(num_tokens, width, seed=5, dtype=x.dtype)
    rounded = add_parts(
        moe.routed_experts(Activation(x), experts, weights, gate_up, down, addend=addend, dtype=x.dtype)
    )
    assert rounded.dtype == x.dtype and difference(rounded, got + addend.float()) < 1e-5
    assert difference(got, expected) < limit
    assert torch.equal(got, add_parts(moe.routed_experts(Activation(x), experts, weights, gate_up, down)))


@pytest.mark.parametrize(("kind", "limit"), [("fp32", 1e-11), ("bf16", 10 * BF16_LIMIT), ("fp8", 1e-3)])
def test_routed_experts(kind: str, limit: float) -> None:
    check_experts(5, 6, 3, 128, 128, kind, limit)


def test_many_tokens_of_few_experts() -> None:
    check_experts(40, 2, 2, 128, 128, "fp8", 1e-3)


@pytest.mark.gpu
@pytest.mark.parametrize("num_tokens", [2, 13, 64, 1500])
def test_real_shapes(num_tokens: int) -> None:
    check_experts(num_tokens, 64, 8, 7168, 2048, "fp8", 1e-3)

"""Router and experts against loops that follow the formulas (spec section 3.6)."""

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from echo_batch.kernels.activation import Activation
from echo_batch.kernels.reference.linear import linear
from echo_batch.kernels.reference.moe import route, routed_experts, swiglu
from echo_batch.kernels.reference.quant import quantize_groups
from echo_batch.kernels.weights import QuantizedWeight, dequantize


def naive_route(
    logits: list[float], bias: list[float], n_group: int, topk_group: int, top_k: int
) -> tuple[list[int], list[float]]:
    probabilities = torch.tensor(logits).sigmoid().tolist()
    biased = (torch.tensor(logits).sigmoid() + torch.tensor(bias)).tolist()
    size = len(logits) // n_group
    groups = range(n_group)
    if n_group > 1:
        sums = torch.tensor(biased).view(n_group, size).topk(2, -1).values.sum(-1).tolist()
        groups = sorted(groups, key=lambda g: (-sums[g], g))[:topk_group]  # type: ignore[assignment]
    allowed = [e for g in groups for e in range(g * size, (g + 1) * size)]
    chosen = sorted(allowed, key=lambda e: (-biased[e], e))[:top_k]
    total = sum(probabilities[e] for e in chosen)
    return chosen, [2.5 * probabilities[e] / total for e in chosen]


@settings(max_examples=150, deadline=None)
@given(st.data())
def test_route_against_a_loop(data: st.DataObject) -> None:
    n_group, topk_group = data.draw(st.sampled_from([(1, 1), (4, 2), (4, 4), (2, 1), (8, 3)]))
    top_k = data.draw(st.integers(1, 4))
    # Coarse values: ties between experts and between groups happen.
    coarse = st.integers(-3, 3).map(float)
    logits = data.draw(st.lists(coarse, min_size=16, max_size=16))
    bias = data.draw(st.lists(coarse.map(lambda v: v / 8), min_size=16, max_size=16))
    weights, experts = route(torch.tensor([logits]), torch.tensor(bias), n_group, topk_group, top_k, True, 2.5)
    expected_experts, expected_weights = naive_route(logits, bias, n_group, topk_group, min(top_k, 16))
    assert experts.dtype == torch.int32 and weights.dtype == torch.float32
    assert experts[0].tolist() == expected_experts
    torch.testing.assert_close(weights[0], torch.tensor(expected_weights))


def test_bias_selects_but_does_not_weigh() -> None:
    logits = torch.tensor([[2.0, 1.0, 0.0, -1.0]])
    bias = torch.tensor([0.0, 0.0, 0.0, 5.0])
    weights, experts = route(logits, bias, 1, 1, 2, False, 1.0)
    assert experts.tolist() == [[3, 0]]
    torch.testing.assert_close(weights, logits[:, [3, 0]].sigmoid())


def test_groups_are_ranked_by_their_two_best() -> None:
    """Group 0 has the single best expert, group 1 the better pair."""
    probabilities = torch.tensor([[0.9, 0.1, 0.6, 0.6]])
    _, experts = route(torch.logit(probabilities), torch.zeros(4), 2, 1, 2, True, 1.0)
    assert sorted(experts[0].tolist()) == [2, 3]


def make_experts(dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    gate_up = torch.randn(6, 2 * 128, 256, generator=generator) / 16
    down = torch.randn(6, 256, 128, generator=generator) / 11
    return gate_up.to(dtype), down.to(dtype)


def naive_experts(x: Tensor, experts: Tensor, weights: Tensor, gate_up: Tensor, down: Tensor) -> Tensor:
    out = torch.zeros(x.shape)
    for token in range(x.shape[0]):
        for slot, expert in enumerate(experts[token].tolist()):
            if expert >= 0:
                gate, up = (gate_up[expert] @ x[token]).chunk(2)
                out[token] += weights[token, slot] * (down[expert] @ (F.silu(gate) * up))
    return out


def random_routing(num_tokens: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    experts = torch.stack([torch.randperm(6, generator=generator)[:3] for _ in range(num_tokens)]).to(torch.int32)
    return experts, torch.rand(num_tokens, 3, generator=generator)


def test_experts_against_a_loop() -> None:
    gate_up, down = make_experts()
    x = torch.randn(30, 256, generator=torch.Generator().manual_seed(2))
    experts, weights = random_routing(30)
    experts[4] = -1
    experts[7, 1] = -1
    out = routed_experts(Activation(x), experts, weights, gate_up, down)
    assert out.dtype == torch.float32
    torch.testing.assert_close(out, naive_experts(x, experts, weights, gate_up, down), atol=1e-5, rtol=1e-5)
    assert (out[4] == 0).all()


def test_unrouted_nan_tokens_do_not_spread() -> None:
    gate_up, down = make_experts()
    x = torch.randn(8, 256, generator=torch.Generator().manual_seed(2))
    experts, weights = random_routing(8)
    expected = routed_experts(Activation(x), experts, weights, gate_up, down)
    x[3], weights[3], experts[3] = float("nan"), float("nan"), -1
    out = routed_experts(Activation(x), experts, weights, gate_up, down)
    keep = torch.arange(8) != 3
    torch.testing.assert_close(out[keep], expected[keep])


def test_bf16_partials_are_summed_in_fp32_in_slot_order() -> None:
    gate_up, down = make_experts(torch.bfloat16)
    x = torch.randn(5, 256, generator=torch.Generator().manual_seed(2)).to(torch.bfloat16)
    experts, weights = random_routing(5)
    expected = torch.zeros(5, 256)
    for slot in range(3):
        only = torch.full_like(experts, -1)
        only[:, 0] = experts[:, slot]
        partial = routed_experts(Activation(x), only, torch.ones_like(weights), gate_up, down)
        assert torch.equal(partial, partial.to(torch.bfloat16).float())  # one expert's output is rounded
        expected += weights[:, slot, None] * partial
    out = routed_experts(Activation(x), experts, weights, gate_up, down)
    torch.testing.assert_close(out, expected, atol=1e-6, rtol=1e-6)


def test_swiglu_in_bf16_rounds_once() -> None:
    gate_up = torch.randn(4, 64, generator=torch.Generator().manual_seed(3)).to(torch.bfloat16)
    gate, up = gate_up.float().chunk(2, -1)
    assert torch.equal(swiglu(gate_up), (F.silu(gate) * up).to(torch.bfloat16))


@pytest.mark.parametrize("ue8m0", [False, True])
def test_quantized_experts(ue8m0: bool) -> None:
    """A stack of quantized experts acts as its dequantized twin up to the rounding of activations."""
    gate_up, down = (quantize_stack(stack, ue8m0) for stack in make_experts())
    x = torch.randn(10, 256, generator=torch.Generator().manual_seed(2))
    experts, weights = random_routing(10)
    out = routed_experts(Activation(x), experts, weights, gate_up, down)
    plain = dequantize(gate_up, torch.float32), dequantize(down, torch.float32)
    exact = routed_experts(Activation(x), experts, weights, *plain)
    assert not torch.equal(out, exact)
    assert 1 - 2 * (out * exact).sum() / (out.square().sum() + exact.square().sum()) < 2e-3


def quantize_stack(stack: Tensor, ue8m0: bool) -> QuantizedWeight:
    experts, rows, columns = stack.shape
    blocks = stack.view(experts, rows // 128, 128, columns // 128, 128)
    scale = blocks.abs().amax((2, 4)) / 448
    data = (blocks / scale[:, :, None, :, None]).view(stack.shape).to(torch.float8_e4m3fn)
    return QuantizedWeight(data, scale, ue8m0)


def test_quantized_linear_rounds_activations_per_group() -> None:
    weight = quantize_stack(make_experts()[0], True).expert(2)
    x = torch.randn(3, 256, generator=torch.Generator().manual_seed(4))
    values, scale = quantize_groups(x, ue8m0=True)
    rounded = (values.float().view(3, 2, 128) * scale[..., None]).view(3, 256)
    expected = rounded.double() @ dequantize(weight, torch.float64).T
    torch.testing.assert_close(linear(Activation(x), weight).double(), expected, atol=1e-5, rtol=1e-5)

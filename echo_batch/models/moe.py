"""Feed-forward part of a layer: dense gated MLP, or routed and shared experts (spec section 3.6)."""

from torch import Tensor

from echo_batch.kernels.ops import Ops
from echo_batch.models.config import ModelConfig
from echo_batch.models.layers import MlpWeights, MoeWeights


def mlp(ops: Ops, weights: MlpWeights, x: Tensor) -> Tensor:
    """down(silu(gate x) * up x): [T, D] -> [T, D]."""
    return ops.linear(ops.swiglu(ops.linear(x, weights.gate_up)), weights.down)


def moe(ops: Ops, config: ModelConfig, weights: MoeWeights, x: Tensor, valid: Tensor | None) -> Tensor:
    """Routed experts plus shared experts: x [T, D], valid bool [T] | None -> [T, D].

    Tokens that are not valid (padding) reach no routed expert. Sums in fp32, rounded once.
    """
    router_weights, experts = ops.route(
        ops.linear_fp32(x, weights.gate),
        weights.bias,
        config.n_group,
        config.topk_group,
        config.num_experts_per_tok,
        config.norm_topk_prob,
        config.routed_scaling_factor,
    )
    if valid is not None:
        experts = experts.masked_fill(~valid.unsqueeze(1), -1)
    routed = ops.routed_experts(x, experts, router_weights, weights.experts.gate_up, weights.experts.down)
    return (routed + mlp(ops, weights.shared, x).float()).to(x.dtype)

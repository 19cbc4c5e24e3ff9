"""Feed-forward part of a layer: dense gated MLP, or routed and shared experts (spec section 3.6)."""

from torch import Tensor

from echo_batch.kernels.activation import Activation, quantization_for
from echo_batch.kernels.ops import Ops
from echo_batch.models.config import ModelConfig
from echo_batch.models.layers import MlpWeights, MoeWeights


def mlp(ops: Ops, weights: MlpWeights, x: Activation) -> Tensor:
    """down(silu(gate x) * up x): [T, D] -> [T, D]."""
    return ops.linear(
        ops.swiglu_activation(ops.linear(x, weights.gate_up), quantization_for(weights.down)), weights.down
    )


def moe(ops: Ops, config: ModelConfig, weights: MoeWeights, x: Activation, valid: Tensor | None) -> Tensor:
    """Routed experts plus shared experts: x [T, D], valid bool [T] | None -> [T, D]. Sums in fp32, rounded once."""
    routed = routed_experts(ops, config, weights, x, valid)
    return (routed + mlp(ops, weights.shared, x).float()).to(x.values.dtype)


def routed_experts(ops: Ops, config: ModelConfig, weights: MoeWeights, x: Activation, valid: Tensor | None) -> Tensor:
    """The experts that this worker holds: x [T, D] -> fp32 [T, D].

    Tokens that are not valid (padding) reach no expert; choices that fall on other workers' experts add nothing here.
    """
    router_weights, experts = ops.route(
        ops.linear_fp32(x.values, weights.gate),
        weights.bias,
        config.n_group,
        config.topk_group,
        config.num_experts_per_tok,
        config.norm_topk_prob,
        config.routed_scaling_factor,
    )
    num_held = weights.experts.gate_up.shape[0]
    if num_held < config.n_routed_experts:
        experts = experts - weights.first_expert
        experts = experts.masked_fill((experts < 0) | (experts >= num_held), -1)
    if valid is not None:
        experts = experts.masked_fill(~valid.unsqueeze(1), -1)
    return ops.routed_experts(x, experts, router_weights, weights.experts.gate_up, weights.experts.down)

"""Feed-forward part of a layer: dense gated MLP, or routed and shared experts (spec section 3.6)."""

import torch.nn.functional as F
from torch import Tensor

from echo_batch.kernels.activation import Activation, quantization_for
from echo_batch.kernels.ops import Ops
from echo_batch.kernels.parts import Result
from echo_batch.models.config import ModelConfig
from echo_batch.models.layers import MlpWeights, MoeWeights


def mlp(ops: Ops, weights: MlpWeights, x: Activation) -> Result:
    """down(silu(gate x) * up x): [T, D] -> [T, D], added up or not."""
    return ops.linear_parts(_gated(ops, weights, x), weights.down)


def _gated(ops: Ops, weights: MlpWeights, x: Activation) -> Activation:
    return ops.swiglu_activation(ops.linear(x, weights.gate_up), quantization_for(weights.down))


def moe(
    ops: Ops,
    config: ModelConfig,
    weights: MoeWeights,
    x: Activation,
    valid: Tensor | None,
    *,
    num_shared: int | None = None,
) -> Result:
    """Routed experts of all tokens, shared experts of the first `num_shared` (None: all): x [T, D] -> [T, D].

    Tokens with valid bool [T] False (padding) reach no expert; choices that fall on other workers' experts add nothing
    here. Sums in fp32, rounded once: by the reader of the result, if the op leaves it in parts.
    """
    num_shared = x.values.shape[0] if num_shared is None else num_shared
    stacked = weights.shared is None
    router_weights, experts = ops.route(
        ops.linear_fp32_parts(x.values, weights.gate),
        weights.bias,
        config.n_group,
        config.topk_group,
        config.num_experts_per_tok,
        config.norm_topk_prob,
        config.routed_scaling_factor,
        held=range(weights.first_expert, weights.first_expert + weights.num_held),
        valid=valid,
        num_shared=num_shared if stacked else 0,
    )
    shared = None
    if weights.shared is not None:
        own = Activation(*(None if part is None else part[:num_shared] for part in x))  # type: ignore[arg-type]
        shared = ops.linear(_gated(ops, weights.shared, own), weights.shared.down)
        shared = F.pad(shared, (0, 0, 0, x.values.shape[0] - num_shared))
    return ops.routed_experts(
        x,
        experts,
        router_weights,
        weights.experts.gate_up,
        weights.experts.down,
        addend=shared,
        dtype=x.values.dtype,
    )

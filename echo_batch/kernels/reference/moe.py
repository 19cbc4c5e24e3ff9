"""Reference mixture of experts: router, gated MLP, routed experts."""

import torch
import torch.nn.functional as F
from torch import Tensor

from echo_batch.kernels.activation import Activation, quantization_for
from echo_batch.kernels.reference.linear import linear
from echo_batch.kernels.reference.quant import quantize_groups
from echo_batch.kernels.weights import Weight, expert_of

_SLICE_TOKENS = 8192
"""Tokens whose expert outputs are held at once; fewer would make the experts' matrices small."""


def route(
    logits: Tensor, bias: Tensor, n_group: int, topk_group: int, top_k: int, normalize: bool, scaling: float
) -> tuple[Tensor, Tensor]:
    """Sigmoid router with a selection-only bias and optional group limits (spec section 3.6).

    logits fp32 [T, E], bias fp32 [E] -> weights fp32 [T, top_k], experts int32 [T, top_k], best first. With n_group > 1
    only the topk_group groups with the largest sums of their two best biased scores can be chosen from. Ties go to the
    lower group and expert. Weights are unbiased probabilities, over their sum if `normalize`, times `scaling`.
    """
    probabilities = logits.sigmoid()
    biased = probabilities + bias
    if n_group > 1:
        grouped = biased.unflatten(1, (n_group, -1))
        group_scores = grouped.topk(2, -1).values.sum(-1)
        kept = group_scores.argsort(dim=-1, descending=True, stable=True)[:, :topk_group]
        keep = torch.zeros_like(group_scores, dtype=torch.bool).scatter_(1, kept, True)
        biased = grouped.masked_fill(~keep.unsqueeze(-1), float("-inf")).flatten(1)
    experts = biased.argsort(dim=-1, descending=True, stable=True)[:, :top_k]
    weights = probabilities.gather(1, experts)
    if normalize:
        weights = weights / (weights.sum(-1, keepdim=True) + 1e-20)
    return weights * scaling, experts.to(torch.int32)


def swiglu(gate_up: Tensor) -> Tensor:
    """[T, 2I] (gate half, then up half) -> silu(gate) * up [T, I], in fp32, returned in the input's dtype."""
    gate, up = gate_up.float().chunk(2, -1)
    return (F.silu(gate) * up).to(gate_up.dtype)


def swiglu_activation(gate_up: Tensor, ue8m0: bool | None) -> Activation:
    """`swiglu` as the input of a linear: with `ue8m0` not None also quantized, from the product before rounding."""
    if ue8m0 is None:
        return Activation(swiglu(gate_up))
    return Activation(swiglu(gate_up), *quantize_groups(swiglu(gate_up.float()), ue8m0=ue8m0))


def routed_experts(x: Activation, experts: Tensor, weights: Tensor, gate_up: Weight, down: Weight) -> Tensor:
    """Weighted sum of each token's experts.

    x [T, D], experts int32 [T, k] (-1 = none), weights fp32 [T, k], gate_up [E, 2I, D], down [E, D, I] -> fp32 [T, D].
    Each (token, slot) has a partial of its own; they are summed in fp32 in slot order, so that the result does not
    depend on the order of execution.
    """
    out = torch.zeros(x.values.shape, dtype=torch.float32, device=x.values.device)
    for start in range(0, out.shape[0], _SLICE_TOKENS):
        part = slice(start, start + _SLICE_TOKENS)
        partials = _partials(_rows(x, part), experts[part], gate_up, down)
        for slot in range(experts.shape[1]):
            out[part] += weights[part, slot, None] * partials[:, slot].float()
    return out


def _rows(x: Activation, rows: slice | Tensor) -> Activation:
    return Activation(*(None if part is None else part[rows] for part in x))  # type: ignore[arg-type]


def _partials(x: Activation, experts: Tensor, gate_up: Weight, down: Weight) -> Tensor:
    """Unweighted expert outputs [T, k, D] in x's dtype; zeros where experts is -1."""
    flat = experts.flatten()
    partials = torch.zeros(flat.shape[0], x.values.shape[1], dtype=x.values.dtype, device=x.values.device)
    order = flat.argsort(stable=True)
    counts = torch.bincount(flat + 1, minlength=gate_up.shape[0] + 1).tolist()
    position = counts[0]
    for expert, count in enumerate(counts[1:]):
        if count == 0:
            continue
        pairs = order[position : position + count]
        position += count
        gated = linear(_rows(x, pairs // experts.shape[1]), expert_of(gate_up, expert))
        partials[pairs] = linear(swiglu_activation(gated, quantization_for(down)), expert_of(down, expert))
    return partials.unflatten(0, experts.shape)

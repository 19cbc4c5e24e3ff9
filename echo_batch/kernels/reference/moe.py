"""Reference mixture of experts: router, gated MLP, routed experts."""

import torch
import torch.nn.functional as F
from torch import Tensor

from echo_batch.kernels.activation import Activation, quantization_for
from echo_batch.kernels.parts import Result
from echo_batch.kernels.reference.linear import linear
from echo_batch.kernels.reference.parts import sum_parts
from echo_batch.kernels.reference.quant import quantize_groups
from echo_batch.kernels.weights import Weight, expert_of

_SLICE_TOKENS = 8192
"""Tokens whose expert outputs are held at once; fewer would make the experts' matrices small."""


def route(
    logits: Tensor,
    bias: Tensor,
    n_group: int,
    topk_group: int,
    top_k: int,
    normalize: bool,
    scaling: float,
    *,
    held: range | None = None,
    valid: Tensor | None = None,
    num_shared: int = 0,
) -> tuple[Tensor, Tensor]:
    """Sigmoid router with a selection-only bias and optional group limits (spec section 3.6).

    logits fp32 [T, E] or their parts [S, T, E] (`linear_fp32_parts`), bias fp32 [E] -> weights fp32 [T, top_k], experts
    int32 [T, top_k], best first. With n_group > 1 only the topk_group groups with the largest sums of their two best
    biased scores can be chosen from. Ties go to the lower group and expert. Weights are unbiased probabilities, over
    their sum if `normalize`, times `scaling`.

    Experts are counted from the first of those `held` here (None: all are); -1 for the others, and in rows that are not
    valid (bool [T]). With num_shared > 0 there is a column more, of a shared expert that stands behind the held ones:
    weight 1, for the first num_shared tokens.
    """
    logits = sum_parts(logits)
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
    weights = weights * scaling
    held = range(logits.shape[1]) if held is None else held
    experts = torch.where((experts >= held.start) & (experts < held.stop), experts - held.start, -1)
    if num_shared:
        token = torch.arange(experts.shape[0], device=experts.device)[:, None]
        experts = torch.cat((experts, torch.where(token < num_shared, len(held), -1)), dim=1)
        weights = F.pad(weights, (0, 1), value=1.0)
    if valid is not None:
        experts = experts.masked_fill(~valid.unsqueeze(1), -1)
    return weights, experts.to(torch.int32)


def swiglu(gate_up: Tensor) -> Tensor:
    """[T, 2I] (gate half, then up half) -> silu(gate) * up [T, I], in fp32, returned in the input's dtype."""
    gate, up = gate_up.float().chunk(2, -1)
    return (F.silu(gate) * up).to(gate_up.dtype)


def swiglu_activation(gate_up: Tensor, ue8m0: bool | None) -> Activation:
    """`swiglu` as the input of a linear: with `ue8m0` not None also quantized, from the product before rounding."""
    if ue8m0 is None:
        return Activation(swiglu(gate_up))
    return Activation(swiglu(gate_up), *quantize_groups(swiglu(gate_up.float()), ue8m0=ue8m0))


def routed_experts(
    x: Activation,
    experts: Tensor,
    weights: Tensor,
    gate_up: Weight,
    down: Weight,
    *,
    addend: Tensor | None = None,
    dtype: torch.dtype = torch.float32,
) -> Result:
    """Weighted sum of each token's experts, added up or not.

    x [T, D], experts int32 [T, k] (-1 = none), weights fp32 [T, k], gate_up [E, 2I, D], down [E, D, I] -> [T, D],
    summed in fp32 and rounded to `dtype` at the end. `addend` [T, D] (another output of the layer) is added last.
    Each (token, slot) has a partial of its own; they are summed in slot order, so that the result does not depend on
    the order of execution.
    """
    out = torch.zeros(x.values.shape, dtype=torch.float32, device=x.values.device)
    for start in range(0, out.shape[0], _SLICE_TOKENS):
        part = slice(start, start + _SLICE_TOKENS)
        partials = _partials(_rows(x, part), experts[part], gate_up, down)
        for slot in range(experts.shape[1]):
            out[part] += weights[part, slot, None] * partials[:, slot].float()
    return (out if addend is None else out + addend.float()).to(dtype)


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

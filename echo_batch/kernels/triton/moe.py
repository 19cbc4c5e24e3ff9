# mypy: allow-untyped-defs, allow-incomplete-defs
"""Router and routed experts in Triton: grouped by expert, deterministic, no host involvement (spec section 3.6)."""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from echo_batch.kernels.activation import Activation, quantization_for
from echo_batch.kernels.parts import ExpertParts, Result
from echo_batch.kernels.triton.quant import dot_type, quantized, swiglu_quantized
from echo_batch.kernels.triton.stages import stages_that_fit
from echo_batch.kernels.weights import QUANT_BLOCK, QuantizedWeight, Weight


@triton.jit
def _route_kernel(
    logits_ptr,
    bias_ptr,
    valid_ptr,
    weights_ptr,
    experts_ptr,
    num_tokens,
    num_experts,
    topk_group,
    scaling,
    first_held,
    num_held,
    num_shared,
    NUM_PARTS: tl.constexpr,
    HAS_VALID: tl.constexpr,
    NUM_COLUMNS: tl.constexpr,
    N_GROUP: tl.constexpr,
    TOP_K: tl.constexpr,
    NORMALIZE: tl.constexpr,
    GROUPS_P2: tl.constexpr,
    GROUP_SIZE: tl.constexpr,
    GROUP_P2: tl.constexpr,
    K_P2: tl.constexpr,
):
    """One token a program; the experts as a matrix [groups, experts of a group]. NUM_COLUMNS: TOP_K, or one more."""
    token = tl.program_id(0).to(tl.int64)
    group = tl.arange(0, GROUPS_P2)[:, None]
    member = tl.arange(0, GROUP_P2)[None, :]
    expert = group * GROUP_SIZE + member
    outside = (member >= GROUP_SIZE) | (group >= N_GROUP)
    logits = tl.load(logits_ptr + token * num_experts + expert, mask=outside == 0, other=0.0)
    for part in tl.static_range(1, NUM_PARTS):
        at = (part * num_tokens + token) * num_experts + expert
        logits += tl.load(logits_ptr + at, mask=outside == 0, other=0.0)
    probability = tl.math.div_rn(tl.full(logits.shape, 1.0, tl.float32), 1.0 + tl.exp(-logits))
    bias = tl.load(bias_ptr + expert, mask=outside == 0, other=0.0)
    biased = tl.where(outside, float("-inf"), probability + bias)
    if N_GROUP > 1:
        best = tl.max(biased, 1)
        best_member = tl.min(tl.where(biased == best[:, None], member, GROUP_P2), 1)
        second = tl.max(tl.where(member == best_member[:, None], float("-inf"), biased), 1)
        score = tl.where(tl.arange(0, GROUPS_P2) < N_GROUP, best + second, float("-inf"))
        index = tl.arange(0, GROUPS_P2)
        tied_before = (score[None, :] == score[:, None]) & (index[None, :] < index[:, None])
        ahead = (score[None, :] > score[:, None]) | tied_before
        rank = tl.sum(ahead.to(tl.int32), 1)
        biased = tl.where(rank[:, None] < topk_group, biased, float("-inf"))
    flat_biased = tl.reshape(biased, (GROUPS_P2 * GROUP_P2,))
    flat_expert = tl.reshape(tl.broadcast_to(expert, biased.shape), (GROUPS_P2 * GROUP_P2,))
    flat_probability = tl.reshape(probability, (GROUPS_P2 * GROUP_P2,))
    flat_taken = tl.reshape(outside.to(tl.int32), (GROUPS_P2 * GROUP_P2,))
    slot = tl.arange(0, K_P2)
    chosen = tl.zeros((K_P2,), tl.int32)
    weights = tl.zeros((K_P2,), tl.float32)
    for i in tl.static_range(TOP_K):
        # Also among equals at -inf (fewer experts in the kept groups than top_k): never one that is taken.
        largest = tl.max(tl.where(flat_taken == 1, float("-inf"), flat_biased), 0)
        is_best = (flat_biased == largest) & (flat_taken == 0)
        best_expert = tl.min(tl.where(is_best, flat_expert, 2147483647), 0)
        picked = (flat_expert == best_expert) & (flat_taken == 0)
        weight = tl.sum(tl.where(picked, flat_probability, 0.0), 0)
        flat_taken = tl.where(picked, 1, flat_taken)
        chosen = tl.where(slot == i, best_expert, chosen)
        weights = tl.where(slot == i, weight, weights)
    if NORMALIZE:
        weights = tl.math.div_rn(weights, tl.broadcast_to(tl.sum(weights, 0) + 1e-20, weights.shape))
    weights = tl.where(slot == TOP_K, 1.0, weights * scaling)
    is_held = (chosen >= first_held) & (chosen < first_held + num_held)
    chosen = tl.where(is_held, chosen - first_held, -1)
    chosen = tl.where(slot == TOP_K, tl.where(token < num_shared, num_held, -1), chosen)
    if HAS_VALID:
        chosen = tl.where(tl.load(valid_ptr + token) != 0, chosen, -1)
    tl.store(weights_ptr + token * NUM_COLUMNS + slot, weights, mask=slot < NUM_COLUMNS)
    tl.store(experts_ptr + token * NUM_COLUMNS + slot, chosen, mask=slot < NUM_COLUMNS)


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
    """Sigmoid router with a selection-only bias and optional group limits; as reference.moe.route.

    logits fp32 [T, E] or parts [S, T, E], bias fp32 [E], valid bool [T] -> weights fp32 [T, top_k (+ 1 with
    num_shared)], experts int32 of the same shape, best first; ties go to the lower group and expert. E must be a
    multiple of n_group.
    """
    num_tokens, num_experts = logits.shape[-2:]
    assert num_experts % n_group == 0 and top_k <= num_experts
    held = range(num_experts) if held is None else held
    columns = top_k + (num_shared > 0)
    weights = torch.empty(num_tokens, columns, dtype=torch.float32, device=logits.device)
    experts = torch.empty(num_tokens, columns, dtype=torch.int32, device=logits.device)
    if num_tokens:
        size = num_experts // n_group
        _route_kernel[(num_tokens,)](
            logits.contiguous(),
            bias,
            bias if valid is None else valid,
            weights,
            experts,
            num_tokens,
            num_experts,
            topk_group,
            scaling,
            held.start,
            len(held),
            num_shared,
            NUM_PARTS=1 if logits.dim() == 2 else logits.shape[0],
            HAS_VALID=valid is not None,
            NUM_COLUMNS=columns,
            N_GROUP=n_group,
            TOP_K=top_k,
            NORMALIZE=normalize,
            GROUPS_P2=triton.next_power_of_2(n_group),
            GROUP_SIZE=size,
            GROUP_P2=triton.next_power_of_2(size),
            K_P2=triton.next_power_of_2(columns),
            num_warps=1,
        )
    return weights, experts


@triton.jit
def _swiglu_kernel(x_ptr, out_ptr, width, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < width
    gate = tl.load(x_ptr + row * 2 * width + column, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(x_ptr + row * 2 * width + width + column, mask=inside, other=0.0).to(tl.float32)
    tl.store(out_ptr + row * width + column, (gate * tl.sigmoid(gate) * up).to(out_ptr.dtype.element_ty), mask=inside)


def swiglu(gate_up: Tensor) -> Tensor:
    """[T, 2I] (gate half, then up half) -> silu(gate) * up [T, I], in fp32, returned in the input's dtype."""
    num_rows, width = gate_up.shape[0], gate_up.shape[1] // 2
    gate_up = gate_up.contiguous()
    out = torch.empty(num_rows, width, dtype=gate_up.dtype, device=gate_up.device)
    if num_rows:
        _swiglu_kernel[(num_rows, triton.cdiv(width, 1024))](gate_up, out, width, BLOCK=1024, num_warps=4)
    return out


@triton.jit
def _group_kernel(
    experts_ptr,
    order_ptr,
    block_expert_ptr,
    row_of_pair_ptr,
    num_pairs,
    num_experts,
    max_blocks,
    BLOCK_M: tl.constexpr,
    EXPERTS_P2: tl.constexpr,
    CHUNK: tl.constexpr,
):
    """Program e lists the pairs of expert e, in order, in blocks of its own; the last program closes the list."""
    expert = tl.program_id(0)
    lane = tl.arange(0, CHUNK)
    bins = tl.arange(0, EXPERTS_P2)
    counts = tl.zeros((EXPERTS_P2,), tl.int32)
    for start in range(0, num_pairs, CHUNK):
        chosen = tl.load(experts_ptr + start + lane, mask=start + lane < num_pairs, other=-1)
        counts += tl.histogram(tl.maximum(chosen, 0), EXPERTS_P2, mask=chosen >= 0)
    blocks = tl.where(bins < num_experts, (counts + BLOCK_M - 1) // BLOCK_M, 0)
    first_block = tl.sum(tl.where(bins < expert, blocks, 0), 0)
    own_blocks = tl.sum(tl.where(bins == expert, blocks, 0), 0)
    position = first_block * BLOCK_M
    for start in range(0, num_pairs, CHUNK):
        chosen = tl.load(experts_ptr + start + lane, mask=start + lane < num_pairs, other=-1)
        mine = chosen == expert
        rank = tl.cumsum(mine.to(tl.int32), 0) - 1
        tl.store(order_ptr + position + rank, start + lane, mask=mine)
        # A pair's partial is stored under its own number.
        marked = (chosen < 0) & (start + lane < tl.where(expert == 0, num_pairs, 0))
        tl.store(row_of_pair_ptr + start + lane, tl.where(mine, start + lane, -1), mask=mine | marked)
        position += tl.sum(mine.to(tl.int32), 0)
    fill = tl.arange(0, BLOCK_M)
    tl.store(order_ptr + position + fill, -1, mask=position + fill < (first_block + own_blocks) * BLOCK_M)
    for block in range(own_blocks):
        tl.store(block_expert_ptr + first_block + block, expert)
    if expert == num_experts - 1:
        for block in range(first_block + own_blocks, max_blocks):
            tl.store(block_expert_ptr + block, -1)


@triton.jit
def _grouped_linear_kernel(
    x_ptr,
    x_scale_ptr,
    weight_ptr,
    weight_scale_ptr,
    order_ptr,
    block_expert_ptr,
    out_ptr,
    num_columns,
    inner,
    pairs_per_row,
    x_scale_row_stride,
    x_scale_group_stride,
    QUANTIZED: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    GROUP: tl.constexpr,
    COMPUTE: tl.constexpr,
):
    """Out row of pair p = x row p // pairs_per_row times its expert's matrix; one program: one block of one expert."""
    expert = tl.load(block_expert_ptr + tl.program_id(0)).to(tl.int64)
    if expert >= 0:
        pair = tl.load(order_ptr + tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M))
        column = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
        k = tl.arange(0, GROUP)
        valid = pair >= 0
        column_inside = column < num_columns
        row = (tl.maximum(pair, 0) // pairs_per_row).to(tl.int64)
        num_blocks = tl.cdiv(inner, GROUP)
        x_ptrs = x_ptr + row[:, None] * inner + k[None, :]
        weight_ptrs = weight_ptr + (expert * num_columns + column)[None, :] * inner + k[:, None]
        x_scale_ptrs = x_scale_ptr + row * x_scale_row_stride
        scale_rows = tl.cdiv(num_columns, GROUP)
        weight_scale_ptr += (expert * scale_rows + (tl.program_id(1) * BLOCK_N) // GROUP) * num_blocks
        total = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
        for block in range(num_blocks):
            if QUANTIZED:
                x = tl.load(x_ptrs + block * GROUP, mask=valid[:, None], other=0.0)
                weight = tl.load(weight_ptrs + block * GROUP, mask=column_inside[None, :], other=0.0)
                x_scale = tl.load(x_scale_ptrs + block * x_scale_group_stride, mask=valid, other=0.0)
                scale = x_scale * tl.load(weight_scale_ptr + block)
                total += tl.dot(x, weight) * scale[:, None]
            else:
                k_inside = block * GROUP + k < inner
                x = tl.load(x_ptrs + block * GROUP, mask=valid[:, None] & k_inside[None, :], other=0.0)
                weight_mask = column_inside[None, :] & k_inside[:, None]
                weight = tl.load(weight_ptrs + block * GROUP, mask=weight_mask, other=0.0)
                total += tl.dot(x.to(COMPUTE), weight.to(COMPUTE), input_precision="ieee")
        at = tl.maximum(pair, 0).to(tl.int64)[:, None] * num_columns + column[None, :]
        tl.store(out_ptr + at, total.to(out_ptr.dtype.element_ty), mask=valid[:, None] & column_inside[None, :])


@triton.jit
def _grouped_few_rows_kernel(
    x_ptr,
    x_scale_ptr,
    weight_ptr,
    weight_scale_ptr,
    order_ptr,
    block_expert_ptr,
    out_ptr,
    num_columns,
    inner,
    pairs_per_row,
    x_scale_row_stride,
    x_scale_group_stride,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    GROUP: tl.constexpr,
    STAGES: tl.constexpr,
):
    """As `_grouped_linear_kernel` for fp8, the weight as the left operand and nothing masked that is loaded (see
    linear._few_rows_part): a block of few pairs only waits for the expert's matrix."""
    expert = tl.load(block_expert_ptr + tl.program_id(0)).to(tl.int64)
    if expert >= 0:
        pair = tl.load(order_ptr + tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M))
        column = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
        k = tl.arange(0, GROUP)
        row = (tl.maximum(pair, 0) // pairs_per_row).to(tl.int64)
        read_column = expert * num_columns + tl.minimum(column, num_columns - 1)
        num_blocks = inner // GROUP
        x_ptrs = x_ptr + row[None, :] * inner + k[:, None]
        weight_ptrs = weight_ptr + read_column[:, None] * inner + k[None, :]
        x_scale_ptrs = x_scale_ptr + row * x_scale_row_stride
        scale_rows = tl.cdiv(num_columns, GROUP)
        weight_scale_ptr += (expert * scale_rows + (tl.program_id(1) * BLOCK_N) // GROUP) * num_blocks
        total = tl.zeros((BLOCK_N, BLOCK_M), tl.float32)
        for block in tl.range(0, num_blocks, num_stages=STAGES):
            weight = tl.load(weight_ptrs + block * GROUP)
            x = tl.load(x_ptrs + block * GROUP)
            scale = tl.load(x_scale_ptrs + block * x_scale_group_stride) * tl.load(weight_scale_ptr + block)
            total += tl.dot(weight, x) * scale[None, :]
        at = tl.maximum(pair, 0).to(tl.int64)[None, :] * num_columns + column[:, None]
        inside = (pair >= 0)[None, :] & (column < num_columns)[:, None]
        tl.store(out_ptr + at, total.to(out_ptr.dtype.element_ty), mask=inside)


class _Tile(NamedTuple):
    """How a program of `_grouped_few_rows_kernel` is made."""

    columns: int
    stages: int
    warps: int


_LONG_ROWS, _SHORT_ROWS = _Tile(128, 6, 4), _Tile(128, 3, 8)
"""Best of seven for 7,168 and 2,048 inputs, together 1 to 12 % faster than the general kernel (docs/benchmarks.md)."""
_FEW_PAIRS = 16
"""Of a block, for `_grouped_few_rows_kernel`: the narrowest that the tensor cores take."""
_FEW_TOKENS = 160
"""Up to here blocks are narrow, however many of the pairs are other workers'."""


def _grouped_linear(
    x: Activation, weight: Weight, order: Tensor, block_expert: Tensor, out: Tensor, block_m: int
) -> None:
    """out [P, N]: row p from x row p // (P / rows of x) and its expert, for the pairs in `order`."""
    if isinstance(weight, QuantizedWeight):
        values, scale = quantized(x, weight.ue8m0)
        data, weight_scale = weight.data, weight.scale
    else:
        values = scale = x.values.contiguous()
        data = weight_scale = weight
    assert values.is_contiguous() and data.is_contiguous() and weight_scale.is_contiguous()
    num_columns, inner = data.shape[1:]
    arguments = (
        values,
        scale,
        data,
        weight_scale,
        order,
        block_expert,
        out,
        num_columns,
        inner,
        out.shape[0] // values.shape[0],
        scale.stride(0),
        scale.stride(1),
    )
    if isinstance(weight, QuantizedWeight) and block_m == _FEW_PAIRS:
        tile = _LONG_ROWS if inner >= 4096 else _SHORT_ROWS
        _grouped_few_rows_kernel[(block_expert.shape[0], triton.cdiv(num_columns, tile.columns))](
            *arguments,
            BLOCK_M=block_m,
            BLOCK_N=tile.columns,
            GROUP=QUANT_BLOCK,
            STAGES=stages_that_fit(tile.stages, (tile.columns + block_m) * QUANT_BLOCK, data.device),
            num_warps=tile.warps,
        )
        return
    block_n = 64 if block_m == _FEW_PAIRS else 128
    _grouped_linear_kernel[(block_expert.shape[0], triton.cdiv(num_columns, block_n))](
        *arguments,
        QUANTIZED=isinstance(weight, QuantizedWeight),
        BLOCK_M=block_m,
        BLOCK_N=block_n,
        GROUP=QUANT_BLOCK if isinstance(weight, QuantizedWeight) else 64,
        COMPUTE=dot_type(x.values),
        num_warps=4,
        num_stages=3,
    )


def swiglu_activation(gate_up: Tensor, ue8m0: bool | None) -> Activation:
    """`swiglu` as the input of a linear: with `ue8m0` not None also quantized, from the product before rounding."""
    return Activation(swiglu(gate_up)) if ue8m0 is None else swiglu_quantized(gate_up, ue8m0=ue8m0)


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
    """Weighted sum of each token's experts, not added up; as reference.moe.routed_experts.

    x [T, D], experts int32 [T, k] (-1 = none), weights fp32 [T, k], gate_up [E, 2I, D], down [E, D, I] -> [T, D]. A
    pair (token, slot) has a partial of its own.
    """
    num_tokens, width = x.values.shape
    device = x.values.device
    num_slots, num_experts = experts.shape[1], gate_up.shape[0]
    num_pairs = num_tokens * num_slots
    if num_tokens == 0:
        return torch.zeros(0, width, dtype=dtype, device=device)
    experts, weights = experts.contiguous(), weights.contiguous()
    block_m = _FEW_PAIRS if num_tokens <= _FEW_TOKENS or num_pairs <= 16 * num_experts else 64
    # An expert's last block may be partly filled, and no block is empty.
    max_blocks = min(num_pairs, num_pairs // block_m + num_experts)
    order = torch.empty(max_blocks * block_m, dtype=torch.int32, device=device)
    row_of_pair = torch.empty(num_tokens, num_slots, dtype=torch.int32, device=device)
    block_expert = torch.empty(max_blocks, dtype=torch.int32, device=device)
    _group_kernel[(num_experts,)](
        experts,
        order,
        block_expert,
        row_of_pair,
        num_pairs,
        num_experts,
        max_blocks,
        BLOCK_M=block_m,
        EXPERTS_P2=max(32, triton.next_power_of_2(num_experts)),
        CHUNK=1024,
        num_warps=4,
    )
    hidden = torch.empty(num_pairs, gate_up.shape[1], dtype=x.values.dtype, device=device)
    _grouped_linear(x, gate_up, order, block_expert, hidden, block_m)
    gated = swiglu_activation(hidden, quantization_for(down))
    del hidden  # with many tokens the two largest tensors should not be there at once
    partials = torch.empty(num_pairs, width, dtype=x.values.dtype, device=device)
    _grouped_linear(gated, down, order, block_expert, partials, block_m)
    return ExpertParts(partials, row_of_pair, weights, None if addend is None else addend.contiguous(), dtype)

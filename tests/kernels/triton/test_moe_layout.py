"""Layouts of grouped rows, seen through what a grouped GEMM would read."""

import pytest
import torch

from echo_batch.kernels.reference.moe import swiglu
from echo_batch.kernels.reference.quant import dequantize_groups, quantize_groups
from echo_batch.kernels.triton.moe_layout import dispatch, dispatch_masked, expert_rows, swiglu_quantize_rows
from tests.kernels.triton.common import DEVICE, difference, randn

NUM_EXPERTS = 5


def pairs(num_tokens: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(num_tokens)
    experts = torch.stack([torch.randperm(NUM_EXPERTS - 1, generator=generator)[:3] for _ in range(num_tokens)])
    experts[num_tokens // 2] = -1
    return experts.to(torch.int32).to(DEVICE)


def tokens(num_tokens: int) -> tuple[torch.Tensor, torch.Tensor]:
    return quantize_groups(randn(num_tokens, 384, seed=1), ue8m0=True)


@pytest.mark.parametrize("num_tokens", [1, 9, 150])
def test_masked(num_tokens: int) -> None:
    experts = pairs(num_tokens)
    rows, _, _ = dispatch_masked(*tokens(num_tokens), experts, NUM_EXPERTS, 512)
    flat = experts.flatten().cpu()
    assert rows.experts_of_rows.tolist() == [int((flat == e).sum()) for e in range(NUM_EXPERTS)]
    for expert in range(NUM_EXPERTS):
        got = rows.row_of_pair.cpu()[flat == expert].tolist()
        assert got == [expert * 512 + i for i in range(len(got))]
    assert bool((rows.row_of_pair.cpu()[flat < 0] == -1).all())


@pytest.mark.parametrize("num_tokens", [1, 9, 400])
def test_contiguous(num_tokens: int) -> None:
    experts = pairs(num_tokens)
    rows = expert_rows(experts, NUM_EXPERTS, alignment=128)
    flat, layout = experts.flatten().cpu(), rows.experts_of_rows.cpu()
    expected = torch.full((rows.num_rows,), -1, dtype=torch.int32)
    start = 0
    for expert in range(NUM_EXPERTS):
        count = int((flat == expert).sum())
        got = rows.row_of_pair.cpu()[flat == expert].tolist()
        assert got == [start + i for i in range(count)]
        expected[start : start + count] = expert
        start += -(-count // 128) * 128
    assert torch.equal(layout, expected)


@pytest.mark.parametrize("masked", [True, False])
def test_dispatch_and_swiglu(masked: bool) -> None:
    experts = pairs(9)
    values, scale = tokens(9)
    per_expert = 128 if masked else 0
    if masked:
        rows, out, out_scale = dispatch_masked(values, scale, experts, NUM_EXPERTS, per_expert)
    else:
        rows = expert_rows(experts, NUM_EXPERTS, alignment=128)
        out, out_scale = dispatch(values, scale, rows)
    used = rows.row_of_pair >= 0
    at = rows.row_of_pair[used].long()
    token = torch.arange(27, device=DEVICE)[used] // 3
    assert torch.equal(out.view(torch.uint8)[at], values.view(torch.uint8)[token])
    assert torch.equal(out_scale.reshape(-1, 3)[at], scale[token])
    assert out_scale.stride()[-2:] == (1, 128 if masked else rows.num_rows)

    gate_up = randn(rows.num_rows, 512, seed=2, dtype=torch.bfloat16)
    activated, activated_scale = swiglu_quantize_rows(gate_up, rows, per_expert, ue8m0=True)
    got = dequantize_groups(activated[at], activated_scale.reshape(-1, 2)[at])
    assert difference(got, swiglu(gate_up[at].float())) < 1e-3

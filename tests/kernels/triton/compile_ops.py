"""Compile the decode step's Triton kernels for Hopper on a machine without a GPU: `python -m ...compile_ops 90 227`.

The interpreter runs kernels as Python and lets through what the compiler refuses (a name that changes its type in a
branch, an argument of 1 that becomes a constant). Here every launch compiles its kernel, with the arguments it would
have on the card, and runs nothing. Needs a process of its own: kernels are made by mode when they are imported.
For another GPU (capability, KB of shared memory of a block) only the loops that keep the most in flight are compiled.
"""

import sys
import tempfile
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.backends.compiler import GPUTarget
from triton.runtime.jit import JITFunction

from echo_batch.kernels.activation import Activation
from echo_batch.kernels.contracts import Marked, make_maps
from echo_batch.kernels.formats import IndexFormat, RowFormat
from echo_batch.kernels.parts import Parts
from echo_batch.kernels.triton import (
    attention,
    cache_ops,
    fused,
    linear,
    moe,
    moe_layout,
    norm_rope,
    parts,
    quant,
    queries,
    row_copy,
    rows,
    sampling,
    slots,
    stages,
    topk,
)
from echo_batch.kernels.weights import QuantizedWeight, block_shape
from tests.kernels.machine_code import delayed_loads, disassemble, find_disassembler

BF16, FP8 = torch.bfloat16, torch.float8_e4m3fn


def compile_instead_of_running(capability: int, shared_kilobytes: int) -> list[str]:
    """From now on a launch only compiles, and must fit; returns the list to which it adds the kernel's name."""
    compiled: list[str] = []
    target = GPUTarget("cuda", capability, 32)
    driver = SimpleNamespace(
        get_current_device=lambda: 0, get_current_stream=lambda device: 0, get_current_target=lambda: target
    )
    triton.runtime.driver.set_active(driver)
    run = JITFunction.run

    def compile_only(self: Any, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> Any:
        compiled.append(self.fn.__name__)
        if self.fn.__name__ == "_attention_kernel":
            kwargs["COMPUTE"] = tl.bfloat16  # as on the card
        kernel = run(self, *args, grid=grid, warmup=True, **kwargs)
        if self.fn.__name__ == "place_kernel" and capability == 90 and find_disassembler() is not None:
            check_recall(kernel.asm["cubin"], waits_for_marks=bool(kwargs["EARLY"]))
        assert kernel.metadata.shared <= shared_kilobytes << 10, (self.fn.__name__, kernel.metadata.shared)
        return kernel

    JITFunction.run = compile_only  # type: ignore[method-assign]
    vars(stages)["_shared_bytes"] = lambda device: (shared_kilobytes << 10) - 2048
    for module in (fused, linear, moe, queries):
        vars(module)["dot_type"] = lambda x: tl.bfloat16 if x.dtype == BF16 else tl.float32
    return compiled


def check_recall(cubin: bytes, *, waits_for_marks: bool) -> None:
    """A row's bytes and the row for it are asked for at once: each wait between is a trip over the link. Marks are
    asked for by loads that acquire, after which nothing is read from the L1 cache that was there before."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        code = disassemble(Path(file.name))
    found = delayed_loads(code, r"LDG\.E\.128\.STRONG\.GPU|ATOMG\.E\.MAX", r"ATOMG\.E\.MAX")
    assert not found, found
    assert waits_for_marks == any("CCTL.IVALL" in instruction.text for instruction in code)


def weight(*shape: int) -> QuantizedWeight:
    return QuantizedWeight(torch.empty(shape, dtype=FP8), torch.empty(block_shape(shape)), True)


def zeros(*shape: int, dtype: torch.dtype = BF16) -> Tensor:
    return torch.zeros(shape, dtype=dtype)


def decode_ops(num_tokens: int) -> None:
    """What a layer and the sampler launch for so many tokens; small sizes stand for the real ones."""
    t, hidden, heads, index_heads, q_rank = num_tokens, 512, 2, 16, 128
    cos = sin = zeros(t, 32, dtype=torch.float32)
    index, kv = IndexFormat("fp8"), RowFormat("fp8")
    fp32 = {size: zeros(size, dtype=torch.float32) for size in (hidden, q_rank, 512, 128)}
    _, x = norm_rope.norm_activation(zeros(t, hidden), zeros(t, hidden), fp32[hidden], 1e-6, True)
    norm_rope.norm_activation(zeros(t, hidden), None, fp32[hidden], 1e-6, None)
    norm_rope.rope_angles(zeros(t, dtype=torch.int32), zeros(32, dtype=torch.float32))
    # The real width, which is split; as is the output projection below.
    wide = Activation(zeros(t, 7168), zeros(t, 7168, dtype=FP8), zeros(t, 56, dtype=torch.float32))
    a, _ = linear.linear_pair(wide, weight(q_rank + 128 + 576, 7168), zeros(index_heads, 7168))
    assert isinstance(a, Parts) and a.values.shape[0] == 4
    first = fused.latent_inputs(
        a,
        cos,
        sin,
        fp32[q_rank],
        fp32[512],
        fp32[128],
        fp32[128],
        eps=1e-6,
        key_eps=1e-6,
        interleaved=True,
        index_interleaved=False,
        row_format=kv,
        index_format=index,
        ue8m0=True,
    )
    for nope in (128, 192):
        for has_indexer in (True, False):
            columns = heads * (nope + 64) + index_heads * 128 * has_indexer
            queries.attention_queries(
                linear.linear(first.query, weight(columns, q_rank)),
                zeros(heads, nope, 512),
                cos,
                sin,
                linear.linear_fp32_parts(x.values, zeros(index_heads, hidden)) if has_indexer else None,
                num_index_heads=index_heads,
                interleaved=True,
                index_interleaved=False,
                index_format=index,
            )
    own = linear.linear(first.query, weight(index_heads * 128, q_rank)).unflatten(1, (index_heads, -1))
    head_logits = linear.linear_fp32_parts(x.values, zeros(index_heads, hidden))
    queries.index_query(own, cos, sin, head_logits, interleaved=False, index_format=index)
    assert first.index_key is not None
    slot = zeros(t, dtype=torch.int32)
    rows.write_index_keys(zeros(4, index.page_bytes, dtype=torch.uint8), slot, first.index_key, index)
    table = zeros(t, 4, dtype=torch.int32)
    topk.topk_positions(zeros(t, 256, dtype=torch.float32), slot, 64, fp32[128][:t], update=True, block_table=table)
    slots.positions_to_slots(slot[:, None], table)
    values = queries.head_values(zeros(t, heads, 512), zeros(heads, 128, 512), True)
    linear.linear(values, weight(hidden, heads * 128))
    out = linear.linear_parts(wide, weight(hidden, 7168))
    assert isinstance(out, Parts)
    parts.add_parts(out)
    norm_rope.norm_activation(zeros(t, hidden), out, fp32[hidden], 1e-6, True)
    experts, inner = 16, 128
    routing = dict(valid=zeros(t, dtype=torch.bool), num_shared=t, held=range(4, 12))
    logits = linear.linear_fp32_parts(x.values, zeros(experts, hidden))
    router_weights, chosen = moe.route(logits, zeros(experts, dtype=torch.float32), 4, 2, 4, True, 2.5, **routing)  # type: ignore[arg-type]
    stacks = weight(9, 2 * inner, hidden), weight(9, hidden, inner)
    for addend in (None, zeros(t, hidden)):
        out = moe.routed_experts(x, chosen, router_weights, *stacks, addend=addend, dtype=BF16)
        norm_rope.norm_activation(zeros(t, hidden), out, fp32[hidden], 1e-6, True)
    parts.add_parts(out)
    assert x.quantized is not None and x.scale is not None
    placed, _, _ = moe_layout.dispatch_masked(x.quantized, x.scale, chosen, 9, 128)
    moe_layout.swiglu_quantize_rows(zeros(placed.num_rows, 2 * inner), placed, 128, ue8m0=True)
    quant.swiglu_quantized(zeros(t, 2 * hidden), ue8m0=True)
    tokens, finite = sampling.greedy_sample(zeros(t, 5000, dtype=torch.float32))
    sampling.advance_rows(
        tokens,
        finite,
        finite,
        token_ids=tokens.clone(),
        positions=slot.clone(),
        active=finite.clone(),
        stop_ids=zeros(t, 4, dtype=torch.int64),
        last_position=slot,
    )


def step_cache_ops(num_tokens: int) -> None:
    """What the cache launches in a step."""
    t, row_bytes = num_tokens, RowFormat("fp8").row_bytes
    maps = make_maps(2, gpu_tokens=256, host_tokens=512, num_candidates=64, device=torch.device("cpu"))
    step, slot = zeros(1, dtype=torch.int32), zeros(t, dtype=torch.int32)
    host, gpu = zeros(512, row_bytes, dtype=torch.uint8), zeros(256, row_bytes, dtype=torch.uint8)
    cache_ops.begin_step(maps, step)
    cache_ops.append(maps, slot, step)
    row_copy.write_rows(zeros(t, row_bytes, dtype=torch.uint8), gpu, slot, host, slot)
    fmt = IndexFormat("fp8")
    keys, pages = zeros(t, fmt.row_bytes, dtype=torch.uint8), zeros(8, fmt.page_bytes, dtype=torch.uint8)
    for pool in (host, None):
        row_copy.write_tokens(zeros(t, row_bytes, dtype=torch.uint8), gpu, slot, pool, slot, keys, pages, fmt)
    found = cache_ops.resolve(maps.group(1), zeros(t, 64, dtype=torch.int32), step, host, gpu)
    entries = zeros(t * 64, dtype=torch.int32)
    marked = Marked(zeros(t, 64, dtype=torch.int32), entries, entries)
    for marks in (marked, marked._replace(marked_count=zeros(1, dtype=torch.int32), num_blocks=8 * t)):
        cache_ops.place(maps.group(1), marks, step, host, gpu, skip=t, dependent=True)
    row_copy.copy_rows(host, found.miss_slots, gpu, found.miss_rows, found.miss_count)
    row_copy.copy_rows(host, slot, gpu, None, None)
    cache_ops.warm(maps.group(0), slot, step)
    cache_ops.release(maps, slot)
    cache_ops.violations(maps, step)


def long_loops(num_tokens: int) -> None:
    """What has most in flight, at the real width."""
    t, width = num_tokens, 7168
    x = Activation(zeros(t, width), zeros(t, width, dtype=FP8), zeros(t, width // 128, dtype=torch.float32))
    linear.linear_pair(x, weight(2240, width), zeros(64, width))
    chosen, router_weights = zeros(t, 9, dtype=torch.int32), zeros(t, 9, dtype=torch.float32)
    moe.routed_experts(x, chosen, router_weights, weight(2, 512, width), weight(2, width, 256))
    queries.head_values(zeros(min(t, queries.FEW_TOKENS), 2, 512), zeros(2, 128, 512), True)


def attend() -> None:
    """Attention of all heads of the large models, by both kinds of rows that they have."""
    for fmt in (RowFormat("fp8"), RowFormat("bf16")):
        pool = zeros(64, fmt.row_bytes, dtype=torch.uint8)
        attention.sparse_mla(zeros(40, 128, 576), pool, zeros(40, 2048, dtype=torch.int32), 1.0, fmt)


def main() -> None:
    capability, shared_kilobytes = (int(argument) for argument in sys.argv[1:])
    compiled = compile_instead_of_running(capability, shared_kilobytes)
    for num_tokens in (1, 19) if capability == 90 else ():
        decode_ops(num_tokens)
        step_cache_ops(num_tokens)
    for num_tokens in (19, 600):
        long_loops(num_tokens)
    attend()
    print(" ".join(sorted(set(compiled))))


if __name__ == "__main__":
    main()

"""Microbenchmark of the kernels at DeepSeek-V3.2's shapes, libraries on the side.

`python -m echo_batch.bench.kernels --json out.json [--only topk,moe]`: median microseconds by replays of a CUDA graph
that holds a kernel several times, on inputs that differ where caches would otherwise flatter it.
"""

import argparse
import json
import statistics
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from echo_batch.kernels.activation import Activation
from echo_batch.kernels.cuda import sampling as cuda_sampling
from echo_batch.kernels.cuda import topk as cuda_topk
from echo_batch.kernels.cuda import topk_rows as cuda_topk_rows
from echo_batch.kernels.formats import BLOCK_SIZE, IndexFormat, RowFormat
from echo_batch.kernels.gpu_ops import GpuLibraries, find_libraries
from echo_batch.kernels.parts import ExpertParts, Parts
from echo_batch.kernels.reference import sampling as reference_sampling
from echo_batch.kernels.reference.sampling import SamplingTensors
from echo_batch.kernels.triton import (
    attention,
    fused,
    indexer,
    linear,
    moe,
    moe_layout,
    norm_rope,
    parts,
    quant,
    queries,
    sampling,
    topk,
)
from echo_batch.kernels.weights import QuantizedWeight, Weight, block_shape

BF16 = torch.bfloat16
HIDDEN = 7168
TOP_K = 2048
INDEX = IndexFormat("fp8")
ROWS = RowFormat("fp8")


@dataclass(frozen=True, slots=True)
class Result:
    """One line of the table. `gb` and `tflop` are moved and done by one call."""

    name: str
    case: str
    variant: str
    us: float | None
    gb: float = 0.0
    tflop: float = 0.0
    error: str = ""

    def line(self) -> str:
        if self.us is None:
            return f"{self.name:16} {self.case:34} {self.variant:14} failed: {self.error}"
        rates = f"{self.gb / self.us * 1e6:8.0f} GB/s" if self.gb else ""
        rates += f"{self.tflop / self.us * 1e6:8.0f} TFLOP/s" if self.tflop else ""
        return f"{self.name:16} {self.case:34} {self.variant:14} {self.us:9.2f} us {rates}"


def measure_us(calls: Sequence[Callable[[], object]], *, repeats: int = 12, replays: int = 15) -> float:
    """Median time of one call: a graph holds `calls` in turn, `repeats` in all; the first calls run eagerly before."""
    for call in calls:
        call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for i in range(repeats):
            calls[i % len(calls)]()
    times = []
    for _ in range(replays + 3):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) * 1e3 / repeats)
    return statistics.median(times[3:])


Case = tuple[str, str, str, Sequence[Callable[[], object]], float, float]
"""name, case, variant, calls, GB, TFLOP"""


def topk_cases(libraries: GpuLibraries) -> Iterator[Case]:
    for batch, length in (
        (1, 98304),
        (13, 98304),
        (18, 98432),
        (32, 65536),
        (32, 98304),
        (13, 32768),
        (13, 163840),
        (256, 98304),
    ):
        scores = torch.randn(batch, length, device="cuda") * 0.7 + 0.5
        lengths = torch.full((batch,), length, dtype=torch.int32, device="cuda")
        kth = scores.topk(TOP_K).values[:, -1].contiguous()
        noise = torch.randn(batch, device="cuda")
        predictions = {
            "exact": kth,
            "realistic": kth + 0.07 * noise,  # a tenth of the scores' standard deviation
            "useless": kth - 100.0,
            "unset": torch.full_like(kth, float("nan")),
        }
        gb = scores.numel() * 4e-9
        for kind, predicted in predictions.items():
            case = f"B={batch} L={length} {kind}"
            if libraries.cuda_kernels:
                yield (
                    "top-2048",
                    case,
                    "cuda",
                    [partial(cuda_topk.topk_positions, scores, lengths, TOP_K, predicted)],
                    gb,
                    0.0,
                )
            if batch == 13 and length == 98304:
                yield (
                    "top-2048",
                    case,
                    "triton",
                    [partial(topk.topk_positions, scores, lengths, TOP_K, predicted)],
                    gb,
                    0.0,
                )
        yield "top-2048", f"B={batch} L={length}", "torch.topk", [partial(scores.topk, TOP_K)], gb, 0.0


def topk_rows_cases(libraries: GpuLibraries) -> Iterator[Case]:
    """Many rows, as in prefill: independent scores, scores alike in groups of eight neighbours, and all equal."""
    for length in (4096, 8192, 16384, 32768, 98304, 131072):
        num_rows = 4096 if length <= 32768 else 2048
        lengths = torch.full((num_rows,), length, dtype=torch.int32, device="cuda")
        out = torch.empty(num_rows, TOP_K, dtype=torch.int32, device="cuda")
        independent = torch.randn(num_rows, length, device="cuda")
        alike = torch.randn(num_rows, length // 8, device="cuda").repeat_interleave(8, 1) + independent
        gb = independent.numel() * 4e-9
        for kind, scores in (("", independent), (" alike", alike), (" equal", torch.full_like(alike, 1.5))):
            case = f"T={num_rows} L={length}{kind}"
            if libraries.cuda_kernels:
                yield "top-2048 rows", case, "cuda", [partial(cuda_topk_rows.topk_rows, scores, lengths, out)], gb, 0.0
        some = independent[:256]
        yield "top-2048 rows", f"T=256 L={length}", "torch.topk", [partial(some.topk, TOP_K)], gb * 256 / num_rows, 0.0


def indexer_cases(libraries: GpuLibraries) -> Iterator[Case]:
    for batch, length in ((1, 98304), (13, 98304), (32, 65536)):
        blocks = length // BLOCK_SIZE
        pages = _random_fp8(batch * blocks, INDEX.page_bytes).view(torch.uint8)
        pages[:, BLOCK_SIZE * 128 :] = torch.rand(batch * blocks, BLOCK_SIZE, device="cuda").view(torch.uint8)
        table = torch.randperm(batch * blocks, device="cuda").to(torch.int32).view(batch, blocks)
        lengths = torch.full((batch,), length, dtype=torch.int32, device="cuda")
        query = _random_fp8(batch, 64, 128)
        weights = torch.randn(batch, 64, device="cuda")
        gb = batch * length * 132e-9
        arguments = (query, weights, pages, table, lengths, INDEX)
        case = f"B={batch} L={length}"
        yield "index scores", case, "triton", [partial(indexer.index_scores_paged, *arguments)], gb, 0.0
        library = libraries.deep_gemm
        if library is not None:
            schedule = library.index_schedule(lengths)
            call = [partial(library.index_scores_paged, *arguments, schedule)]
            yield "index scores", case, "deep_gemm", call, gb, 0.0
            yield "index schedule", case, "deep_gemm", [partial(library.index_schedule, lengths)], 0.0, 0.0
    keys = torch.cat(
        (_random_fp8(32768, 128).view(torch.uint8), torch.rand(32768, 1, device="cuda").view(torch.uint8)), 1
    )
    ends = torch.full((1024,), 32768, dtype=torch.int32, device="cuda")
    prefill = (_random_fp8(1024, 64, 128), torch.randn(1024, 64, device="cuda"), keys, ends, INDEX)
    tflop = 1024 * 32768 * 64 * 128 * 2e-12
    yield "index prefill", "T=1024 S=32768", "triton", [partial(indexer.index_scores_contiguous, *prefill)], 0.0, tflop
    if libraries.deep_gemm is not None:
        call = [partial(libraries.deep_gemm.index_scores_contiguous, *prefill)]
        yield "index prefill", "T=1024 S=32768", "deep_gemm", call, 0.0, tflop


def attention_cases(libraries: GpuLibraries) -> Iterator[Case]:
    num_rows = 131072
    values = torch.randn(num_rows, 576, device="cuda", dtype=BF16)
    packed = torch.cat(
        (
            values[:, :512].to(torch.float8_e4m3fn).view(torch.uint8),
            torch.full((num_rows, 4), 0.01, device="cuda").view(torch.uint8),
            values[:, 512:].contiguous().view(torch.uint8),
        ),
        1,
    )
    for batch in (1, 13, 32, 64, 1024):
        query = torch.randn(batch, 128, 576, device="cuda", dtype=BF16)
        indices = torch.randint(num_rows, (batch, TOP_K), dtype=torch.int32, device="cuda")
        tflop = batch * 128 * TOP_K * (576 + 512) * 2e-12
        for fmt, rows in ((ROWS, packed), (RowFormat("bf16"), values.view(torch.uint8))):
            arguments = (query, rows, indices, 0.135, fmt)
            case = f"T={batch} {fmt.kind} rows"
            yield "sparse MLA", case, "triton", [partial(attention.sparse_mla, *arguments)], 0.0, tflop
            if libraries.flash_mla is not None:
                call = [partial(libraries.flash_mla.sparse_mla, *arguments)]
                yield "sparse MLA", case, "flash_mla", call, 0.0, tflop


SHAPES = (
    ("a", 2240, HIDDEN),
    ("q_b", 32768, 1536),
    ("o", HIDDEN, 16384),
    ("gate_up", 4096, HIDDEN),
    ("down", HIDDEN, 2048),
)
"""fp8 matrices of a layer: name, rows, columns."""


def linear_cases(libraries: GpuLibraries) -> Iterator[Case]:
    # Several weights in turn: in a model they are never in the L2 cache.
    for name, columns, inner in SHAPES:
        copies = max(2, -(-150_000_000 // (columns * inner)))
        stack = [random_weight(columns, inner) for _ in range(copies)]
        for tokens in (13, 19, 32, 64):
            x = torch.randn(tokens, inner, device="cuda", dtype=BF16)
            values, scale = quant.quantize_groups(x, ue8m0=True)
            gb = columns * inner * 1e-9
            case = f"{name} {columns}x{inner} T={tokens}"
            triton_calls = [partial(linear.fp8_linear, values, scale, w, BF16) for w in stack]
            yield "fp8 linear", case, "triton", triton_calls, gb, 0.0
            library = libraries.deep_gemm
            if library is not None:
                calls = [partial(library.fp8_linear, values, scale, w, BF16) for w in stack]
                yield "fp8 linear", case, "deep_gemm", calls, gb, 0.0
    for name, columns in (("router", 256), ("head weights", 64), ("logits", 129280)):
        weight = torch.randn(columns, HIDDEN, device="cuda", dtype=BF16)
        x = torch.randn(13, HIDDEN, device="cuda", dtype=BF16)
        case = f"{name} {columns}x{HIDDEN} T=13"
        call = [partial(linear.linear_fp32, x, weight)]
        yield "linear to fp32", case, "cublas", call, columns * HIDDEN * 2e-9, 0.0
        if columns <= 512:
            call = [partial(linear.linear_fp32_parts, x, weight)]
            yield "linear to fp32", case, "triton parts", call, columns * HIDDEN * 2e-9, 0.0


def moe_cases(libraries: GpuLibraries) -> Iterator[Case]:
    num_experts, inner = 256, 2048
    gate_up = random_weight(num_experts, 2 * inner, HIDDEN)
    down = random_weight(num_experts, HIDDEN, inner)
    for tokens in (13, 32, 64, 2048):
        logits, bias = torch.randn(tokens, num_experts, device="cuda"), torch.zeros(num_experts, device="cuda")
        weights, experts = moe.route(logits, bias, 8, 4, 8, True, 2.5)
        distinct = experts.unique().numel()
        x = torch.randn(tokens, HIDDEN, device="cuda", dtype=BF16)
        activation = Activation(x, *quant.quantize_groups(x, ue8m0=True))
        arguments = (activation, experts, weights, gate_up, down)
        gb = distinct * 3 * inner * HIDDEN * 1e-9
        tflop = tokens * 8 * 3 * inner * HIDDEN * 2e-12 if tokens > 1000 else 0.0
        case = f"T={tokens}, {distinct} experts"
        yield "routed experts", case, "triton", [partial(moe.routed_experts, *arguments)], gb, tflop
        if libraries.deep_gemm is not None:
            call = [partial(libraries.deep_gemm.routed_experts, *arguments)]
            yield "routed experts", case, "deep_gemm", call, gb, tflop
        if tokens > 64:
            continue
        case = f"T={tokens}"
        yield "router", case, "triton", [partial(moe.route, logits, bias, 8, 4, 8, True, 2.5)], 0.0, 0.0
        fp8 = quant.quantized(activation, True)
        place = [partial(moe_layout.dispatch_masked, *fp8, experts, num_experts, 128)]
        yield "dispatch", case, "triton", place, 0.0, 0.0
        partials = torch.randn(tokens * 8, HIDDEN, device="cuda", dtype=BF16)
        order = torch.arange(tokens * 8, dtype=torch.int32, device="cuda").view(tokens, 8)
        combine = [partial(parts.add_parts, ExpertParts(partials, order, weights, None, BF16))]
        yield "combine", case, "triton", combine, 0.0, 0.0


def small_cases(libraries: GpuLibraries) -> Iterator[Case]:
    for tokens in (13, 64):
        hidden, delta = (torch.randn(tokens, HIDDEN, device="cuda", dtype=BF16) for _ in range(2))
        weight = torch.ones(HIDDEN, device="cuda")
        positions = torch.arange(tokens, device="cuda")
        frequencies = torch.rand(32, device="cuda")
        cos, sin = norm_rope.rope_angles(positions, frequencies)
        a = torch.randn(tokens, 2240, device="cuda", dtype=BF16)
        query = torch.randn(tokens, 64, 128, device="cuda", dtype=BF16)
        logits = torch.randn(tokens, 64, device="cuda")
        heads = torch.randn(tokens, 128, 192, device="cuda", dtype=BF16)
        key_up = torch.randn(128, 128, 512, device="cuda", dtype=BF16)
        projected = torch.randn(tokens, 32768, device="cuda", dtype=BF16)
        head_logits = torch.randn(28, tokens, 64, device="cuda")
        latent = torch.randn(tokens, 128, 512, device="cuda", dtype=BF16)
        gate_up = torch.randn(tokens, 2 * 18432, device="cuda", dtype=BF16)
        value = torch.randn(tokens, 16384, device="cuda", dtype=BF16)
        ones = {size: torch.ones(size, device="cuda") for size in (128, 512, 1536)}
        case = f"T={tokens}"
        calls: dict[str, Callable[[], object]] = {
            "norm activation": partial(norm_rope.norm_activation, hidden, delta, weight, 1e-6, True),
            "rope angles": partial(norm_rope.rope_angles, positions, frequencies),
            "latent inputs": partial(
                fused.latent_inputs,
                a,
                cos,
                sin,
                ones[1536],
                ones[512],
                ones[128],
                ones[128],
                eps=1e-6,
                key_eps=1e-6,
                interleaved=True,
                index_interleaved=False,
                row_format=ROWS,
                index_format=INDEX,
                ue8m0=True,
            ),
            "index query": partial(queries.index_query, query, cos, sin, logits, interleaved=False, index_format=INDEX),
            "absorbed query": partial(queries.absorbed_query, heads, key_up, cos, sin, True),
            "attention queries": partial(
                queries.attention_queries,
                projected,
                key_up,
                cos,
                sin,
                head_logits,
                num_index_heads=64,
                interleaved=True,
                index_interleaved=False,
                index_format=INDEX,
            ),
            "head values": partial(queries.head_values, latent, key_up, True),
            "swiglu dense": partial(moe.swiglu_activation, gate_up, True),
            "quantize o": partial(quant.quantize_groups, value, ue8m0=True),
        }
        for name, call in calls.items():
            yield name, case, "triton", [call], 0.0, 0.0


def split_sums_cases(libraries: GpuLibraries) -> Iterator[Case]:
    """What reading results in parts saves: launches that only add, against their work inside the kernel that reads."""
    first = [random_weight(2240, HIDDEN) for _ in range(10)]
    last = [random_weight(HIDDEN, 16384) for _ in range(3)]
    small = [torch.randn(64, HIDDEN, device="cuda", dtype=BF16) for _ in range(10)]
    ones = {size: torch.ones(size, device="cuda") for size in (128, 512, 1536, HIDDEN)}
    for tokens in (3, 18, 32):
        case = f"T={tokens}"
        hidden, x, value = (torch.randn(tokens, width, device="cuda", dtype=BF16) for width in (HIDDEN, HIDDEN, 16384))
        normed = Activation(x, *quant.quantize_groups(x, ue8m0=True))
        attended = Activation(value, *quant.quantize_groups(value, ue8m0=True))
        cos, sin = norm_rope.rope_angles(torch.arange(tokens, device="cuda"), torch.rand(32, device="cuda"))
        norm = partial(norm_rope.norm_activation, weight=ones[HIDDEN], eps=1e-6, ue8m0=True)
        latent = partial(
            fused.latent_inputs,
            cos=cos,
            sin=sin,
            q_weight=ones[1536],
            kv_weight=ones[512],
            key_weight=ones[128],
            key_bias=ones[128],
            eps=1e-6,
            key_eps=1e-6,
            interleaved=True,
            index_interleaved=False,
            row_format=ROWS,
            index_format=INDEX,
            ue8m0=True,
        )
        onto = partial(norm, hidden)
        for name, op in (("add first", linear.linear), ("parts", linear.linear_parts)):
            calls = [partial(_read, onto, op, attended, w) for w in last]
            yield "o + norm", case, name, calls, HIDDEN * 16384e-9, 0.0
            calls = [partial(_read, latent, op, normed, w) for w in first]
            yield "a + latents", case, name, calls, 2240 * HIDDEN * 1e-9, 0.0
        gb = (2240 + 2 * 64) * HIDDEN * 1e-9
        for name, pair in (("apart", _two_linears), ("one launch", linear.linear_pair)):
            both = [partial(pair, normed, w, s) for w, s in zip(first, small, strict=True)]
            yield "a + head weights", case, name, both, gb, 0.0
        results = [_expert_parts(tokens) for _ in range(4)]
        calls = [partial(_read, onto, parts.add_parts, result) for result in results]
        yield "experts + norm", case, "add first", calls, 0.0, 0.0
        yield "experts + norm", case, "parts", [partial(onto, result) for result in results], 0.0, 0.0
        delta = torch.randn_like(hidden)
        yield "norm", case, "added", [partial(onto, delta)], 0.0, 0.0
    # One worker of eight, of 18 tokens each: 32 experts and the shared one.
    x = torch.randn(144, HIDDEN, device="cuda", dtype=BF16)
    experts = torch.rand(144, 264, device="cuda").topk(9).indices.to(torch.int32)
    experts = torch.where(experts < 33, experts, -1)
    call = [partial(moe_layout.dispatch_masked, *quant.quantize_groups(x, ue8m0=True), experts, 33, 256)]
    yield "dispatch", "T=144, 33 experts", "triton", call, 0.0, 0.0


def _read(reader: Callable[[Any], object], op: Callable[..., object], *arguments: object) -> None:
    reader(op(*arguments))


def _two_linears(x: Activation, weight: Weight, small: Tensor) -> tuple[Tensor | Parts, Tensor]:
    return linear.linear_parts(x, weight), linear.linear_fp32_parts(x.values, small)


def _expert_parts(tokens: int) -> ExpertParts:
    """Results of eight experts and the shared one, in rows far apart."""
    rows = torch.randperm(33 * 256, device="cuda")[: tokens * 9].to(torch.int32).view(tokens, 9)
    values = torch.randn(33 * 256, HIDDEN, device="cuda", dtype=BF16)
    return ExpertParts(values, rows, torch.rand(tokens, 9, device="cuda"), None, BF16)


def sampling_cases(libraries: GpuLibraries) -> Iterator[Case]:
    batch, vocab = 32, 129280
    logits = torch.randn(batch, vocab, device="cuda") * 3
    gb = logits.numel() * 4e-9
    yield "sampling", f"B={batch} greedy", "triton", [partial(sampling.greedy_sample, logits)], gb, 0.0

    def filled(value: float, dtype: torch.dtype) -> Tensor:
        return torch.full((batch,), value, dtype=dtype, device="cuda")

    for top_p, top_k, min_p in ((1.0, 0, 0.0), (0.95, 0, 0.0), (1.0, 50, 0.0), (0.95, 50, 0.0), (0.95, 0, 0.05)):
        params = SamplingTensors(
            temperature=filled(0.7, torch.float32),
            top_p=filled(top_p, torch.float32),
            top_k=filled(top_k, torch.int32),
            min_p=filled(min_p, torch.float32),
            seed=filled(1, torch.int64),
            row_id=torch.arange(batch, device="cuda"),
            position=filled(1000, torch.int32),
        )
        case = f"B={batch} top_p={top_p} top_k={top_k} min_p={min_p}"
        if libraries.cuda_kernels:
            yield "sampling", case, "cuda", [partial(cuda_sampling.sample, logits, params)], gb, 0.0
        yield "sampling", case, "torch", [partial(reference_sampling.sample, logits, params)], gb, 0.0


GROUPS = {
    "topk": topk_cases,
    "topk_rows": topk_rows_cases,
    "indexer": indexer_cases,
    "attention": attention_cases,
    "linear": linear_cases,
    "moe": moe_cases,
    "small": small_cases,
    "split_sums": split_sums_cases,
    "sampling": sampling_cases,
}


def _random_fp8(*shape: int) -> Tensor:
    """Finite random e4m3 values."""
    return torch.randn(shape, device="cuda", dtype=BF16).to(torch.float8_e4m3fn)


def random_weight(*shape: int) -> QuantizedWeight:
    """Random block-scaled weight, filled in slices (a stack of experts is larger than its fp32 form should be)."""
    data = torch.empty(shape, dtype=torch.float8_e4m3fn, device="cuda")
    for part in data if len(shape) == 3 else (data,):
        part.copy_(torch.randn(part.shape, device="cuda", dtype=BF16).mul_(50.0))
    scale = torch.rand(block_shape(shape), device="cuda") * 1e-3
    return QuantizedWeight(data, scale, True)


def run(groups: Sequence[str]) -> list[Result]:
    """Measure the groups; a variant that fails is a result with its error, not the end."""
    libraries = find_libraries(torch.device("cuda", torch.cuda.current_device()))
    results = []
    for group in groups:
        for name, case, variant, calls, gb, tflop in GROUPS[group](libraries):
            try:
                result = Result(name, case, variant, measure_us(calls), gb, tflop)
            except Exception as error:
                result = Result(name, case, variant, None, error=f"{type(error).__name__}: {error}"[:300])
            print(result.line(), flush=True)
            results.append(result)
        torch.cuda.empty_cache()
    return results


def main(arguments: Sequence[str]) -> None:
    parser = argparse.ArgumentParser(description="Microbenchmark of the kernels at DeepSeek-V3.2's shapes")
    parser.add_argument("--json", type=Path, help="write all results there")
    parser.add_argument("--only", default=",".join(GROUPS), help=f"groups to run: {','.join(GROUPS)}")
    options = parser.parse_args(arguments)
    results = run(options.only.split(","))
    if options.json is not None:
        report = {
            "gpu": torch.cuda.get_device_name(),
            "torch": torch.__version__,
            "results": list(map(asdict, results)),
        }
        options.json.write_text(json.dumps(report, indent=1))


if __name__ == "__main__":
    main(sys.argv[1:])

"""`echo-batch bench decode`: time of decode steps on the engine's own path, contexts filled without prefill.

Every case runs in one process on one model: steps are replays of the same graphs that a job uses. What a step costs
with the cache manager and without it is measured by running the same batch with offloading and, where the rows fit,
without.
"""

import json
import statistics
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

import torch

from echo_batch.bench.setup import ModelOptions, bench_device, make_model, make_spec, origin
from echo_batch.bench.workload import WorkloadModel, WorkloadShape, fill_contexts
from echo_batch.cache.manager import CacheCounters, KVCache, make_cache
from echo_batch.cache.spec import PrefetchMode, minimum_gpu_tokens
from echo_batch.engine.batch import BatchState
from echo_batch.engine.runner import EagerRunner, GraphRunner, StepShape
from echo_batch.errors import ConfigError
from echo_batch.kernels.formats import BLOCK_SIZE
from echo_batch.kernels.select import select_ops
from echo_batch.models.config import ModelConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class DecodeBench(ModelOptions):
    """Options of `bench decode`; tokens per worker. `gpu_tokens` is ignored with `offload` False (all HBM of the pool
    is then `host_tokens`)."""

    context: int
    batches: tuple[int, ...]
    gpu_tokens: int
    host_tokens: int
    steps: int
    locality: float | None
    residency: bool
    """With everything in the GPU pool: steps without the cache manager; False measures its cost."""
    prefetch: PrefetchMode


def run_decode_bench(options: DecodeBench) -> dict[str, Any]:
    """Measure every batch size; returns what `--json` writes."""
    device = bench_device(options.device)
    config = ModelConfig.from_dir(options.model, num_layers=options.num_layers)
    ops = select_ops(device)
    model, load_seconds = make_model(options, config, ops)
    largest = max(options.batches)
    room = _room(options)
    spec = make_spec(
        options,
        config,
        host_tokens=options.host_tokens,
        gpu_tokens=options.gpu_tokens,
        prefetch=options.prefetch,
    )
    need = _slots(options, largest)
    if need > spec.host_tokens:
        raise ConfigError(f"batch {largest} needs {need} tokens: give --host-pool {need} or a smaller batch")
    if options.offload and minimum_gpu_tokens([options.context + room] * largest, spec.index_topk) > spec.gpu_tokens:
        raise ConfigError(f"batch {largest} needs a larger --gpu-pool than {spec.gpu_tokens}")
    cache = make_cache(spec, device, ops, residency=options.residency)
    workload = WorkloadModel(
        model,
        WorkloadShape(
            capacity=largest,
            locality=options.locality,
            uniform_routing=options.routing == "uniform",
            ep_slice=options.ep_slice,
        ),
    )
    state = BatchState.allocate(largest, options.context + room, spec.num_groups, device)
    runner: EagerRunner | GraphRunner
    if device.type == "cuda":
        runner = GraphRunner(workload, cache, ops, state, depth=1)
        runner.capture([_shape(cache, options, b) for b in options.batches])
    else:
        runner = EagerRunner(workload, cache, ops, state)
    cases = []
    try:
        for batch in options.batches:
            fill_contexts(
                workload, cache, ops, state, batch=batch, context=options.context, room=room, seed=options.seed
            )
            assert cache.resident == _shape(cache, options, batch).resident
            cases.append(_measure(runner, options, batch))
    finally:
        cache.close()
    return {
        "bench": "decode",
        "options": asdict(options),
        **origin(config, device, load_seconds),
        "capture": asdict(runner.report) if isinstance(runner, GraphRunner) else None,
        "peak_memory_bytes": torch.cuda.max_memory_allocated() if device.type == "cuda" else None,
        "communication": _communication(options, config),
        "cases": cases,
    }


def _communication(options: DecodeBench, config: ModelConfig) -> list[dict[str, int]] | None:
    """What `--ep-slice` leaves out of the step: bytes that a worker receives and sends in it, for each batch.

    In each MoE layer all workers' tokens are gathered (bf16), and partial sums go back to their workers (fp32).
    """
    if options.ep_slice == 1:
        return None
    others, moe_layers = options.ep_slice - 1, sum(layer.mlp == "moe" for layer in config.layers)
    values = [batch * others * config.hidden_size * moe_layers for batch in options.batches]
    return [
        {"batch": batch, "all_gather_bytes": 2 * n, "reduce_scatter_bytes": 4 * n}
        for batch, n in zip(options.batches, values, strict=True)
    ]


def _room(options: DecodeBench) -> int:
    """Tokens that a row gets during the measurement."""
    return options.steps + _warmup_steps(options) + 8


def _warmup_steps(options: DecodeBench) -> int:
    """Steps before the timed ones, until the GPU pool holds what such steps select; on a CPU a token of it."""
    return 50 if torch.device(options.device).type == "cuda" else 8


def _slots(options: DecodeBench, batch: int) -> int:
    """Token slots of a batch."""
    return batch * -(-(options.context + _room(options)) // BLOCK_SIZE) * BLOCK_SIZE


def _shape(cache: KVCache, options: DecodeBench, batch: int) -> StepShape:
    """The step of a batch; without the manager if everything fits the GPU pool and `residency` is on."""
    fits = options.residency and _slots(options, batch) <= cache.spec.gpu_tokens
    return StepShape(bucket=batch, greedy_only=True, resident=fits or not cache.spec.offload)


def _measure(runner: EagerRunner | GraphRunner, options: DecodeBench, batch: int) -> dict[str, Any]:
    shape = _shape(runner.cache, options, batch)
    on_gpu = runner.state.device.type == "cuda"
    max_blocks = runner.state.block_table.shape[1]

    def step() -> None:
        runner.launch(shape, max_blocks=max_blocks, num_logprobs=None)

    if isinstance(runner.model, WorkloadModel):
        # Cases and processes are to be compared: with other experts a step would take another time.
        runner.model.restart(options.seed)
    for _ in range(_warmup_steps(options)):
        step()
    before, prefetched_before = runner.cache.counters(), runner.cache.prefetch_counters()
    times_ms: list[float] = []
    if on_gpu:
        torch.cuda.synchronize()
        events = [torch.cuda.Event(enable_timing=True) for _ in range(options.steps + 1)]
        events[0].record()
        for event in events[1:]:
            step()
            event.record()
        torch.cuda.synchronize()
        times_ms = [a.elapsed_time(b) for a, b in zip(events, events[1:], strict=False)]
    else:
        for _ in range(options.steps):
            started = time.perf_counter()
            step()
            times_ms.append(1e3 * (time.perf_counter() - started))
    after, prefetched_after = runner.cache.counters(), runner.cache.prefetch_counters()
    selected, hits, recalled, evicted, offloaded, fallbacks = (
        [y - x for x, y in zip(old, new, strict=True)]
        for old, new in ((getattr(before, f.name), getattr(after, f.name)) for f in fields(CacheCounters))
    )
    spec = runner.cache.spec
    layers = [len(g) for g in spec.group_layers]
    recalled_bytes = sum(r * n for r, n in zip(recalled, layers, strict=True)) * spec.row_format.row_bytes
    median = statistics.median(times_ms)
    kernels = _kernels(step) if on_gpu else None
    return {
        "batch": batch,
        "resident": shape.resident,
        "step_ms": round(median, 4),
        "step_ms_p10": round(statistics.quantiles(times_ms, n=10)[0], 4),
        "step_ms_p90": round(statistics.quantiles(times_ms, n=10)[-1], 4),
        "tok_s": round(batch / median * 1e3, 1),
        "hit_rate": round(sum(hits) / sum(selected), 5) if sum(selected) else None,
        "hit_rate_per_group": [round(h / s, 5) if s else None for h, s in zip(hits, selected, strict=True)],
        "recalled_rows_per_step": sum(recalled) / options.steps,
        "recalled_bytes_per_step": recalled_bytes / options.steps,
        "evicted_rows_per_step": sum(evicted) / options.steps,
        "offloaded_rows_per_step": sum(offloaded) / options.steps,
        "fallback_rows_per_step": sum(fallbacks) / options.steps,
        "prefetch_rows_per_step": None
        if prefetched_before is None or prefetched_after is None
        else {
            name: (sum(getattr(prefetched_after, name)) - sum(getattr(prefetched_before, name))) / options.steps
            for name in ("candidates", "prefetched", "used", "wasted", "late", "dropped")
        },
        "distinct_experts_per_layer": runner.model.distinct_experts(batch)
        if isinstance(runner.model, WorkloadModel)
        else None,
        "active_rows_at_end": int(runner.state.active.sum()),
        "graph_nodes_per_layer": None
        if kernels is None
        else round(sum(row["launches"] for row in kernels) / spec.num_layers, 2),
        "cache_us_per_step": None if kernels is None else _cache_kernels(kernels),
        "kernels": kernels,
    }


_CACHE_KERNELS = (
    "count_ages", "count_kernel", "prepare_kernel", "list_candidates", "list_kernel", "append_kernel", "mark_kernel",
    "place_kernel", "write_rows_kernel", "write_tokens_kernel", "copy_rows_kernel", "set_aside_kernel", "claim_kernel",
    "fetch_kernel",
)  # fmt: skip
"""Of kernels/triton and kernels/cuda/ages.cu: what a step has because of offloading (without it, one plain row write a
layer). The look-up is not among them where the CUDA top-k does it."""


def _cache_kernels(kernels: list[dict[str, Any]]) -> dict[str, float]:
    """Their microseconds a step, all layers together, by kernel."""
    return {row["name"]: row["us"] for row in kernels if row["name"] in _CACHE_KERNELS}


def _kernels(step: Callable[[], None], replays: int = 5) -> list[dict[str, Any]]:
    """Time and number of launches of every kernel of a step, longest first (kernels of two branches overlap)."""
    activities = [torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=activities) as profile:
        for _ in range(replays):
            step()
        torch.cuda.synchronize()
    found: dict[str, list[float]] = {}
    for event in profile.events():
        if event.device_type.name == "CUDA":
            found.setdefault(event.name, []).append(event.device_time)
    rows = [
        {"name": name[:120], "us": round(sum(times) / replays, 2), "launches": len(times) / replays}
        for name, times in found.items()
    ]
    return sorted(rows, key=lambda row: -row["us"])


def write_json(result: dict[str, Any], path: str | None) -> None:
    """Write a bench result to `path`, or nothing without one."""
    if path is not None:
        Path(path).write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")

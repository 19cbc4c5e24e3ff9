"""`echo-batch bench prefill`: prompts through the engine's own prefill, in groups as a job would make them.

Measured: tokens per second, time of every kernel and how much of the wall clock their sum is, what writing KV rows to
the host costs (the same prompts with and without), memory beyond weights and pools, and what a shared prefix saves.
"""

import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch

from echo_batch.bench.setup import ModelOptions, bench_device, make_model, make_spec, origin
from echo_batch.bench.workload import uniform_routing
from echo_batch.cache.manager import KVCache, make_cache
from echo_batch.engine.prefill import Prompt, prefill
from echo_batch.errors import ConfigError
from echo_batch.kernels.formats import BLOCK_SIZE
from echo_batch.kernels.ops import Ops
from echo_batch.kernels.select import select_ops
from echo_batch.models.config import ModelConfig
from echo_batch.models.model import Model
from echo_batch.models.sizes import prefill_flops

_COMPARED_PROMPTS = 2
"""Prompts that are run once more, with and without host writes, and under the profiler."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefillBench(ModelOptions):
    """Options of `bench prefill`; tokens per worker.

    `prefix` > 0: all prompts begin with the same so many tokens, which are computed once.
    """

    context: int
    prompts: int
    prefix: int
    chunk: int
    slice: int
    group: int
    streamed_per_token: float
    gpu_tokens: int
    host_tokens: int | None


def run_prefill_bench(options: PrefillBench) -> dict[str, Any]:
    """Measure; returns what `--json` writes."""
    if not 0 <= options.prefix < options.context:
        raise ConfigError("--prefix must be shorter than --context")
    device = bench_device(options.device)
    config = ModelConfig.from_dir(options.model, num_layers=options.num_layers)
    ops = select_ops(device)
    if options.routing == "uniform":
        ops = uniform_routing(ops, config.n_routed_experts, device)
    prompts = _make_prompts(options, config.vocab_size)
    need = BLOCK_SIZE * (1 + max(block for p in prompts for block in p.blocks))
    model, load_seconds = make_model(options, config, ops)
    host_tokens = max(need, options.host_tokens or 0)
    spec = make_spec(options, config, host_tokens=host_tokens, gpu_tokens=options.gpu_tokens)
    cache = make_cache(spec, device, ops)
    try:
        case = _Case(options, model, cache, ops, device)
        result = case.measure(prompts)
    finally:
        cache.close()
    return {
        "bench": "prefill",
        "options": asdict(options),
        **origin(config, device, load_seconds),
        **result,
    }


def _make_prompts(options: PrefillBench, vocab_size: int) -> list[Prompt]:
    """Random prompts in blocks of their own, but for those of the shared prefix."""
    generator = torch.Generator().manual_seed(options.seed)
    shared = options.prefix // BLOCK_SIZE
    each = -(-options.context // BLOCK_SIZE) - shared
    prefix = torch.randint(vocab_size, (options.prefix,), generator=generator).tolist()
    prompts = []
    for number in range(options.prompts):
        rest = torch.randint(vocab_size, (options.context - options.prefix,), generator=generator).tolist()
        first = shared + number * each
        prompts.append(
            Prompt(
                token_ids=prefix + rest,
                blocks=[*range(shared), *range(first, first + each)],
                num_cached=shared * BLOCK_SIZE if number else 0,
            )
        )
    return prompts


def _groups(prompts: Sequence[Prompt], group_tokens: int) -> list[list[Prompt]]:
    """Prompts in groups of at most so many computed tokens (a longer prompt alone), as the scheduler makes them."""
    groups: list[list[Prompt]] = []
    room = 0
    for prompt in prompts:
        computed = len(prompt.token_ids) - prompt.num_cached
        if not groups or computed > room:
            groups.append([])
            room = group_tokens
        groups[-1].append(prompt)
        room -= computed
    return groups


class _WithoutHostWrites:
    """A cache that drops prefilled rows: what is left of the time is everything but the writes."""

    def __init__(self, cache: KVCache) -> None:
        self._cache = cache

    def __getattr__(self, name: str) -> Any:
        return getattr(self._cache, name)

    def write_host(self, layer: int, slots: torch.Tensor, kv_rows: torch.Tensor) -> None:
        """Nothing."""


@dataclass(frozen=True, slots=True)
class _Case:
    options: PrefillBench
    model: Model
    cache: KVCache
    ops: Ops
    device: torch.device

    def measure(self, prompts: list[Prompt]) -> dict[str, Any]:
        options = self.options
        groups = _groups(prompts, options.group)
        on_gpu = self.device.type == "cuda"
        self._seconds(groups[:1], self.cache)  # compiles kernels
        memory = {}
        if on_gpu:
            before = torch.cuda.memory_allocated()
            torch.cuda.reset_peak_memory_stats()
        seconds = self._seconds(groups, self.cache)
        if on_gpu:
            memory = {
                "extra_memory_bytes": torch.cuda.max_memory_allocated() - before,
                "reserved_memory_bytes": torch.cuda.memory_reserved(),
                "allocated_before_bytes": before,
            }
        tokens = sum(len(p.token_ids) for p in prompts)
        computed = sum(len(p.token_ids) - p.num_cached for p in prompts)
        flops = sum(prefill_flops(self.model.config, p.num_cached, len(p.token_ids)) for p in prompts)
        result: dict[str, Any] = {
            "prompts": len(prompts),
            "prompt_tokens": tokens,
            "computed_tokens": computed,
            "groups": len(groups),
            "seconds": round(seconds, 4),
            "tok_s": round(tokens / seconds, 1),
            "us_per_computed_token_layer": round(1e6 * seconds / computed / self.model.config.num_layers, 4),
            "tflop_s": round(flops / seconds / 1e12, 1),
            **memory,
        }
        if options.prefix:
            alone = [Prompt(token_ids=prompts[-1].token_ids, blocks=prompts[-1].blocks)]
            separate = self._seconds([alone], self.cache)
            result["one_alone_seconds"] = round(separate, 4)
            result["faster_than_separate"] = round(separate * len(prompts) / seconds, 2)
        sample = _groups(prompts[:_COMPARED_PROMPTS], options.group)
        times = {True: 0.0, False: 0.0}
        for write in (True, False, False, True):
            cache: Any = self.cache if write else _WithoutHostWrites(self.cache)
            times[write] += self._seconds(sample, cache)
        result["host_write_share"] = round(times[True] / times[False] - 1, 5)
        if on_gpu:
            result["kernels"] = self._kernels(sample)
            result["kernel_seconds"] = round(sum(k["us"] for k in result["kernels"]) / 1e6, 4)
            result["kernel_share_of_wall"] = round(2 * result["kernel_seconds"] / times[True], 4)
            sample_prompts = [p for group in sample for p in group]
            own = sum(prefill_flops(self.model.config, p.num_cached, len(p.token_ids)) for p in sample_prompts)
            result["tflop_s_of_kernels"] = round(own / result["kernel_seconds"] / 1e12, 1)
        return result

    def _seconds(self, groups: list[list[Prompt]], cache: KVCache) -> float:
        """Wall clock of these groups, one after the other."""
        self._wait()
        started = time.perf_counter()
        for group in groups:
            self._run(group, cache)
        self._wait()
        return time.perf_counter() - started

    def _run(self, group: list[Prompt], cache: KVCache) -> None:
        for _ in prefill(
            self.model,
            cache,
            self.ops,
            group,
            chunk_tokens=self.options.chunk,
            slice_tokens=self.options.slice,
            streamed_per_token=self.options.streamed_per_token,
            on_device=self.device,
        ):
            pass

    def _wait(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def _kernels(self, groups: list[list[Prompt]]) -> list[dict[str, Any]]:
        """Time and number of launches of every kernel and copy of these groups, longest first."""
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
            for group in groups:
                self._run(group, self.cache)
            self._wait()
        found: dict[str, list[float]] = {}
        for event in profile.events():
            if event.device_type.name == "CUDA":
                found.setdefault(event.name, []).append(event.device_time)
        rows = [{"name": n[:120], "us": round(sum(t), 1), "launches": len(t)} for n, t in found.items()]
        return sorted(rows, key=lambda row: -float(str(row["us"])))

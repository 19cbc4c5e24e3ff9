"""make_plan: what a run will do with this model on this machine, decided before anything is loaded. Pure, printable.

What was asked is a RunConfig; what will happen is a Plan. A plan that does not fit is still a Plan, whose `problems`
say what is too big and the nearest setting that fits. Imports no torch.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from itertools import takewhile
from typing import Literal

from echo_batch.cache.spec import CacheSpec, PrefetchMode
from echo_batch.config import RunConfig
from echo_batch.engine import memory
from echo_batch.engine.hardware import Hardware
from echo_batch.engine.pools import Need, Problem, Room, choose_pools
from echo_batch.errors import ConfigError
from echo_batch.kernels.formats import IndexFormat, RowFormat
from echo_batch.models.config import ModelConfig
from echo_batch.sizes import format_bytes, round_up_to_block

_MAX_AUTO_SEQS = {"cuda": 256, "cpu": 32}
_CHUNK_TOKENS = {"cuda": 16384, "cpu": 1024}
"""At 16,384 each of 256 experts gets 512 tokens: a ninth of a GEMM's rows is padding, and a layer's experts are read
in a twentieth of the time that they compute."""
_GROUP_TOKENS = {"cuda": 65536, "cpu": 8192}
_MIN_CHUNK_TOKENS = 256
_CHUNK_SHARE = 0.15
"""Of the memory that weights leave, for the activations of one prefill chunk."""
_GROUP_SHARE = 0.10
"""Of the same, for the hidden states of prompts prefilled together, unless one prompt alone needs more."""
_CPU_SHARE = 0.8
"""Of free memory, for everything on a CPU: Python objects, input and output need the rest."""
_HOST_SHARE = 0.95
"""Of free host memory, for host pools asked for by size."""
_PREFETCH_TOKENS = 100_000
"""Host pool from which on fused prefetch is the default: steps of 98K, of 1.3 and of 1.8 million scored tokens were
measured (docs/prefetch.md)."""
_CONTEXT_STEP = 1024
"""Step of the search for a context that fits."""
_CPU_ROWS_WITHOUT_INPUT = 4
"""Rows at the context limit that an automatic CPU pool holds when the input is not known."""


@dataclass(frozen=True, slots=True, kw_only=True)
class InputStats:
    """What the preflight found. A row's tokens are prompt + max_tokens, clipped to the context limit;
    `total_row_tokens` sums them rounded up to whole blocks (the host slots that all rows together would reserve)."""

    num_rows: int
    num_bad_rows: int
    prompt_tokens: int
    longest_prompt_tokens: int
    longest_row_tokens: int
    total_row_tokens: int

    @property
    def num_good_rows(self) -> int:
        return self.num_rows - self.num_bad_rows


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceMemory:
    """Bytes per worker on its GPU (on CPU: in host memory, host pool included). `budget` may be used of `total`."""

    total: int
    budget: int
    weights: int
    runtime: int
    allocator: int
    """What the allocator keeps beside the activations (memory.allocator_bytes)."""
    activations: int
    index_cache: int
    gpu_pool: int
    metadata: int
    host_pool: int = 0

    @property
    def used(self) -> int:
        fixed = self.weights + self.runtime + self.allocator + self.activations
        return fixed + self.index_cache + self.gpu_pool + self.metadata + self.host_pool


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """What will happen. Sizes are per worker unless they say otherwise.

    `min_host_tokens` holds the longest row of the input (without an input: one row at the context limit);
    `min_gpu_tokens` is what that row needs on the GPU, min(k, L) + 1, in whole blocks.
    """

    model: ModelConfig
    hardware: Hardware
    input: InputStats | None
    device: Literal["cpu", "cuda"]
    num_workers: int
    dtype: memory.Dtype
    cache: CacheSpec
    max_model_len: int
    max_num_seqs: int
    decode_buckets: tuple[int, ...]
    prefill_chunk_tokens: int
    prefill_group_tokens: int
    lookahead_steps: int
    device_memory: DeviceMemory
    host_pool_bytes: int
    host_budget_bytes: int
    min_host_tokens: int
    min_gpu_tokens: int
    problems: tuple[Problem, ...]
    notes: tuple[str, ...]

    @property
    def fits(self) -> bool:
        return not self.problems

    def require_fit(self) -> None:
        """Raises ConfigError with every problem and its remedy, if there is one."""
        if self.problems:
            raise ConfigError("this does not fit: " + "; ".join(describe(p) for p in self.problems))

    def bucket(self, num_rows: int) -> int:
        """The smallest decode batch shape that holds `num_rows` rows."""
        assert 1 <= num_rows <= self.max_num_seqs, num_rows
        return next(b for b in self.decode_buckets if b >= num_rows)


def describe(problem: Problem) -> str:
    """One problem in one line."""
    return f"{problem.what} (try {problem.suggestion})" if problem.suggestion else problem.what


def decode_buckets(max_num_seqs: int) -> tuple[int, ...]:
    """Batch shapes up to `max_num_seqs`: 1, 2, 3, 4, 6, 8, 12, 16, 20, 24, 32, 40, 48, 64, ... and the limit itself."""
    return (*takewhile(lambda bucket: bucket < max_num_seqs, _bucket_series()), max_num_seqs)


def context_limit(model: ModelConfig, config: RunConfig) -> int:
    """Longest context in tokens as far as it is known before the pools: --max-model-len, else the model's own limit,
    and never more than a host pool given in tokens. Raises ConfigError above the model's limit."""
    limit = config.model.max_model_len or model.max_position_embeddings
    if limit > model.max_position_embeddings:
        raise ConfigError(f"--max-model-len {limit}: the model was made for {model.max_position_embeddings} tokens")
    if config.cache.host_pool.kind == "tokens":
        limit = min(limit, int(config.cache.host_pool.value))
    return limit


def compute_dtype(config: RunConfig, device: Literal["cpu", "cuda"]) -> memory.Dtype:
    """--dtype, or float32 on CPUs and bfloat16 on GPUs."""
    if config.model.dtype != "auto":
        return config.model.dtype
    return "float32" if device == "cpu" else "bfloat16"


def cache_formats(model: ModelConfig, config: RunConfig, hardware: Hardware) -> tuple[RowFormat, IndexFormat]:
    """Layouts of KV rows and index keys: fp8 rows on Hopper and newer unless computing in float32; fp8 index keys
    unless computing in float32. Raises ConfigError for fp8 rows on a GPU that has no kernels for them."""
    dtype = compute_dtype(config, hardware.kind)
    kinds: dict[str, Literal["fp8", "bf16", "fp32"]] = {"fp8": "fp8", "bfloat16": "bf16", "float32": "fp32"}
    asked = config.cache.kv_cache_dtype
    if asked == "auto":
        asked = "fp8" if hardware.has_fp8 and dtype != "float32" else dtype
    if asked == "fp8" and hardware.kind == "cuda" and not hardware.has_fp8:
        raise ConfigError(f"--kv-cache-dtype fp8 needs a Hopper GPU or newer, this is {hardware.name}: use bfloat16")
    return (
        RowFormat(kinds[asked], latent_dim=model.kv_lora_rank, rope_dim=model.qk_rope_head_dim),
        IndexFormat("fp32" if dtype == "float32" else "fp8", head_dim=model.index_head_dim),
    )


def make_plan(model: ModelConfig, config: RunConfig, hardware: Hardware, stats: InputStats | None) -> Plan:
    """Decide dtype, formats, pools, batch and prefill sizes for one job.

    `stats` is None when there is no input to look at. Raises ConfigError for settings that contradict each other or the
    machine; what merely does not fit is in `problems` (see `Plan.require_fit`).
    """
    weights = _weights(model, config, hardware)
    plan = _decide(model, config, hardware, stats, weights)
    if plan.fits or plan.problems[0].suggestion:
        return plan
    remedy = _remedy(plan, config, stats, weights)
    return replace(plan, problems=tuple(replace(p, suggestion=p.suggestion or remedy) for p in plan.problems))


def row_limit(model: ModelConfig, config: RunConfig, hardware: Hardware) -> int:
    """Longest row (prompt and output, in tokens) that a plan on this machine can hold, before the input is known.

    The smaller of `context_limit` and the host pool; with an automatic host pool also what the activations of such a
    long prompt leave room for. When nothing fits it is `context_limit`, and the plan says what is wrong.
    """
    limit, size = context_limit(model, config), config.cache.host_pool.kind
    if size == "tokens":
        return limit
    weights = _weights(model, config, hardware)

    if size != "auto":
        return _decide(model, config, hardware, None, weights).max_model_len
    return _longest_context(model, config, hardware, None, weights) or limit


def _longest_context(
    model: ModelConfig,
    config: RunConfig,
    hardware: Hardware,
    stats: InputStats | None,
    weights: memory.WeightBytes,
) -> int:
    """The largest context limit with which a plan fits and its host pool holds the longest row; 0 if there is none."""

    def holds(context: int) -> bool:
        shorter = replace(config, model=replace(config.model, max_model_len=context))
        plan = _decide(model, shorter, hardware, stats, weights)
        return plan.fits and plan.cache.host_tokens >= plan.min_host_tokens

    limit = context_limit(model, config)
    if holds(limit):
        return limit
    low, high = 0, -(-limit // _CONTEXT_STEP)
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if holds(middle * _CONTEXT_STEP) else (low, middle)
    return low * _CONTEXT_STEP


def _weights(model: ModelConfig, config: RunConfig, hardware: Hardware) -> memory.WeightBytes:
    """Linears stay in fp8 on a GPU in bfloat16, if the checkpoint has them so; random weights always do."""
    dtype = compute_dtype(config, hardware.kind)
    has_fp8 = model.quant is not None or config.model.load_format == "dummy"
    keep_fp8 = has_fp8 and hardware.kind == "cuda" and dtype == "bfloat16"
    return memory.weight_bytes(model, dtype=dtype, keep_fp8=keep_fp8)


def _decide(
    model: ModelConfig,
    config: RunConfig,
    hardware: Hardware,
    stats: InputStats | None,
    weight_bytes: memory.WeightBytes,
) -> Plan:
    """make_plan without the search for a remedy outside the pools."""
    workers = _check_machine(config, hardware)
    on_cpu = hardware.kind == "cpu"
    dtype = compute_dtype(config, hardware.kind)
    row, index = cache_formats(model, config, hardware)
    limit = context_limit(model, config)
    known = stats if stats is not None and stats.num_good_rows > 0 else None
    longest_row = limit if known is None else max(1, min(limit, known.longest_row_tokens))
    longest_prompt = longest_row if known is None else max(1, min(longest_row, known.longest_prompt_tokens))
    seqs_bound = config.engine.max_num_seqs or _MAX_AUTO_SEQS[hardware.kind]

    weights = weight_bytes.per_worker(workers)
    total = hardware.host_bytes if on_cpu else hardware.hbm_bytes
    utilization = config.engine.gpu_memory_utilization
    budget = int(total * _CPU_SHARE) if on_cpu else min(int(total * utilization), hardware.hbm_free_bytes)
    runtime, allocator = memory.runtime_bytes(hardware.kind), memory.allocator_bytes(hardware.kind)
    left = budget - weights - runtime - allocator

    group_cost = memory.group_token_bytes(model, dtype=dtype, row=row, index=index)
    group = _group_tokens(config, hardware, longest_prompt, known, int(left * _GROUP_SHARE) // group_cost)

    def chunk_bytes(tokens: int) -> int:
        return memory.chunk_bytes(model, dtype=dtype, kind=hardware.kind, chunk_tokens=tokens, context=longest_row)

    chunk = _chunk_tokens(config, hardware, group, chunk_bytes, int(left * _CHUNK_SHARE))
    decode = seqs_bound * memory.decode_row_bytes(model, dtype=dtype, context=longest_row)
    activations = group * group_cost + max(chunk_bytes(chunk), decode)
    # The room for prefetch's lists is kept before the pool's size is known.
    prefetch = prefetch_mode(model, config, hardware, row, index, host_tokens=None)
    cache_fixed = memory.cache_fixed_bytes(model, row, index, prefetch=prefetch) if config.cache.offload else 0

    host_share = hardware.host_bytes // workers
    pools = choose_pools(
        memory.token_bytes(model, row, index, offload=config.cache.offload),
        config.cache,
        Room(
            device_bytes=left - activations - cache_fixed,
            device_total_bytes=total,
            host_bytes=host_share,
            usable_host_bytes=None if on_cpu else int(host_share * _HOST_SHARE),
        ),
        Need(
            longest_row=longest_row,
            index_topk=model.index_topk,
            wanted_tokens=_wanted_tokens(known, workers, longest_row, seqs_bound, on_cpu=on_cpu),
            max_num_seqs=seqs_bound,
        ),
    )
    problems = pools.problems
    if left - activations <= 0:
        what = "the weights" if left <= 0 else "weights and the activations of the longest prompt"
        need = weights + runtime + allocator + (activations if left > 0 else 0)
        problems = (Problem(f"{what} take {format_bytes(need)} per worker, {format_bytes(budget)} may be used", ""),)
    cache = CacheSpec(
        group_layers=model.group_layers,
        row_format=row,
        index_format=index,
        index_topk=model.index_topk,
        host_tokens=pools.host_tokens,
        gpu_tokens=pools.gpu_tokens,
        offload=config.cache.offload,
        prefetch=prefetch_mode(model, config, hardware, row, index, host_tokens=pools.host_tokens),
    )
    max_num_seqs = config.engine.max_num_seqs or _auto_seqs(cache, known, workers, longest_row, seqs_bound)
    lookahead = config.engine.lookahead_steps
    model_limit = config.model.max_model_len or model.max_position_embeddings
    min_host = round_up_to_block(longest_row if known is None else min(model_limit, known.longest_row_tokens))
    return Plan(
        model=model,
        hardware=hardware,
        input=stats,
        device=hardware.kind,
        num_workers=workers,
        dtype=dtype,
        cache=cache,
        max_model_len=min(limit, cache.host_tokens),
        max_num_seqs=max_num_seqs,
        decode_buckets=decode_buckets(max_num_seqs),
        prefill_chunk_tokens=chunk,
        prefill_group_tokens=group,
        lookahead_steps=(0 if on_cpu else 2) if lookahead is None else lookahead,
        device_memory=DeviceMemory(
            total=total,
            budget=budget,
            weights=weights,
            runtime=runtime,
            allocator=allocator,
            activations=activations,
            index_cache=cache.index_cache_bytes,
            gpu_pool=cache.gpu_pool_bytes,
            metadata=cache.metadata_bytes,
            host_pool=cache.host_pool_bytes if on_cpu else 0,
        ),
        host_pool_bytes=cache.host_pool_bytes,
        host_budget_bytes=int(host_share * (_CPU_SHARE if on_cpu else _HOST_SHARE)),
        min_host_tokens=min_host,
        min_gpu_tokens=pools.min_gpu_tokens,
        problems=problems,
        notes=() if problems else pools.notes + _context_notes(cache.host_tokens, min_host, known, limit),
    )


def _check_machine(config: RunConfig, hardware: Hardware) -> int:
    """Number of workers; raises ConfigError when the machine is not what was asked for."""
    if config.engine.device not in ("auto", hardware.kind):
        raise ConfigError(f"--device {config.engine.device}: the machine planned for is {hardware.name}")
    workers = config.engine.data_parallel_size
    if workers > hardware.num_devices:
        what = "a CPU run has one worker" if hardware.kind == "cpu" else f"there are {hardware.num_devices} GPUs"
        raise ConfigError(f"--dp {workers}: {what}")
    return workers


def prefetch_mode(
    model: ModelConfig,
    config: RunConfig,
    hardware: Hardware,
    row: RowFormat,
    index: IndexFormat,
    *,
    host_tokens: int | None,
) -> PrefetchMode:
    """What `cache.prefetch` stands for. auto is fused where that was measured to be faster: Hopper, fp8 rows and keys,
    64 index heads, a host pool of _PREFETCH_TOKENS or more. `host_tokens` None: its size is not known, it may be."""
    if not config.cache.offload:
        return "off"
    if config.cache.prefetch != "auto":
        return config.cache.prefetch
    is_hopper = hardware.kind == "cuda" and hardware.compute_capability[0] == 9
    is_measured = row.kind == index.kind == "fp8" and model.index_n_heads == 64
    is_large = host_tokens is None or host_tokens >= _PREFETCH_TOKENS
    return "fused" if is_hopper and is_measured and is_large else "off"


def _group_tokens(
    config: RunConfig, hardware: Hardware, longest_prompt: int, known: InputStats | None, affordable: int
) -> int:
    """Prompt tokens prefilled together: never less than the longest prompt, which cannot be split."""
    asked = config.engine.prefill_group_tokens or min(_GROUP_TOKENS[hardware.kind], affordable)
    if known is not None:
        asked = min(asked, known.prompt_tokens)
    return max(asked, longest_prompt)


def _chunk_tokens(
    config: RunConfig, hardware: Hardware, group: int, cost: Callable[[int], int], affordable_bytes: int
) -> int:
    """Tokens inside a layer at once: halved until their activations fit their share of memory."""
    if config.engine.prefill_chunk_tokens is not None:
        return config.engine.prefill_chunk_tokens
    chunk = _CHUNK_TOKENS[hardware.kind]
    while chunk > _MIN_CHUNK_TOKENS and cost(chunk) > affordable_bytes:
        chunk //= 2
    return min(chunk, round_up_to_block(group))


def _wanted_tokens(known: InputStats | None, workers: int, longest_row: int, seqs: int, *, on_cpu: bool) -> int | None:
    """Host slots that the job can use at once, per worker; None: more is always better."""
    row = round_up_to_block(longest_row)
    if known is None:
        return _CPU_ROWS_WITHOUT_INPUT * row if on_cpu else None
    return max(row, min(-(-known.total_row_tokens // workers), seqs * row))


def _auto_seqs(cache: CacheSpec, known: InputStats | None, workers: int, longest_row: int, bound: int) -> int:
    """Batch rows that the pools can feed. Rows shorter than the mean may double that, and admission keeps to the pools
    anyway; without an input, rows of index_topk tokens are assumed."""
    mean_row = min(longest_row, cache.index_topk)
    slack = 1
    if known is not None:
        bound = min(bound, -(-known.num_good_rows // workers))
        mean_row = max(1, known.total_row_tokens // known.num_good_rows)
        slack = 2
    rows = cache.host_tokens // round_up_to_block(mean_row)
    if cache.offload:
        rows = min(rows, cache.gpu_tokens // (min(cache.index_topk, mean_row) + 1))
    rows = max(1, slack * rows)
    return min(bound, next(b for b in _bucket_series() if b >= rows))


def _bucket_series() -> Iterator[int]:
    """1, 2, 3, 4, 6, 8, 12, 16, 20, 24, 32, 40, 48, 64, 80, 96, 128, ... without end."""
    yield from (1, 2, 3, 4, 6, 8, 12)
    power = 16
    while True:
        yield from (power, power * 5 // 4, power * 3 // 2)
        power *= 2


def _context_notes(host_tokens: int, min_host: int, known: InputStats | None, limit: int) -> tuple[str, ...]:
    """What a host pool shorter than the longest row means."""
    if known is not None and host_tokens < min_host:
        return (
            f"the host pool holds {host_tokens:,} tokens and the longest row needs {min_host:,}: longer prompts become "
            f"too_long and outputs are cut; --host-pool {min_host} holds every row",
        )
    if known is None and host_tokens < limit:
        return (f"the host pool lowers the context limit from {limit:,} to {host_tokens:,} tokens",)
    return ()


def _remedy(plan: Plan, config: RunConfig, stats: InputStats | None, weights: memory.WeightBytes) -> str:
    """The nearest setting outside the pools that fits: more workers, a shorter context, a larger node; "" if none."""
    engine, hardware = config.engine, plan.hardware
    for workers in (plan.num_workers * 2**n for n in range(1, 7)):
        if hardware.kind == "cuda" and workers <= hardware.num_devices:
            wider = replace(config, engine=replace(engine, data_parallel_size=workers))
            if _decide(plan.model, wider, hardware, stats, weights).fits:
                return f"--dp {workers}"
    length = _longest_context(plan.model, config, hardware, stats, weights)
    if length:
        return f"--max-model-len {length}"
    for workers in (plan.num_workers * 2**n for n in range(1, 7)):
        if hardware.kind == "cuda" and workers > hardware.num_devices:
            wider = replace(config, engine=replace(engine, data_parallel_size=workers))
            if _decide(plan.model, wider, replace(hardware, num_devices=workers), stats, weights).fits:
                return f"{workers} GPUs of this kind"
    return ""

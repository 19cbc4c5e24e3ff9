"""A Plan for people (rich tables) and for programs (JSON). Decides nothing."""

from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from echo_batch.engine.plan import Plan
from echo_batch.engine.pools import Problem
from echo_batch.sizes import format_bytes

PLAN_VERSION = 1
"""Of the JSON form: raised when a key changes its meaning or goes."""


def plan_to_dict(plan: Plan) -> dict[str, Any]:
    """The plan as JSON values: tokens and bytes as integers, per worker and in total."""
    cache, memory, stats = plan.cache, plan.device_memory, plan.input
    per_worker = {
        "weights": memory.weights,
        "indexer_cache": memory.index_cache,
        "gpu_pool": memory.gpu_pool,
        "metadata": memory.metadata,
        "activations": memory.activations,
        "allocator": memory.allocator,
        "runtime": memory.runtime,
        "host_pool": plan.host_pool_bytes,
        "device_used": memory.used,
        "device_budget": memory.budget,
        "host_budget": plan.host_budget_bytes,
    }
    return {
        "version": PLAN_VERSION,
        "fits": plan.fits,
        "problems": [{"what": p.what, "suggestion": p.suggestion} for p in plan.problems],
        "notes": list(plan.notes),
        "model": {
            "architecture": plan.model.architecture,
            "layers": plan.model.num_layers,
            "selection_groups": cache.num_groups,
            "index_topk": cache.index_topk,
        },
        "hardware": {
            "kind": plan.hardware.kind,
            "name": plan.hardware.name,
            "devices": plan.hardware.num_devices,
            "device_bytes": plan.hardware.hbm_bytes,
            "free_host_bytes": plan.hardware.host_bytes,
        },
        "input": None
        if stats is None
        else {
            "rows": stats.num_rows,
            "bad_rows": stats.num_bad_rows,
            "prompt_tokens": stats.prompt_tokens,
            "longest_prompt_tokens": stats.longest_prompt_tokens,
            "longest_row_tokens": stats.longest_row_tokens,
        },
        "workers": plan.num_workers,
        "dtype": plan.dtype,
        "kv_cache": {
            "row_format": cache.row_format.kind,
            "row_bytes": cache.row_format.row_bytes,
            "index_format": cache.index_format.kind,
            "offload": cache.offload,
            "prefetch": cache.prefetch,
            "host_pool_tokens": cache.host_tokens if cache.offload else 0,
            "gpu_pool_tokens": cache.gpu_tokens,
            "minimum_host_pool_tokens": plan.min_host_tokens,
            "minimum_gpu_pool_tokens": plan.min_gpu_tokens,
        },
        "limits": {
            "max_model_len": plan.max_model_len,
            "max_num_seqs": plan.max_num_seqs,
            "decode_buckets": list(plan.decode_buckets),
            "prefill_chunk_tokens": plan.prefill_chunk_tokens,
            "prefill_group_tokens": plan.prefill_group_tokens,
            "lookahead_steps": plan.lookahead_steps,
        },
        "bytes": {
            "per_worker": per_worker,
            "total": {name: value * plan.num_workers for name, value in per_worker.items()},
        },
    }


def print_plan(plan: Plan, console: Console) -> None:
    """Show the whole plan: memory, limits, and what does not fit."""
    console.print(Text(_title(plan), "bold"), _memory_table(plan), _settings_table(plan), sep="\n")
    for note in plan.notes:
        console.print(Text.assemble(("note: ", "yellow"), note))
    for problem in plan.problems:
        console.print(problem_text(problem))
    if plan.fits:
        console.print(Text("fits", style="green"))


def problem_text(problem: Problem) -> Text:
    """One problem, its remedy standing out."""
    text = Text.assemble(("does not fit: ", "bold red"), problem.what)
    if problem.suggestion:
        text.append("\n  try: ").append(problem.suggestion, style="bold")
    return text


def plan_summary(plan: Plan) -> str:
    """One line for the start of a run and its log."""
    cache, workers = plan.cache, plan.num_workers
    host = (
        f"host pool {cache.host_tokens:,} tokens ({format_bytes(plan.host_pool_bytes)})"
        + (f", {cache.prefetch} prefetch" if cache.prefetch != "off" else "")
        if cache.offload
        else "no offload"
    )
    per = f" on each of {workers} GPUs" if workers > 1 else ""
    return (
        f"{plan.device}, {plan.dtype}, {cache.row_format.kind} KV rows; {host}, GPU pool {cache.gpu_tokens:,} tokens "
        f"({format_bytes(cache.gpu_pool_bytes)}){per}; at most {plan.max_num_seqs} requests at once, "
        f"context limit {plan.max_model_len:,}"
    )


def _memory_table(plan: Plan) -> Table:
    cache, memory, workers = plan.cache, plan.device_memory, plan.num_workers
    on_cpu = plan.device == "cpu"
    table = Table(show_edge=False, pad_edge=False)
    table.add_column("memory" if on_cpu else "per GPU")
    table.add_column("tokens", justify="right")
    table.add_column("bytes" if on_cpu else "per GPU", justify="right")
    if workers > 1:
        table.add_column(f"{workers} GPUs", justify="right")

    def add(name: str, num_bytes: int, tokens: int | None = None, style: str | None = None) -> None:
        cells = [name, "" if tokens is None else f"{tokens:,}", format_bytes(num_bytes)]
        if workers > 1:
            cells.append(format_bytes(num_bytes * workers))
        table.add_row(*cells, style=style)

    add("weights", memory.weights)
    add("indexer cache", memory.index_cache, cache.host_tokens)
    add("GPU pool", memory.gpu_pool, cache.gpu_tokens)
    if cache.offload:
        add("cache metadata", memory.metadata)
    add("activations", memory.activations)
    if memory.allocator:
        add("allocator's gaps", memory.allocator)
    add("runtime, graphs", memory.runtime)
    if on_cpu and cache.offload:
        add("host pool", plan.host_pool_bytes, cache.host_tokens)
    table.add_section()
    over = "bold red"
    add("used", memory.used, style=over if memory.used > memory.budget else "bold")
    add("may be used", memory.budget)
    if not on_cpu and cache.offload:
        table.add_section()
        too_much = plan.host_pool_bytes > plan.host_budget_bytes
        add("host pool (host memory)", plan.host_pool_bytes, cache.host_tokens, style=over if too_much else "bold")
        add("may be used", plan.host_budget_bytes)
    return table


def _title(plan: Plan) -> str:
    hardware = plan.hardware
    where = f"{plan.num_workers} x {hardware.name}" if plan.device == "cuda" else "CPU"
    return f"{plan.model.architecture}, {plan.model.num_layers} layers, on {where}"


def _settings_table(plan: Plan) -> Table:
    cache, stats = plan.cache, plan.input
    row, index = cache.row_format, cache.index_format
    rows = [
        ("compute", f"{plan.dtype}, KV rows {row.kind} ({row.row_bytes:,} B), index keys {index.kind}"),
        ("context limit", f"{plan.max_model_len:,} tokens"),
        ("batch", f"at most {plan.max_num_seqs} requests per worker"),
        (
            "prefill",
            f"{plan.prefill_chunk_tokens:,} tokens in a layer at once, "
            f"prompts of {plan.prefill_group_tokens:,} tokens together",
        ),
    ]
    host = f"--host-pool {plan.min_host_tokens}, " if cache.offload else ""
    rows.append(
        (
            f"minimum for {'one full context' if stats is None else 'the longest row'}",
            f"{host}--gpu-pool {plan.min_gpu_tokens}",
        )
    )
    if stats is not None:
        bad = f" ({stats.num_bad_rows:,} bad)" if stats.num_bad_rows else ""
        rows = [
            ("input", f"{stats.num_rows:,} rows{bad}, {stats.prompt_tokens:,} prompt tokens"),
            ("longest prompt", f"{stats.longest_prompt_tokens:,} tokens"),
            ("longest row", f"{stats.longest_row_tokens:,} tokens with its output"),
            *rows,
        ]
    table = Table.grid(padding=(0, 2))
    for name, text in rows:
        table.add_row(Text(name, style="dim"), text)
    return table

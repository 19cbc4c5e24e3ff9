"""The end of a job in a few lines, from its report. A table on a terminal, plain lines elsewhere."""

from collections.abc import Mapping
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from echo_batch.report import units


def summary_rows(report: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Label and value of each line of the summary (not the error that ended a job, which the command says last)."""
    job, tokens, seconds = report["job"], report["tokens"], report["seconds"]
    throughput, cache, scheduler = report["throughput"], report["cache"], report["scheduler"]
    of = f" of {job['rows']:,}" if job["rows"] is not None else ""
    rows = f"{job['rows_done']:,}{of} done"
    if job["rows_resumed"]:
        rows += f", {job['rows_resumed']:,} of them by earlier starts"
    lines = [("output", job["output"] if job["exit_code"] in (0, 10) else f"{job['output']} (not finished)")]
    lines.append(("model", job["model"] + (" (demo model, for trying out only)" if job["demo_model"] else "")))
    lines.append(("rows", rows))
    if job["rows_failed"]:
        codes = ", ".join(f"{count:,} {code}" for code, count in job["failed_by_code"].items())
        lines.append(("failed", f"{job['rows_failed']:,} ({codes}), listed in errors.jsonl"))
    else:
        lines.append(("failed", "0"))
    if cut := job["finish_reasons"].get("length"):
        lines.append(("length", f"{cut:,} rows ended at their max_tokens or at the context limit"))
    cached = f" ({units.count(tokens['cached'])} cached)" if tokens["cached"] else ""
    lines.append(
        ("tokens", f"{units.count(tokens['prompt'])} prompt{cached}, {units.count(tokens['generated'])} generated")
    )
    stages = [f"{name} {units.duration(seconds[name])}" for name in ("load", "prefill", "decode") if seconds[name] > 0]
    lines.append(("time", units.duration(seconds["total"]) + (f" ({', '.join(stages)})" if stages else "")))
    if throughput["decode_tokens_per_s"] is not None:
        prefill = throughput["prefill_tokens_per_s"]
        speed = f"decode {units.count(throughput['decode_tokens_per_s'])} tok/s"
        speed += "" if prefill is None else f", prefill {units.count(prefill)} tok/s"
        lines.append(("speed", f"{speed}, {scheduler['effective_batch']:.1f} rows per step"))
    if scheduler["resident_steps"]:
        share = units.share(scheduler["resident_steps"] / scheduler["steps"])
        lines.append(("resident", f"everything was on the GPU in {share} of the steps"))
    if cache["selected_rows"]:
        lines.append(
            (
                "cache",
                f"hit rate {units.share(cache['hit_rate'])}, {units.count(cache['recalled_rows'])} rows recalled, "
                f"{units.count(cache['evicted_rows'])} evicted",
            )
        )
    return lines


def print_summary(console: Console, report: Mapping[str, Any]) -> None:
    """Prints the summary of a job on `console`."""
    lines = summary_rows(report)
    if not console.is_terminal:
        for label, value in lines:
            console.print(f"{label}: {value}", soft_wrap=True, markup=False, highlight=False, emoji=False)
        return
    table = Table(show_header=False, box=None, padding=(0, 1))
    table.add_column(style="bold")
    table.add_column(overflow="fold")
    for label, value in lines:
        style = "yellow" if label == "failed" and report["job"]["rows_failed"] else ""
        table.add_row(label, Text(value, style=style))
    console.print(table)

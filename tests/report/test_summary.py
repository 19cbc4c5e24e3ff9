import io

from rich.console import Console

from echo_batch.report.metrics import JobMetrics
from echo_batch.report.summary import print_summary, summary_rows
from echo_batch.request import Completion, RowFailure


def a_report(**kwargs):
    metrics = JobMetrics(rows_total=3)
    metrics.add_completion(Completion(row_id=0, token_ids=(1, 2), num_input_tokens=5))
    metrics.add_completion(Completion(row_id=1, failure=RowFailure(code="too_long", message="")))
    return metrics.report(**{"exit_code": 0, "output": "out[1].parquet", "model": "glm", **kwargs})


def printed(report, terminal):
    console = Console(file=io.StringIO(), force_terminal=terminal, width=60, color_system=None)
    print_summary(console, report)
    return console.file.getvalue()


def test_it_says_what_happened():
    rows = dict(summary_rows(a_report()))
    assert rows["output"] == "out[1].parquet"
    assert rows["rows"] == "2 of 3 done"
    assert rows["failed"] == "1 (1 too_long), listed in errors.jsonl"
    assert rows["tokens"] == "5 prompt, 2 generated"
    assert not {"speed", "cache", "length"} & rows.keys()
    rows = dict(summary_rows(a_report(exit_code=75, message="SIGTERM; run again", demo_model=True)))
    assert rows["output"].endswith("(not finished)")
    assert "SIGTERM" not in "".join(rows.values())  # the command says it, once
    assert "demo" in rows["model"]


def test_rows_that_were_cut_off_are_counted():
    metrics = JobMetrics(rows_total=3)
    for i, reason in enumerate(("stop", "length", "length")):
        metrics.add_completion(Completion(row_id=i, token_ids=(1,), finish_reason=reason))
    report = metrics.report(exit_code=0, output="out.parquet", model="glm")
    assert report["job"]["finish_reasons"] == {"length": 2, "stop": 1}
    assert dict(summary_rows(report))["length"].startswith("2 rows ended at their max_tokens")


def test_plain_lines_are_one_line_each_and_not_markup():
    lines = printed(a_report(output="a/very/long/path/" * 6 + "out[1].parquet"), terminal=False).splitlines()
    assert len(lines) == len(summary_rows(a_report()))
    assert lines[0].endswith("out[1].parquet")


def test_a_terminal_gets_a_table():
    text = printed(a_report(), terminal=True)
    assert "out[1].parquet" in text and "output:" not in text


def test_cache_and_speed_appear_when_measured():
    report = a_report()
    report["cache"] |= {"hit_rate": 0.9, "selected_rows": 10, "recalled_rows": 1, "evicted_rows": 2}
    report["throughput"] |= {"decode_tokens_per_s": 123.4, "prefill_tokens_per_s": 20_000.0}
    report["scheduler"] |= {"effective_batch": 7.25, "steps": 8, "resident_steps": 2}
    rows = dict(summary_rows(report))
    assert rows["speed"] == "decode 123 tok/s, prefill 20K tok/s, 7.2 rows per step"
    assert rows["resident"] == "everything was on the GPU in 25.0 % of the steps"
    assert rows["cache"] == "hit rate 90.0 %, 1 rows recalled, 2 evicted"

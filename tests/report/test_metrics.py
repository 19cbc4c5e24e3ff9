import dataclasses
import json

import pytest

from echo_batch.report.metrics import CACHE_FIELDS, ENGINE_FIELDS, EngineCounters, JobMetrics, Snapshot, usage, versions
from echo_batch.request import Completion, RowFailure


@dataclasses.dataclass
class Engine:
    prompt_tokens: int = 100
    cached_tokens: int = 30
    generated_tokens: int = 40
    decode_steps: int = 10
    decode_row_steps: int = 35
    resident_steps: int = 3
    prefill_seconds: float = 2.0
    decode_seconds: float = 4.0
    running: int = 3
    waiting: int = 1
    max_waiting: int = 5
    max_running: int = 4
    host_tokens_used: int = 64
    gpu_tokens_reserved: int = 32


@dataclasses.dataclass
class Cache:
    selected_rows: tuple = (100, 300)
    hit_rows: tuple = (50, 250)
    recalled_rows: tuple = (60, 40)
    evicted_rows: tuple = (7, 8)
    offloaded_rows: tuple = (9, 9)
    fallback_rows: tuple = (1, 2)


class Clock:
    now = 100.0

    def __call__(self):
        return self.now


def report(metrics, **kwargs):
    return metrics.report(**{"exit_code": 0, "output": "out.parquet", "model": "glm", **kwargs})


def test_the_protocol_and_the_fields_read_agree():
    assert set(ENGINE_FIELDS) == set(EngineCounters.__annotations__)


def test_completions_are_counted_on_top_of_what_earlier_starts_committed():
    metrics = JobMetrics(rows_total=10)
    metrics.resume(rows=4, failed=[("too_long", 1)], prompt_tokens=30, cached_tokens=5, generated_tokens=12)
    metrics.add_completion(
        Completion(row_id=4, token_ids=(1, 2), num_input_tokens=7, num_cached_tokens=3, num_cut_tokens=2)
    )
    for code in ("too_long", "bad_json"):
        failure = RowFailure(code=code, message="")
        metrics.add_completion(Completion(row_id=5, token_ids=(1,), num_input_tokens=7, failure=failure))
    result = report(metrics)
    assert result["job"]["rows_done"] == 7
    assert result["job"]["rows_resumed"] == 4
    assert result["job"]["rows_failed"] == 3
    assert result["job"]["failed_by_code"] == {"bad_json": 1, "too_long": 2}
    assert result["tokens"] == {"prompt": 37, "cached": 8, "generated": 14, "cut": 2}
    assert (metrics.snapshot().finished_rows, metrics.snapshot().finished_tokens) == (1, 2)


def test_the_report_has_its_documented_fields():
    clock = Clock()
    metrics = JobMetrics(rows_total=2, clock=clock, bytes_per_recall=[10, 30], peak_device_bytes=1)
    with metrics.in_stage("preflight"):
        clock.now += 1.5
    with metrics.in_stage("run"):
        clock.now += 8.0
        metrics.rows_done = 2
        metrics.read_engine([Engine(), Engine()])
        metrics.read_cache([Cache(), Cache()])
    result = json.loads(json.dumps(report(metrics, plan={"host_pool_tokens": 64}), allow_nan=False))
    assert result["version"] == 1
    assert result["seconds"] == {
        "preflight": 1.5, "load": 0.0, "run": 8.0, "merge": 0.0, "prefill": 4.0, "decode": 8.0, "total": 9.5
    }  # fmt: skip
    assert result["throughput"] == {
        "prefill_tokens_per_s": 35.0,
        "decode_tokens_per_s": 8.75,
        "generated_tokens_per_s": 10.0,
        "rows_per_s": 0.25,
    }
    assert result["scheduler"] == {
        "max_waiting": 10, "max_running": 8, "effective_batch": 3.5, "steps": 20, "resident_steps": 6
    }  # fmt: skip
    cache = result["cache"]
    assert cache["hit_rate"] == 0.75
    assert [cache[name] for name in CACHE_FIELDS] == [800, 600, 30, 200, 36, 6]
    assert cache["recalled_bytes"] == 120 * 10 + 80 * 30
    assert cache["groups"][0] == {
        "hit_rate": 0.5, "selected_rows": 200, "hit_rows": 100, "evicted_rows": 14, "recalled_rows": 120,
        "offloaded_rows": 18, "fallback_rows": 2,
    }  # fmt: skip
    assert result["plan"] == {"host_pool_tokens": 64}
    assert result["memory"]["peak_device_bytes"] == 1 and result["memory"]["peak_rss_bytes"] > 1e6
    assert result["versions"].keys() >= {"python", "pyarrow", "torch"}


def test_an_interrupted_start_reports_the_stage_it_was_in():
    clock = Clock()
    metrics = JobMetrics(clock=clock)
    with pytest.raises(KeyboardInterrupt), metrics.in_stage("load", total=100):
        clock.now += 3.0
        metrics.stage_done = 40
        assert report(metrics, exit_code=75, message="SIGTERM")["seconds"]["load"] == 3.0
        raise KeyboardInterrupt
    clock.now += 1.0
    result = report(metrics, exit_code=75, message="SIGTERM")
    assert (result["seconds"]["load"], result["seconds"]["total"]) == (3.0, 4.0)
    assert (result["job"]["exit_code"], result["job"]["message"]) == (75, "SIGTERM")


def test_the_demo_model_is_named_as_such():
    assert report(JobMetrics())["job"]["note"] is None
    assert "demo" in report(JobMetrics(), demo_model=True)["job"]["note"]


def test_nothing_measured_is_not_a_number_made_up():
    result = report(JobMetrics())
    assert result["cache"]["hit_rate"] is None
    assert set(result["throughput"].values()) == {None}
    assert result["scheduler"]["effective_batch"] == 0.0


def test_an_empty_pool_is_used_to_0_percent():
    assert usage(0, 0) == 0.0
    assert usage(0, 640) == 0.0
    assert usage(64, 640) == 0.1
    empty = JobMetrics(host_pool_tokens=640, gpu_pool_tokens=640).snapshot()
    assert usage(empty.host_pool_used, empty.host_pool_tokens) == 0.0


def test_work_changes_with_anything_that_advances():
    base = Snapshot()
    counters = ("stage_done", "pieces", "prefill_tokens", "decode_tokens", "steps")
    for change in ({"stage": "run"}, *({name: 1} for name in counters)):
        assert dataclasses.replace(base, **change).work != base.work
    assert dataclasses.replace(base, waiting=3, host_pool_used=5).work == base.work


def test_versions_import_nothing():
    assert versions()["python"].startswith("3.")

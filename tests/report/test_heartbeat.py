import io
import json
import time

from echo_batch.report.heartbeat import Heartbeat
from echo_batch.report.metrics import Snapshot


class Clock:
    now = 1000.0

    def __call__(self):
        return self.now


def test_a_line_has_the_numbers_of_the_last_interval():
    clock = Clock()
    beat = Heartbeat(io.StringIO(), interval=30.0, clock=clock)
    for second in range(0, 61, 10):
        clock.now = 1000.0 + second
        beat.update(
            Snapshot(
                stage="run",
                decode_tokens=second * 5,
                prefill_tokens=second * 2,
                prefill_cached=second // 2,
                steps=second,
                rows_done=1,
                rows_total=4,
                rows_failed=1,
                running=3,
                waiting=2,
                host_pool_used=32,
                host_pool_tokens=64,
                selected_rows=4 * second,
                hit_rows=3 * second,
                recalled_bytes=second * 10**9,
            )
        )
    line = json.loads(json.dumps(beat.line()))
    assert line["event"] == "heartbeat"
    assert (line["state"], line["idle_s"], line["elapsed_s"]) == ("working", 0.0, 60.0)
    assert (line["decode_tokens_per_s"], line["prefill_tokens_per_s"]) == (5.0, 1.5)
    assert (line["rows_done"], line["rows_total"], line["rows_failed"]) == (1, 4, 1)
    assert (line["running"], line["waiting"], line["steps"]) == (3, 2, 60)
    assert (line["host_pool_use"], line["gpu_pool_use"], line["hit_rate"]) == (0.5, 0.0, 0.75)
    assert line["recall_gb_per_s"] == 1.0


def test_slow_and_hung_look_different():
    clock = Clock()
    slow, hung = (Heartbeat(io.StringIO(), interval=30.0, clock=clock) for _ in range(2))
    for second in range(0, 90, 25):  # a step every 25 s
        clock.now = 1000.0 + second
        slow.update(Snapshot(stage="run", steps=second))
        hung.update(Snapshot(stage="run", steps=min(second, 25)))
    assert slow.line()["state"] == "working" and slow.line()["idle_s"] == 0.0
    assert hung.line()["state"] == "stalled" and hung.line()["idle_s"] == 50.0


def test_a_job_that_hangs_before_its_first_update_is_stalled_too():
    clock = Clock()
    beat = Heartbeat(io.StringIO(), interval=30.0, clock=clock)
    clock.now += 31
    assert beat.line()["state"] == "stalled"


def test_lines_come_by_interval_not_by_update_and_also_without_updates():
    stream = io.StringIO()
    with Heartbeat(stream, interval=0.05) as beat:
        for step in range(1000):
            beat.update(Snapshot(stage="run", steps=step))
        time.sleep(0.3)
    lines = [json.loads(line) for line in stream.getvalue().splitlines()]
    assert 2 <= len(lines) <= 12
    assert [line["event"] for line in lines] == ["heartbeat"] * (len(lines) - 1) + ["end"]
    assert lines[-1]["steps"] == 999
    assert lines[-2]["state"] == "stalled"
    beat.close()  # again is harmless
    assert len(stream.getvalue().splitlines()) == len(lines)


def test_a_short_job_still_has_one_line():
    stream = io.StringIO()
    with Heartbeat(stream, interval=30.0) as beat:
        beat.update(Snapshot(stage="preflight"))
    assert len(stream.getvalue().splitlines()) == 1


def test_a_job_that_did_not_begin_has_none():
    stream = io.StringIO()
    with Heartbeat(stream, interval=30.0):
        pass
    assert stream.getvalue() == ""


def test_a_closed_stderr_does_not_end_the_job():
    stream = io.StringIO()
    with Heartbeat(stream, interval=0.02) as beat:
        stream.close()
        time.sleep(0.1)
        beat.update(Snapshot(steps=1))

import io

from rich.console import Console

from echo_batch.report.heartbeat import Heartbeat
from echo_batch.report.metrics import Snapshot
from echo_batch.report.progress import TerminalProgress, make_progress


class Clock:
    now = 0.0

    def __call__(self):
        return self.now


def console(terminal=True):
    return Console(file=io.StringIO(), force_terminal=terminal, width=160, color_system=None)


def shown(progress, out):
    with out.capture() as capture:
        out.print(progress.render())
    return capture.get()


def test_the_run_shows_tokens_rows_and_pools():
    clock, out = Clock(), console()
    progress = TerminalProgress(out, clock=clock)
    for second in range(11):
        clock.now = float(second)
        progress.update(
            Snapshot(
                stage="run",
                rows_done=2,
                rows_total=8,
                rows_failed=1,
                finished_rows=2,
                finished_tokens=40,
                prefill_tokens=3_000 * second,
                prefill_cached=1_000 * second,
                prefill_total=60_000,
                prefill_seconds=5.0,
                decode_tokens=10 * second,
                decode_bound=800,
                decode_seconds=5.0,
                running=3,
                waiting=4,
                host_pool_used=16,
                host_pool_tokens=64,
                selected_rows=10,
                hit_rows=9,
                recalled_bytes=second * 2 * 10**9,
            )
        )
    text = shown(progress, out)
    for words in (
        "prefill tokens", "30K/60K", "2,000 tok/s (avg 4,000)", "100/160", "10 tok/s (avg 20)", "2/8", "1 failed",
        "ETA 8.0s", "running 3, waiting 4", "host pool 25.0 %", "GPU pool 0.0 %", "hit rate 90.0 %", "recall 2.00 GB/s",
    ):  # fmt: skip
        assert words in text, (words, text)
    assert "nothing new" not in text
    clock.now += 70.0
    assert "nothing new for 1m10s" in shown(progress, out)


def test_other_stages_show_their_own_units():
    out = console()
    progress = TerminalProgress(out, clock=Clock())
    progress.update(Snapshot(stage="load", stage_done=2**30, stage_total=4 * 2**30))
    assert "1 GiB/4 GiB" in shown(progress, out)
    progress.update(Snapshot(stage="preflight", stage_done=123))
    assert "reading rows" in shown(progress, out) and "123" in shown(progress, out)
    progress.update(Snapshot(stage="merge", stage_done=0, stage_total=0))
    assert "0/0" in shown(progress, out)


def test_it_runs_live_and_leaves_the_terminal_clean():
    out = console()
    with TerminalProgress(out) as progress:
        progress.update(Snapshot(stage="run", rows_total=3))
    assert out.file.getvalue()


def test_without_a_terminal_there_are_heartbeats():
    assert isinstance(make_progress(console(terminal=True), io.StringIO(), interval=1.0), TerminalProgress)
    assert isinstance(make_progress(console(terminal=False), io.StringIO(), interval=1.0), Heartbeat)

"""Progress on a terminal: bars in tokens and rows, rates, pools. Elsewhere `make_progress` gives a Heartbeat."""

import threading
import time
from collections.abc import Callable
from contextlib import suppress
from types import TracebackType
from typing import TextIO

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from echo_batch.report import units
from echo_batch.report.heartbeat import Heartbeat
from echo_batch.report.metrics import Snapshot, ratio, usage
from echo_batch.report.pace import Pace, eta_seconds, expected_decode_tokens

STAGE_WORDS = {
    "start": ("starting", units.count),
    "preflight": ("reading rows", units.count),
    "load": ("loading weights", units.size),
    "merge": ("writing output", units.count),
}
IDLE_SHOWN_SECONDS = 5.0
IDLE_WARNING_SECONDS = 60.0


class TerminalProgress:
    """Live bars. Rich redraws them in its own thread from the last snapshot, so that the time since the last token
    goes on counting while the loop hangs. `update` is cheap: call it at every step."""

    def __init__(self, console: Console, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._began = clock()
        self._latest = Snapshot()
        self._pace = Pace()
        self._pace.add(self._began, self._latest)
        self._lock = threading.Lock()
        self._is_shown = False
        self._live = Live(console=console, get_renderable=self.render, refresh_per_second=4, transient=True)

    def __enter__(self) -> "TerminalProgress":
        with suppress(OSError, SystemExit):  # rich exits when its terminal has gone; the job goes on
            self._live.start()
            self._is_shown = True
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def update(self, snapshot: Snapshot) -> None:
        """Leaves the numbers of now for the next redraw."""
        with self._lock:
            self._latest = snapshot
            self._pace.add(self._clock(), snapshot)

    def close(self) -> None:
        """Removes the bars (the summary comes in their place)."""
        if self._is_shown:
            self._is_shown = False
            with suppress(OSError, SystemExit):
                self._live.stop()

    def render(self) -> RenderableType:
        """What the terminal shows now."""
        with self._lock:
            return self._render(self._clock())

    def _render(self, now: float) -> RenderableType:
        s = self._latest
        elapsed = now - self._began
        bars = Table.grid(padding=(0, 1))
        if s.stage != "run":
            words, unit = STAGE_WORDS.get(s.stage, (s.stage, units.count))
            _bar(bars, words, s.stage_done, s.stage_total, unit)
            return Group(bars, Text("  ".join([units.duration(elapsed), *self._idle(now)]), style="dim"))
        decode_total = expected_decode_tokens(s)
        _bar(bars, "prefill tokens", s.prefill_tokens, s.prefill_total, units.count, self._prefill_speed(s, now))
        _bar(bars, "decode tokens", s.decode_tokens, decode_total, units.count, self._decode_speed(s, now))
        _bar(bars, "rows", s.rows_done, s.rows_total, units.count, f"{s.rows_failed} failed" if s.rows_failed else "")
        eta = eta_seconds(s)
        line = [
            units.duration(elapsed),
            f"ETA {'-' if eta is None else units.duration(eta)}",
            f"running {s.running}, waiting {s.waiting}",
            f"host pool {units.share(usage(s.host_pool_used, s.host_pool_tokens))}",
            f"GPU pool {units.share(usage(s.gpu_pool_used, s.gpu_pool_tokens))}",
            f"hit rate {units.share(ratio(s.hit_rows, s.selected_rows))}",
            f"recall {self._pace.rate('recalled_bytes', now) / 1e9:.2f} GB/s",
        ]
        text = Text("  ".join(line))
        for words in self._idle(now):
            text.append(
                "  " + words, style="bold yellow" if self._pace.idle_seconds(now) > IDLE_WARNING_SECONDS else ""
            )
        return Group(bars, text)

    def _prefill_speed(self, s: Snapshot, now: float) -> str:
        """'850 tok/s (avg 790)'; the average is over the seconds spent in the phase."""
        return _speed(self._pace.rate("prefill_computed", now), ratio(s.prefill_computed, s.prefill_seconds))

    def _decode_speed(self, s: Snapshot, now: float) -> str:
        return _speed(self._pace.rate("decode_tokens", now), ratio(s.decode_tokens, s.decode_seconds))

    def _idle(self, now: float) -> list[str]:
        idle = self._pace.idle_seconds(now)
        return [f"nothing new for {units.duration(idle)}"] if idle >= IDLE_SHOWN_SECONDS else []


def make_progress(console: Console, stream: TextIO, *, interval: float) -> TerminalProgress | Heartbeat:
    """Bars when `console` is a terminal, else JSON lines on `stream` every `interval` seconds. Both are context
    managers with `update(snapshot)`."""
    return TerminalProgress(console) if console.is_terminal else Heartbeat(stream, interval=interval)


def _speed(lately: float, average: float | None) -> str:
    return f"{units.count(lately)} tok/s" + ("" if average is None else f" (avg {units.count(average)})")


def _bar(table: Table, label: str, done: int, total: int | None, unit: Callable[[float], str], note: str = "") -> None:
    bar = ProgressBar(total=total if total else None, completed=done, width=30, pulse=total is None)
    if total == 0:  # nothing to do is done, not a bar that pulses for ever
        bar = ProgressBar(total=1, completed=1, width=30)
    numbers = f"{unit(done)}/{unit(total)}" if total is not None else unit(done)
    table.add_row(label, bar, numbers, note)

"""Progress for logs: one JSON line per interval, also (and above all) while the job hangs.

A thread writes the lines, because a job that hangs in a device call or on a dead file system cannot: a slow job shows
counters that grow, a hung one `"state": "stalled"` with growing seconds, a dead one nothing. The thread only reads the
last snapshot that the loop left.
"""

import json
import threading
import time
from collections.abc import Callable
from datetime import UTC, datetime
from types import TracebackType
from typing import Any, TextIO

from echo_batch.report.metrics import Snapshot, ratio, usage
from echo_batch.report.pace import Pace, eta_seconds


class Heartbeat:
    """Writes a line to `stream` every `interval` seconds between `__enter__` and `close`, and a last one at the end.

    `update` is cheap: call it at every step.
    """

    def __init__(self, stream: TextIO, *, interval: float = 30.0, clock: Callable[[], float] = time.monotonic) -> None:
        self._stream = stream
        self._interval = interval
        self._clock = clock
        self._began = clock()
        self._latest = Snapshot()
        self._pace = Pace(window=interval)
        self._pace.add(self._began, self._latest)
        self._lock = threading.Lock()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._beat, name="heartbeat", daemon=True)

    def __enter__(self) -> "Heartbeat":
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def update(self, snapshot: Snapshot) -> None:
        """Leaves the numbers of now for the next line."""
        with self._lock:
            self._latest = snapshot
            self._pace.add(self._clock(), snapshot)

    def close(self) -> None:
        """Stops the lines after a last one."""
        if not self._stop.is_set():
            self._stop.set()
            if self._thread.ident is not None:
                self._thread.join(timeout=1.0)
            if self._latest.stage != "start":  # else the job did not begin, and its error says all
                self._write("end")

    def line(self, event: str = "heartbeat") -> dict[str, Any]:
        """The content of a line now. `state` is "stalled" when nothing advanced for a whole interval, else "working";
        rates are over the last interval."""
        with self._lock:
            now = self._clock()
            s = self._latest
            idle = self._pace.idle_seconds(now)
            counters = ("prefill_computed", "decode_tokens", "recalled_bytes")
            rates = {name: self._pace.rate(name, now) for name in counters}
        eta = eta_seconds(s)
        return {
            "time": datetime.now(UTC).isoformat(timespec="seconds"),
            "event": event,
            "state": "stalled" if idle >= self._interval else "working",
            "stage": s.stage,
            "stage_done": s.stage_done,
            "stage_total": s.stage_total,
            "elapsed_s": round(now - self._began, 1),
            "idle_s": round(idle, 1),
            "eta_s": None if eta is None else round(eta),
            "rows_done": s.rows_done,
            "rows_total": s.rows_total,
            "rows_failed": s.rows_failed,
            "prefill_tokens": s.prefill_tokens,
            "prefill_total": s.prefill_total,
            "decode_tokens": s.decode_tokens,
            "steps": s.steps,
            "prefill_tokens_per_s": round(rates["prefill_computed"], 1),
            "decode_tokens_per_s": round(rates["decode_tokens"], 1),
            "running": s.running,
            "waiting": s.waiting,
            "host_pool_use": round(usage(s.host_pool_used, s.host_pool_tokens), 4),
            "gpu_pool_use": round(usage(s.gpu_pool_used, s.gpu_pool_tokens), 4),
            "hit_rate": _rounded(ratio(s.hit_rows, s.selected_rows)),
            "recall_gb_per_s": round(rates["recalled_bytes"] / 1e9, 3),
        }

    def _beat(self) -> None:
        while not self._stop.wait(self._interval):
            if not self._write("heartbeat"):
                return

    def _write(self, event: str) -> bool:
        try:
            self._stream.write(json.dumps(self.line(event)) + "\n")
            self._stream.flush()
        except (OSError, ValueError):  # the reader of stderr has gone: no reason to stop the job
            return False
        return True


def _rounded(value: float | None) -> float | None:
    return None if value is None else round(value, 4)

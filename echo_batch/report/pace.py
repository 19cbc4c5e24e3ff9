"""How fast a job goes and when it ends, from its snapshots. Pure arithmetic; knows no clock and no terminal."""

from collections import deque

from echo_batch.report.metrics import Snapshot


class Pace:
    """Rates over the last `window` seconds, and the time since anything advanced. Fed with (time, snapshot) pairs by
    the job's loop, often; asked at any time."""

    def __init__(self, window: float = 10.0) -> None:
        self._window = window
        self._marks: deque[tuple[float, Snapshot]] = deque()
        self._advanced_at: float | None = None

    def add(self, now: float, snapshot: Snapshot) -> None:
        """Takes the snapshot of time `now` (seconds, never decreasing)."""
        if not self._marks or snapshot.work != self._marks[-1][1].work:
            self._advanced_at = now
        # One mark a tenth of the window is enough to measure by.
        if len(self._marks) > 1 and now - self._marks[-2][0] < self._window / 10:
            self._marks[-1] = (now, snapshot)
        else:
            self._marks.append((now, snapshot))
        while len(self._marks) > 2 and self._marks[1][0] <= now - self._window:
            self._marks.popleft()

    def rate(self, name: str, now: float) -> float:
        """Units of the snapshot's counter `name` per second lately; falls towards 0 while nothing is fed."""
        if len(self._marks) < 2:
            return 0.0
        (began, first), (_, last) = self._marks[0], self._marks[-1]
        seconds = now - began
        return max(0.0, (getattr(last, name) - getattr(first, name)) / seconds) if seconds > 0 else 0.0

    def idle_seconds(self, now: float) -> float:
        """Seconds since any counter advanced."""
        return 0.0 if self._advanced_at is None else max(0.0, now - self._advanced_at)


def expected_decode_tokens(snapshot: Snapshot) -> int | None:
    """How many tokens this start will have generated at its end: as finished rows did on average, at most the bound."""
    if snapshot.rows_total is None or snapshot.decode_bound is None:
        return None
    rows_left = snapshot.rows_total - snapshot.rows_done
    if snapshot.finished_rows == 0:
        return snapshot.decode_bound
    mean = snapshot.finished_tokens / snapshot.finished_rows
    expected = round(snapshot.finished_tokens + mean * rows_left)
    return max(snapshot.decode_tokens, min(expected, snapshot.decode_bound))


def eta_seconds(snapshot: Snapshot) -> float | None:
    """Seconds that prefill and decode still need, from what a token of each has cost so far. None while unknown."""
    if snapshot.stage != "run" or snapshot.prefill_total is None:
        return None
    decode_total = expected_decode_tokens(snapshot)
    if decode_total is None:
        return None
    left = ((snapshot.prefill_total - snapshot.prefill_tokens), (decode_total - snapshot.decode_tokens))
    done = (snapshot.prefill_tokens, snapshot.decode_tokens)
    spent = (snapshot.prefill_seconds, snapshot.decode_seconds)
    eta = 0.0
    for tokens_left, tokens_done, seconds in zip(left, done, spent):
        if tokens_left > 0:
            if tokens_done == 0 or seconds <= 0:
                return None
            eta += tokens_left * seconds / tokens_done
    return eta

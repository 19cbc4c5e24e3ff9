"""What a running job tells the outside: progress, heartbeat, metrics file, log. Here the stop flag is polled too."""

import logging
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from rich.console import Console

from echo_batch.config import RunConfig
from echo_batch.errors import OutputError
from echo_batch.files import write_errors
from echo_batch.io.reader import Source
from echo_batch.report.metrics import JobMetrics, Snapshot
from echo_batch.report.textfile import MetricsTextfile
from echo_batch.signals import StopFlag

logger = logging.getLogger("echo_batch")


class Reporter:
    """Feeds progress, heartbeat and the metrics file, and polls the stop flag, from wherever the job is."""

    def __init__(self, config: RunConfig, metrics: JobMetrics, progress: Any, stop: StopFlag) -> None:
        self._metrics, self._progress, self._stop = metrics, progress, stop
        path = config.report.metrics_textfile
        self._textfile = MetricsTextfile(Path(path)) if path is not None else None
        self._interval = config.report.heartbeat_seconds
        self._written: float | None = None

    def step(self) -> None:
        """Call it at every step of any loop. Raises InterruptedJobError when a stop was asked for."""
        snapshot = self._metrics.snapshot()
        self._progress.update(snapshot)
        if self._written is None or time.monotonic() - self._written >= self._interval:
            self._write_metrics(snapshot, None)
        self._stop.check()

    def finish(self, *, success: bool) -> None:
        """The last numbers; `success` stamps the time of the last success."""
        self._write_metrics(self._metrics.snapshot(), time.time() if success else None)

    def _write_metrics(self, snapshot: Snapshot, success_at: float | None) -> None:
        """Raises OutputError when the file cannot be written at the start, where it is a mistake of the command. Later
        (a full disk, a directory that has gone) it is no reason to end a job."""
        is_first, self._written = self._written is None, time.monotonic()
        if self._textfile is None:
            return
        try:
            self._textfile.write(snapshot, success_at=success_at)
        except OutputError as error:
            if is_first:
                raise
            logger.warning("%s", error)


def scan(source: Source, metrics: JobMetrics, reporter: Reporter) -> None:
    """First pass over the input: rows, columns, spool."""
    with metrics.in_stage("preflight"):
        for done in source.scan():
            metrics.stage_done = done.num_rows
            reporter.step()


def say(console: Console, line: str) -> None:
    """One line for the user. A screen that has gone away (closed terminal, broken pipe) is no reason to stop."""
    with suppress(OSError, SystemExit):
        console.print(line, soft_wrap=True, highlight=False, markup=False, emoji=False)


class _LogFile(logging.FileHandler):
    """A log on a full disk is no reason to stop, nor to print a traceback."""

    def handleError(self, record: logging.LogRecord) -> None:
        pass

    def close(self) -> None:
        with suppress(OSError):
            super().close()


@contextmanager
def log_file(path: Path) -> Iterator[None]:
    """The log of one start, appended to `path`. Raises OutputError when it cannot be opened."""
    with write_errors(path):
        handler = _LogFile(path, encoding="utf-8", errors="backslashreplace")
    handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(message)s"))
    before = logger.level, logger.propagate
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    logger.propagate = False
    try:
        yield
    finally:
        logger.removeHandler(handler)
        logger.level, logger.propagate = before
        handler.close()

"""Signals that ask a job to stop. The first sets a flag that the loop polls; the second ends the process at once."""

import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

from echo_batch.errors import InterruptedJobError

STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1)


@contextmanager
def interruptible() -> Iterator[None]:
    """All stop signals interrupt as Ctrl-C does (KeyboardInterrupt): for what comes before a job and its StopFlag, such
    as the download of a model, which a SIGTERM would else end with 143."""
    previous = {}
    if threading.current_thread() is threading.main_thread():
        for number in STOP_SIGNALS:
            if signal.getsignal(number) is not signal.SIG_IGN:
                previous[number] = signal.signal(number, signal.default_int_handler)
    try:
        yield
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)


class StopFlag:
    """A context manager that takes the stop signals over. Outside the main thread it takes none and never stops.

    A signal that was ignored before stays ignored: nohup ignores SIGHUP, and a shell ignores SIGINT for what it starts
    in the background.
    """

    def __init__(self) -> None:
        self.signal_name: str | None = None
        self._previous: dict[signal.Signals, object] = {}

    def __enter__(self) -> "StopFlag":
        if threading.current_thread() is threading.main_thread():
            for number in STOP_SIGNALS:
                if signal.getsignal(number) is not signal.SIG_IGN:
                    self._previous[number] = signal.signal(number, self._handle)
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)  # type: ignore[arg-type]
        self._previous.clear()

    def check(self) -> None:
        """Raises InterruptedJobError (75) when a stop was asked for."""
        if self.signal_name is not None:
            raise InterruptedJobError(f"stopped by {self.signal_name}")

    def _handle(self, number: int, _frame: FrameType | None) -> None:
        if self.signal_name is not None:
            # Nothing below may delay the end: parts are whole or absent, so there is nothing to clean up.
            os._exit(InterruptedJobError.exit_code)
        self.signal_name = signal.Signals(number).name

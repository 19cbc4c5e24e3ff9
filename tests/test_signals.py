import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator

import pytest

from echo_batch.errors import InterruptedJobError
from echo_batch.signals import STOP_SIGNALS, StopFlag


@pytest.fixture(autouse=True)
def nothing_is_ignored() -> Iterator[None]:
    """Whoever runs the tests may ignore signals (nohup, a shell's background jobs), and new processes inherit that."""
    before = {number: signal.signal(number, signal.SIG_DFL) for number in STOP_SIGNALS}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.mark.parametrize("number", STOP_SIGNALS)
def test_the_first_signal_sets_a_flag(number: signal.Signals) -> None:
    before = signal.getsignal(number)
    with StopFlag() as flag:
        flag.check()
        os.kill(os.getpid(), number)
        with pytest.raises(InterruptedJobError, match=number.name):
            flag.check()
    assert signal.getsignal(number) is before


def test_the_second_signal_ends_the_process_at_once() -> None:
    """In a loop that never looks at the flag, with a cleanup that would take for ever."""
    code = """
import time
from echo_batch.signals import StopFlag
with StopFlag():
    print("ready", flush=True)
    try:
        while True:
            time.sleep(0.01)
    finally:
        time.sleep(1000)
"""
    process = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    process.send_signal(signal.SIGTERM)
    time.sleep(0.1)
    assert process.poll() is None
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=10)
    assert process.returncode == 75 and err == ""


def test_what_was_ignored_stays_ignored() -> None:
    """nohup: the terminal may go, the job goes on."""
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with StopFlag() as flag:
            os.kill(os.getpid(), signal.SIGHUP)
            flag.check()
        assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGHUP, before)


def test_other_threads_take_no_signals() -> None:
    seen: list[str | None] = []

    def run() -> None:
        with StopFlag() as flag:
            seen.append(flag.signal_name)
            flag.check()

    before = [signal.getsignal(number) for number in STOP_SIGNALS]
    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    assert seen == [None]
    assert [signal.getsignal(number) for number in STOP_SIGNALS] == before

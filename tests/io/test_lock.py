import os
import signal
import socket
import subprocess
import sys
import time

import pytest

from echo_batch.errors import InterruptedJobError
from echo_batch.io.lock import take_lock

HOLD = """
import sys, time
from pathlib import Path
from echo_batch.io.lock import take_lock
lock = take_lock(Path(sys.argv[1]))
print("held", flush=True)
time.sleep(60)
"""


def test_a_held_lock_is_exit_75_with_pid_and_host_and_dies_with_its_process(tmp_path):
    path = tmp_path / "lock"
    holder = subprocess.Popen([sys.executable, "-c", HOLD, str(path)], stdout=subprocess.PIPE)
    try:
        assert holder.stdout is not None and holder.stdout.readline() == b"held\n"
        with pytest.raises(InterruptedJobError) as caught:
            take_lock(path)
        assert caught.value.exit_code == 75
        assert f"pid {holder.pid} on host {socket.gethostname()}" in str(caught.value)
    finally:
        os.kill(holder.pid, signal.SIGKILL)
        holder.wait()
    take_lock(path).release()


def test_a_lock_is_held_within_the_process_too_until_released(tmp_path):
    path = tmp_path / "lock"
    lock = take_lock(path)
    with pytest.raises(InterruptedJobError, match=f"pid {os.getpid()}"):
        take_lock(path)
    lock.release()
    assert path.exists()
    take_lock(path).release(remove=True)
    assert not path.exists()


def test_started_programs_do_not_keep_the_lock(tmp_path):
    lock = take_lock(tmp_path / "lock")
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE, close_fds=False)
    try:
        lock.release()
        deadline = time.monotonic() + 10.0
        while True:  # the child closes it within its exec, which may end a moment after Popen returns
            try:
                take_lock(tmp_path / "lock").release()
                break
            except InterruptedJobError:
                assert time.monotonic() < deadline
                time.sleep(0.01)
    finally:
        child.kill()
        child.wait()


def test_a_lock_file_removed_between_open_and_flock_is_not_taken(tmp_path, monkeypatch):
    """Two processes must never hold locks on two files of the same name."""
    import fcntl

    path = tmp_path / "lock"
    first = take_lock(path)
    real_flock = fcntl.flock
    calls = []

    def flock(fd, operation):
        if not calls:
            first.release(remove=True)  # the holder ends just now
        calls.append(fd)
        real_flock(fd, operation)

    monkeypatch.setattr("echo_batch.io.lock.fcntl.flock", flock)
    lock = take_lock(path)
    assert len(calls) == 2
    assert os.path.samestat(os.fstat(lock.fd), os.stat(path))
    lock.release()

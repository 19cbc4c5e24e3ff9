"""The lock of a run directory: an flock, which the kernel drops with its process. Knows nothing of what it protects."""

import fcntl
import json
import os
import socket
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

from echo_batch.errors import InterruptedJobError
from echo_batch.files import write_errors


@dataclass(frozen=True, slots=True)
class FileLock:
    """A held lock. `release` or the end of the process (any end) gives it up."""

    path: Path
    fd: int

    def release(self, *, remove: bool = False) -> None:
        """Gives the lock up; with `remove` its file goes too (safe: takers check that the file is still theirs)."""
        if remove:
            with suppress(OSError):
                self.path.unlink(missing_ok=True)
        os.close(self.fd)


def take_lock(path: Path) -> FileLock:
    """Takes the lock of `path` or fails at once.

    The file holds the taker's pid and host for the others' message. Python closes the descriptor in programs it
    starts, so that a child that lives on does not keep the lock; a plain fork() would share it.
    Raises InterruptedJobError (exit 75) naming pid and host when held, OutputError when it cannot be written.
    """
    with write_errors(path):
        while True:
            fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                holder = _holder(fd)
                os.close(fd)
                raise InterruptedJobError(
                    f"{path.parent} is in use by {holder}; run the same command again when that job has ended"
                ) from None
            except OSError:
                os.close(fd)
                raise
            if not _is_at(fd, path):  # the former holder removed the file between our open and our lock
                os.close(fd)
                continue
            _write_holder(fd)
            return FileLock(path, fd)


def _is_at(fd: int, path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(fd), os.stat(path))
    except FileNotFoundError:
        return False


def _write_holder(fd: int) -> None:
    holder = {"pid": os.getpid(), "host": socket.gethostname(), "since": datetime.now(UTC).isoformat("T", "seconds")}
    os.ftruncate(fd, 0)
    os.pwrite(fd, json.dumps(holder).encode(), 0)


def _holder(fd: int) -> str:
    try:
        holder = json.loads(os.pread(fd, 4096, 0))
        return f"pid {holder['pid']} on host {holder['host']} since {holder['since']}"
    except (ValueError, KeyError, TypeError):  # taken, and its name not written yet
        return "another process"

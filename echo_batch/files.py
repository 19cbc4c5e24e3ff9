"""Files that appear whole or not at all, and the one place where a failed write becomes an OutputError.

Knows nothing of what is written. Imports no torch.
"""

import json
import os
import re
import sqlite3
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from echo_batch.errors import OutputError

# SQLite reports a failing disk as OperationalError with one of these primary codes.
_SQLITE_WRITE_FAILURES = (
    sqlite3.SQLITE_FULL,
    sqlite3.SQLITE_IOERR,
    sqlite3.SQLITE_READONLY,
    sqlite3.SQLITE_CANTOPEN,
    sqlite3.SQLITE_PERM,
)

_SURROGATE = re.compile("[\ud800-\udfff]")


@contextmanager
def write_errors(path: Path | str) -> Iterator[None]:
    """Turns an OSError (disk full, no permission, ...) or a failing SQLite write inside into an OutputError naming
    `path`; a full disk names the remedy. Other errors pass."""
    try:
        yield
    except OSError as error:
        # pyarrow raises its own messages without strerror.
        raise OutputError(f"cannot write {path}: {error.strerror or error}") from error
    except sqlite3.OperationalError as error:
        if (error.sqlite_errorcode & 0xFF) not in _SQLITE_WRITE_FAILURES:
            raise
        raise OutputError(f"cannot write {path}: {error}") from error


def fsync_file(path: Path) -> None:
    """Makes the content of a file survive a power loss."""
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def fsync_dir(path: Path) -> None:
    """Makes the names in a directory (creations, renames) survive a power loss; a file system without it is skipped."""
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        with suppress(OSError):
            os.fsync(fd)
    finally:
        os.close(fd)


def temporary_name(path: Path) -> Path:
    """The hidden name beside `path` under which it is written. Fixed, so that a killed process leaves at most one."""
    return path.with_name(f".{path.name}.tmp")


def publish(temporary: Path, path: Path) -> None:
    """Gives a finished temporary file its name, durably: fsync, rename over `path`, fsync of the directory."""
    fsync_file(temporary)
    os.replace(temporary, path)
    fsync_dir(path.parent)


def write_text_atomic(path: Path, text: str) -> None:
    """Writes a UTF-8 file that readers see whole or not at all. Raises OutputError."""
    temporary = temporary_name(path)
    with write_errors(path):
        try:
            temporary.write_text(text, encoding="utf-8")
            publish(temporary, path)
        except BaseException:
            temporary.unlink(missing_ok=True)
            raise


def write_json_atomic(path: Path, value: Any) -> None:
    """Writes an indented JSON file that readers see whole or not at all. Raises OutputError; ValueError on NaN."""
    text = json.dumps(value, indent=2, ensure_ascii=False, allow_nan=False)
    if not text.isascii() and _SURROGATE.search(text):  # file names that are not UTF-8, as Python has them
        text = json.dumps(value, indent=2, allow_nan=False)
    write_text_atomic(path, text + "\n")

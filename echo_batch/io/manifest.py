"""The manifest of a run directory: which rows are committed, in which part, and what happened to the job so far.

One SQLite file. A row counts as done when, and only when, the transaction that names it and its part has been
committed (WAL, synchronous FULL: it survives a power loss). Knows neither Parquet nor completions.
"""

import json
import sqlite3
from collections.abc import Iterable, Iterator, Sequence
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from echo_batch.errors import ConfigError
from echo_batch.files import write_errors
from echo_batch.request import RowFailure

FORMAT_VERSION = 1
"""Of the tables here and of the columns of the parts."""

JobState = Literal["running", "publishing", "complete"]

# `num_bytes` of a row lets the merge cut the rows into ranges of equal size, however uneven the answers are.
_TABLES = """
CREATE TABLE meta (key TEXT PRIMARY KEY, value TEXT NOT NULL) WITHOUT ROWID;
CREATE TABLE parts (part INTEGER PRIMARY KEY, num_rows INTEGER NOT NULL, num_bytes INTEGER NOT NULL,
    num_input_tokens INTEGER NOT NULL, num_cached_tokens INTEGER NOT NULL, num_generated_tokens INTEGER NOT NULL);
CREATE TABLE rows (row_id INTEGER PRIMARY KEY, part INTEGER NOT NULL, num_bytes INTEGER NOT NULL);
CREATE TABLE failures (row_id INTEGER PRIMARY KEY, code TEXT NOT NULL, message TEXT NOT NULL);
CREATE TABLE in_flight (row_id INTEGER PRIMARY KEY);
CREATE TABLE losses (row_id INTEGER PRIMARY KEY, count INTEGER NOT NULL);
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class PartEntry:
    """What the manifest records of one part. `rows` are (row id, bytes in memory) pairs."""

    rows: Sequence[tuple[int, int]]
    failures: Sequence[tuple[int, RowFailure]]
    num_input_tokens: int
    num_cached_tokens: int
    num_generated_tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Totals:
    """Sums over all committed rows of the job, whichever start wrote them."""

    rows: int = 0
    failed: tuple[tuple[str, int], ...] = ()
    """Error code and number of rows, by code."""
    input_tokens: int = 0
    cached_tokens: int = 0
    generated_tokens: int = 0

    @property
    def failed_rows(self) -> int:
        return sum(count for _, count in self.failed)


class Manifest:
    """An open manifest. One process at a time (the run directory's lock), one thread. Raises OutputError when the
    disk fails and ConfigError when the file is not a manifest of this version."""

    def __init__(self, path: Path) -> None:
        self.path = path
        with write_errors(path):
            self._db = sqlite3.connect(path, isolation_level=None)
        try:
            with write_errors(path):
                self._db.execute("PRAGMA synchronous=FULL")
                found = self._db.execute("SELECT name FROM sqlite_master WHERE name = 'meta'").fetchone() is not None
            self._check_version(found)
        except sqlite3.DatabaseError as error:
            self._db.close()
            raise ConfigError(f"{path} is damaged ({error}); --restart starts the job anew") from error
        except BaseException:
            self._db.close()
            raise

    def _check_version(self, found: bool) -> None:
        version = self.get("format") if found else None
        if found and version != FORMAT_VERSION:
            raise ConfigError(
                f"{self.path} was written by another version of echo-batch (format {version}, this one reads "
                f"{FORMAT_VERSION}); finish the job with that version, or --restart"
            )
        self.exists = found

    def create(self, meta: dict[str, Any]) -> None:
        """Makes the tables and the first entries in one transaction: a manifest is there whole or not at all."""
        with write_errors(self.path):
            self._db.execute("PRAGMA journal_mode=WAL")
            with self._transaction():
                for statement in _TABLES.split(";"):
                    if statement.strip():
                        self._db.execute(statement)
                for key, value in {"format": FORMAT_VERSION, **meta}.items():
                    self._set(key, value)
        self.exists = True

    def reopen_for_writing(self) -> None:
        """Switches a manifest that was closed tidily back to the write-ahead log (a file system without shared memory
        keeps the rollback journal, which is as durable)."""
        with write_errors(self.path):
            self._db.execute("PRAGMA journal_mode=WAL")

    def close(self, *, tidy: bool = False) -> None:
        """Closes the file; `tidy` folds the write-ahead log into it, so that one plain file is left."""
        if tidy:
            with suppress(sqlite3.OperationalError):  # someone reads it just now: the log stays, nothing is lost
                self._db.execute("PRAGMA journal_mode=DELETE")
        with write_errors(self.path):
            self._db.close()

    # --- entries ---------------------------------------------------------------------------------------------------

    def get(self, key: str) -> Any:
        """The value of a meta entry, None when there is none."""
        found = self._db.execute("SELECT value FROM meta WHERE key = ?", (key,)).fetchone()
        return None if found is None else json.loads(found[0])

    def set(self, **entries: Any) -> None:
        """Writes meta entries (JSON values) in one transaction."""
        with write_errors(self.path), self._transaction():
            for key, value in entries.items():
                self._set(key, value)

    # --- committed rows --------------------------------------------------------------------------------------------

    def commit_part(self, part: int, entry: PartEntry) -> None:
        """Commits the rows of a part that lies on disk under its final name. A row that is already committed, or
        twice in the part, is a broken invariant and commits nothing."""
        assert entry.rows, "a part without rows"
        ids = [(row_id,) for row_id, _ in entry.rows]
        totals = (entry.num_input_tokens, entry.num_cached_tokens, entry.num_generated_tokens)
        num_bytes = sum(size for _, size in entry.rows)
        try:
            with write_errors(self.path), self._transaction():
                self._db.execute("INSERT INTO parts VALUES (?,?,?,?,?,?)", (part, len(ids), num_bytes, *totals))
                self._db.executemany("INSERT INTO rows VALUES (?,?,?)", ((row, part, size) for row, size in entry.rows))
                self._db.executemany(
                    "INSERT INTO failures VALUES (?,?,?)", ((row, f.code, f.message) for row, f in entry.failures)
                )
                self._db.executemany("DELETE FROM in_flight WHERE row_id = ?", ids)
                self._db.executemany("DELETE FROM losses WHERE row_id = ?", ids)
                self._set("barren_starts", 0)
        except sqlite3.IntegrityError as error:
            raise AssertionError(f"a row of part {part} is committed already: {error}") from error

    def is_committed(self, row_id: int) -> bool:
        return self._db.execute("SELECT 1 FROM rows WHERE row_id = ?", (row_id,)).fetchone() is not None

    def num_committed(self) -> int:
        return int(self._db.execute("SELECT coalesce(sum(num_rows), 0) FROM parts").fetchone()[0])

    def uncommitted(self, row_ids: Iterable[int]) -> Iterator[int]:
        """Those of `row_ids` without a committed result, in the same order, one look-up each."""
        for row_id in row_ids:
            if not self.is_committed(row_id):
                yield row_id

    def iter_rows(self) -> Iterator[tuple[int, int]]:
        """(row id, bytes) of every committed row, by row id; reads as it goes."""
        with closing(self._db.cursor()) as cursor:
            yield from cursor.execute("SELECT row_id, num_bytes FROM rows ORDER BY row_id")

    def iter_failures(self) -> Iterator[tuple[int, RowFailure]]:
        """Every committed failure by row id; reads as it goes."""
        with closing(self._db.cursor()) as cursor:
            for row_id, code, message in cursor.execute("SELECT * FROM failures ORDER BY row_id"):
                yield row_id, RowFailure(code=code, message=message)

    def parts(self) -> list[int]:
        """The numbers of the committed parts, ascending."""
        return [part for (part,) in self._db.execute("SELECT part FROM parts ORDER BY part")]

    def totals(self) -> Totals:
        """Sums over the committed rows."""
        sums = self._db.execute(
            "SELECT sum(num_rows), sum(num_input_tokens), sum(num_cached_tokens), sum(num_generated_tokens) FROM parts"
        ).fetchone()
        failed = self._db.execute("SELECT code, count(*) FROM failures GROUP BY code ORDER BY code").fetchall()
        rows, prompt, cached, generated = (value or 0 for value in sums)
        return Totals(
            rows=rows, failed=tuple(failed), input_tokens=prompt, cached_tokens=cached, generated_tokens=generated
        )

    # --- rows in flight --------------------------------------------------------------------------------------------

    def mark_in_flight(self, row_ids: Iterable[int]) -> None:
        """Adds rows to those being worked on. Not fsynced: it has to survive the process, not the machine."""
        with write_errors(self.path):
            self._db.execute("PRAGMA synchronous=NORMAL")
            try:
                with self._transaction():
                    self._db.executemany("INSERT OR IGNORE INTO in_flight VALUES (?)", ((row,) for row in row_ids))
            finally:
                self._db.execute("PRAGMA synchronous=FULL")

    def in_flight(self) -> list[int]:
        return [row for (row,) in self._db.execute("SELECT row_id FROM in_flight ORDER BY row_id")]

    def clear_in_flight(self) -> None:
        with write_errors(self.path), self._transaction():
            self._db.execute("DELETE FROM in_flight")

    def count_losses(self, *, at_most: int | None = None) -> None:
        """Adds one loss to every row in flight (not past `at_most`) and clears the rows in flight."""
        with write_errors(self.path), self._transaction():
            self._db.execute(
                "INSERT INTO losses SELECT row_id, 1 FROM in_flight WHERE true "
                "ON CONFLICT (row_id) DO UPDATE SET count = max(count, min(count + 1, ?))",
                (2**62 if at_most is None else at_most,),
            )
            self._db.execute("DELETE FROM in_flight")

    def losses(self) -> dict[int, int]:
        """Losses of every uncommitted row that has met one."""
        return dict(self._db.execute("SELECT row_id, count FROM losses ORDER BY row_id"))

    # ---------------------------------------------------------------------------------------------------------------

    def _set(self, key: str, value: Any) -> None:
        self._db.execute("INSERT OR REPLACE INTO meta VALUES (?,?)", (key, json.dumps(value)))

    @contextmanager
    def _transaction(self) -> Iterator[None]:
        self._db.execute("BEGIN IMMEDIATE")
        try:
            yield
            self._db.execute("COMMIT")
        except BaseException:
            if self._db.in_transaction:
                self._db.execute("ROLLBACK")
            raise

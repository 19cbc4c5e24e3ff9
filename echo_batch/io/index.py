"""The preflight index: one small SQLite row for each input row, so that the order of work can be chosen over the
whole input in bounded memory (at most 64 bytes a row).

It is built once, in row order, by the same RequestBuilder that the run uses, and found again by fingerprint. Knows
token counts, not tokens.
"""

import hashlib
import json
import sqlite3
import sys
from array import array
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing, suppress
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple, Protocol
from urllib.parse import quote

from echo_batch.errors import InputError
from echo_batch.files import fsync_file, publish, temporary_name, write_errors
from echo_batch.io.openai import custom_id
from echo_batch.io.schema import Record
from echo_batch.request import Request, RowFailure

BLOCK_TOKENS = 64
PREFIX_BLOCKS = (1, 8, 64, 512)
"""Lengths, in whole blocks, of the prompt prefixes that are hashed: 64, 512, 4,096 and 32,768 tokens."""
PREFIX_HASH_BYTES = 8

_VERSION = 2
_BATCH_ROWS = 256
_BATCH_CHARACTERS = 2_000_000
_MAX_MESSAGE = 500
_SCHEMA = """
CREATE TABLE meta (key TEXT PRIMARY KEY, value TEXT NOT NULL) WITHOUT ROWID;
CREATE TABLE rows (
    row_id INTEGER PRIMARY KEY, num_tokens INTEGER NOT NULL, max_tokens INTEGER NOT NULL, prefixes BLOB
);
CREATE TABLE errors (row_id INTEGER PRIMARY KEY, code TEXT NOT NULL, message TEXT NOT NULL);
CREATE TABLE work (place INTEGER PRIMARY KEY, row_id INTEGER NOT NULL);
CREATE TABLE seen_ids (hash BLOB PRIMARY KEY) WITHOUT ROWID;
"""


_SELECT = "SELECT row_id, num_tokens, max_tokens, prefixes FROM rows"


def _make_order() -> str:
    """The statement that fills `work`, the good rows in the order of work.

    Rows are grouped by their first block, inside that by their first 8 blocks, and so on: rows with a common prefix
    stand together, the closer the longer it is. At every level groups come longest first by their longest row, then by
    their first row id; a row that shares nothing at a level is a group of its own. SQLite sorts, in temporary files.
    """
    total = "num_tokens + max_tokens"
    columns, order = [], []
    for level in range(len(PREFIX_BLOCKS)):
        # Equal bytes up to here are equal prefixes: each hash also covers what the ones before it cover.
        length = (level + 1) * PREFIX_HASH_BYTES
        group = (
            f"PARTITION BY CASE WHEN length(prefixes) >= {length} THEN substr(prefixes, 1, {length}) ELSE row_id END"
        )
        columns.append(f"max({total}) OVER ({group}) AS longest{level}, min(row_id) OVER ({group}) AS first{level}")
        order.append(f"longest{level} DESC, first{level}")
    return (
        f"INSERT INTO work (row_id) SELECT row_id FROM (SELECT *, {', '.join(columns)} FROM rows)"
        f" ORDER BY {', '.join(order)}, {total} DESC, row_id"
    )


_MAKE_ORDER = _make_order()
_SELECT_IN_ORDER = (
    "SELECT row_id, num_tokens, max_tokens, prefixes FROM work CROSS JOIN rows USING (row_id) ORDER BY place"
)


class _Source(Protocol):
    @property
    def num_rows(self) -> int: ...

    def iter_records(self, start: int = 0) -> Iterator[Record]: ...


class _Builder(Protocol):
    @property
    def is_openai(self) -> bool: ...

    def build_many(self, records: Sequence[Record]) -> list[Request | RowFailure]: ...


class IndexProgress(NamedTuple):
    """How far the preflight is."""

    num_rows: int
    total_rows: int
    num_tokens: int
    num_failed: int


class IndexEntry(NamedTuple):
    """One good row. `prefixes` holds up to four 8-byte hashes of the first 1, 8, 64 and 512 whole blocks of its prompt,
    as many as it has: rows with equal bytes at a place begin with the same tokens."""

    row_id: int
    num_tokens: int
    max_tokens: int
    prefixes: bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class IndexTotals:
    """Sums over the input. Tokens count good rows only; `total` is prompt plus max_tokens of one row."""

    num_rows: int
    num_good: int
    failures: Mapping[str, int]
    prompt_tokens: int
    max_tokens: int
    longest_prompt: int
    longest_total: int
    total_blocks: int
    """Sum of each row's total rounded up to whole blocks of 64 tokens: what the whole input could occupy at once."""
    histogram: tuple[tuple[int, int], ...]
    """(upper bound of the total, a power of two; number of rows at or below it and above the one before)."""


def build_index(
    path: Path, source: _Source, builder: _Builder, *, fingerprint: Mapping[str, Any]
) -> Iterator[IndexProgress]:
    """Build the index at `path`, yielding progress; it is there, whole, when the iterator ends.

    Does nothing if an index with this fingerprint is there already, and goes on where an earlier process with the
    same fingerprint stopped. `fingerprint` must hold all that decides tokens: input, tokenizer, chat template, prompt
    options, sampling, limits. Raises InputError, OutputError.
    """
    wanted = json.dumps({"version": _VERSION, **fingerprint}, sort_keys=True)
    if _is_current(path, wanted):
        return
    temporary = temporary_name(path)
    with write_errors(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        database = _open_unfinished(temporary, wanted)
    with closing(database):
        yield from _fill(database, path, source, builder)
        with write_errors(path):
            database.execute(_MAKE_ORDER)  # begins the transaction: all of this happens or nothing
            database.execute("DROP TABLE seen_ids")
            database.execute("INSERT OR REPLACE INTO meta VALUES ('complete', '1')")
            database.commit()
            if builder.is_openai:
                database.execute("VACUUM")
    with write_errors(path):
        fsync_file(temporary)
        publish(temporary, path)


def load_index(path: Path, source: _Source, builder: _Builder, *, fingerprint: Mapping[str, Any]) -> "RowIndex":
    """`build_index` without progress, opened."""
    for _ in build_index(path, source, builder, fingerprint=fingerprint):
        pass
    return RowIndex(path)


class RowIndex:
    """A finished index, read only."""

    def __init__(self, path: Path) -> None:
        # The run reads it from one thread at a time, not always the one that opened it.
        self._database = sqlite3.connect(f"file:{quote(str(path))}?mode=ro", uri=True, check_same_thread=False)

    def iter_order(self) -> Iterator[int]:
        """Row ids of good rows in the order of work: see `iter_entries`."""
        for entry in self.iter_entries():
            yield entry.row_id

    def iter_entries(self) -> Iterator[IndexEntry]:
        """Good rows in the order of work: those that begin alike together, longest first by prompt plus max_tokens,
        then by row id."""
        for found in self._database.execute(_SELECT_IN_ORDER):
            yield _entry(found)

    def entry(self, row_id: int) -> IndexEntry | None:
        """One row; None when it failed."""
        found = self._database.execute(f"{_SELECT} WHERE row_id = ?", (row_id,)).fetchone()
        return None if found is None else _entry(found)

    def iter_failures(self) -> Iterator[tuple[int, RowFailure]]:
        """Rows that failed before they ran, in row order."""
        for row_id, code, message in self._database.execute("SELECT row_id, code, message FROM errors ORDER BY row_id"):
            yield row_id, RowFailure(code=code, message=message)

    def num_longer_than(self, total_tokens: int) -> int:
        """Good rows whose prompt plus max_tokens is above `total_tokens`."""
        query = "SELECT count(*) FROM rows WHERE num_tokens + max_tokens > ?"
        return int(self._database.execute(query, (total_tokens,)).fetchone()[0])

    def totals(self) -> IndexTotals:
        """Sums over the input."""
        run = self._database.execute
        failures = dict(run("SELECT code, count(*) FROM errors GROUP BY code ORDER BY code").fetchall())
        sums = run(
            "SELECT count(*), total(num_tokens), total(max_tokens), max(num_tokens), max(num_tokens + max_tokens),"
            f" total((num_tokens + max_tokens + {BLOCK_TOKENS - 1}) / {BLOCK_TOKENS}) FROM rows"
        ).fetchone()
        num_good, prompt_tokens, max_tokens, longest_prompt, longest_total, total_blocks = (int(v or 0) for v in sums)
        buckets: dict[int, int] = {}
        bound = 1
        while bound < 2 * longest_total:
            query = "SELECT count(*) FROM rows WHERE num_tokens + max_tokens > ? AND num_tokens + max_tokens <= ?"
            count = int(run(query, (bound // 2, bound)).fetchone()[0])
            if count:
                buckets[bound] = count
            bound *= 2
        return IndexTotals(
            num_rows=num_good + sum(failures.values()),
            num_good=num_good,
            failures=failures,
            prompt_tokens=prompt_tokens,
            max_tokens=max_tokens,
            longest_prompt=longest_prompt,
            longest_total=longest_total,
            total_blocks=total_blocks,
            histogram=tuple(buckets.items()),
        )

    def close(self) -> None:
        self._database.close()


def prefix_hashes(token_ids: Sequence[int]) -> bytes:
    """8-byte hashes of the first 1, 8, 64 and 512 whole blocks of a prompt, as many as it has, one after another."""
    num_tokens = min(len(token_ids), PREFIX_BLOCKS[-1] * BLOCK_TOKENS)
    data = array("i", token_ids[:num_tokens])
    if sys.byteorder == "big":
        data.byteswap()
    view = memoryview(data.tobytes())
    digest = hashlib.blake2b(digest_size=PREFIX_HASH_BYTES)
    hashes, begin = [], 0
    for blocks in PREFIX_BLOCKS:
        end = blocks * BLOCK_TOKENS * data.itemsize
        if end > len(view):
            break
        digest.update(view[begin:end])
        hashes.append(digest.digest())
        begin = end
    return b"".join(hashes)


def _entry(found: tuple[int, int, int, bytes | None]) -> IndexEntry:
    row_id, num_tokens, max_tokens, prefixes = found
    return IndexEntry(row_id, num_tokens, max_tokens, prefixes or b"")


def _fill(database: sqlite3.Connection, path: Path, source: _Source, builder: _Builder) -> Iterator[IndexProgress]:
    run = database.execute
    good, num_tokens, last = run("SELECT count(*), total(num_tokens), max(row_id) FROM rows").fetchone()
    failed, last_failed = run("SELECT count(*), max(row_id) FROM errors").fetchone()
    done = max(-1 if last is None else last, -1 if last_failed is None else last_failed) + 1
    assert done == good + failed, "rows are indexed in order"
    records = source.iter_records(done)
    while batch := _next_batch(records):
        if batch[0].row_id != done or batch[-1].row_id != done + len(batch) - 1:
            raise InputError(f"the input skips from row {done} to {batch[0].row_id}; did it change?")
        results = builder.build_many(batch)
        with write_errors(path):
            for record, result in zip(batch, results):
                if builder.is_openai and not _is_new(database, record):
                    message = f"custom_id {custom_id(record.values)!r} is used by an earlier row"
                    result = RowFailure(code="duplicate_id", message=message)
                if isinstance(result, Request):
                    ids = result.prompt_token_ids
                    values = (record.row_id, len(ids), result.sampling.max_tokens, prefix_hashes(ids) or None)
                    run("INSERT INTO rows VALUES (?, ?, ?, ?)", values)
                    num_tokens += len(ids)
                else:
                    run("INSERT INTO errors VALUES (?, ?, ?)", (record.row_id, result.code, _storable(result.message)))
                    failed += 1
            database.commit()
        done += len(batch)
        yield IndexProgress(done, source.num_rows, int(num_tokens), failed)
    if done != source.num_rows:
        raise InputError(f"the input has {done} rows and had {source.num_rows} when it was opened; did it change?")


def _next_batch(records: Iterator[Record]) -> list[Record]:
    """Records to be tokenized together: many short ones, or a few long ones."""
    batch: list[Record] = []
    characters = 0
    for record in islice(records, _BATCH_ROWS):
        batch.append(record)
        characters += sum(_characters(value) for value in record.values.values())
        if characters >= _BATCH_CHARACTERS:
            break
    return batch


def _characters(value: Any) -> int:
    if isinstance(value, str):
        return len(value)
    if isinstance(value, list):
        return 4 * len(value) if value and isinstance(value[0], int) else sum(map(_characters, value))
    if isinstance(value, dict):
        return sum(map(_characters, value.values()))
    return 0


def _is_new(database: sqlite3.Connection, record: Record) -> bool:
    """Whether this is the first row with its custom_id (rows without one are not compared). 16 bytes are kept of it."""
    name = custom_id(record.values)
    if name is None:
        return True
    digest = hashlib.blake2b(name.encode("utf-8", "surrogatepass"), digest_size=16).digest()
    return database.execute("INSERT OR IGNORE INTO seen_ids VALUES (?)", (digest,)).rowcount == 1


def _storable(message: str) -> str:
    return message[:_MAX_MESSAGE].encode("utf-8", "replace").decode()


def _open_unfinished(path: Path, wanted: str) -> sqlite3.Connection:
    """The database that is being built: an earlier process's, when it was for the same job, else a new one."""
    if path.exists():
        with suppress(sqlite3.DatabaseError):
            database = _connect(path)
            if _meta(database, "fingerprint") == wanted and _meta(database, "complete") is None:
                return database
            database.close()
        path.unlink()
        path.with_name(path.name + "-journal").unlink(missing_ok=True)
    database = _connect(path)
    database.executescript(_SCHEMA)
    database.execute("INSERT INTO meta VALUES ('fingerprint', ?)", (wanted,))
    database.commit()
    return database


def _connect(path: Path) -> sqlite3.Connection:
    database = sqlite3.connect(path)
    # Until it is published a power loss may cost the file; a kill does not, as the journal is still written.
    database.execute("PRAGMA synchronous = OFF")
    return database


def _is_current(path: Path, wanted: str) -> bool:
    if not path.is_file():
        return False
    try:
        with closing(sqlite3.connect(f"file:{quote(str(path))}?mode=ro", uri=True)) as database:
            return _meta(database, "fingerprint") == wanted and _meta(database, "complete") == "1"
    except sqlite3.DatabaseError:
        return False


def _meta(database: sqlite3.Connection, key: str) -> str | None:
    found = database.execute("SELECT value FROM meta WHERE key = ?", (key,)).fetchone()
    return None if found is None else str(found[0])

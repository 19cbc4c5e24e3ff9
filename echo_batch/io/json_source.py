"""JSON Lines, OpenAI Batch lines and JSON arrays as a Source: one scan finds the rows and the schema, then lines are
parsed again where they are needed. Parsing costs little beside tokenizing and holds one row at a time."""

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pyarrow as pa

from echo_batch.errors import InputError, InputMissingError
from echo_batch.files import write_errors, write_json_atomic
from echo_batch.io.json_rows import ColumnTypes, parse_row
from echo_batch.io.lines import Line, OffsetLines, SpooledLines
from echo_batch.io.parquet_rows import BATCH_BYTES, MAX_BATCH_ROWS
from echo_batch.io.paths import InputFile, files_fingerprint
from echo_batch.io.progress import ScanProgress
from echo_batch.io.schema import Record
from echo_batch.request import RowFailure

_VERSION = 1
_PROGRESS_ROWS = 1_000


class JsonSource:
    """See reader.Source. Lines are found by offsets in plain local files, else kept in a spool."""

    def __init__(
        self,
        files: Sequence[InputFile],
        *,
        directory: Path,
        limit: int | None = None,
        temporary: "TemporaryDirectory[str] | None" = None,
    ) -> None:
        self._files = tuple(files)
        self._limit = limit
        self._temporary = temporary
        self._state_path = directory / "input.json"
        in_place = all(f.fs is None and f.compression is None and f.form == "jsonl" for f in files)
        with write_errors(directory):
            directory.mkdir(parents=True, exist_ok=True)
        self._lines: OffsetLines | SpooledLines = (OffsetLines if in_place else SpooledLines)(files, directory)
        self._types = ColumnTypes()
        self._schema: pa.Schema | None = None
        self._is_openai = False
        self._fingerprint: dict[str, Any] | None = None

    def scan(self) -> Iterator[ScanProgress]:
        """See reader.Source."""
        if self._schema is not None or self._load_state():
            return
        total = sum(file.size_bytes for file in self._files)
        num_objects = num_openai = 0
        types = ColumnTypes()
        done_before, last, unsaid = 0, 0, 0
        for line in self._lines.scan(self._limit):
            values = parse_row(line.text)
            if isinstance(values, dict):
                types.observe(values)
                num_objects += 1
                num_openai += "body" in values and ("url" in values or "custom_id" in values)
            if line.stored_bytes < last:  # the next file has begun
                done_before += last
            last = line.stored_bytes
            unsaid += len(line.text)
            if line.row_id % _PROGRESS_ROWS == 0 or unsaid >= BATCH_BYTES:  # a stop is seen here
                unsaid = 0
                yield ScanProgress(line.row_id + 1, min(done_before + last, total), total)
        self._types = types
        self._schema = types.schema()
        # Rows of an OpenAI file may be broken, the first one too: the form is what most rows have.
        self._is_openai = 2 * num_openai > num_objects
        self._save_state()
        yield ScanProgress(self.num_rows, total, total)

    @property
    def schema(self) -> pa.Schema:
        assert self._schema is not None, "scan first"
        return self._schema

    @property
    def num_rows(self) -> int:
        return self._lines.first_rows[-1]

    @property
    def is_openai(self) -> bool:
        return self._is_openai

    def iter_records(self, start: int = 0) -> Iterator[Record]:
        """See reader.Source."""
        return map(_record, self._lines.iter_lines(start))

    def read_records(self, row_ids: Sequence[int]) -> Iterator[Record]:
        """See reader.Source."""
        return map(_record, self._lines.take(row_ids))

    def iter_batches(self) -> Iterator[pa.RecordBatch]:
        """See reader.Source."""
        rows: list[dict[str, Any] | None] = []
        held_bytes = 0
        for line in self._lines.iter_lines(0):
            values = parse_row(line.text)
            rows.append(values if isinstance(values, dict) else None)
            held_bytes += len(line.text)
            if held_bytes >= BATCH_BYTES or len(rows) >= MAX_BATCH_ROWS:
                yield self._types.to_batch(rows)
                rows, held_bytes = [], 0
        if rows:
            yield self._types.to_batch(rows)

    def fingerprint(self) -> dict[str, Any]:
        """See reader.Source."""
        if self._fingerprint is None:
            self._fingerprint = {"files": files_fingerprint(self._files)}
        return self._fingerprint

    def close(self) -> None:
        """Close files and remove what is temporary."""
        self._lines.close()
        if self._temporary is not None:
            self._temporary.cleanup()

    def _state(self) -> dict[str, Any]:
        return {"version": _VERSION, "limit": self._limit, "input": self.fingerprint()}

    def _save_state(self) -> None:
        found = {
            "first_rows": self._lines.first_rows,
            # As ASCII text: names may hold what UTF-8 cannot.
            "kinds": json.dumps(list(self._types.kinds.items())),
            "is_openai": self._is_openai,
        }
        write_json_atomic(self._state_path, self._state() | found)

    def _load_state(self) -> bool:
        """Take up what an earlier process found in the same input, if it is all there."""
        try:
            state = json.loads(self._state_path.read_text(encoding="utf-8"))
            if {key: state.get(key) for key in ("version", "limit", "input")} != self._state():
                return False
            self._lines.load(state["first_rows"])
            self._types = ColumnTypes(dict(json.loads(state["kinds"])))
            self._is_openai = bool(state["is_openai"])
        except (OSError, ValueError, KeyError, TypeError, InputError, InputMissingError):
            return False
        self._schema = self._types.schema()
        return True


def _record(line: Line) -> Record:
    values = parse_row(line.text)
    if isinstance(values, RowFailure):
        failure = RowFailure(code=values.code, message=f"{line.position}: {values.message}")
        return Record(line.row_id, {}, failure, line.position)
    return Record(line.row_id, values, None, line.position)

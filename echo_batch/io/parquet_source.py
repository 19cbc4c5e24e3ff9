"""Parquet files as a Source: read in place when row groups are small and local, else through a spool of the columns
that make prompts."""

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pyarrow as pa

from echo_batch.config import InputConfig
from echo_batch.errors import InputError, InputMissingError
from echo_batch.files import write_errors, write_json_atomic
from echo_batch.io.arrow_types import with_leaves
from echo_batch.io.parquet_rows import MAX_RANDOM_GROUP_BYTES, ParquetRows, to_values
from echo_batch.io.paths import InputFile, files_fingerprint
from echo_batch.io.progress import ScanProgress
from echo_batch.io.schema import Record, check_columns, request_columns
from echo_batch.io.spool import SpoolWriter, spool_file
from echo_batch.request import RowFailure

_VERSION = 1


class ParquetSource:
    """See reader.Source. Records hold only the columns that requests are built from.

    Raises InputError for corrupt files and for a column that `config` names and the files lack.
    """

    is_openai = False

    def __init__(
        self,
        files: Sequence[InputFile],
        *,
        directory: Path,
        config: InputConfig,
        temporary: "TemporaryDirectory[str] | None" = None,
        max_group_bytes: int = MAX_RANDOM_GROUP_BYTES,
    ) -> None:
        self._files = tuple(files)
        self._limit = config.limit
        self._temporary = temporary
        self._max_group_bytes = max_group_bytes
        self._state_path = directory / "input.json"
        self._spool_path = directory / "input.parquet"
        self._rows = ParquetRows(files)
        self._random = self._rows
        check_columns(config, self._rows.schema.names, self.num_rows)
        self._columns = request_columns(config, self._rows.schema.names)
        self._fingerprint: dict[str, Any] | None = None

    def scan(self) -> Iterator[ScanProgress]:
        """See reader.Source. Only inputs that cannot be read at random cheaply are spooled."""
        if self._random is not self._rows or not self._columns:
            return
        is_local = all(file.fs is None for file in self._files)
        if is_local and self._rows.largest_group_bytes(self._columns) <= self._max_group_bytes:
            return
        if self._load_spool():
            return
        total = sum(file.size_bytes for file in self._files)
        with write_errors(self._spool_path):
            self._spool_path.parent.mkdir(parents=True, exist_ok=True)
        done = 0
        schema = pa.schema([self._rows.schema.field(name) for name in self._columns])
        with SpoolWriter(self._spool_path, schema) as writer:
            for batch in self._rows.iter_batches(self._columns):
                batch = batch.slice(0, self.num_rows - done)
                writer.write(batch)
                done += batch.num_rows
                yield ScanProgress(done, total * done // max(self.num_rows, 1), total)
                if done == self.num_rows:
                    break
        write_json_atomic(self._state_path, self._state())
        self._random = ParquetRows([spool_file(self._spool_path)])

    @property
    def schema(self) -> pa.Schema:
        return self._rows.schema

    @property
    def num_rows(self) -> int:
        return self._rows.num_rows if self._limit is None else min(self._limit, self._rows.num_rows)

    def iter_records(self, start: int = 0) -> Iterator[Record]:
        """See reader.Source."""
        row_id = start
        for batch in self._random.iter_batches(self._columns, start):
            for values in to_values(batch.slice(0, self.num_rows - row_id)):
                yield self._record(row_id, values)
                row_id += 1
            if row_id >= self.num_rows:
                return

    def read_records(self, row_ids: Sequence[int]) -> Iterator[Record]:
        """See reader.Source."""
        for row_id, values in zip(row_ids, self._random.take(row_ids, self._columns)):
            yield self._record(row_id, values)

    def iter_batches(self) -> Iterator[pa.RecordBatch]:
        """See reader.Source."""
        left = self.num_rows
        for batch in self._rows.iter_batches(self._rows.schema.names):
            batch = batch.slice(0, left)
            left -= batch.num_rows
            yield _with_valid_text(batch)
            if left == 0:
                return

    def fingerprint(self) -> dict[str, Any]:
        """See reader.Source."""
        if self._fingerprint is None:
            self._fingerprint = {"files": files_fingerprint(self._files)}
        return self._fingerprint

    def close(self) -> None:
        """Close files and remove what is temporary."""
        self._rows.close()
        self._random.close()
        if self._temporary is not None:
            self._temporary.cleanup()

    def _record(self, row_id: int, values: dict[str, Any] | RowFailure) -> Record:
        position = f"row {row_id}"
        if isinstance(values, RowFailure):
            return Record(row_id, {}, RowFailure(code=values.code, message=f"{position}: {values.message}"), position)
        return Record(row_id, values, None, position)

    def _state(self) -> dict[str, Any]:
        return {
            "version": _VERSION,
            "limit": self._limit,
            "columns": self._columns,
            "num_rows": self.num_rows,
            "input": self.fingerprint(),
        }

    def _load_spool(self) -> bool:
        """Take up the spool that an earlier process made of the same input, if it is whole."""
        try:
            if json.loads(self._state_path.read_text(encoding="utf-8")) != self._state():
                return False
            rows = ParquetRows([spool_file(self._spool_path)])
        except (OSError, ValueError, InputError, InputMissingError):
            return False
        if rows.num_rows != self.num_rows:
            return False
        self._random = rows
        return True


def _with_valid_text(batch: pa.RecordBatch) -> pa.RecordBatch:
    """The batch with texts that hold no invalid UTF-8 (it becomes U+FFFD), those in lists, structs and maps too."""
    columns = []
    for column in batch.columns:
        stored_type = with_leaves(column.type, _as_binary)
        if stored_type != column.type:
            try:
                column.validate(full=True)
            except pa.ArrowInvalid:
                values = column.cast(stored_type).to_pylist()
                column = pa.array([_decoded(value, column.type) for value in values], column.type)
        columns.append(column)
    return pa.record_batch(columns, schema=batch.schema) if columns else batch


def _as_binary(kind: pa.DataType) -> pa.DataType:
    if pa.types.is_large_string(kind):
        return pa.large_binary()
    return pa.binary() if pa.types.is_string(kind) else kind


def _decoded(value: Any, kind: pa.DataType) -> Any:
    """A value of `with_leaves(kind, _as_binary)` as one of `kind`."""
    if value is None:
        return None
    if pa.types.is_string(kind) or pa.types.is_large_string(kind):
        return value.decode("utf-8", "replace")
    if pa.types.is_struct(kind):
        return {field.name: _decoded(value[field.name], field.type) for field in kind}
    if pa.types.is_map(kind):
        return [(_decoded(key, kind.key_type), _decoded(item, kind.item_type)) for key, item in value]
    if isinstance(value, list):
        return [_decoded(item, kind.value_type) for item in value]
    return value

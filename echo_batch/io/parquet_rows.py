"""Rows of Parquet files: in order in bounded memory, at random through row groups.

Files are read a batch at a time, columns are never read whole. Knows nothing of prompts.
"""

from array import array
from bisect import bisect_right
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from echo_batch.errors import InputError
from echo_batch.io.paths import InputFile
from echo_batch.request import RowFailure

BATCH_BYTES = 8 * 1024 * 1024
"""About what one batch of rows takes in memory."""
MAX_BATCH_ROWS = 4096
MAX_RANDOM_GROUP_BYTES = 32 * 1024 * 1024
"""Row groups above this are not read at random: each row would cost as much to decode."""
_READ_BUFFER_BYTES = 1024 * 1024
_NUM_OPEN_FILES = 8
_NUM_CACHED_GROUPS = 4
_TAKE_WINDOW = 64


class ParquetRows:
    """Rows of several Parquet files as one sequence, row 0 first.

    `schema` is what all files agree on (columns that a file lacks are null there). Raises InputError for a corrupt
    file, columns of clashing types and columns of the same name.
    """

    def __init__(self, files: Sequence[InputFile]) -> None:
        self._files = tuple(files)
        self._open: OrderedDict[int, pq.ParquetFile] = OrderedDict()
        self._groups: OrderedDict[tuple[int, int, tuple[str, ...]], pa.Table] = OrderedDict()
        # One entry for each row group: its first row and its file; a file's groups are consecutive.
        self._group_start = array("Q")
        self._group_file = array("L")
        self._first_group = array("Q")
        self.num_rows = 0
        schemas: list[pa.Schema] = []
        for i in range(len(self._files)):
            schemas.append(self._read_footer(i))
        self.schema = self._unify(schemas)

    def largest_group_bytes(self, columns: Sequence[str]) -> int:
        """Uncompressed bytes of `columns` in the largest row group."""
        wanted, largest = set(columns), 0
        for i in range(len(self._files)):
            metadata = self._file(i).metadata
            for g in range(metadata.num_row_groups):
                largest = max(largest, _group_bytes(metadata.row_group(g), wanted))
        return largest

    def iter_batches(self, columns: Sequence[str], start: int = 0) -> Iterator[pa.RecordBatch]:
        """Record batches of `columns` in row order from row `start`, each of about BATCH_BYTES."""
        schema = pa.schema([self.schema.field(name) for name in columns])
        for i, file in enumerate(self._files):
            groups = range(self._first_group[i], self._first_group[i + 1])
            groups = range(max(groups.start, bisect_right(self._group_start, start) - 1), groups.stop)
            if not groups:
                continue
            skip = max(0, start - self._group_start[groups.start])
            for batch in self._read_file(i, [g - self._first_group[i] for g in groups], columns):
                if skip >= batch.num_rows:
                    skip -= batch.num_rows
                    continue
                with file.read_errors():
                    yield _conform(batch.slice(skip), schema)
                skip = 0

    def take(self, rows: Sequence[int], columns: Sequence[str]) -> Iterator[dict[str, Any] | RowFailure]:
        """Values of `columns` in each of `rows`, in the order asked.

        Within a window of 64 rows each row group is decoded once; a few decoded groups are kept.
        """
        for begin in range(0, len(rows), _TAKE_WINDOW):
            window = rows[begin : begin + _TAKE_WINDOW]
            found: dict[int, dict[str, Any] | RowFailure] = {}
            for row in sorted(window):
                group = bisect_right(self._group_start, row) - 1
                at = row - self._group_start[group]
                found[row] = to_values(self._group(group, tuple(columns)).slice(at, 1))[0]
            yield from (found[row] for row in window)

    def close(self) -> None:
        self._groups.clear()
        while self._open:
            self._open.popitem()[1].close(force=True)

    def _read_footer(self, i: int) -> pa.Schema:
        file = self._file(i)
        metadata = file.metadata
        self._first_group.append(len(self._group_start))
        for g in range(metadata.num_row_groups):
            self._group_start.append(self.num_rows)
            self._group_file.append(i)
            self.num_rows += metadata.row_group(g).num_rows
        if i == len(self._files) - 1:
            self._first_group.append(len(self._group_start))
        return file.schema_arrow

    def _unify(self, schemas: Sequence[pa.Schema]) -> pa.Schema:
        unified = schemas[0] if schemas else pa.schema([])
        for file, schema in zip(self._files, schemas):
            doubled = sorted({name for name in schema.names if schema.names.count(name) > 1})
            if doubled:
                raise InputError(f"{file.path}: several columns are called {doubled[0]!r}")
            try:
                unified = pa.unify_schemas([unified, schema])
            except pa.ArrowException as error:
                first = self._files[0].path
                raise InputError(f"{first} and {file.path} do not fit together: {str(error)[:300]}") from error
        # Where a file lacks a column there are nulls, whatever the others say of it.
        everywhere = set(unified.names).intersection(*(schema.names for schema in schemas))
        return pa.schema([field if field.name in everywhere else field.with_nullable(True) for field in unified])

    def _file(self, i: int) -> pq.ParquetFile:
        file = self._open.pop(i, None)
        if file is None:
            source = self._files[i]
            with source.read_errors():
                file = pq.ParquetFile(
                    source.path if source.fs is None else source.open(),
                    buffer_size=_READ_BUFFER_BYTES,
                    pre_buffer=False,
                )
            while len(self._open) >= _NUM_OPEN_FILES:
                self._open.popitem(last=False)[1].close(force=True)
        self._open[i] = file
        return file

    def _read_file(self, i: int, groups: list[int], columns: Sequence[str]) -> Iterator[pa.RecordBatch]:
        file = self._file(i)
        present = [name for name in columns if name in file.schema_arrow.names]
        metadata = file.metadata
        num_rows = sum(metadata.row_group(g).num_rows for g in groups)
        num_bytes = sum(_group_bytes(metadata.row_group(g), set(present)) for g in groups)
        rows = max(1, min(MAX_BATCH_ROWS, BATCH_BYTES * num_rows // max(num_bytes, 1)))
        with self._files[i].read_errors():
            batches = file.iter_batches(batch_size=rows, row_groups=groups, columns=present, use_threads=False)
        while True:
            with self._files[i].read_errors():
                batch = next(batches, None)
            if batch is None:
                return
            yield batch

    def _group(self, group: int, columns: tuple[str, ...]) -> pa.Table:
        i = self._group_file[group]
        key = (i, group, columns)
        table = self._groups.pop(key, None)
        if table is None:
            while len(self._groups) >= _NUM_CACHED_GROUPS:
                self._groups.popitem(last=False)
            schema = pa.schema([self.schema.field(name) for name in columns])
            batches = [_conform(b, schema) for b in self._read_file(i, [group - self._first_group[i]], columns)]
            table = pa.Table.from_batches(batches, schema=schema)
        self._groups[key] = table
        return table


def to_values(rows: pa.Table | pa.RecordBatch) -> list[dict[str, Any] | RowFailure]:
    """Rows as Python values. Text that is not valid UTF-8 is repaired with U+FFFD; where that cannot be done (inside
    lists and structs) the row is a failure (`bad_json`) and the others are not."""
    try:
        columns = [_to_list(column) for column in rows.columns]
    except (UnicodeDecodeError, ValueError, OverflowError) as error:
        if rows.num_rows > 1:
            return [to_values(rows.slice(i, 1))[0] for i in range(rows.num_rows)]
        return [RowFailure(code="bad_json", message=f"a value that cannot be read: {str(error)[:200]}")]
    names = rows.schema.names
    return [dict(zip(names, values)) for values in zip(*columns)] if names else [{} for _ in range(rows.num_rows)]


def _to_list(column: pa.Array | pa.ChunkedArray) -> list[Any]:
    kind = column.type
    if pa.types.is_string(kind) or pa.types.is_large_string(kind):
        try:
            return column.to_pylist()
        except UnicodeDecodeError:
            return [
                v if v is None else v.decode("utf-8", "replace") for v in column.cast(pa.large_binary()).to_pylist()
            ]
    if (pa.types.is_list(kind) or pa.types.is_large_list(kind)) and pa.types.is_integer(kind.value_type):
        # Token lists: to_pylist would build a scalar for each of their many integers.
        values = (scalar.values for scalar in column)
        return [v if v is None else v.to_pylist() if v.null_count else v.to_numpy().tolist() for v in values]
    return column.to_pylist()


def _group_bytes(group: Any, columns: set[str]) -> int:
    chunks = (group.column(c) for c in range(group.num_columns))
    return sum(c.total_uncompressed_size for c in chunks if c.path_in_schema.split(".")[0] in columns)


def _conform(batch: pa.RecordBatch, schema: pa.Schema) -> pa.RecordBatch:
    """The batch with exactly the columns and types of `schema`; columns that its file lacks are null."""
    names = batch.schema.names
    arrays = [
        batch.column(names.index(field.name)).cast(field.type)
        if field.name in names
        else pa.nulls(batch.num_rows, field.type)
        for field in schema
    ]
    if not arrays:
        return pa.RecordBatch.from_struct_array(pa.array([{}] * batch.num_rows, pa.struct([])))
    return pa.record_batch(arrays, schema=schema)

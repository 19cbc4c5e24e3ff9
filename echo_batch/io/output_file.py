"""The final output file, from joined tables: Parquet, JSON Lines or OpenAI lines, whole or not at all."""

import base64
import json
import math
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from datetime import date, datetime, time, timedelta
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from echo_batch.files import temporary_name, write_errors
from echo_batch.io.arrow_types import with_leaves
from echo_batch.io.json_rows import JSON_TEXT
from echo_batch.io.merge import (
    DEFAULT_RANGE_BYTES,
    InputTable,
    join_results,
    plan_ranges,
    read_ranges,
    regroup,
    spill,
)
from echo_batch.io.openai_output import OpenAIOutput
from echo_batch.io.output_schema import ResultColumns, output_schema
from echo_batch.io.ownership import METADATA_KEY, OutputFormat
from echo_batch.io.run_dir import RunDirectory

ROW_GROUP_BYTES = 64 * 1024 * 1024
ROW_GROUP_ROWS = 65_536
_JSON_CHUNK_BYTES = 4 * 1024 * 1024
_JSON_CHUNK_ROWS = 1024


def write_output(
    run: RunDirectory,
    source: InputTable,
    *,
    num_rows: int,
    columns: ResultColumns,
    form: OutputFormat,
    versions: Mapping[str, str],
    openai: OpenAIOutput | None = None,
    limited: bool = False,
    range_bytes: int = DEFAULT_RANGE_BYTES,
) -> Iterator[int]:
    """Merges the parts with the input into the output file and marks the job complete.

    A generator: it yields the number of rows written so far, and the file appears when it is exhausted. `limited`:
    the input may have more rows than `num_rows` (--limit). `openai` is needed for that form.
    Raises OutputError (73) when the disk fails, EchoBatchError when a row has no result or the input has changed.
    """
    ranges = plan_ranges(run.manifest, num_rows, range_bytes=range_bytes)
    for _ in spill(run, ranges, columns.schema, range_bytes=range_bytes):
        yield 0
    schema = output_schema(source.schema, columns.schema)
    results = read_ranges(run.merge_dir, ranges)
    tables = join_results(source, results, schema, num_rows, limited=limited)
    temporary = temporary_name(run.output)
    try:
        if form == "parquet":
            metadata = {"run_id": run.run_id, "fingerprint": run.fingerprint, "versions": dict(versions)}
            yield from _write_parquet(temporary, tables, schema, metadata)
        elif form == "jsonl":
            yield from _write_lines(temporary, tables, schema, None, source.schema)
        else:
            assert openai is not None
            yield from _write_lines(temporary, tables, schema, openai, source.schema)
        run.publish_output(temporary)
        shutil.rmtree(run.merge_dir, ignore_errors=True)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


def _write_parquet(
    path: Path, tables: Iterator[pa.Table], schema: pa.Schema, metadata: dict[str, Any]
) -> Iterator[int]:
    storable = pa.schema([field.with_type(_parquet_type(field.type)) for field in schema])
    storable = storable.with_metadata({METADATA_KEY: json.dumps(metadata).encode()})
    done = 0
    with _open_parquet(path, storable) as writer:
        for table in regroup(tables, max_bytes=ROW_GROUP_BYTES, max_rows=ROW_GROUP_ROWS):
            group = _as_schema(table, storable)
            with write_errors(path):  # not around the loop: reading the input can fail too
                writer.write_table(group, row_group_size=group.num_rows)
            done += group.num_rows
            yield done


@contextmanager
def _open_parquet(path: Path, schema: pa.Schema) -> Iterator[pq.ParquetWriter]:
    with write_errors(path):
        writer = pq.ParquetWriter(path, schema, compression="zstd")
    try:
        yield writer
    except BaseException:
        with suppress(Exception):  # the first error counts
            writer.close()
        raise
    with write_errors(path):
        writer.close()


def _write_lines(
    path: Path,
    tables: Iterator[pa.Table],
    schema: pa.Schema,
    openai: OpenAIOutput | None,
    input_schema: pa.Schema,
) -> Iterator[int]:
    readable = pa.schema([field.with_type(_json_type(field.type)) for field in schema])
    num_inputs = len(input_schema)
    json_columns = [field.name for field in schema if (field.metadata or {}).items() >= JSON_TEXT.items()]
    done = 0
    with write_errors(path):
        path.write_bytes(b"")
    for table in regroup(tables, max_bytes=_JSON_CHUNK_BYTES, max_rows=_JSON_CHUNK_ROWS):
        lines = []
        for row in _as_schema(table, readable).to_pylist():
            row |= {name: _parsed(row[name]) for name in json_columns}
            if openai is not None:
                values = list(row.values())
                inputs = dict(zip(input_schema.names, values[:num_inputs], strict=True))
                row = openai.line(inputs, dict(zip(schema.names[num_inputs:], values[num_inputs:], strict=True)))
            lines.append(_dumps(row) + "\n")
        with write_errors(path), path.open("a", encoding="utf-8") as file:
            file.writelines(lines)
        done += table.num_rows
        yield done


def _parsed(text: str | None) -> Any:
    """The value that a column of JSON text holds: objects come out of JSON Lines as they went in."""
    try:
        return None if text is None else json.loads(text)
    except (ValueError, RecursionError):
        return text


def _as_schema(table: pa.Table, schema: pa.Schema) -> pa.Table:
    """The table in types that the output's form can hold; values that no cast can carry are written as JSON text."""
    columns = []
    for column, field in zip(table.columns, schema, strict=True):
        if column.type != field.type:
            if pa.types.is_string(field.type) and pa.types.is_nested(column.type):
                column = pa.chunked_array([pa.array(_json_texts(column), pa.string())])
            else:
                column = _cast(column, field.type)
        columns.append(column)
    return pa.Table.from_arrays(columns, schema=schema)


def _cast(column: pa.ChunkedArray, kind: pa.DataType) -> pa.ChunkedArray:
    try:
        return column.cast(kind)
    except pa.ArrowInvalid:  # a time zone that this machine does not know (containers often have none): in UTC
        return column.cast(_in_utc(column.type)).cast(kind)


def _json_texts(column: pa.ChunkedArray) -> list[str | None]:
    return [None if value is None else _dumps(value) for value in column.to_pylist()]


def _parquet_type(kind: pa.DataType) -> pa.DataType:
    """Parquet has no struct without fields: a column with one inside becomes JSON text."""
    return pa.string() if _any_type(kind, lambda t: pa.types.is_struct(t) and t.num_fields == 0) else kind


def _json_type(kind: pa.DataType) -> pa.DataType:
    """Times as ISO text: Python has no nanoseconds, so that Arrow would refuse to hand them out."""

    def readable(leaf: pa.DataType) -> pa.DataType:
        if pa.types.is_temporal(leaf):
            return pa.int64() if pa.types.is_duration(leaf) else pa.string()
        return _json_type(leaf.value_type) if pa.types.is_dictionary(leaf) else leaf

    return with_leaves(kind, readable)


def _in_utc(kind: pa.DataType) -> pa.DataType:
    def in_utc(leaf: pa.DataType) -> pa.DataType:
        is_zoned = pa.types.is_timestamp(leaf) and leaf.tz is not None
        return pa.timestamp(leaf.unit, "+00:00") if is_zoned else leaf

    return with_leaves(kind, in_utc)


def _any_type(kind: pa.DataType, test: Any) -> bool:
    if test(kind):
        return True
    return any(_any_type(kind.field(i).type, test) for i in range(kind.num_fields))


def _dumps(value: Any) -> str:
    try:
        return json.dumps(value, ensure_ascii=False, allow_nan=False, default=_json_value)
    except ValueError:  # NaN or an infinity somewhere: null, as everyone does
        return json.dumps(_without_nan(value), ensure_ascii=False, default=_json_value)


def _json_value(value: Any) -> Any:
    if isinstance(value, bytes):
        return base64.b64encode(value).decode("ascii")
    if isinstance(value, datetime | date | time):
        return value.isoformat()
    if isinstance(value, timedelta):
        return value.total_seconds()
    return str(value)


def _without_nan(value: Any) -> Any:
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {key: _without_nan(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_without_nan(item) for item in value]
    return value

"""From parts in any order to results in row order, and their join with the input: bounded memory whatever the sizes.

The rows are cut into ranges of about equal bytes (the manifest knows each row's). One pass over the parts deals every
result to the file of its range; then the ranges are read one after the other, sorted, and laid beside the input.
Every row has exactly one result or the merge fails. Knows no output form.
"""

import shutil
from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, Protocol

import pyarrow as pa
import pyarrow.parquet as pq

from echo_batch.errors import ConfigError, EchoBatchError
from echo_batch.files import write_errors
from echo_batch.io.manifest import Manifest
from echo_batch.io.run_dir import RunDirectory

DEFAULT_RANGE_BYTES = 64 * 1024 * 1024
_MAX_RANGE_ROWS = 262_144


class InputTable(Protocol):
    """What the merge needs of the input (`reader.Source` is one): all columns of every row, in row order."""

    @property
    def schema(self) -> Any: ...

    def iter_batches(self) -> Iterator[Any]: ...


def plan_ranges(manifest: Manifest, num_rows: int, *, range_bytes: int = DEFAULT_RANGE_BYTES) -> list[int]:
    """Where the ranges of rows begin, and at the end num_rows: [0, 120, 260, 300].

    A range holds at most `range_bytes` of results, or one row. Raises EchoBatchError when a row of 0..num_rows-1 has
    no committed result, or there are results of others.
    """
    starts = [0]
    size = 0
    expected = 0
    for row_id, num_bytes in manifest.iter_rows():
        if row_id != expected:
            break
        if row_id > starts[-1] and (size + num_bytes > range_bytes or row_id - starts[-1] >= _MAX_RANGE_ROWS):
            starts.append(row_id)
            size = 0
        size += num_bytes
        expected += 1
    committed = manifest.num_committed()
    if expected < num_rows:
        raise EchoBatchError(f"row {expected} of {num_rows} has no result ({committed} rows are committed)")
    if committed != num_rows:
        raise EchoBatchError(f"{committed} rows are committed and the input has {num_rows}")
    return [*starts, num_rows] if num_rows else [0]


def spill(
    run: RunDirectory, ranges: list[int], schema: pa.Schema, *, range_bytes: int = DEFAULT_RANGE_BYTES
) -> Iterator[None]:
    """Deals the results of all parts to one file per range in the run directory's merge/; yields after each part.

    Parts are taken together up to `range_bytes`, so that a range's file is made of few pieces however small the parts
    are. Files are opened for one piece at a time: there may be more ranges than descriptors. Raises OutputError, and
    ConfigError for a damaged part.
    """
    with write_errors(run.merge_dir):
        if run.merge_dir.exists():
            shutil.rmtree(run.merge_dir)
        run.merge_dir.mkdir()
        held: list[pa.Table] = []
        held_bytes = 0
        for part in run.manifest.parts():
            table = _read_part(run.part_path(part), schema)
            held.append(table)
            held_bytes += table.nbytes
            if held_bytes >= range_bytes:
                _deal(pa.concat_tables(held), ranges, run.merge_dir)
                held, held_bytes = [], 0
            yield
        if held:
            _deal(pa.concat_tables(held), ranges, run.merge_dir)


def read_ranges(merge_dir: Path, ranges: list[int]) -> Iterator[pa.Table]:
    """The results in row order, one table per range. Raises EchoBatchError when a row is missing or there twice."""
    for index, (low, high) in enumerate(zip(ranges, ranges[1:])):
        path = _range_path(merge_dir, index)
        pieces = []
        with pa.OSFile(str(path), "rb") as file:
            while file.tell() < file.size():
                with pa.ipc.open_stream(file) as stream:
                    pieces.append(stream.read_all())
        path.unlink()
        table = pa.concat_tables(pieces).combine_chunks().sort_by("row_id")
        if table["row_id"].to_pylist() != list(range(low, high)):
            raise EchoBatchError(f"the parts do not hold each of the rows {low} to {high - 1} once")
        yield table


def join_results(
    source: InputTable, results: Iterable[pa.Table], schema: pa.Schema, num_rows: int, *, limited: bool = False
) -> Iterator[pa.Table]:
    """Lays the results (in row order) beside the input's columns: tables of `schema`, in row order.

    With `limited` the input may have more rows than num_rows. Raises EchoBatchError when their numbers differ.
    """
    if not source.schema.names:
        # No row could be read. Arrow forgets the number of rows of batches without columns.
        yield from results
        return
    tables = iter(results)
    current = schema.empty_table().select(range(len(source.schema), len(schema)))
    done = 0
    for batch in source.iter_batches():
        room = num_rows - done
        if batch.num_rows > room and not limited:
            raise EchoBatchError(f"the input has more rows than the {num_rows} it had at the start; did it change?")
        inputs = pa.Table.from_batches([batch.slice(0, room)]).cast(source.schema)
        offset = 0
        while offset < inputs.num_rows:
            if current.num_rows == 0:
                current = next(tables)
            n = min(inputs.num_rows - offset, current.num_rows)
            columns = inputs.slice(offset, n).columns + current.slice(0, n).columns
            yield pa.Table.from_arrays(columns, schema=schema)
            current = current.slice(n)
            offset += n
        done += inputs.num_rows
        if limited and done == num_rows:
            break
    if done != num_rows:
        raise EchoBatchError(f"the input has {done} rows now and had {num_rows} at the start; did it change?")
    assert current.num_rows == 0 and next(tables, None) is None, "results without an input row"


def regroup(tables: Iterable[pa.Table], *, max_bytes: int, max_rows: int) -> Iterator[pa.Table]:
    """The same rows in tables of at most `max_rows` rows and about `max_bytes`, filled up before one is given out."""
    held: list[pa.Table] = []
    held_bytes = held_rows = 0
    for table in tables:
        while table.num_rows:
            row_bytes = max(1, table.nbytes // table.num_rows)
            room = min(max_rows - held_rows, (max_bytes - held_bytes) // row_bytes)
            if not held:
                room = max(1, room)
            if room > 0:
                head = table.slice(0, room)
                table = table.slice(room)
                held.append(head)
                held_rows += head.num_rows
                held_bytes += head.nbytes
            if table.num_rows:  # full
                yield pa.concat_tables(held)
                held, held_bytes, held_rows = [], 0, 0
    if held:
        yield pa.concat_tables(held)


def _read_part(path: Path, schema: pa.Schema) -> pa.Table:
    try:
        with pq.ParquetFile(path) as file:
            return file.read().select(schema.names)
    except (OSError, pa.ArrowException) as error:
        raise ConfigError(f"{path} is damaged ({str(error)[:200]}); --restart starts the job anew") from error


def _deal(table: pa.Table, ranges: list[int], merge_dir: Path) -> None:
    """Appends each range's rows to its file, as one Arrow stream."""
    table = table.sort_by("row_id")
    row_ids = table["row_id"].to_pylist()
    options = pa.ipc.IpcWriteOptions(compression="lz4")
    low = 0
    while low < len(row_ids):
        index = bisect_right(ranges, row_ids[low]) - 1
        high = bisect_left(row_ids, ranges[index + 1], lo=low)
        assert high > low, (row_ids[low], ranges)
        with _range_path(merge_dir, index).open("ab") as file:
            with pa.ipc.new_stream(file, table.schema, options=options) as stream:
                stream.write_table(table.slice(low, high - low))
        low = high


def _range_path(merge_dir: Path, index: int) -> Path:
    return merge_dir / f"range-{index:06d}.arrows"

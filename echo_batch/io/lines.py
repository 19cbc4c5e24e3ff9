"""Stored lines of JSON: where each row's line stands, so that it can be read again by its row id.

Plain local files are read in place through an array of offsets (8 bytes a row, memory-mapped); everything else is
read once and kept in a spool. Both give (row id, line, where it stands). Knows nothing of what a line says.
"""

import mmap
from array import array
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import BinaryIO, NamedTuple

import ijson
import pyarrow as pa

from echo_batch.errors import InputError
from echo_batch.files import publish, temporary_name, write_errors
from echo_batch.io.json_rows import MAX_ROW_BYTES, dump_row
from echo_batch.io.parquet_rows import ParquetRows
from echo_batch.io.paths import InputFile, stored_bytes_read
from echo_batch.io.spool import SpoolWriter, spool_file
from echo_batch.request import RowFailure

SPOOL_SCHEMA = pa.schema([("line", pa.large_binary()), ("position", pa.string())])
_OFFSETS_HELD = 65_536
_SPOOL_BATCH_BYTES = 8 * 1024 * 1024
_NUM_OPEN_FILES = 8
_RANDOM_BUFFER_BYTES = 64 * 1024
_BOM = b"\xef\xbb\xbf"
_END = object()


class Line(NamedTuple):
    """One row as text. `stored_bytes` counts what has been read of its file so far (0 when read again)."""

    row_id: int
    text: bytes
    position: str
    stored_bytes: int = 0


class OffsetLines:
    """Lines of plain local JSON Lines files, found by their offsets."""

    def __init__(self, files: Sequence[InputFile], directory: Path) -> None:
        self._files = tuple(files)
        self._path = directory / "input.offsets"
        self._first_row = [0]
        self._map: mmap.mmap | None = None
        self._offsets: memoryview | None = None
        self._open: dict[int, BinaryIO] = {}

    @property
    def first_rows(self) -> list[int]:
        """First row id of each file, then the number of rows."""
        return self._first_row

    def scan(self, limit: int | None) -> Iterator[Line]:
        """Read all lines (at most `limit`) and write the offsets; they are in place when the iterator ends."""
        temporary = temporary_name(self._path)
        held, num_rows, first_row = array("Q"), 0, [0]
        # Closing the file writes what is buffered, so it is inside; reading turns its errors into InputError itself.
        with write_errors(self._path), temporary.open("wb") as out:
            for i, file in enumerate(self._files):
                for offset, text, stored in _iter_file(file):
                    if num_rows == limit:
                        break
                    held.append(offset)
                    if len(held) == _OFFSETS_HELD:
                        held.tofile(out)
                        held = array("Q")
                    yield Line(num_rows, text, self._position(i, offset), stored)
                    num_rows += 1
                first_row.append(num_rows)
            held.tofile(out)
        with write_errors(self._path):
            publish(temporary, self._path)
        self.load(first_row)

    def load(self, first_rows: Sequence[int]) -> None:
        """Use the offsets of an earlier scan. Raises FileNotFoundError or ValueError when they are not whole."""
        self.close()
        self._first_row = list(first_rows)
        num_rows = self._first_row[-1]
        if self._path.stat().st_size != 8 * num_rows:
            raise ValueError(f"{self._path} is not whole")
        if num_rows:
            with self._path.open("rb") as file:
                self._map = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
            self._offsets = memoryview(self._map).cast("Q")

    def iter_lines(self, start: int) -> Iterator[Line]:
        """All lines in row order from row `start`."""
        num_rows = self._first_row[-1]
        if start >= num_rows:
            return
        assert self._offsets is not None
        row_id = start
        first = bisect_right(self._first_row, start) - 1
        for i in range(first, len(self._files)):
            if self._first_row[i] == self._first_row[i + 1]:
                continue
            for offset, text, _ in _iter_file(self._files[i], self._offsets[row_id]):
                if row_id == self._first_row[i + 1]:
                    break
                if offset != self._offsets[row_id]:
                    raise InputError(f"{self._files[i].path} has changed since it was read first")
                yield Line(row_id, text, self._position(i, offset))
                row_id += 1
            if row_id != self._first_row[i + 1]:
                raise InputError(f"{self._files[i].path} has changed since it was read first")

    def take(self, row_ids: Sequence[int]) -> Iterator[Line]:
        """The lines of these rows, in the order asked."""
        for row_id in row_ids:
            assert self._offsets is not None
            i = bisect_right(self._first_row, row_id) - 1
            offset = self._offsets[row_id]
            with self._files[i].read_errors():
                stream = self._open.get(i)
                if stream is None:
                    if len(self._open) >= _NUM_OPEN_FILES:
                        self._open.pop(next(iter(self._open))).close()
                    stream = self._open[i] = self._files[i].open(buffer_bytes=_RANDOM_BUFFER_BYTES)
                stream.seek(offset)
                text = stream.readline(MAX_ROW_BYTES + 1)
            yield Line(row_id, text, self._position(i, offset))

    def close(self) -> None:
        for stream in self._open.values():
            stream.close()
        self._open.clear()
        if self._offsets is not None:
            self._offsets.release()
        if self._map is not None:
            self._map.close()
        self._offsets = self._map = None

    def _position(self, i: int, offset: int) -> str:
        return f"{self._files[i].name}, byte {offset}"


class SpooledLines:
    """Lines of compressed or remote JSON Lines, or elements of JSON arrays, copied once into a Parquet spool."""

    def __init__(self, files: Sequence[InputFile], directory: Path) -> None:
        self._files = tuple(files)
        self._path = directory / "input.parquet"
        self._first_row = [0]
        self._rows: ParquetRows | None = None

    @property
    def first_rows(self) -> list[int]:
        """First row id of each file, then the number of rows."""
        return self._first_row

    def scan(self, limit: int | None) -> Iterator[Line]:
        """Read all lines (at most `limit`) and write the spool; it is in place when the iterator ends."""
        first_row, num_rows = [0], 0
        texts: list[bytes] = []
        positions: list[str] = []
        held_bytes = 0
        with SpoolWriter(self._path, SPOOL_SCHEMA) as writer:
            for file in self._files:
                for text, position, stored in _iter_any(file):
                    if num_rows == limit:
                        break
                    texts.append(text)
                    positions.append(position)
                    held_bytes += len(text)
                    if held_bytes >= _SPOOL_BATCH_BYTES:
                        writer.write(pa.record_batch([texts, positions], schema=SPOOL_SCHEMA))
                        texts, positions, held_bytes = [], [], 0
                    yield Line(num_rows, text, position, stored)
                    num_rows += 1
                first_row.append(num_rows)
            writer.write(pa.record_batch([texts, positions], schema=SPOOL_SCHEMA))
        self.load(first_row)

    def load(self, first_rows: Sequence[int]) -> None:
        """Use the spool of an earlier scan. Raises InputMissingError, InputError or ValueError when it is not whole."""
        self.close()
        self._first_row = list(first_rows)
        self._rows = ParquetRows([spool_file(self._path)])
        if self._rows.num_rows != self._first_row[-1]:
            raise ValueError(f"{self._path} is not whole")

    def iter_lines(self, start: int) -> Iterator[Line]:
        """All lines in row order from row `start`."""
        assert self._rows is not None
        row_id = start
        for batch in self._rows.iter_batches(SPOOL_SCHEMA.names, start):
            for text, position in zip(batch.column(0).to_pylist(), batch.column(1).to_pylist()):
                yield Line(row_id, text, position)
                row_id += 1

    def take(self, row_ids: Sequence[int]) -> Iterator[Line]:
        """The lines of these rows, in the order asked."""
        assert self._rows is not None
        for row_id, values in zip(row_ids, self._rows.take(row_ids, SPOOL_SCHEMA.names)):
            assert not isinstance(values, RowFailure), values
            yield Line(row_id, values["line"], values["position"])

    def close(self) -> None:
        if self._rows is not None:
            self._rows.close()
            self._rows = None


def _iter_any(file: InputFile) -> Iterator[tuple[bytes, str, int]]:
    if file.form == "array":
        yield from _iter_array(file)
    else:
        for offset, text, stored in _iter_file(file):
            yield text, f"{file.name}, byte {offset}", stored


def _iter_file(file: InputFile, start: int = 0) -> Iterator[tuple[int, bytes, int]]:
    """(offset, line, stored bytes read) of every line that is not blank.

    A line above MAX_ROW_BYTES is cut there, one byte too long, which is how `parse_row` knows it.
    """
    with file.open_text() as stream:
        if start:
            stream.seek(start)
        offset = start
        while True:
            with file.read_errors():
                line = stream.readline(MAX_ROW_BYTES + 1)
                begin, offset = offset, offset + len(line)
                rest = line
                while len(rest) > MAX_ROW_BYTES and not rest.endswith(b"\n"):
                    rest = stream.readline(MAX_ROW_BYTES + 1)
                    offset += len(rest)
                stored = stored_bytes_read(stream)
            if not line:
                return
            if not line.isspace() and (begin > 0 or line.removeprefix(_BOM).strip()):
                yield begin, line, stored


def _iter_array(file: InputFile) -> Iterator[tuple[bytes, str, int]]:
    """(element as one line of JSON, position, stored bytes read) of every element of the array."""
    with file.open_text() as stream:
        index = 0
        with file.read_errors():
            _skip_bom(stream)
            elements = ijson.items(stream, "item")
        while True:
            try:
                with file.read_errors():
                    element = next(elements, _END)
            except ijson.JSONError as error:
                message = str(error).strip().splitlines()[0]
                raise InputError(f"{file.path}: broken JSON array after element {index}: {message}") from error
            if element is _END:
                return
            yield dump_row(element), f"{file.name}, element {index}", stored_bytes_read(stream)
            index += 1


def _skip_bom(stream: BinaryIO) -> None:
    peek = getattr(stream, "peek", None)
    if peek is not None and peek(3)[:3] == _BOM:
        stream.read(3)

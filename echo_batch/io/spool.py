"""Spools: copies of an input in the run directory that can be read at random, as Parquet of small row groups."""

import os
from contextlib import AbstractContextManager
from pathlib import Path
from types import TracebackType

import pyarrow as pa
import pyarrow.parquet as pq

from echo_batch.files import publish, temporary_name, write_errors
from echo_batch.io.paths import InputFile

GROUP_BYTES = 2 * 1024 * 1024


class SpoolWriter(AbstractContextManager["SpoolWriter"]):
    """Writes a Parquet file of row groups of about 2 MiB, so that single rows can be read cheaply.

    The file appears under its name only when the `with` block ends without an error. Raises OutputError.
    """

    def __init__(self, path: Path, schema: pa.Schema) -> None:
        self._path = path
        self._temporary = temporary_name(path)
        self._schema = schema
        self._pending: list[pa.RecordBatch] = []
        self._pending_bytes = 0
        with write_errors(path):
            path.parent.mkdir(parents=True, exist_ok=True)
            self._writer = pq.ParquetWriter(
                self._temporary, schema, compression="zstd", compression_level=1, use_dictionary=False
            )

    def write(self, batch: pa.RecordBatch) -> None:
        """Append rows."""
        rows = max(1, GROUP_BYTES * batch.num_rows // max(batch.nbytes, 1))
        for begin in range(0, batch.num_rows, rows):
            part = batch.slice(begin, rows)
            if self._pending_bytes + part.nbytes > GROUP_BYTES:
                self._flush()
            self._pending.append(part)
            self._pending_bytes += part.nbytes

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        with write_errors(self._path):
            if kind is None:
                self._flush()
            self._writer.close()
            if kind is None:
                publish(self._temporary, self._path)
            else:
                self._temporary.unlink(missing_ok=True)

    def _flush(self) -> None:
        if self._pending:
            with write_errors(self._path):
                self._writer.write_table(pa.Table.from_batches(self._pending, schema=self._schema))
            self._pending, self._pending_bytes = [], 0


def spool_file(path: Path) -> InputFile:
    """A spool as an input file."""
    return InputFile(str(path), os.path.getsize(path), "parquet", None)

"""The input as rows: Parquet, JSON Lines (also OpenAI Batch), one JSON array; local, remote, compressed.

`open_source` gives a Source; memory stays bounded whatever the size of the input. Knows files and rows, not prompts.
"""

import tempfile
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, Protocol

import pyarrow as pa

from echo_batch.config import InputConfig
from echo_batch.io.json_source import JsonSource
from echo_batch.io.parquet_source import ParquetSource
from echo_batch.io.paths import resolve_inputs
from echo_batch.io.progress import ScanProgress
from echo_batch.io.schema import Record


class Source(Protocol):
    """An input of any form. Rows are 0 .. num_rows-1 over all files sorted by path."""

    def scan(self) -> Iterator[ScanProgress]:
        """Prepare random access and (for JSON) find the schema; must be drained before anything else is used.

        What it writes to the spool directory is found again by the next process with the same input.
        """
        ...

    @property
    def schema(self) -> pa.Schema:
        """Arrow schema of all input columns."""
        ...

    @property
    def num_rows(self) -> int: ...

    @property
    def is_openai(self) -> bool:
        """Whether rows are requests of the OpenAI Batch form (custom_id, method, url, body)."""
        ...

    def iter_records(self, start: int = 0) -> Iterator[Record]:
        """Records in row order from row `start`."""
        ...

    def read_records(self, row_ids: Sequence[int]) -> Iterator[Record]:
        """Records of these rows, in the order asked; cheapest when neighbours stand together."""
        ...

    def iter_batches(self) -> Iterator[pa.RecordBatch]:
        """All input columns of all rows, in row order, as batches of `schema`; bad rows are all nulls."""
        ...

    def fingerprint(self) -> dict[str, Any]:
        """What identifies the content: names, sizes and sampled hashes of the files (paths.files_fingerprint)."""
        ...

    def close(self) -> None: ...


def open_source(
    paths: Sequence[str],
    *,
    spool_dir: Path | None,
    config: InputConfig | None = None,
    exclude: Iterable[str] = (),
    scan: bool = True,
) -> Source:
    """Open an input.

    `spool_dir` is where copies and offsets are kept (the run directory); None uses a temporary directory that `close`
    removes. `config` says which columns make prompts and how many rows to read (`limit`). `exclude` names local files
    that are never input (the output). With `scan` False the caller drains `Source.scan` itself, to show progress.
    Raises InputMissingError (66), InputError (65), ConfigError (a bad template), OutputError (spool not writable).
    """
    config = config or InputConfig()
    files = resolve_inputs(paths, exclude=exclude)
    temporary = None
    if spool_dir is None:
        temporary = tempfile.TemporaryDirectory(prefix="echo-batch-")
        spool_dir = Path(temporary.name)
    source: Source
    if files[0].form == "parquet":
        source = ParquetSource(files, directory=spool_dir, config=config, temporary=temporary)
    else:
        source = JsonSource(files, directory=spool_dir, limit=config.limit, temporary=temporary)
    if scan:
        for _ in source.scan():
            pass
    return source

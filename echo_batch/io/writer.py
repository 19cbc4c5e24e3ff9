"""PartWriter: completions, as they come, to parts on disk and rows in the manifest. Knows no input and no order.

A part is written under a hidden name, fsynced and renamed; then one transaction commits its rows. Killed before that
transaction, the part is as good as absent and its rows are done again; after it, they are never done again.
"""

import time
from collections.abc import Callable, Iterable
from types import TracebackType

import pyarrow.parquet as pq

from echo_batch.files import fsync_dir, publish, temporary_name, write_errors
from echo_batch.io.manifest import PartEntry
from echo_batch.io.output_schema import ResultColumns, clean_text, result_bytes, results_table
from echo_batch.io.run_dir import RunDirectory
from echo_batch.request import Completion, RowFailure

DEFAULT_MAX_ROWS = 16_384
DEFAULT_MAX_BYTES = 32 * 1024 * 1024
DEFAULT_MAX_SECONDS = 10.0


class PartWriter:
    """Buffers completions and commits them as a part when there are `max_rows` of them, `max_bytes` of results, or
    when the oldest is `max_seconds` old (seen by `write` and `poll`; call one of them at every step of the loop).

    Rows that are buffered when the process is killed are lost to this start and done again by the next. Raises
    OutputError (73) when the disk is full or fails; the rows are then not committed.
    """

    def __init__(
        self,
        run: RunDirectory,
        columns: ResultColumns,
        *,
        max_rows: int = DEFAULT_MAX_ROWS,
        max_bytes: int = DEFAULT_MAX_BYTES,
        max_seconds: float = DEFAULT_MAX_SECONDS,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.columns = columns
        self.num_committed = 0
        """Rows committed by this writer."""
        self._run = run
        self._max_rows, self._max_bytes, self._max_seconds = max_rows, max_bytes, max_seconds
        self._clock = clock
        self._buffer: dict[int, Completion] = {}
        self._buffer_bytes = 0
        self._oldest = 0.0
        self._next_part = max(run.manifest.parts(), default=0) + 1

    def write(self, completions: Iterable[Completion]) -> int:
        """Takes completions over, each row once; returns the number of rows committed meanwhile."""
        committed = 0
        for completion in completions:
            assert completion.row_id not in self._buffer, f"row {completion.row_id} is completed twice"
            if not self._buffer:
                self._oldest = self._clock()
            self._buffer[completion.row_id] = completion
            self._buffer_bytes += result_bytes(completion)
            if len(self._buffer) >= self._max_rows or self._buffer_bytes >= self._max_bytes:
                committed += self.flush()
        return committed + self.poll()

    def poll(self) -> int:
        """Commits the buffered rows when the oldest is due; returns the number of rows committed."""
        if self._buffer and self._clock() - self._oldest >= self._max_seconds:
            return self.flush()
        return 0

    def flush(self) -> int:
        """Commits all buffered rows now; returns their number."""
        if not self._buffer:
            return 0
        completions = sorted(self._buffer.values(), key=lambda completion: completion.row_id)
        part = self._next_part
        self._write_part(part, completions)
        failures = [
            (c.row_id, RowFailure(code=c.failure.code, message=clean_text(c.failure.message) or ""))
            for c in completions
            if c.failure is not None
        ]
        done = [c for c in completions if c.failure is None]
        self._run.manifest.commit_part(
            part,
            PartEntry(
                rows=[(c.row_id, result_bytes(c)) for c in completions],
                failures=failures,
                num_input_tokens=sum(c.num_input_tokens for c in done),
                num_cached_tokens=sum(c.num_cached_tokens for c in done),
                num_generated_tokens=sum(len(c.token_ids) for c in done),
            ),
        )
        self._next_part += 1
        self._buffer.clear()
        self._buffer_bytes = 0
        self.num_committed += len(completions)
        self._run.append_errors(failures)
        return len(completions)

    def close(self) -> None:
        """Commits what is buffered."""
        self.flush()

    def __enter__(self) -> "PartWriter":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        # Finished rows are finished, whatever ended the loop; an error of the flush must not hide the first one.
        if error is None:
            self.close()
            return
        try:
            self.close()
        except Exception as second:
            error.add_note(f"and the finished rows could not be saved: {second}")

    def _write_part(self, part: int, completions: list[Completion]) -> None:
        path = self._run.part_path(part)
        temporary = temporary_name(path)
        table = results_table(completions, self.columns)
        with write_errors(path):
            try:
                pq.write_table(table, temporary, compression="zstd")
                publish(temporary, path)
            except BaseException:
                temporary.unlink(missing_ok=True)
                raise
            # The first part also made its directory.
            if part == 1:
                fsync_dir(path.parent.parent)

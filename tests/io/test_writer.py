import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pyarrow.parquet as pq
import pytest

from echo_batch.errors import OutputError
from echo_batch.io import writer
from echo_batch.io.manifest import Manifest
from echo_batch.io.output_schema import ResultColumns
from echo_batch.io.run_dir import RunDirectory
from echo_batch.io.writer import PartWriter
from echo_batch.request import Completion, RowFailure


class Clock:
    now = 0.0

    def __call__(self):
        return self.now


def completion(row_id):
    if row_id % 5 == 4:
        return Completion(row_id=row_id, failure=RowFailure(code="too_long", message=f"row {row_id}"))
    return Completion(
        row_id=row_id, text=f"text {row_id}", token_ids=(row_id,), finish_reason="stop", num_input_tokens=2
    )


def open_run(tmp_path):
    return RunDirectory.open(tmp_path / "out.jsonl", fingerprint={"a": "b"}, config={})


@pytest.fixture
def run(tmp_path):
    with open_run(tmp_path) as run:
        yield run


def rows_on_disk(run):
    """Row ids of the committed parts, in part order."""
    return [pq.read_table(run.part_path(part))["row_id"].to_pylist() for part in run.manifest.parts()]


def test_parts_are_cut_by_rows_sorted_and_readable_at_once(run):
    with PartWriter(run, ResultColumns(), max_rows=3) as parts:
        assert parts.write([completion(4), completion(0)]) == 0
        assert parts.write([completion(2), completion(1)]) == 3
        assert rows_on_disk(run) == [[0, 2, 4]]
    assert rows_on_disk(run) == [[0, 2, 4], [1]]
    assert pq.read_table(run.part_path(1))["generated_text"].to_pylist() == ["text 0", "text 2", None]
    assert parts.num_committed == 4
    totals = run.manifest.totals()
    assert (totals.rows, totals.failed, totals.input_tokens, totals.generated_tokens) == (4, (("too_long", 1),), 6, 3)


def test_parts_are_cut_by_bytes_and_by_age(run):
    clock = Clock()
    parts = PartWriter(run, ResultColumns(), max_bytes=10_000, max_seconds=10.0, clock=clock)
    assert parts.write([Completion(row_id=0, text="x" * 6_000)]) == 0
    assert parts.write([Completion(row_id=1, text="x" * 6_000)]) == 2
    clock.now = 100.0
    assert parts.write([completion(2)]) == 0  # its age counts from its own arrival
    clock.now = 109.0
    assert parts.poll() == 0
    clock.now = 110.0
    assert parts.poll() == 1
    assert parts.poll() == 0


def test_failures_are_appended_to_errors_jsonl_once_committed(run):
    parts = PartWriter(run, ResultColumns(), max_rows=100)
    parts.write(completion(row) for row in range(10))
    assert run.errors_path.read_text() == ""
    parts.flush()
    lines = [json.loads(line) for line in run.errors_path.read_text().splitlines()]
    assert lines == [{"row_id": r, "error_code": "too_long", "error_message": f"row {r}"} for r in (4, 9)]


def test_a_row_twice_is_a_broken_invariant(run):
    parts = PartWriter(run, ResultColumns(), max_rows=2)
    parts.write([completion(0), completion(1)])
    with pytest.raises(AssertionError):
        parts.write([completion(0), completion(2)])
    parts = PartWriter(run, ResultColumns())
    with pytest.raises(AssertionError, match="row 3 is completed twice"):
        parts.write([completion(3), completion(3)])


def test_finished_rows_are_saved_when_the_loop_ends_with_an_error(run):
    with pytest.raises(KeyboardInterrupt), PartWriter(run, ResultColumns()) as parts:
        parts.write([completion(0)])
        raise KeyboardInterrupt
    assert rows_on_disk(run) == [[0]]


def test_a_disk_that_fails_is_73_and_commits_nothing(run):
    parts = PartWriter(run, ResultColumns(), max_rows=1)
    parts.write([completion(0)])
    run.parts_dir.rename(run.path / "elsewhere")
    with pytest.raises(OutputError, match=r"part-000002\.parquet") as caught:
        parts.write([completion(1)])
    assert caught.value.exit_code == 73
    assert run.manifest.parts() == [1]
    (run.path / "elsewhere").rename(run.parts_dir)
    assert parts.flush() == 1  # the rows are still there
    assert rows_on_disk(run) == [[0], [1]]


class Killed(BaseException):
    """Stands for SIGKILL: nothing after it runs."""


CRASH_POINTS = [
    (writer.pq, "write_table", "before"),
    (writer.pq, "write_table", "after"),
    (writer, "publish", "before"),
    (os, "replace", "before"),
    (os, "replace", "after"),
    (Manifest, "commit_part", "before"),
    (Manifest, "commit_part", "after"),
    (RunDirectory, "append_errors", "after"),
]


@pytest.mark.parametrize("owner, name, when", CRASH_POINTS, ids=lambda v: v if isinstance(v, str) else v.__name__)
def test_killed_at_any_point_nothing_is_lost_or_doubled(tmp_path, monkeypatch, owner, name, when):
    run = open_run(tmp_path)
    parts = PartWriter(run, ResultColumns(), max_rows=5)
    parts.write(completion(row) for row in range(5))

    real = getattr(owner, name)

    def crashing(*args, **kwargs):
        if when == "after":
            real(*args, **kwargs)
        raise Killed

    with monkeypatch.context() as patch:
        patch.setattr(owner, name, crashing)
        # A killed process removes no temporary file either.
        patch.setattr(Path, "unlink", lambda *args, **kwargs: None)
        with pytest.raises(Killed):
            parts.write(completion(row) for row in range(5, 10))
    run._manifest._db.close()  # as the kernel does
    os.close(run._lock.fd)

    with open_run(tmp_path) as run:
        committed_before_the_kill = when == "after" and owner in (Manifest, RunDirectory)
        todo = list(run.manifest.uncommitted(range(12)))
        assert todo == ([10, 11] if committed_before_the_kill else list(range(5, 12)))
        with PartWriter(run, ResultColumns(), max_rows=4) as parts:
            parts.write(completion(row) for row in reversed(todo))
        assert sorted(row for part in rows_on_disk(run) for row in part) == list(range(12))
        assert len(list(run.parts_dir.iterdir())) == len(run.manifest.parts())
        errors = [json.loads(line)["row_id"] for line in run.errors_path.read_text().splitlines()]
        assert sorted(errors) == [4, 9]


JOB = """
import sys, time
from pathlib import Path
import pyarrow as pa
from echo_batch.errors import EchoBatchError
from echo_batch.io.output_file import write_output
from echo_batch.io.output_schema import ResultColumns
from echo_batch.io.run_dir import RunDirectory
from echo_batch.io.writer import PartWriter
from echo_batch.request import Completion, RowFailure

NUM_ROWS = 400

class Source:
    schema = pa.schema([("n", pa.int64())])
    def iter_batches(self):
        for low in range(0, NUM_ROWS, 50):
            yield pa.record_batch({"n": list(range(low, low + 50))}, schema=self.schema)

try:
    run = RunDirectory.open(sys.argv[1], fingerprint={"a": "b"}, config={})
except EchoBatchError as error:
    sys.exit(error.exit_code)
print("started", flush=True)
if run.state != "complete":
    writer = PartWriter(run, ResultColumns(), max_rows=7)
    for row in run.manifest.uncommitted(sorted(range(NUM_ROWS), key=lambda r: r * 37 % NUM_ROWS)):
        run.mark_in_flight([row])
        failure = RowFailure(code="too_long", message="m") if row % 50 == 0 else None
        writer.write([Completion(row_id=row, text=f"text {row}", failure=failure)])
        time.sleep(0.001)
    writer.close()
    for _ in write_output(run, Source(), num_rows=NUM_ROWS, columns=ResultColumns(), form="jsonl", versions={},
                          range_bytes=4000):
        time.sleep(0.01)
run.close()
"""


def test_killed_again_and_again_the_job_ends_with_every_row_once(tmp_path):
    output = tmp_path / "out.jsonl"
    rng = random.Random(0)
    kills = 0
    for _ in range(40):
        process = subprocess.Popen([sys.executable, "-c", JOB, str(output)], stdout=subprocess.PIPE)
        assert process.stdout is not None
        process.stdout.readline()  # "started", or the end of a refused start
        if kills < 4:
            time.sleep(rng.uniform(0.0, 0.4))
            process.kill()
        code = process.wait()
        kills += code == -signal.SIGKILL
        if output.exists():  # it is whole from the moment it is there
            rows = [json.loads(line) for line in output.read_text().splitlines()]
            assert [row["row_id"] for row in rows] == [row["n"] for row in rows] == list(range(400))
        if code == 0:
            break
        assert code in (-signal.SIGKILL, 1)
    assert code == 0 and kills >= 3
    for row in rows:
        assert row["generated_text"] == (None if row["n"] % 50 == 0 else f"text {row['n']}")
    errors = [json.loads(line)["row_id"] for line in (tmp_path / "out.jsonl.run/errors.jsonl").read_text().splitlines()]
    assert sorted(errors) == list(range(0, 400, 50))

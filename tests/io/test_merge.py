import dataclasses
import os
import random
import subprocess
import sys

import pyarrow as pa
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from echo_batch.errors import ConfigError, EchoBatchError
from echo_batch.io.merge import join_results, plan_ranges, read_ranges, regroup, spill
from echo_batch.io.output_schema import ResultColumns, output_schema
from echo_batch.io.run_dir import RunDirectory
from echo_batch.io.writer import PartWriter
from echo_batch.request import Completion

COLUMNS = ResultColumns(token_ids=True)


@dataclasses.dataclass
class FakeSource:
    """Rows numbered in column `n`, given out in batches of these sizes."""

    batch_sizes: list[int]
    schema: pa.Schema = dataclasses.field(default_factory=lambda: pa.schema([("n", pa.int64())]))

    def iter_batches(self):
        low = 0
        for size in self.batch_sizes:
            yield pa.record_batch([pa.array(range(low, low + size), pa.int64())], schema=self.schema)
            low += size


def open_run(directory):
    return RunDirectory.open(directory / "out.parquet", fingerprint={}, config={})


def write_rows(run, row_ids, *, part_rows=4, text_bytes=lambda row: 10):
    with PartWriter(run, COLUMNS, max_rows=part_rows) as writer:
        for row in row_ids:
            writer.write([Completion(row_id=row, text=f"{row:>{text_bytes(row)}}", token_ids=(row, row + 1))])


def merged(run, source, num_rows, *, range_bytes, limited=False):
    ranges = plan_ranges(run.manifest, num_rows, range_bytes=range_bytes)
    for _ in spill(run, ranges, COLUMNS.schema, range_bytes=range_bytes):
        pass
    results = read_ranges(run.merge_dir, ranges)
    schema = output_schema(source.schema, COLUMNS.schema)
    return ranges, list(join_results(source, results, schema, num_rows, limited=limited))


@settings(max_examples=15, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_any_order_of_completion_gives_input_order(tmp_path_factory, monkeypatch, data):
    monkeypatch.setattr(os, "fsync", lambda fd: None)  # hundreds of small parts
    num_rows = data.draw(st.integers(0, 30))
    rng = random.Random(data.draw(st.integers(0, 2**32)))
    order = rng.sample(range(num_rows), num_rows)
    sizes = [rng.choice([0, 10, 400]) for _ in range(num_rows)]
    batches: list[int] = []
    while sum(batches) < num_rows:
        batches.append(min(num_rows - sum(batches), rng.randint(0, 15)))
    range_bytes = data.draw(st.sampled_from([1, 300, 1000, 10**6]))
    with open_run(tmp_path_factory.mktemp("job")) as run:
        write_rows(run, order, part_rows=data.draw(st.integers(2, 9)), text_bytes=lambda row: sizes[row] + 2)
        ranges, tables = merged(run, FakeSource(batches), num_rows, range_bytes=range_bytes)
        assert list(run.merge_dir.iterdir()) == []
    rows = pa.concat_tables(tables).to_pylist() if tables else []
    assert [row["n"] for row in rows] == [row["row_id"] for row in rows] == list(range(num_rows))
    for row in rows:
        assert int(row["generated_text"]) == row["n"]
        assert row["generated_token_ids"] == [row["n"], row["n"] + 1]
    if range_bytes == 1:
        assert ranges == list(range(num_rows + 1))
    if range_bytes == 10**6:
        assert ranges == ([0, num_rows] if num_rows else [0])


def test_ranges_are_cut_by_bytes_however_uneven(tmp_path):
    with open_run(tmp_path) as run:
        write_rows(run, range(10), text_bytes=lambda row: 5000 if row in (3, 4) else 10)
        assert plan_ranges(run.manifest, 10, range_bytes=5600) == [0, 4, 9, 10]


def test_a_missing_or_extra_row_is_an_error(tmp_path):
    with open_run(tmp_path) as run:
        write_rows(run, [0, 1, 3])
        with pytest.raises(EchoBatchError, match="row 2 of 4 has no result"):
            plan_ranges(run.manifest, 4)
        with pytest.raises(EchoBatchError, match="row 2 of 3 has no result"):
            plan_ranges(run.manifest, 3)
        with pytest.raises(EchoBatchError, match="3 rows are committed and the input has 2"):
            plan_ranges(run.manifest, 2)


def test_parts_that_disagree_with_the_manifest_are_an_error(tmp_path):
    with open_run(tmp_path) as run:
        write_rows(run, [0, 1, 2, 3], part_rows=2)
        run.part_path(2).write_bytes(run.part_path(1).read_bytes())
        with pytest.raises(EchoBatchError, match="do not hold each of the rows 0 to 3 once"):
            merged(run, FakeSource([4]), 4, range_bytes=10**6)


@pytest.mark.parametrize("content", [b"", b"PAR1" + bytes(60) + b"PAR1"])
def test_a_damaged_part_is_named(tmp_path, content):
    with open_run(tmp_path) as run:
        write_rows(run, [0, 1, 2, 3], part_rows=2)
        run.part_path(2).write_bytes(content)
        with pytest.raises(ConfigError, match=r"part-000002\.parquet is damaged"):
            merged(run, FakeSource([4]), 4, range_bytes=10**6)


@pytest.mark.parametrize("batches, words", [([3], "has 3 rows now and had 4"), ([3, 3], "more rows than the 4")])
def test_an_input_that_changed_is_an_error(tmp_path, batches, words):
    with open_run(tmp_path) as run:
        write_rows(run, range(4))
        with pytest.raises(EchoBatchError, match=words):
            merged(run, FakeSource(batches), 4, range_bytes=100)


@pytest.mark.parametrize("num_rows", [0, 3, 4, 5])
def test_a_limited_job_takes_the_first_rows(tmp_path, num_rows):
    with open_run(tmp_path) as run:
        write_rows(run, range(num_rows))
        _, tables = merged(run, FakeSource([2, 2, 2]), num_rows, range_bytes=100, limited=True)
        assert sum((table["n"].to_pylist() for table in tables), []) == list(range(num_rows))  # noqa: RUF017


def test_batches_are_cast_to_the_schema_of_the_source(tmp_path):
    class Mixed(FakeSource):
        def iter_batches(self):
            yield pa.record_batch({"n": pa.array([0], pa.int8())})
            yield pa.record_batch({"n": pa.array([1], pa.int64())})

    with open_run(tmp_path) as run:
        write_rows(run, range(2))
        _, tables = merged(run, Mixed([]), 2, range_bytes=10**6)
        assert pa.concat_tables(tables)["n"].type == pa.int64()


tables_of_rows = st.lists(st.integers(0, 30)).map(
    lambda sizes: [pa.table({"s": pa.array(["x" * (i % 7) for i in range(size)], pa.string())}) for size in sizes]
)


@given(tables_of_rows, st.integers(1, 40), st.integers(1, 200))
def test_regroup_keeps_rows_and_fills_groups(tables, max_rows, max_bytes):
    groups = list(regroup(tables, max_bytes=max_bytes, max_rows=max_rows))
    rows = [row for table in tables for row in table["s"].to_pylist()]
    assert [row for group in groups for row in group["s"].to_pylist()] == rows
    assert all(1 <= group.num_rows <= max_rows for group in groups)
    if max_bytes == 200 and groups:
        assert all(group.num_rows >= min(max_rows, 8) for group in groups[:-1])


MEMORY_JOB = """
import resource, sys
from pathlib import Path
import pyarrow as pa
from echo_batch.io.output_file import write_output
from echo_batch.io.output_schema import ResultColumns
from echo_batch.io.run_dir import RunDirectory
from echo_batch.io.writer import PartWriter
from echo_batch.request import Completion

N, MB = 1200, 1 << 20

class Source:
    schema = pa.schema([("prompt", pa.string())])
    def iter_batches(self):
        for low in range(0, N, 20):
            yield pa.record_batch({"prompt": [chr(97 + low % 26) * 20_000] * 20}, schema=self.schema)

run = RunDirectory.open(sys.argv[1], fingerprint={}, config={})
with PartWriter(run, ResultColumns(), max_bytes=MB) as writer:
    for row in sorted(range(N), key=lambda r: r * 1237 % N):
        writer.write([Completion(row_id=row, text=f"{row} " * 4000)])
before = pa.default_memory_pool().max_memory()
for _ in write_output(run, Source(), num_rows=N, columns=ResultColumns(), form="jsonl", versions={},
                      range_bytes=MB):
    pass
print(before, pa.default_memory_pool().max_memory(), run.manifest.totals().rows)
"""


def test_memory_is_bounded_whatever_the_sizes(tmp_path):
    """20 MB of answers and 20 MB of prompts merge within a few ranges of 1 MB."""
    result = subprocess.run(
        [sys.executable, "-c", MEMORY_JOB, str(tmp_path / "out.jsonl")], capture_output=True, text=True, check=True
    )
    _, peak, rows = map(int, result.stdout.split())
    assert rows == 1200
    assert (tmp_path / "out.jsonl").stat().st_size > 40e6
    assert peak < 15e6

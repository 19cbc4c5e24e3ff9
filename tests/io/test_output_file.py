import dataclasses
import datetime
import decimal
import json
import os
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from echo_batch.errors import EchoBatchError, OutputError
from echo_batch.files import temporary_name
from echo_batch.io import output_file
from echo_batch.io.openai_output import OpenAIOutput
from echo_batch.io.output_file import write_output
from echo_batch.io.output_schema import ResultColumns
from echo_batch.io.run_dir import RunDirectory
from echo_batch.io.writer import PartWriter
from echo_batch.request import Completion, RowFailure

FINGERPRINT = {"model": "m"}
VERSIONS = {"echo_batch": "1.2.3"}
DEFAULT = ResultColumns()


@dataclasses.dataclass
class FakeSource:
    table: pa.Table
    batch_rows: int = 2

    @property
    def schema(self):
        return self.table.schema

    def iter_batches(self):
        yield from self.table.to_batches(max_chunksize=self.batch_rows)


def open_run(output):
    return RunDirectory.open(output, fingerprint=FINGERPRINT, config={})


def write(output, table, completions, *, form, columns=DEFAULT, **kwargs):
    with open_run(output) as run:
        with PartWriter(run, columns) as writer:
            writer.write(completions)
        counts = list(
            write_output(
                run, FakeSource(table), num_rows=table.num_rows, columns=columns, form=form, versions=VERSIONS, **kwargs
            )
        )
        assert counts == sorted(counts) and (counts or [0])[-1] == table.num_rows
        assert counts[:1] in ([], [0])  # a stop is seen while the results are dealt, too
        assert run.state == "complete"
        assert not run.merge_dir.exists()
        return run.run_id


def answers(num_rows, failed=()):
    for row in reversed(range(num_rows)):
        if row in failed:
            yield Completion(row_id=row, failure=RowFailure(code="no_prompt", message="nothing to do"))
        else:
            yield Completion(
                row_id=row, text=f"answer {row}", token_ids=(row,), finish_reason="stop", num_input_tokens=3
            )


def test_parquet_keeps_every_column_and_adds_the_results(tmp_path):
    output = tmp_path / "out.parquet"
    schema = pa.schema(
        [
            ("id", pa.int16()),
            ("row_id", pa.string()),
            ("tags", pa.list_(pa.string())),
            ("when", pa.timestamp("ns", "UTC")),
            ("kind", pa.dictionary(pa.int8(), pa.string())),
            ("blob", pa.large_binary()),
        ]
    )
    rows = [
        {
            "id": i,
            "row_id": f"r{i}",
            "tags": ["a"] * i,
            "when": 1_700_000_000_000_000_001 + i,
            "kind": "k",
            "blob": b"\xff",
        }
        for i in range(5)
    ]
    table = pa.Table.from_pylist(rows, schema=schema)
    run_id = write(output, table, answers(5, failed={3}), form="parquet")
    out = pq.read_table(output)
    assert out.column_names == (["id", "input_row_id", "tags", "when", "kind", "blob"] + ResultColumns().schema.names)
    for before, after in zip(table.columns, out.columns):
        assert before.to_pylist() == after.to_pylist() if before.type != pa.timestamp("ns", "UTC") else True
        assert before.type == after.type
    assert out["when"].cast(pa.int64()) == table["when"].cast(pa.int64())
    assert out["row_id"].to_pylist() == list(range(5))
    assert out["generated_text"].to_pylist() == ["answer 0", "answer 1", "answer 2", None, "answer 4"]
    assert out["error_code"].to_pylist() == [None, None, None, "no_prompt", None]
    metadata = json.loads(pq.read_metadata(output).metadata[b"echo_batch"])
    assert metadata == {"run_id": run_id, "fingerprint": FINGERPRINT, "versions": VERSIONS}
    assert pq.read_metadata(output).row_group(0).column(0).compression == "ZSTD"
    with open_run(output) as run:
        assert run.state == "complete"


def test_row_groups_are_of_a_sensible_size(tmp_path, monkeypatch):
    monkeypatch.setattr(output_file, "ROW_GROUP_ROWS", 4)
    table = pa.table({"a": range(10)})
    write(tmp_path / "out.parquet", table, answers(10), form="parquet", range_bytes=300)
    metadata = pq.read_metadata(tmp_path / "out.parquet")
    assert [metadata.row_group(i).num_rows for i in range(metadata.num_row_groups)] == [4, 4, 2]


@pytest.mark.parametrize("form", ["parquet", "jsonl", "openai"])
def test_no_rows_are_an_empty_file_with_the_schema(tmp_path, form):
    output = tmp_path / "out"
    openai = OpenAIOutput(run_id="r", model="m", created=1)
    write(output, pa.table({"a": pa.array([], pa.string())}), [], form=form, openai=openai)
    if form == "parquet":
        assert pq.read_table(output).column_names == ["a", *ResultColumns().schema.names]
        assert pq.read_table(output).num_rows == 0
    else:
        assert output.read_bytes() == b""


def test_parquet_writes_a_column_that_it_cannot_hold_as_json_text(tmp_path):
    schema = pa.schema([("meta", pa.struct([("inner", pa.struct([])), ("n", pa.int64())])), ("nothing", pa.null())])
    table = pa.Table.from_pylist([{"meta": {"inner": {}, "n": 1}}, {"meta": None}], schema=schema)
    write(tmp_path / "out.parquet", table, answers(2), form="parquet")
    out = pq.read_table(tmp_path / "out.parquet")
    assert out["meta"].to_pylist() == ['{"inner": {}, "n": 1}', None]
    assert out["nothing"].to_pylist() == [None, None]


def test_jsonl_holds_every_type_as_json(tmp_path):
    table = pa.table(
        {
            "text": ["é\u2028\n", None],
            "nan": [float("nan"), 0.5],
            "nested": [[{"x": float("inf"), "t": datetime.date(2024, 5, 6)}], []],
            "when": pa.array([1_700_000_000_000_000_001, None], pa.timestamp("ns")),
            "money": [decimal.Decimal("1.10"), None],
            "blob": [b"\xff\x00", None],
            "wait": pa.array([5, None], pa.duration("ns")),
            "map": pa.array([[("k", 1)], None], pa.map_(pa.string(), pa.int64())),
            "when map": pa.array([[("k", 1)], None], pa.map_(pa.string(), pa.timestamp("ns"))),
            "when pair": pa.array([[0, 1], None], pa.list_(pa.time64("ns"), 2)),
            "here": pa.array([7200, None], pa.timestamp("s", "+02:00")),
            "nowhere": pa.array([1, None], pa.timestamp("s", "No/Where")),
            "kind": pa.array(["a", "b"]).dictionary_encode(),
        }
    )
    columns = ResultColumns(token_ids=True)
    write(tmp_path / "out.jsonl", table, answers(2, failed={1}), form="jsonl", columns=columns)
    text = (tmp_path / "out.jsonl").read_text(encoding="utf-8")
    first, second = [json.loads(line) for line in text.split("\n")[:-1]]
    assert first == {
        "text": "é\u2028\n",
        "nan": None,
        "nested": [{"x": None, "t": "2024-05-06"}],
        "when": "2023-11-14 22:13:20.000000001",
        "money": "1.10",
        "blob": "/wA=",
        "wait": 5,
        "map": [["k", 1]],
        "when map": [["k", "1970-01-01 00:00:00.000000001"]],
        "when pair": ["00:00:00.000000000", "00:00:00.000000001"],
        "here": "1970-01-01 04:00:00+0200",
        "nowhere": "1970-01-01 00:00:01+0000",
        "kind": "a",
        "row_id": 0,
        "generated_text": "answer 0",
        "reasoning_text": None,
        "finish_reason": "stop",
        "num_input_tokens": 3,
        "num_cached_tokens": 0,
        "num_generated_tokens": 1,
        "error_code": None,
        "error_message": None,
        "generated_token_ids": [0],
    }
    assert second["nan"] == 0.5
    assert (second["error_code"], second["generated_text"], second["generated_token_ids"]) == ("no_prompt", None, None)


def test_openai_lines(tmp_path):
    table = pa.table({"custom_id": ["a", "b"], "url": ["/v1/completions", "/v1/chat/completions"], "row_id": [5, 6]})
    openai = OpenAIOutput(run_id="r", model="m", created=1)
    write(tmp_path / "out.jsonl", table, answers(2, failed={1}), form="openai", openai=openai)
    lines = [json.loads(line) for line in (tmp_path / "out.jsonl").read_text().splitlines()]
    assert [line["custom_id"] for line in lines] == ["a", "b"]
    assert lines[0]["response"]["body"]["choices"][0]["text"] == "answer 0"
    assert lines[1]["response"]["status_code"] == 400


def test_lone_surrogates_in_answers_become_replacement_characters(tmp_path):
    table = pa.table({"a": [1]})
    write(tmp_path / "out.jsonl", table, [Completion(row_id=0, text="x\ud800y")], form="jsonl")
    assert json.loads((tmp_path / "out.jsonl").read_text(encoding="utf-8"))["generated_text"] == "x\ufffdy"


class Killed(BaseException):
    pass


MERGE_CRASH_POINTS = [
    (output_file, "spill", "before"),
    (output_file, "spill", "after"),
    (output_file, "_as_schema", "after"),
    (RunDirectory, "publish_output", "before"),
    (os, "replace", "before"),
    (os, "replace", "after"),
    (RunDirectory, "publish_output", "after"),
]


@pytest.mark.parametrize("form", ["parquet", "jsonl"])
@pytest.mark.parametrize("owner, name, when", MERGE_CRASH_POINTS, ids=lambda v: v if isinstance(v, str) else v.__name__)
def test_killed_during_the_merge_the_file_is_whole_or_absent(tmp_path, monkeypatch, owner, name, when, form):
    output = tmp_path / "out"
    table = pa.table({"a": range(7)})

    def merge(run):
        for _ in write_output(
            run, FakeSource(table), num_rows=7, columns=ResultColumns(), form=form, versions={}, range_bytes=300
        ):
            pass

    run = open_run(output)
    with PartWriter(run, ResultColumns()) as writer:
        writer.write(answers(7))
    real = getattr(owner, name)

    def crashing(*args, **kwargs):
        if when == "after":
            real(*args, **kwargs)
        raise Killed

    with monkeypatch.context() as patch:
        patch.setattr(owner, name, crashing)
        patch.setattr(Path, "unlink", lambda *args, **kwargs: None)
        with pytest.raises(Killed):
            merge(run)
    run._manifest._db.close()
    os.close(run._lock.fd)

    renamed = when == "after" and name in ("replace", "publish_output")
    assert output.exists() == renamed
    with open_run(output) as run:
        assert run.state == ("complete" if name == "publish_output" and when == "after" else "resumed")
        if run.state == "resumed":
            merge(run)
    if form == "parquet":
        assert pq.read_table(output)["a"].to_pylist() == list(range(7))
    else:
        assert [json.loads(line)["a"] for line in output.read_text().splitlines()] == list(range(7))
    assert not temporary_name(output).exists()


def test_a_failing_disk_is_73_and_the_job_can_go_on(tmp_path, monkeypatch):
    output = tmp_path / "out.jsonl"
    table = pa.table({"a": [1]})

    def full(*args):
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr("echo_batch.io.run_dir.publish", lambda temporary, path: full())
        with pytest.raises(OutputError, match="No space left") as caught:
            write(output, table, answers(1), form="jsonl")
    assert caught.value.exit_code == 73
    assert not output.exists() and not temporary_name(output).exists()
    write(output, table, [], form="jsonl")
    assert output.exists()


def test_an_error_of_the_input_is_not_blamed_on_the_output(tmp_path):
    class Broken(FakeSource):
        def iter_batches(self):
            yield from self.table.to_batches()
            raise FileNotFoundError(2, "No such file", "input.parquet")

    with open_run(tmp_path / "out.parquet") as run:
        with PartWriter(run, ResultColumns()) as writer:
            writer.write(answers(2))
        with pytest.raises(FileNotFoundError):
            for _ in write_output(
                run,
                Broken(pa.table({"a": [1, 2]})),
                num_rows=2,
                columns=ResultColumns(),
                form="parquet",
                versions={},
            ):
                pass


def test_rows_without_results_never_make_a_file(tmp_path):
    output = tmp_path / "out.parquet"
    with pytest.raises(EchoBatchError, match="row 1 of 2 has no result"):
        write(output, pa.table({"a": [1, 2]}), answers(1), form="parquet")
    assert not output.exists()

import gzip
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import fsspec
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import zstandard

from echo_batch.config import InputConfig
from echo_batch.errors import InputError, InputMissingError, OutputError
from echo_batch.io.json_rows import JSON_TEXT
from echo_batch.io.json_source import JsonSource
from echo_batch.io.reader import Source, open_source
from echo_batch.io.schema import Record

ROWS: list[dict[str, Any]] = [
    {"prompt": f"text {i} é\u2028 " + "x" * (i % 7), "n": i, "score": i / 2 if i % 2 else i, "tags": ["a"] * (i % 3)}
    for i in range(500)
]


def lines(rows: list[Any]) -> bytes:
    return b"".join(json.dumps(row, ensure_ascii=False).encode() + b"\n" for row in rows)


def write_jsonl(path: Path) -> None:
    path.with_suffix(".jsonl").write_bytes(lines(ROWS))


def write_gz(path: Path) -> None:
    path.with_suffix(".jsonl.gz").write_bytes(gzip.compress(lines(ROWS)))


def write_zst(path: Path) -> None:
    path.with_suffix(".jsonl.zst").write_bytes(zstandard.compress(lines(ROWS)))


def write_array(path: Path) -> None:
    path.with_suffix(".json").write_bytes(b"\xef\xbb\xbf" + json.dumps(ROWS, indent=1).encode())


def write_array_gz(path: Path) -> None:
    path.with_suffix(".json.gz").write_bytes(gzip.compress(json.dumps(ROWS).encode()))


def write_parquet(path: Path) -> None:
    table = pa.Table.from_pylist([{**row, "score": float(row["score"])} for row in ROWS])
    pq.write_table(table, path.with_suffix(".parquet"), row_group_size=90)


def write_remote(path: Path) -> None:
    fsspec.filesystem("memory").pipe_file(f"/{path.parent.name}/rows.jsonl", lines(ROWS))


def write_remote_parquet(path: Path) -> None:
    write_parquet(path)
    local = path.with_suffix(".parquet")
    fsspec.filesystem("memory").pipe_file(f"/{path.parent.name}/rows.parquet", local.read_bytes())
    local.unlink()


WRITERS = [
    write_jsonl,
    write_gz,
    write_zst,
    write_array,
    write_array_gz,
    write_parquet,
    write_remote,
    write_remote_parquet,
]


def open_rows(tmp_path: Path, **options: Any) -> Source:
    return open_source([str(tmp_path)], spool_dir=tmp_path / "out.run", **options)


def seen(records: list[Record]) -> list[tuple[int, Any]]:
    return [(record.row_id, record.values.get("prompt")) for record in records]


@pytest.mark.parametrize("write", WRITERS, ids=lambda w: w.__name__)
def test_every_form_gives_the_same_rows(tmp_path: Path, write: Callable[[Path], None]) -> None:
    write(tmp_path / "rows")
    remote = "remote" in write.__name__
    paths = [f"memory://{tmp_path.name}" if remote else str(tmp_path)]
    source = open_source(paths, spool_dir=tmp_path / "out.run")
    want = [(i, row["prompt"]) for i, row in enumerate(ROWS)]
    assert source.num_rows == 500 and not source.is_openai
    assert seen(list(source.iter_records())) == want
    for start in (1, 89, 90, 91, 499, 500):
        assert seen(list(source.iter_records(start))) == want[start:]
    ids = [499, 0, 90, 91, 3, 3, 250, *range(100, 180)]
    assert seen(list(source.read_records(ids))) == [want[i] for i in ids]
    assert list(source.read_records([])) == []
    batches = list(source.iter_batches())
    assert all(batch.schema.equals(source.schema) for batch in batches)
    assert source.schema.names == ["prompt", "n", "score", "tags"]
    assert pa.types.is_float64(source.schema.field("score").type)
    assert pa.Table.from_batches(batches).to_pylist() == ROWS
    again = open_source(paths, spool_dir=tmp_path / "out.run")
    assert again.fingerprint() == source.fingerprint()
    source.close()
    assert seen(list(again.read_records([7]))) == [want[7]]
    again.close()


@pytest.mark.parametrize("write", WRITERS[:6], ids=lambda w: w.__name__)
@pytest.mark.parametrize("limit", [0, 1, 95, 1000])
def test_limit(tmp_path: Path, write: Callable[[Path], None], limit: int) -> None:
    write(tmp_path / "rows")
    source = open_rows(tmp_path, config=InputConfig(limit=limit))
    count = min(limit, 500)
    assert source.num_rows == count
    assert [r.row_id for r in source.iter_records()] == list(range(count))
    assert sum(batch.num_rows for batch in source.iter_batches()) == count
    source.close()


def test_rows_are_counted_over_sorted_files(tmp_path: Path) -> None:
    (tmp_path / "b.jsonl").write_bytes(lines(ROWS[3:5]))
    (tmp_path / "a.jsonl").write_bytes(lines(ROWS[:3]))
    (tmp_path / "empty.jsonl").write_bytes(b"")
    (tmp_path / "z.jsonl").write_bytes(lines(ROWS[5:6]))
    source = open_rows(tmp_path)
    assert seen(list(source.iter_records(2))) == [(i, ROWS[i]["prompt"]) for i in range(2, 6)]
    assert seen(list(source.read_records([5, 3, 0]))) == [(i, ROWS[i]["prompt"]) for i in (5, 3, 0)]


def test_blank_and_bad_lines(tmp_path: Path) -> None:
    data = b'\xef\xbb\xbf{"prompt": "0"}\n\n  \t\r\n{"prompt": \n{"prompt": "2"}\r\n[]\n\xff\n{"prompt": "5"}'
    (tmp_path / "a.jsonl").write_bytes(data)
    (tmp_path / "b.jsonl.gz").write_bytes(gzip.compress(data))
    for name in ("a.jsonl", "b.jsonl.gz"):
        source = open_source([str(tmp_path / name)], spool_dir=None)
        assert source.num_rows == 6
        records = list(source.iter_records())
        assert [r.values.get("prompt") for r in records] == ["0", None, "2", None, None, "5"]
        failures = [(r.row_id, r.error.code) for r in records if r.error is not None]
        assert failures == [(1, "bad_json"), (3, "bad_json"), (4, "bad_json")]
        assert records[1].error is not None and records[1].error.message.startswith(f"{name}, byte 25: ")
        assert list(source.read_records(range(6))) == records
        assert [row["prompt"] for batch in source.iter_batches() for row in batch.to_pylist()] == [
            r.values.get("prompt") for r in records
        ]
        source.close()


def test_array_elements_that_are_no_objects_or_hold_strange_numbers(tmp_path: Path) -> None:
    deep = "[" * 5_000 + "]" * 5_000
    text = f'[{{"prompt": "a", "x": 1.0}}, 5, {{"x": {10**30}}}, {{"x": 1e400}}, {{"x": {deep}}}, {{"prompt": "b"}}]'
    (tmp_path / "a.json").write_text(text)
    source = open_rows(tmp_path)
    records = list(source.iter_records())
    assert [record.error.code if record.error else None for record in records] == [
        None, "bad_json", None, None, "bad_json", None,
    ]  # fmt: skip
    assert records[1].error is not None and "element 1" in records[1].error.message
    assert records[2].values == {"x": 10**30}


@pytest.mark.parametrize("text", ['[{"a": 1}', '[{"a": 1} {"a": 2}]', '[{"a": NaN}]', '[{"a": 1}] x', "["])
def test_broken_array(tmp_path: Path, text: str) -> None:
    (tmp_path / "a.json").write_text(text)
    with pytest.raises(InputError, match="broken JSON array"):
        open_rows(tmp_path)
    assert not list((tmp_path / "out.run").glob("*.parquet"))


@pytest.mark.parametrize("name", ["a.jsonl", "a.json", "a.jsonl.gz", "a.jsonl.zst"])
@pytest.mark.parametrize("data", [b"", b"\n \n"])
def test_empty_text(tmp_path: Path, name: str, data: bytes) -> None:
    compress: Callable[[bytes], bytes] = {"z": gzip.compress, "t": zstandard.compress}.get(name[-1], bytes)
    (tmp_path / name).write_bytes(compress(data))
    check_empty(open_rows(tmp_path), [])


def test_empty_file_without_an_archive_in_it(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl.gz").write_bytes(b"")
    check_empty(open_rows(tmp_path), [])


def test_empty_array(tmp_path: Path) -> None:
    (tmp_path / "a.json").write_text(" [ ] ")
    check_empty(open_rows(tmp_path), [])


def test_empty_parquet(tmp_path: Path) -> None:
    pq.write_table(pa.table({"prompt": pa.array([], pa.string())}), tmp_path / "a.parquet")
    check_empty(open_rows(tmp_path), ["prompt"])
    pq.write_table(pa.table({}), tmp_path / "a.parquet")
    check_empty(open_rows(tmp_path), [])


def check_empty(source: Source, columns: list[str]) -> None:
    assert source.num_rows == 0 and source.schema.names == columns
    assert list(source.iter_records()) == [] and sum(b.num_rows for b in source.iter_batches()) == 0
    source.close()


def test_openai_form_is_what_most_rows_have(tmp_path: Path) -> None:
    good = {"custom_id": "a", "method": "POST", "url": "/v1/completions", "body": {"prompt": "x"}}
    (tmp_path / "a.jsonl").write_bytes(b"{broken\n" + lines([{"custom_id": "x"}, good, good]))
    source = open_rows(tmp_path)
    assert source.is_openai
    assert source.schema.field("body").metadata == JSON_TEXT
    assert next(iter(source.read_records([2]))).values == good
    (tmp_path / "a.jsonl").write_bytes(lines([{"prompt": "x", "body": "y"}, {"prompt": "x"}, good]))
    assert not open_rows(tmp_path).is_openai


def test_a_row_above_the_limit_is_bad_and_the_next_is_not(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for module in ("json_rows", "lines"):
        monkeypatch.setattr(f"echo_batch.io.{module}.MAX_ROW_BYTES", 1_000)
    data = lines([{"prompt": "x" * 2_500}, {"prompt": "y"}, {"prompt": "z" * 985}, {"prompt": "w" * 990}])
    (tmp_path / "a.jsonl").write_bytes(data)
    (tmp_path / "b.jsonl.gz").write_bytes(gzip.compress(data))
    for name in ("a.jsonl", "b.jsonl.gz"):
        source = open_source([str(tmp_path / name)], spool_dir=None)
        codes = [record.error.code if record.error else None for record in source.iter_records()]
        assert codes == ["bad_json", None, None, "bad_json"]
        assert [r.error is None for r in source.read_records([0, 1, 2, 3])] == [False, True, True, False]
        source.close()


def test_scan_is_kept_for_the_next_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_jsonl(tmp_path / "rows")
    source = open_rows(tmp_path, scan=False)
    progress = list(source.scan())
    assert progress[-1].num_rows == 500 and progress[-1].bytes_done == progress[-1].bytes_total > 0
    assert list(source.scan()) == []

    def fail(*args: object) -> None:
        raise AssertionError("scanned again")

    with monkeypatch.context() as patched:
        patched.setattr("echo_batch.io.lines.OffsetLines.scan", fail)
        again = open_rows(tmp_path)
        assert again.schema == source.schema and again.num_rows == 500
    # Anything that is not whole, or of another input, is made again.
    (tmp_path / "out.run" / "input.offsets").write_bytes(b"12345678")
    assert open_rows(tmp_path).num_rows == 500
    (tmp_path / "out.run" / "input.json").write_text("{")
    assert open_rows(tmp_path).num_rows == 500
    (tmp_path / "rows.jsonl").write_bytes(lines(ROWS[:3]))
    assert open_rows(tmp_path).num_rows == 3


def test_names_that_utf8_cannot_hold_survive_the_kept_scan(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_bytes(b'{"a\\ud800": 1, "prompt": "p\\ud800"}\n')
    for _ in range(2):
        source = open_rows(tmp_path)
        assert [batch.to_pylist() for batch in source.iter_batches()] == [[{"a�": 1, "prompt": "p�"}]]


def test_a_file_that_changes_under_the_job_is_an_error(tmp_path: Path) -> None:
    write_jsonl(tmp_path / "rows")
    source = open_rows(tmp_path)
    (tmp_path / "rows.jsonl").write_bytes(b"\n" + lines(ROWS))
    with pytest.raises(InputError, match="changed"):
        list(source.iter_records())
    (tmp_path / "rows.jsonl").write_bytes(lines(ROWS[:-1]))
    with pytest.raises(InputError, match="changed"):
        list(source.iter_records())
    (tmp_path / "rows.jsonl").unlink()
    with pytest.raises(InputMissingError):
        list(source.iter_batches())


def test_truncated_archive(tmp_path: Path) -> None:
    data = gzip.compress(lines(ROWS), 0)
    (tmp_path / "a.jsonl.gz").write_bytes(data[: len(data) // 2])
    with pytest.raises(InputError, match="ends too early"):
        open_rows(tmp_path)
    assert not list((tmp_path / "out.run").glob("*.parquet"))


def test_temporary_spool_is_removed(tmp_path: Path) -> None:
    write_gz(tmp_path / "rows")
    source = open_source([str(tmp_path)], spool_dir=None)
    assert isinstance(source, JsonSource) and source._temporary is not None
    directory = Path(source._temporary.name)
    assert (directory / "input.parquet").exists()
    source.close()
    assert not directory.exists()


def test_a_full_disk_under_the_offsets_is_an_output_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The few bytes of a small input are written when the file is closed."""
    (tmp_path / "a.jsonl").write_text("{}\n")
    monkeypatch.setattr("echo_batch.io.lines.temporary_name", lambda _: Path("/dev/full"))
    with pytest.raises(OutputError, match="No space left"):
        open_source([str(tmp_path / "a.jsonl")], spool_dir=tmp_path / "spool")


def test_the_scan_of_long_rows_can_be_stopped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("echo_batch.io.json_source.BATCH_BYTES", 2_000)
    (tmp_path / "a.jsonl").write_text('{"prompt": "%s"}\n' % ("x" * 1_000) * 10)
    source = open_source([str(tmp_path / "a.jsonl")], spool_dir=tmp_path / "spool", scan=False)
    assert [done.num_rows for done in source.scan()] == [1, 3, 5, 7, 9, 10]

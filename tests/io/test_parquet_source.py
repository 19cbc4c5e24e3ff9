import decimal
from datetime import date
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from echo_batch.config import InputConfig
from echo_batch.errors import InputError
from echo_batch.io.parquet_rows import ParquetRows, to_values
from echo_batch.io.parquet_source import ParquetSource
from echo_batch.io.paths import resolve_inputs
from echo_batch.io.reader import open_source
from echo_batch.io.spool import SpoolWriter, spool_file
from echo_batch.request import RowFailure


def source_of(tmp_path: Path, config: InputConfig | None = None, **options: Any) -> ParquetSource:
    return ParquetSource(
        resolve_inputs([str(tmp_path)]), directory=tmp_path / "x.run", config=config or InputConfig(), **options
    )


def test_types_are_kept(tmp_path: Path) -> None:
    table = pa.table(
        {
            "prompt": pa.array(["a", "b"]).dictionary_encode(),
            "d": pa.array([date(2026, 1, 1), None]),
            "m": pa.array([decimal.Decimal("1.50"), None]),
            "s": pa.array([{"x": 1, "y": ["z"]}, None]),
            "i": pa.array([1, None], pa.int16()),
            "l": pa.array([[1], None], pa.list_(pa.int8())),
            "b": pa.array([b"\xff", None]),
        }
    )
    pq.write_table(table, tmp_path / "a.parquet")
    source = source_of(tmp_path)
    assert source.schema.equals(pq.read_schema(tmp_path / "a.parquet"))
    assert pa.Table.from_batches(source.iter_batches()).equals(pq.read_table(tmp_path / "a.parquet"))
    # Only what makes a request is read for records.
    assert [dict(r.values) for r in source.iter_records()] == [{"prompt": "a"}, {"prompt": "b"}]


def test_files_that_lack_columns_have_nulls_there(tmp_path: Path) -> None:
    pq.write_table(pa.table({"prompt": ["a"], "x": pa.array([None], pa.null())}), tmp_path / "1.parquet")
    pq.write_table(pa.table({"prompt": ["b"], "x": [5]}), tmp_path / "2.parquet")
    never_null = pa.schema([("x", pa.int64()), pa.field("temperature", pa.float64(), nullable=False)])
    pq.write_table(pa.table({"x": [6], "temperature": [0.5]}, schema=never_null), tmp_path / "3.parquet")
    source = source_of(tmp_path)
    assert source.schema.names == ["prompt", "x", "temperature"]
    assert pa.Table.from_batches(source.iter_batches()).to_pylist() == [
        {"prompt": "a", "x": None, "temperature": None},
        {"prompt": "b", "x": 5, "temperature": None},
        {"prompt": None, "x": 6, "temperature": 0.5},
    ]
    assert [r.values["prompt"] for r in source.read_records([2, 1, 0])] == [None, "b", "a"]


def test_clashing_types_and_doubled_columns(tmp_path: Path) -> None:
    pq.write_table(pa.table({"prompt": ["a"], "x": ["t"]}), tmp_path / "1.parquet")
    pq.write_table(pa.table({"prompt": ["b"], "x": [5]}), tmp_path / "2.parquet")
    with pytest.raises(InputError, match=r"1\.parquet and .*2\.parquet do not fit together.*x"):
        source_of(tmp_path)
    pq.write_table(pa.table({"prompt": ["a"]}), tmp_path / "1.parquet")
    pq.write_table(pa.table({"prompt": ["c"], "x": ["t"]}), tmp_path / "3.parquet")
    with pytest.raises(InputError, match=r"3\.parquet do not fit together.*x"):  # the first lacks the column
        source_of(tmp_path)
    (tmp_path / "2.parquet").unlink()
    (tmp_path / "3.parquet").unlink()
    pq.write_table(pa.Table.from_arrays([pa.array(["a"])] * 2, ["prompt", "prompt"]), tmp_path / "1.parquet")
    with pytest.raises(InputError, match="several columns are called 'prompt'"):
        source_of(tmp_path)


@pytest.mark.parametrize("data", [b"", b"PAR1", b"PAR1" + bytes(100) + b"PAR1", b"not parquet at all" * 100])
def test_corrupt_file(tmp_path: Path, data: bytes) -> None:
    (tmp_path / "a.parquet").write_bytes(data)
    with pytest.raises(InputError, match=r"cannot read .*a\.parquet"):
        source_of(tmp_path)


def test_corrupt_page(tmp_path: Path) -> None:
    path = tmp_path / "a.parquet"
    pq.write_table(pa.table({"prompt": [f"{i} text" * 50 for i in range(1000)]}), path, compression="zstd")
    data = bytearray(path.read_bytes())
    data[200:2000] = bytes(1800)
    path.write_bytes(data)
    source = source_of(tmp_path)
    with pytest.raises(InputError, match=r"cannot read .*a\.parquet"):
        list(source.iter_records())


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (InputConfig(prompt_column="nope"), "--prompt-column nope: no such column.*text, id"),
        (InputConfig(prompt_template="{text}{nope}"), "no column 'nope'"),
        (InputConfig(), "no column prompt, messages.*--prompt-column"),
    ],
)
def test_unknown_columns(tmp_path: Path, config: InputConfig, message: str) -> None:
    pq.write_table(pa.table({"text": ["a"], "id": [1]}), tmp_path / "a.parquet")
    with pytest.raises(InputError, match=message):
        open_source([str(tmp_path)], spool_dir=None, config=config)


def test_large_row_groups_are_spooled(tmp_path: Path) -> None:
    texts = [f"{i:04d}" * 500 for i in range(3000)]
    table = pa.table({"prompt": texts, "other": ["y" * 50] * 3000, "seed": range(3000)})
    pq.write_table(table, tmp_path / "a.parquet", row_group_size=3000)
    source = source_of(tmp_path, max_group_bytes=1_000_000)
    progress = list(source.scan())
    assert progress[-1].num_rows == 3000
    spool = pq.ParquetFile(tmp_path / "x.run" / "input.parquet")
    assert spool.schema_arrow.names == ["prompt", "seed"]
    sizes = [spool.metadata.row_group(g).total_byte_size for g in range(spool.num_row_groups)]
    assert len(sizes) >= 3 and max(sizes) < 2.5e6
    assert [r.values for r in source.read_records([2999, 0, 7])] == [
        {"prompt": texts[i], "seed": i} for i in (2999, 0, 7)
    ]
    assert [r.values["prompt"] for r in source.iter_records(2990)] == texts[2990:]
    assert pa.Table.from_batches(source.iter_batches()).equals(table)
    # The next process takes it up; another config does not.
    again = source_of(tmp_path, max_group_bytes=1_000_000)
    assert list(again.scan()) == [] and next(iter(again.read_records([5]))).values["seed"] == 5
    other = source_of(tmp_path, InputConfig(prompt_column="other"), max_group_bytes=1_000)
    assert list(other.scan()) and next(iter(other.read_records([5]))).values == {"other": "y" * 50, "seed": 5}
    in_place = source_of(tmp_path)
    assert list(in_place.scan()) == []


def test_spool_appears_whole_or_not_at_all(tmp_path: Path) -> None:
    schema = pa.schema([("a", pa.int64())])
    path = tmp_path / "deep" / "s.parquet"
    with pytest.raises(RuntimeError):
        with SpoolWriter(path, schema) as writer:
            writer.write(pa.record_batch([pa.array([1])], schema=schema))
            raise RuntimeError
    assert list(path.parent.iterdir()) == []
    with SpoolWriter(path, schema) as writer:
        writer.write(pa.record_batch([pa.array([1, 2])], schema=schema))
    assert ParquetRows([spool_file(path)]).num_rows == 2


def test_invalid_utf8_is_repaired_and_stays_in_its_row(tmp_path: Path) -> None:
    raw = pa.array([b"good", b"bad \xff", None])
    text = pa.Array.from_buffers(pa.string(), 3, raw.buffers())
    nested = pa.StructArray.from_arrays([text], ["content"])
    batch = pa.record_batch({"prompt": text, "messages": nested})
    values = to_values(batch)
    assert values[0] == {"prompt": "good", "messages": {"content": "good"}}
    assert isinstance(values[1], RowFailure) and values[1].code == "bad_json"
    assert isinstance(values[2], dict)
    assert to_values(batch.select(["prompt"])) == [{"prompt": "good"}, {"prompt": "bad �"}, {"prompt": None}]
    deep = pa.array(
        [[("k", {"n": 1, "b": b"\xff"})]] * 3, pa.map_(pa.string(), pa.struct({"n": "int8", "b": "binary"}))
    )
    lists = pa.ListArray.from_arrays([0, 2, 2, 3], nested)
    table = pa.table({"prompt": text, "nested": nested, "lists": lists, "deep": deep, "map": maps_of(text)})
    pq.write_table(table, tmp_path / "a.parquet")
    source = source_of(tmp_path)
    merged = pa.Table.from_batches(source.iter_batches())
    merged.validate(full=True)
    assert merged["prompt"].to_pylist() == ["good", "bad �", None]
    assert merged["nested"].to_pylist() == [{"content": "good"}, {"content": "bad �"}, {"content": None}]
    assert merged["lists"].to_pylist() == [[{"content": "good"}, {"content": "bad �"}], [], [{"content": None}]]
    assert merged["map"].to_pylist() == [[("k", "good")], [("k", "bad �")], [("k", None)]]
    assert merged["deep"].combine_chunks().equals(deep)


def maps_of(texts: pa.Array) -> pa.Array:
    return pa.MapArray.from_arrays(range(len(texts) + 1), pa.array(["k"] * len(texts)), texts)


def test_token_lists() -> None:
    kinds = [pa.list_(pa.int32()), pa.large_list(pa.int64()), pa.list_(pa.int16(), 2), pa.list_(pa.uint8())]
    for kind in kinds:
        batch = pa.record_batch({"prompt_token_ids": pa.array([[1, 2], None, [3, None]], kind)})
        rows = to_values(batch)
        assert rows == [{"prompt_token_ids": value} for value in ([1, 2], None, [3, None])]
        assert isinstance(rows[0], dict) and type(rows[0]["prompt_token_ids"][0]) is int

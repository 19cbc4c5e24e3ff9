from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from echo_batch.errors import ConfigError
from echo_batch.io.ownership import local_output_path, output_format, read_output_metadata


def test_output_format_is_as_asked_else_by_suffix():
    assert output_format("a.parquet") == "parquet"
    assert output_format(Path("a.JSONL")) == "jsonl"
    assert output_format("a.parquet", "openai") == "openai"
    for name in ("a", "a.csv", "a.jsonl.gz"):
        with pytest.raises(ConfigError, match="--format parquet"):
            output_format(name)


def test_local_output_path():
    assert local_output_path("out/a.parquet") == Path("out/a.parquet")
    assert local_output_path("file:///data/a.parquet") == Path("/data/a.parquet")
    with pytest.raises(ConfigError, match="remote outputs are not supported yet"):
        local_output_path("s3://bucket/a.parquet")


def test_read_output_metadata_is_none_for_everything_else(tmp_path):
    (tmp_path / "a").write_text("not parquet")
    pq.write_table(pa.table({"a": [1]}), tmp_path / "b")
    pq.write_table(pa.table({"a": [1]}).replace_schema_metadata({"echo_batch": "{broken"}), tmp_path / "c")
    for name in "abcd":
        assert read_output_metadata(tmp_path / name) is None
    pq.write_table(pa.table({"a": [1]}).replace_schema_metadata({"echo_batch": '{"run_id": "x"}'}), tmp_path / "e")
    assert read_output_metadata(tmp_path / "e") == {"run_id": "x"}

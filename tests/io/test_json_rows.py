import json
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from echo_batch.errors import InputError
from echo_batch.io.json_rows import (
    JSON_TEXT,
    MAX_COLUMNS,
    MAX_DEPTH,
    ColumnTypes,
    json_text,
    parse_row,
    without_surrogates,
)
from echo_batch.io.output_file import _dumps
from echo_batch.request import RowFailure

json_values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**70), 2**70)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(st.characters(), max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=6,
)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (b"{", "Expecting"),
        (b'{"a": 1,}', "Expecting"),
        (b'{"a": 1} x', "Extra data"),
        (b"[1]", "expected an object, got list"),
        (b"3", "expected an object, got int"),
        (b"null", "expected an object, got NoneType"),
        (b'{"a": "\xff"}', "not valid UTF-8 at byte 7"),
        (b'{"a": ' + b"[" * 200_000 + b"}", "nested too deeply"),
        (b'{"a": ' + b"[" * MAX_DEPTH + b"]" * MAX_DEPTH + b"}", "nested too deeply"),
        (b'{"a": ' * (MAX_DEPTH + 1) + b"1" + b"}" * (MAX_DEPTH + 1), "nested too deeply"),
        (b'{"a": 1' + b"0" * 5_000 + b"}", "digits"),
        (b'{"a": "\n"}', "control character"),
    ],
)
def test_bad_json(line: bytes, message: str) -> None:
    row = parse_row(line)
    assert isinstance(row, RowFailure) and row.code == "bad_json"
    assert message in row.message and len(row.message) <= 220


def test_the_deepest_row_can_be_written() -> None:
    depth = MAX_DEPTH - 1
    row = parse_row(b'{"a": ' + b"[" * depth + b"1e999" + b"]" * depth + b', "b": [[], [], {}]}')
    assert isinstance(row, dict)
    assert _dumps(row) == '{"a": ' + "[" * depth + "null" + "]" * depth + ', "b": [[], [], {}]}'


def test_too_long_row(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("echo_batch.io.json_rows.MAX_ROW_BYTES", 2**20)
    row = parse_row(b'{"a": "%s"}' % (b"x" * 2**20))
    assert isinstance(row, RowFailure) and "longer than 1 MiB" in row.message


def test_lenient_where_nothing_is_lost() -> None:
    assert parse_row(b'\xef\xbb\xbf{"a": NaN, "b": [Infinity, 1]}\r\n') == {"a": None, "b": [None, 1]}


def table(rows: list[Any]) -> pa.RecordBatch:
    types = ColumnTypes()
    for row in rows:
        if row is not None:
            types.observe(row)
    batch = types.to_batch(rows)
    batch.validate(full=True)
    assert batch.schema.equals(types.schema(), check_metadata=True)
    return batch


@pytest.mark.parametrize(
    ("values", "kind", "expected"),
    [
        ([1, 2], pa.int64(), [1, 2]),
        ([1, 2.5], pa.float64(), [1.0, 2.5]),
        ([True, None], pa.bool_(), [True, None]),
        (["a", None], pa.large_string(), ["a", None]),
        ([None, None], pa.large_string(), [None, None]),
        ([[1], [], None], pa.list_(pa.int64()), [[1], [], None]),
        ([[1], [2.5, None]], pa.list_(pa.float64()), [[1.0], [2.5, None]]),
        ([["a"], ["b", "c"]], pa.list_(pa.large_string()), [["a"], ["b", "c"]]),
        (["a\ud800b", "c"], pa.large_string(), ["a�b", "c"]),
        ([["a\udfff"]], pa.list_(pa.large_string()), [["a�"]]),
    ],
)
def test_columns_of_one_type(values: list[Any], kind: pa.DataType, expected: list[Any]) -> None:
    batch = table([{"x": value} for value in values])
    assert batch.schema.field("x").type == kind
    assert batch.schema.field("x").metadata is None
    assert batch.column(0).to_pylist() == expected


@pytest.mark.parametrize(
    "values",
    [
        [1, "a"],
        [True, 1],
        ["a", ["a"]],
        [{"a": 1}],
        [[{"a": 1}]],
        [[1, "a"]],
        [[[1]]],
        [2**63],
        [[2**70]],
        [1, {"a": "é"}],
        [[1], ["a"]],
    ],
)
def test_everything_else_is_json_text(values: list[Any]) -> None:
    batch = table([{"x": value} for value in (*values, None)])
    assert batch.schema.field("x").type == pa.large_string()
    assert batch.schema.field("x").metadata == JSON_TEXT
    texts = batch.column(0).to_pylist()
    assert texts[-1] is None
    assert [json.loads(text) for text in texts[:-1]] == values
    assert "\\u00e9" not in "".join(texts[:-1])


def test_missing_keys_bad_rows_and_order() -> None:
    batch = table([{"b": 1}, None, {"a": "x", "b": 2}])
    assert batch.to_pylist() == [{"b": 1, "a": None}, {"b": None, "a": None}, {"b": 2, "a": "x"}]
    assert table([None, {}]).num_rows == 2  # no columns, still rows
    assert ColumnTypes().schema() == pa.schema([])


def test_names_that_utf8_cannot_hold() -> None:
    batch = table([json.loads('{"a\\ud800": 1, "a\\udfff": 2, "": 3}')])
    assert batch.to_pydict() == {"a�": [1], "a�_": [2], "": [3]}


def test_too_many_columns() -> None:
    types = ColumnTypes()
    with pytest.raises(InputError, match="different keys"):
        types.observe({str(i): i for i in range(MAX_COLUMNS + 1)})


def test_text_too_deep_to_write_is_null() -> None:
    value: Any = 1
    for _ in range(100_000):
        value = [value]
    assert json_text(value) is None


def clean(value: Any) -> Any:
    """What is left of a JSON value where UTF-8 cannot hold it."""
    if isinstance(value, str):
        return without_surrogates(value)
    if isinstance(value, list):
        return [clean(item) for item in value]
    if isinstance(value, dict):
        return {clean(name): clean(item) for name, item in value.items()}
    return value


@settings(max_examples=60, deadline=None)
@given(st.lists(st.dictionaries(st.sampled_from("abc"), json_values, max_size=3), max_size=6))
def test_any_rows_make_a_valid_table(rows: list[dict[str, Any]]) -> None:
    batch = table(rows)
    assert batch.num_rows == len(rows)
    for field, column in zip(batch.schema, batch.columns):
        for row, value in zip(rows, column.to_pylist()):
            original = row.get(field.name)
            if field.metadata == JSON_TEXT and original is not None:
                assert json.loads(value) == clean(original)
            else:
                assert value == clean(original)

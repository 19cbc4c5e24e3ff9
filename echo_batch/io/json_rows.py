"""JSON rows: one line to a row or a failure, and the columns that all rows together need.

The unified schema, found over all rows in bounded memory: a column of one scalar type keeps it (integers and floats
together become double), a list of one scalar type becomes a list; everything else (objects, lists of objects, mixed
types, integers beyond 64 bits) becomes JSON text. Such a column's field carries JSON_TEXT in its metadata.
"""

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

import pyarrow as pa

from echo_batch.errors import InputError
from echo_batch.request import RowFailure

MAX_ROW_BYTES = 64 * 1024 * 1024
MAX_COLUMNS = 2_000
MAX_DEPTH = 256
"""Lists and objects inside one another. Python reads deeper ones, and then cannot walk through them or write them."""
JSON_TEXT = {b"echo_batch": b"json"}

# NaN and Infinity are not JSON, but many programs write them.
_DECODER = json.JSONDecoder(parse_constant=lambda _: None)
_BOM = b"\xef\xbb\xbf"
_SURROGATE = re.compile("[\ud800-\udfff]")
_INT64 = range(-(2**63), 2**63)
_SCALARS = {type(None): "null", bool: "bool", int: "int", float: "double", str: "string"}
_ARROW = {
    "null": pa.large_string(),
    "bool": pa.bool_(),
    "int": pa.int64(),
    "double": pa.float64(),
    "string": pa.large_string(),
    "json": pa.large_string(),
}


def parse_row(line: bytes) -> dict[str, Any] | RowFailure:
    """One line of JSON Lines as a row, or why it is none (`bad_json`). NaN and Infinity are read as null."""
    if len(line) > MAX_ROW_BYTES:
        return RowFailure(code="bad_json", message=f"the row is longer than {MAX_ROW_BYTES // 2**20} MiB")
    try:
        value = _DECODER.decode(line.removeprefix(_BOM).decode("utf-8"))
    except UnicodeDecodeError as error:
        return RowFailure(code="bad_json", message=f"not valid UTF-8 at byte {error.start} of the row")
    except RecursionError:
        return RowFailure(code="bad_json", message="nested too deeply")
    except ValueError as error:
        return RowFailure(code="bad_json", message=str(error)[:200])
    if not isinstance(value, dict):
        return RowFailure(code="bad_json", message=f"expected an object, got {type(value).__name__}")
    if line.count(b"[") + line.count(b"{") > MAX_DEPTH and _is_deep(value):
        return RowFailure(code="bad_json", message="nested too deeply")
    return value


def _is_deep(value: Any) -> bool:
    level = [value]
    for _ in range(MAX_DEPTH):
        items = (item for held in level for item in (held.values() if type(held) is dict else held))
        level = [item for item in items if type(item) in (dict, list)]
        if not level:
            return False
    return True


def without_surrogates(text: str) -> str:
    """The text with lone surrogates, which UTF-8 cannot hold, replaced by U+FFFD."""
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:
        return _SURROGATE.sub("�", text)
    return text


def json_text(value: Any) -> str | None:
    """Any value as JSON text; None (null) stays None, as does what is nested too deeply to be written."""
    if value is None:
        return None
    try:
        return without_surrogates(json.dumps(value, ensure_ascii=False))
    except RecursionError:
        return None


def dump_row(value: Any) -> bytes:
    """A value read by ijson as one line of JSON that `parse_row` reads back."""
    try:
        return json.dumps(value, ensure_ascii=False, default=float).encode("utf-8", "surrogatepass")
    except (RecursionError, OverflowError):
        return b"element that is nested too deeply or holds a number that is too large"


class ColumnTypes:
    """Kinds of the columns seen so far: "null bool int double string json" or "list:<scalar kind>"."""

    def __init__(self, kinds: Mapping[str, str] | None = None) -> None:
        self.kinds: dict[str, str] = dict(kinds or {})

    def observe(self, values: Mapping[str, Any]) -> None:
        """Widen the columns so that this row fits. Raises InputError past MAX_COLUMNS different keys."""
        kinds = self.kinds
        for name, value in values.items():
            known = kinds.get(name)
            if known == "json":
                continue
            kind = _kind_of(value)
            if kind != known:
                kinds[name] = kind if known is None else _unify(known, kind)
        if len(kinds) > MAX_COLUMNS:
            raise InputError(f"more than {MAX_COLUMNS} different keys in the rows: this is not a table")

    def schema(self) -> pa.Schema:
        """Arrow schema of all columns, in order of first appearance."""
        fields, taken = [], set()
        for name, kind in self.kinds.items():
            clean = without_surrogates(name)
            while clean in taken:  # two keys that differ in lone surrogates only
                clean += "_"
            taken.add(clean)
            fields.append(pa.field(clean, _arrow_type(kind), metadata=JSON_TEXT if kind == "json" else None))
        return pa.schema(fields)

    def to_batch(self, rows: Sequence[Mapping[str, Any] | None]) -> pa.RecordBatch:
        """Rows as a record batch of `schema()`; a None row (a bad one) is all nulls."""
        schema = self.schema()
        if not self.kinds:
            # Built from no arrays, a batch would lose its number of rows.
            return pa.RecordBatch.from_struct_array(pa.array([{}] * len(rows), pa.struct([])))
        arrays = [
            pa.array([_convert(row.get(name), kind) if row else None for row in rows], type=_arrow_type(kind))
            for name, kind in self.kinds.items()
        ]
        return pa.record_batch(arrays, schema=schema)


def _kind_of(value: Any) -> str:
    kind = _SCALARS.get(type(value), "json")
    if kind == "int":
        return "int" if value in _INT64 else "json"
    if type(value) is not list:
        return kind
    kinds = {_SCALARS.get(t, "json") for t in set(map(type, value))}
    if "int" in kinds and any(type(item) is int and item not in _INT64 for item in value):
        return "json"
    inner = "null"
    for item_kind in kinds:
        inner = _unify(inner, item_kind)
    return "json" if inner == "json" else f"list:{inner}"


def _unify(a: str, b: str) -> str:
    if a == b or b == "null":
        return a
    if a == "null":
        return b
    if {a, b} == {"int", "double"}:
        return "double"
    if a.startswith("list:") and b.startswith("list:"):
        inner = _unify(a[5:], b[5:])
        return "json" if inner == "json" else f"list:{inner}"
    return "json"


def _arrow_type(kind: str) -> pa.DataType:
    return pa.list_(_ARROW[kind[5:]]) if kind.startswith("list:") else _ARROW[kind]


def _convert(value: Any, kind: str) -> Any:
    if value is None:
        return None
    if kind == "string":
        return without_surrogates(value)
    if kind == "double":
        return float(value)
    if kind == "json":
        return json_text(value)
    if kind.startswith("list:") and kind[5:] in ("string", "double"):
        return [_convert(item, kind[5:]) for item in value]
    return value

"""The columns of results: from completions to Arrow, and what input columns are called beside them. Knows no files."""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import pyarrow as pa

from echo_batch.request import Completion, TokenLogprobs

_SURROGATE = re.compile("[\ud800-\udfff]")

TOP_LOGPROB_TYPE = pa.struct([("token_id", pa.int32()), ("logprob", pa.float32())])
LOGPROBS_TYPE = pa.list_(
    pa.struct([("token_id", pa.int32()), ("logprob", pa.float32()), ("top", pa.list_(TOP_LOGPROB_TYPE))])
)

_BASE_FIELDS = (
    pa.field("row_id", pa.int64(), nullable=False),
    pa.field("generated_text", pa.string()),
    pa.field("reasoning_text", pa.string()),
    pa.field("finish_reason", pa.string()),
    pa.field("num_input_tokens", pa.int32()),
    pa.field("num_cached_tokens", pa.int32()),
    pa.field("num_generated_tokens", pa.int32()),
    pa.field("error_code", pa.string()),
    pa.field("error_message", pa.string()),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class ResultColumns:
    """Which of the optional result columns this job writes."""

    cut_tokens: bool = False
    """`num_cut_tokens`: prompt tokens removed by the too-long policy (only with a policy that cuts)."""
    token_ids: bool = False
    """`generated_token_ids` list<int32>."""
    logprobs: bool = False
    """`logprobs`: per generated token its id, log-probability and the likeliest ones."""

    @property
    def schema(self) -> pa.Schema:
        """The Arrow schema of the result columns, `row_id` first."""
        fields = list(_BASE_FIELDS)
        if self.cut_tokens:
            fields.append(pa.field("num_cut_tokens", pa.int32()))
        if self.token_ids:
            fields.append(pa.field("generated_token_ids", pa.list_(pa.int32())))
        if self.logprobs:
            fields.append(pa.field("logprobs", LOGPROBS_TYPE))
        return pa.schema(fields)


def clean_text(text: str | None) -> str | None:
    """Text that UTF-8 can hold: surrogate pairs are joined, a lone surrogate becomes U+FFFD."""
    if text is None or _SURROGATE.search(text) is None:
        return text
    return text.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace")


def results_table(completions: Sequence[Completion], columns: ResultColumns) -> pa.Table:
    """The completions as a table of `columns.schema`, in the order given. A failed row has no text, no tokens and no
    finish reason, whatever its completion holds."""
    rows = [_result_row(completion, columns) for completion in completions]
    return pa.Table.from_pylist(rows, schema=columns.schema)


def result_bytes(completion: Completion) -> int:
    """About the bytes of a completion's row in Arrow memory; an upper bound but for the width of rare characters."""
    size = 96
    for text in (completion.text, completion.reasoning_text):
        if text is not None:
            size += len(text) if text.isascii() else len(text.encode("utf-8", "surrogatepass"))
    size += 4 * len(completion.token_ids)
    for entry in completion.logprobs or ():
        size += 16 + 8 * len(entry.top)
    if completion.failure is not None:
        size += 2 * len(completion.failure.message)
    return size


def _result_row(completion: Completion, columns: ResultColumns) -> dict[str, Any]:
    failure = completion.failure
    ok = failure is None
    row: dict[str, Any] = {
        "row_id": completion.row_id,
        "generated_text": clean_text(completion.text) if ok else None,
        "reasoning_text": clean_text(completion.reasoning_text) if ok else None,
        "finish_reason": completion.finish_reason if ok else None,
        "num_input_tokens": completion.num_input_tokens,
        "num_cached_tokens": completion.num_cached_tokens,
        "num_generated_tokens": len(completion.token_ids) if ok else 0,
        "error_code": failure.code if failure is not None else None,
        "error_message": clean_text(failure.message) if failure is not None else None,
    }
    if columns.cut_tokens:
        row["num_cut_tokens"] = completion.num_cut_tokens
    if columns.token_ids:
        row["generated_token_ids"] = completion.token_ids if ok else None
    if columns.logprobs:
        asked = ok and completion.logprobs is not None
        row["logprobs"] = [_logprob_row(entry) for entry in completion.logprobs or ()] if asked else None
    return row


def _logprob_row(entry: TokenLogprobs) -> dict[str, Any]:
    top = [{"token_id": token, "logprob": logprob} for token, logprob in entry.top]
    return {"token_id": entry.token_id, "logprob": entry.logprob, "top": top}


def output_names(input_names: Sequence[str], result_names: Sequence[str]) -> list[str]:
    """What the input columns are called in the output, by position.

    A name that a result column has (or an earlier input column: Parquet allows doubles) becomes `input_<name>`, with
    as many `input_` as it takes to be the only one.
    """
    taken = set(result_names)
    # Columns that keep their name keep it even when an earlier clashing one would like it.
    kept = {name for name in input_names if name not in taken}
    names: list[str] = []
    for name in input_names:
        if name in taken:
            while name in taken or name in kept:
                name = f"input_{name}"
        taken.add(name)
        names.append(name)
    return names


def output_schema(input_schema: pa.Schema, results: pa.Schema) -> pa.Schema:
    """Input columns (renamed where they clash), then result columns. File metadata of the input is left behind: what
    pandas or datasets wrote there describes other columns."""
    names = output_names(input_schema.names, results.names)
    fields = [field.with_name(name) for field, name in zip(input_schema, names, strict=True)]
    return pa.schema(fields + list(results))

import pyarrow as pa
from hypothesis import given
from hypothesis import strategies as st

from echo_batch.io.output_schema import (
    ResultColumns,
    clean_text,
    output_names,
    output_schema,
    result_bytes,
    results_table,
)
from echo_batch.request import Completion, RowFailure, TokenLogprobs

ALL = ResultColumns(cut_tokens=True, token_ids=True, logprobs=True)


def test_the_default_columns_are_the_documented_ones():
    documented = (
        "row_id generated_text reasoning_text finish_reason num_input_tokens num_cached_tokens num_generated_tokens "
        "error_code error_message"
    )
    assert " ".join(ResultColumns().schema.names) == documented
    assert ALL.schema.names[9:] == ["num_cut_tokens", "generated_token_ids", "logprobs"]
    assert ALL.schema.field("generated_token_ids").type == pa.list_(pa.int32())


def test_a_completion_becomes_a_row():
    done = Completion(
        row_id=7,
        token_ids=(4, 5),
        text="hi",
        reasoning_text="hm",
        finish_reason="stop",
        num_input_tokens=10,
        num_cached_tokens=3,
        num_cut_tokens=2,
        logprobs=(
            TokenLogprobs(token_id=4, logprob=-0.5, top=((4, -0.5), (9, -1.0))),
            TokenLogprobs(token_id=5, logprob=0),
        ),
    )
    (row,) = results_table([done], ALL).to_pylist()
    assert row == {
        "row_id": 7,
        "generated_text": "hi",
        "reasoning_text": "hm",
        "finish_reason": "stop",
        "num_input_tokens": 10,
        "num_cached_tokens": 3,
        "num_generated_tokens": 2,
        "error_code": None,
        "error_message": None,
        "num_cut_tokens": 2,
        "generated_token_ids": [4, 5],
        "logprobs": [
            {"token_id": 4, "logprob": -0.5, "top": [{"token_id": 4, "logprob": -0.5}, {"token_id": 9, "logprob": -1}]},
            {"token_id": 5, "logprob": 0.0, "top": []},
        ],
    }


def test_a_failed_row_has_no_text_whatever_it_got_so_far():
    failed = Completion(
        row_id=1, token_ids=(4,), text="part", finish_reason="length", num_input_tokens=3,
        failure=RowFailure(code="engine_failed", message="lost \ud800"),
    )  # fmt: skip
    (row,) = results_table([failed], ALL).to_pylist()
    assert row["generated_text"] is row["finish_reason"] is row["generated_token_ids"] is row["logprobs"] is None
    assert (row["num_generated_tokens"], row["error_code"], row["error_message"]) == (0, "engine_failed", "lost \ufffd")


def test_without_a_tokenizer_text_is_null_and_an_empty_answer_is_not():
    rows = results_table([Completion(row_id=0, token_ids=(1,)), Completion(row_id=1, text="")], ResultColumns())
    assert rows["generated_text"].to_pylist() == [None, ""]


def test_clean_text():
    assert clean_text(None) is None
    assert clean_text("a\ud83db") == "a\ufffdb"
    assert clean_text("\ud83d\ude00") == "\U0001f600"
    assert clean_text("\ude00\ud83d") == "\ufffd\ufffd"


@given(st.text(alphabet=st.characters(exclude_categories=())))
def test_clean_text_is_utf8_and_leaves_proper_text_alone(text):
    cleaned = clean_text(text)
    assert cleaned.encode("utf-8").decode("utf-8") == cleaned
    if not any("\ud800" <= c <= "\udfff" for c in text):
        assert cleaned == text


def test_result_bytes_is_about_what_arrow_takes():
    completion = Completion(
        row_id=0,
        token_ids=tuple(range(500)),
        text="häßlich" * 300,
        logprobs=tuple(TokenLogprobs(token_id=t, logprob=-1.0, top=((t, -1.0),) * 5) for t in range(500)),
    )
    real = results_table([completion], ALL).nbytes
    assert real <= result_bytes(completion) * 1.2
    assert result_bytes(completion) <= real * 1.5


def test_clashing_names():
    results = ["row_id", "error_code"]
    assert output_names(["id", "row_id"], results) == ["id", "input_row_id"]
    assert output_names(["row_id", "input_row_id"], results) == ["input_input_row_id", "input_row_id"]
    assert output_names(["a", "a"], results) == ["a", "input_a"]
    assert output_names(["generated_token_ids"], ResultColumns().schema.names) == ["generated_token_ids"]


names = st.lists(st.sampled_from(["row_id", "input_row_id", "input_input_row_id", "a", "input_a", "error_code"]))


@given(names)
def test_output_names_are_unique_and_change_only_what_clashes(inputs):
    results = ResultColumns().schema.names
    renamed = output_names(inputs, results)
    assert len(set(renamed) | set(results)) == len(inputs) + len(results)
    for i, (old, new) in enumerate(zip(inputs, renamed, strict=True)):
        assert new.endswith(old)
        assert set(new[: -len(old)].split("input_")) <= {""}
        if old not in results and old not in inputs[:i]:
            assert new == old


def test_output_schema_keeps_field_metadata_and_drops_the_files():
    field = pa.field("x", pa.list_(pa.int8()), nullable=False, metadata={"k": "v"})
    schema = output_schema(pa.schema([field], metadata={"pandas": "{}"}), ResultColumns().schema)
    assert schema.field("x").equals(field, check_metadata=True)
    assert schema.metadata is None

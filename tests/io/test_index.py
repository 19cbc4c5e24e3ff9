import json
import sqlite3
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from echo_batch.config import InputConfig, RunConfig
from echo_batch.errors import InputError, OutputError
from echo_batch.files import temporary_name
from echo_batch.io.chat import load_chat
from echo_batch.io.index import IndexEntry, RowIndex, build_index, load_index, prefix_hashes
from echo_batch.io.reader import Source, open_source
from echo_batch.io.requests import PromptLimits, RequestBuilder
from echo_batch.io.schema import Record
from echo_batch.request import Request, RowFailure, SamplingParams


def make_builder(limit: int = 100_000, is_openai: bool = False, max_tokens: int | None = 10) -> RequestBuilder:
    config = RunConfig(
        input=InputConfig(), sampling=SamplingParams(max_tokens=max_tokens), explicit_sampling=frozenset({"max_tokens"})
    )
    chat = load_chat(None, tokenizer=None, model_type=None)
    limits = PromptLimits(context_tokens=limit, vocab_size=1_000)
    return RequestBuilder(config, None, chat, limits, is_openai=is_openai)


def make_source(tmp_path: Path, rows: Sequence[Any]) -> Source:
    lines = (row if isinstance(row, str) else json.dumps(row) for row in rows)
    (tmp_path / "rows.jsonl").write_text("".join(line + "\n" for line in lines))
    return open_source([str(tmp_path / "rows.jsonl")], spool_dir=tmp_path / "run")


def ids(n: int, first: int = 1) -> dict[str, Any]:
    return {"prompt_token_ids": [first + i % 900 for i in range(n)]}


def test_order_failures_and_totals(tmp_path: Path) -> None:
    rows = [ids(5), "{bad", ids(70), ids(5), {}, ids(70) | {"max_tokens": 1}, ids(200), ids(5)]
    source = make_source(tmp_path, rows)
    builder = make_builder()
    path = tmp_path / "run" / "index.sqlite"
    progress = list(build_index(path, source, builder, fingerprint={"a": 1}))
    assert progress[-1] == (8, 8, 355, 2)
    index = RowIndex(path)
    assert list(index.iter_order()) == [6, 2, 5, 0, 3, 7]
    entries = list(index.iter_entries())
    assert [(e.row_id, e.num_tokens, e.max_tokens) for e in entries[:3]] == [(6, 200, 10), (2, 70, 10), (5, 70, 1)]
    assert index.entry(5) == entries[2] and index.entry(1) is None
    failures = list(index.iter_failures())
    assert [(row, failure.code) for row, failure in failures] == [(1, "bad_json"), (4, "no_prompt")]
    # What the run sees is what the preflight saw.
    for record in source.read_records(list(index.iter_order())):
        request = builder.build(record)
        entry = index.entry(record.row_id)
        assert entry == IndexEntry(
            record.row_id,
            len(request.prompt_token_ids),
            request.sampling.max_tokens or 0,
            prefix_hashes(request.prompt_token_ids),
        )
    totals = index.totals()
    assert (totals.num_rows, totals.num_good, dict(totals.failures)) == (8, 6, {"bad_json": 1, "no_prompt": 1})
    assert (totals.prompt_tokens, totals.max_tokens, totals.longest_prompt, totals.longest_total) == (355, 51, 200, 210)
    assert totals.total_blocks == 3 * 1 + 2 + 2 + 4
    assert totals.histogram == ((16, 3), (128, 2), (256, 1))
    assert [index.num_longer_than(n) for n in (14, 15, 71, 80, 210)] == [6, 3, 2, 1, 0]
    index.close()


def test_rows_that_begin_alike_stand_together_longest_first(tmp_path: Path) -> None:
    def prompt(*parts: tuple[int, int]) -> dict[str, Any]:
        """Parts of (number of tokens, token)."""
        return {"prompt_token_ids": [token for count, token in parts for _ in range(count)]}

    task, a, b = (64, 1), (448, 2), (448, 3)  # a and b: two books behind one block that both have
    rows = [
        prompt(task, a, (10, 4)),  # 0
        prompt((560, 9)),  # 1: alone
        prompt(task, b, (30, 5)),  # 2
        prompt(task, a, (90, 6)),  # 3: the longest of all
        prompt((50, 1)),  # 4: less than a block
        prompt(task, b, (40, 7)),  # 5
        prompt(task, (100, 8)),  # 6: shares the first block only
        prompt((50, 1)),  # 7
        prompt((560, 10)),  # 8: as long as row 1
    ]
    index = load_index(tmp_path / "i.sqlite", make_source(tmp_path, rows), make_builder(), fingerprint={})
    assert list(index.iter_order()) == [3, 0, 5, 2, 6, 1, 8, 4, 7]


def test_zero_rows(tmp_path: Path) -> None:
    index = load_index(tmp_path / "i.sqlite", make_source(tmp_path, []), make_builder(), fingerprint={})
    assert list(index.iter_order()) == [] and list(index.iter_failures()) == []
    totals = index.totals()
    assert totals.num_rows == totals.longest_total == totals.total_blocks == 0 and totals.histogram == ()


def test_duplicate_ids_are_the_later_rows(tmp_path: Path) -> None:
    def row(name: Any, prompt: str = "") -> dict[str, Any]:
        body = {"prompt": [1, 2]} if not prompt else {"prompt": prompt, "n": 2}
        return {"custom_id": name, "method": "POST", "url": "/v1/completions", "body": body}

    rows = [row("a"), row("b", "bad"), row("a"), row("b"), row(None), row(None), row("é\ud800"), row("é\ud800")]
    source = make_source(tmp_path, rows)
    assert source.is_openai
    path = tmp_path / "i.sqlite"
    index = load_index(path, source, make_builder(is_openai=True), fingerprint={})
    assert [(row_id, failure.code) for row_id, failure in index.iter_failures()] == [
        (1, "unsupported_param"),
        (2, "duplicate_id"),
        (3, "duplicate_id"),  # also when the earlier one failed
        (4, "bad_params"),
        (5, "bad_params"),
        (7, "duplicate_id"),
    ]
    assert sorted(index.iter_order()) == [0, 6]


class Interrupted(Exception):
    pass


class CountingSource:
    """A source that breaks off at a row, and remembers where it was asked to begin."""

    def __init__(self, inner: Source, stop_at: int | None = None) -> None:
        self.inner, self.stop_at, self.starts = inner, stop_at, []  # type: tuple[Source, int | None, list[int]]

    @property
    def num_rows(self) -> int:
        return self.inner.num_rows

    def iter_records(self, start: int = 0) -> Iterator[Record]:
        self.starts.append(start)
        for record in self.inner.iter_records(start):
            if record.row_id == self.stop_at:
                raise Interrupted
            yield record


def test_goes_on_where_it_stopped_and_is_found_again(tmp_path: Path) -> None:
    rows = [ids(1 + i % 50, 1 + i) for i in range(600)]
    inner = make_source(tmp_path, rows)
    path = tmp_path / "i.sqlite"
    whole = load_index(tmp_path / "whole.sqlite", inner, make_builder(), fingerprint={"x": 1})
    with pytest.raises(Interrupted):
        load_index(path, CountingSource(inner, 520), make_builder(), fingerprint={"x": 1})
    assert not path.exists() and temporary_name(path).exists()
    source = CountingSource(inner)
    index = load_index(path, source, make_builder(), fingerprint={"x": 1})
    assert source.starts == [512] and not temporary_name(path).exists()
    assert list(index.iter_entries()) == list(whole.iter_entries()) and index.totals() == whole.totals()
    load_index(path, source, make_builder(), fingerprint={"x": 1})
    assert source.starts == [512]
    load_index(path, source, make_builder(), fingerprint={"x": 2})
    assert source.starts == [512, 0]


def test_another_jobs_or_broken_leftovers_are_replaced(tmp_path: Path) -> None:
    source = make_source(tmp_path, [ids(i + 1) for i in range(600)])
    path = tmp_path / "i.sqlite"
    with pytest.raises(Interrupted):
        load_index(path, CountingSource(source, 300), make_builder(), fingerprint={"x": 1})
    counting = CountingSource(source)
    load_index(path, counting, make_builder(), fingerprint={"x": 2})
    assert counting.starts == [0]
    for target in (path, temporary_name(path)):
        target.write_bytes(b"no database" * 1_000)
    assert load_index(path, counting, make_builder(), fingerprint={"x": 2}).totals().num_rows == 600
    path.write_bytes(b"")
    assert load_index(path, counting, make_builder(), fingerprint={"x": 2}).totals().num_rows == 600


def test_an_input_that_changed_is_an_error(tmp_path: Path) -> None:
    source = make_source(tmp_path, [ids(1)] * 10)

    class Short(CountingSource):
        def iter_records(self, start: int = 0) -> Iterator[Record]:
            return iter(list(super().iter_records(start))[:-1])

    class Skipping(CountingSource):
        def iter_records(self, start: int = 0) -> Iterator[Record]:
            return iter(list(super().iter_records(start))[1:])

    for broken in (Short(source), Skipping(source)):
        with pytest.raises(InputError, match="did it change"):
            load_index(tmp_path / "i.sqlite", broken, make_builder(), fingerprint={})


def test_unwritable_place(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(OutputError):
        load_index(tmp_path / "file" / "i.sqlite", make_source(tmp_path, [ids(1)]), make_builder(), fingerprint={})


def test_prefix_hashes() -> None:
    long = list(range(900)) * 40
    assert prefix_hashes(long[:63]) == b""
    lengths = [(64, 1), (511, 1), (512, 2), (4_096, 3), (32_767, 3), (32_768, 4), (36_000, 4)]
    assert [(n, len(prefix_hashes(long[:n])) // 8) for n, _ in lengths] == lengths
    for n, _ in lengths:
        assert prefix_hashes(long).startswith(prefix_hashes(long[:n]))
    changed = list(long)
    changed[600] += 1
    same = [prefix_hashes(long)[i : i + 8] == prefix_hashes(changed)[i : i + 8] for i in range(0, 32, 8)]
    assert same == [True, True, False, False]


class ManyRows:
    """Rows that cost nothing to read, for the size of the index."""

    is_openai = False
    num_rows = 30_000

    def iter_records(self, start: int = 0) -> Iterator[Record]:
        return (Record(i, {}) for i in range(start, self.num_rows))

    def build_many(self, records: Sequence[Record]) -> list[Request | RowFailure]:
        tokens = range(33_000)
        sampling = SamplingParams(max_tokens=4_096)
        return [Request(row_id=record.row_id, prompt_token_ids=tokens, sampling=sampling) for record in records]


def test_at_most_64_bytes_a_row(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("echo_batch.io.index.prefix_hashes", lambda ids: b"\xff" * 32)
    rows = ManyRows()
    path = tmp_path / "i.sqlite"
    load_index(path, rows, rows, fingerprint={})
    assert path.stat().st_size / rows.num_rows <= 64


def test_the_index_is_read_only_and_usable_from_another_thread(tmp_path: Path) -> None:
    from threading import Thread

    index = load_index(tmp_path / "i ?#.sqlite", make_source(tmp_path, [ids(1)]), make_builder(), fingerprint={})
    with pytest.raises(sqlite3.OperationalError):
        index._database.execute("DELETE FROM rows")
    found: list[int] = []
    thread = Thread(target=lambda: found.extend(index.iter_order()))
    thread.start()
    thread.join()
    assert found == [0]

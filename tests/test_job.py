"""What a job leaves and does beside its exit code: reports, logs, prompts, losses of the engine."""

import functools
import gzip
import io
import json
import logging
import os
import shutil
from collections.abc import Callable, Generator, Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console

from echo_batch.config_file import make_config
from echo_batch.engine.core import EngineCore
from echo_batch.io.tokenizer import Tokenizer, load_tokenizer
from echo_batch.io.writer import PartWriter
from echo_batch.job import run_job
from echo_batch.reporter import Reporter
from echo_batch.request import Completion, Request
from tests.jobs import GREEDY, Workplace, token_rows
from tests.models.oracle import CheckpointFixture

RunFunction = Callable[[EngineCore, Iterable[Request]], Generator[Completion | None, None, None]]


@pytest.fixture
def place(
    tiny_checkpoint: CheckpointFixture,
    tmp_path: Path,
    capfd: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> Workplace:
    monkeypatch.chdir(tmp_path)
    return Workplace(tmp_path, tiny_checkpoint("v32", "fp32") / "model", capfd)


@pytest.fixture
def tokenizer(place: Workplace) -> Tokenizer:
    tokenizer = load_tokenizer(place.model)
    assert tokenizer is not None
    return tokenizer


# --- what a job leaves ---


def test_report_log_heartbeat_and_metrics(place: Workplace) -> None:
    source = place.write("rows.jsonl", [*token_rows((40, 70, 20)), {"prompt": ""}])
    metrics = place.path / "metrics.prom"
    options = ["--set", "report.heartbeat_seconds=0.05", "--metrics-textfile", str(metrics), "--max-error-rate", "0.25"]
    options += ["--set", "cache.residency=off"]  # everything fits, and there would be nothing to count
    outcome = place.run(source, *GREEDY, *options, "-o", place.output())
    assert outcome.code == 0 and outcome.out == ""

    report = place.report()
    assert report["version"] == 1
    sections = {"version", "job", "tokens", "seconds", "throughput", "cache", "scheduler", "memory", "plan", "versions"}
    assert sections <= report.keys()
    job = report["job"]
    assert (job["rows"], job["rows_done"], job["rows_failed"], job["rows_resumed"], job["starts"]) == (4, 4, 1, 0, 1)
    assert job["failed_by_code"] == {"empty_prompt": 1} and job["message"] is None and not job["demo_model"]
    assert report["tokens"] == {"prompt": 130, "cached": 0, "generated": 15, "cut": 0}
    assert report["cache"]["hit_rate"] is not None and len(report["cache"]["groups"]) == 4
    assert report["cache"]["offloaded_rows"] == 4 * 3 * 4  # in 4 layers, 3 rows, all tokens but their first and last
    assert report["scheduler"]["effective_batch"] == 3.0 and report["scheduler"]["steps"] == 4
    stages = ("preflight", "load", "load_weights", "load_pools", "run", "merge", "total")
    assert all(report["seconds"][stage] > 0 for stage in stages)
    assert report["plan"]["kv_cache"]["host_pool_tokens"] == 3968
    assert report["memory"]["peak_rss_bytes"] > 0

    lines = outcome.heartbeats
    assert len(lines) >= 2 and lines[-1]["event"] == "end" and {line["event"] for line in lines[:-1]} == {"heartbeat"}
    assert lines[-1]["rows_done"] == 4 and lines[-1]["decode_tokens"] == 15
    done = [line["rows_done"] for line in lines]
    assert done == sorted(done)

    text = metrics.read_text(encoding="utf-8")
    assert "echo_batch:request_success_total 3.0" in text and "echo_batch:request_failed_total 1.0" in text
    assert "echo_batch:last_success_timestamp_seconds" in text

    assert "plan: cpu, float32" in outcome.said and "1 of 4 rows cannot run (1 empty_prompt)" in outcome.said
    log = place.log()
    assert "plan: cpu, float32" in log and "start 1 of this job" in log and "exit code 0" in log
    assert json.loads((place.run_dir() / "config.json").read_text())["sampling"]["max_tokens"] == 5


def test_a_metrics_file_that_goes_away_stops_nothing(place: Workplace, monkeypatch: pytest.MonkeyPatch) -> None:
    original = EngineCore.run

    def run(core: EngineCore, requests: Iterable[Request]) -> Generator[Completion | None, None, None]:
        shutil.rmtree(metrics.parent)
        yield from original(core, requests)

    monkeypatch.setattr(EngineCore, "run", run)
    metrics = place.path / "metrics" / "m.prom"
    args = [place.write("rows.jsonl", token_rows((40, 20))), *GREEDY, "--metrics-textfile", str(metrics)]
    args += ["--set", "report.heartbeat_seconds=0.01", "-o", place.output()]
    assert place.run(*args).code == 73  # at the start it is a mistake of the command
    metrics.parent.mkdir()
    assert place.run(*args).code == 0 and f"cannot write {metrics}" in place.log()


def test_prefetch_modes_write_the_same_rows(place: Workplace) -> None:
    source = place.write("rows.jsonl", token_rows((250, 300, 200)))
    results, reports = [], []
    for mode in ("off", "branch", "fused"):
        options = ("--prefetch", mode, "--set", "cache.residency=off", "--max-tokens", "12", "--output-token-ids")
        outcome = place.run(source, *GREEDY, *options, "-o", place.output(f"{mode}.parquet"))
        assert outcome.code == 0, outcome.err
        results.append([row["generated_token_ids"] for row in place.rows(f"{mode}.parquet")])
        reports.append(place.report(f"{mode}.parquet"))
    assert results[0] == results[1] == results[2] and all(len(ids) == 12 for ids in results[0])
    assert [r["plan"]["kv_cache"]["prefetch"] for r in reports] == ["off", "branch", "fused"]
    assert reports[0]["cache"]["prefetch"] is None
    for found in (r["cache"]["prefetch"] for r in reports[1:]):
        assert 0 < found["prefetched"] == found["used"] + found["wasted"] <= found["candidates"]


def test_the_log_handler_goes_with_the_job(place: Workplace) -> None:
    logger = logging.getLogger("echo_batch")
    before = (logger.level, logger.propagate, list(logger.handlers))
    place.run(place.write("rows.jsonl", token_rows((3,))), *GREEDY, "-o", place.output())
    assert (logger.level, logger.propagate, list(logger.handlers)) == before


def test_token_ids_logprobs_and_json_lines(place: Workplace, tokenizer: Tokenizer) -> None:
    rows = [row | {"nested": {"a": [1, None]}} for row in token_rows((40, 12))]
    source = place.write("rows.jsonl", [*rows, {"prompt": "x", "row_id": 7, "logprobs": 0, "max_tokens": 1}])
    options = ["--output-token-ids", "--logprobs", "2"]
    assert place.run(source, *GREEDY, *options, "-o", place.output("out.jsonl")).code == 0
    for i, row in enumerate(place.rows("out.jsonl")):
        assert row["row_id"] == i
        assert row["generated_text"] == tokenizer.decode(row["generated_token_ids"])
        assert len(row["logprobs"]) == row["num_generated_tokens"] == len(row["generated_token_ids"])
        for token, entry in zip(row["generated_token_ids"], row["logprobs"], strict=True):
            assert entry["token_id"] == token and entry["logprob"] <= 0
            assert len(entry["top"]) == (0 if i == 2 else 2)
            if entry["top"]:
                assert entry["top"][0]["token_id"] == token  # greedy
    assert place.rows("out.jsonl")[2]["input_row_id"] == 7
    assert place.rows("out.jsonl")[0]["nested"] == {"a": [1, None]}


# --- prompts ---


@pytest.mark.parametrize("policy", ["fail", "cut-head", "cut-middle", "cut-tail"])
def test_too_long_prompts(place: Workplace, policy: str) -> None:
    row, short = token_rows((150, 20))
    ids = row["prompt_token_ids"]
    source = place.write("rows.jsonl", [row, short])
    options = ["--max-model-len", "100", "--max-tokens", "10", "--output-token-ids"]
    outcome = place.run(source, *GREEDY, *options, "--too-long", policy, "-o", place.output())
    long, other = place.rows()
    assert other["error_code"] is None
    if policy == "fail":
        assert outcome.code == 10 and long["error_code"] == "too_long" and "150 tokens" in long["error_message"]
        return
    assert outcome.code == 0
    assert (long["num_input_tokens"], long["num_cut_tokens"], other["num_cut_tokens"]) == (90, 60, 0)
    cut = {"cut-head": ids[60:], "cut-middle": ids[:45] + ids[105:], "cut-tail": ids[:90]}[policy]
    source = place.write("cut.jsonl", [{"prompt_token_ids": cut}])
    assert place.run(source, *GREEDY, *options, "-o", place.output("cut.parquet")).code == 0
    assert place.rows("cut.parquet")[0]["generated_token_ids"] == long["generated_token_ids"]
    assert place.report()["tokens"]["cut"] == 60


def test_outputs_are_clipped_at_the_context_limit(place: Workplace) -> None:
    source = place.write("rows.jsonl", token_rows((90, 99, 100)))
    outcome = place.run(source, *GREEDY, "--max-model-len", "100", "--max-tokens", "50", "-o", place.output())
    assert outcome.code == 10
    assert [row["num_generated_tokens"] for row in place.rows()] == [10, 1, 0]
    assert [row["finish_reason"] for row in place.rows()] == ["length", "length", None]
    assert place.rows()[2]["error_code"] == "too_long"


def test_chats_of_both_families(place: Workplace, tiny_checkpoint: CheckpointFixture, tokenizer: Tokenizer) -> None:
    chat = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "hello"}]
    texts = {
        "v32": "<｜begin▁of▁sentence｜>Be brief.<｜User｜>hello<｜Assistant｜>",
        "glm5": "[gMASK]<sop><|system|>Be brief.<|user|>hello<|assistant|>",
    }
    thinking = {"v32": "thinking", "glm5": "enable_thinking"}
    for family, text in texts.items():
        place = Workplace(place.path, tiny_checkpoint(family, "fp32") / "model", place.capture)  # type: ignore[arg-type]
        for on, end in ((False, "</think>"), (True, "<think>")):
            ids = tokenizer.encode(text + end)
            source = place.write("rows.jsonl", [{"messages": chat}, {"prompt_token_ids": ids}, {"messages": []}])
            name = f"{family}-{on}.parquet"
            kwargs = json.dumps({thinking[family]: on})
            options = ["--chat-template-kwargs", kwargs, "--output-token-ids"]
            assert place.run(source, *GREEDY, *options, "-o", place.output(name)).code == 10
            as_chat, as_ids, bad = place.rows(name)
            assert bad["error_code"] == "empty_prompt"
            assert as_chat["num_input_tokens"] == len(ids)
            assert as_chat["generated_token_ids"] == as_ids["generated_token_ids"]
            # Five tokens of a random model close no thinking part: all of it is reasoning.
            assert (as_chat["reasoning_text"] is not None) == on and (as_chat["generated_text"] == "") == on


def test_templates_and_stop_strings(place: Workplace, tokenizer: Tokenizer) -> None:
    rows = [{"a": "one", "b": "two"}, {"a": "three"}]
    args = [place.write("rows.jsonl", rows), *GREEDY, "--prompt-template", "{a}\\n{b}!", "--max-tokens", "20"]
    assert place.run(*args, "-o", place.output()).code == 10
    free, missing = place.rows()
    assert missing["error_code"] == "no_prompt" and "'b'" in missing["error_message"]
    assert free["num_input_tokens"] == len(tokenizer.encode("one\ntwo!", add_special_tokens=True))
    stop = free["generated_text"][3:5]
    place.run(*args, "--stop", stop, "-o", place.output("b.parquet"))
    stopped = place.rows("b.parquet")[0]
    assert stopped["finish_reason"] == "stop"
    assert stopped["generated_text"] == free["generated_text"].split(stop)[0]


# --- losses, bugs, full disks ---


def lose_engine_with(poison: set[int], original: RunFunction) -> RunFunction:
    """EngineCore.run whose device is lost as soon as one of these rows joins."""

    def run(core: EngineCore, requests: Iterable[Request]) -> Generator[Completion | None, None, None]:
        def watched() -> Iterator[Request]:
            for request in requests:
                if request.row_id in poison:
                    raise torch.OutOfMemoryError("CUDA out of memory.\nTried to allocate 20 GiB.")
                yield request

        yield from original(core, watched())

    return run


def test_a_row_that_takes_the_engine_down_ends_up_alone_and_then_fails(
    place: Workplace, monkeypatch: pytest.MonkeyPatch
) -> None:
    args = [place.write("rows.jsonl", token_rows((60, 50, 40, 30))), *GREEDY, "--output-token-ids"]
    assert place.run(*args, "-o", place.output("clean.parquet")).code == 0
    expected = place.rows("clean.parquet")
    monkeypatch.setattr(EngineCore, "run", lose_engine_with({3}, EngineCore.run))
    done = []
    for _ in range(3):
        outcome = place.run(*args, "-o", place.output())
        assert outcome.code == 75 and "CUDA out of memory" in outcome.said
        assert "the same command resumes the job" in outcome.said
        done.append(place.report()["job"]["rows_done"])
    # Twice all four rows were in flight; at the third start each ran alone, longest first, up to the poison.
    assert done == [0, 0, 3]
    outcome = place.run(*args, "-o", place.output())
    assert outcome.code == 10, outcome.err
    rows = place.rows()
    assert [row["error_code"] for row in rows] == [None, None, None, "engine_failed"]
    assert "3 losses" in rows[3]["error_message"]
    assert rows[:3] == expected[:3]
    assert place.report()["job"]["starts"] == 4


def test_three_starts_without_a_row_are_a_failure(place: Workplace, monkeypatch: pytest.MonkeyPatch) -> None:
    args = [place.write("rows.jsonl", token_rows((30, 40))), *GREEDY, "-o", place.output()]
    original = EngineCore.run
    monkeypatch.setattr(EngineCore, "run", lose_engine_with({0, 1}, original))
    outcomes = [place.run(*args) for _ in range(3)]
    assert [outcome.code for outcome in outcomes] == [75, 75, 1]
    assert "3 starts in a row finished no row (in flight: row 0, 1)" in outcomes[2].said
    assert place.report()["job"]["exit_code"] == 1
    # Who runs it again, after a look at the log, is not refused.
    monkeypatch.setattr(EngineCore, "run", original)
    assert place.run(*args).code in (0, 10)


def test_a_bug_is_1_with_its_traceback_in_the_log(place: Workplace, monkeypatch: pytest.MonkeyPatch) -> None:
    args = [place.write("rows.jsonl", token_rows((30, 40))), *GREEDY, "-o", place.output()]

    def broken(core: EngineCore, requests: Iterable[Request]) -> Iterator[None]:
        yield None
        raise KeyError("boom")

    with monkeypatch.context() as patch:
        patch.setattr(EngineCore, "run", broken)
        outcome = place.run(*args)
    assert outcome.code == 1 and "bug in echo-batch" in outcome.said and "echo-batch.log" in outcome.said
    assert "KeyError: 'boom'" in place.log() and "Traceback" in place.log()
    assert place.report()["job"]["exit_code"] == 1 and "boom" in place.report()["job"]["message"]
    assert place.run(*args).code == 0


@pytest.mark.parametrize("where", ["echo_batch.io.writer.pq.write_table", "echo_batch.io.output_file.pq.ParquetWriter"])
def test_a_full_disk_is_73_and_loses_nothing(place: Workplace, monkeypatch: pytest.MonkeyPatch, where: str) -> None:
    args = [place.write("rows.jsonl", token_rows((30, 40))), *GREEDY, "-o", place.output()]

    def full(*_args: Any, **_kwargs: Any) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(where, full)
        outcome = place.run(*args)
    assert outcome.code == 73 and "No space left on device" in outcome.said
    job = place.report()["job"]
    num_done = 0 if "writer" in where else 2  # what the disk did not take is not done
    assert (job["exit_code"], job["rows_done"]) == (73, num_done)
    assert not Path(place.output()).exists()
    assert place.run(*args).code == 0 and len(place.rows()) == 2


def test_a_log_on_a_full_disk_stops_nothing(place: Workplace, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nor does it print logging's own tracebacks (`Workplace.run` looks for them)."""
    monkeypatch.setattr(
        logging.FileHandler, "_open", lambda _handler: os.fdopen(os.open("/dev/full", os.O_WRONLY), "w")
    )
    args = [place.write("rows.jsonl", token_rows((30, 40))), *GREEDY, "-o", place.output()]
    assert place.run(*args).code == 0 and len(place.rows()) == 2


def test_a_run_directory_that_is_removed_under_the_job(place: Workplace, monkeypatch: pytest.MonkeyPatch) -> None:
    def removed(*_args: Any, **_kwargs: Any) -> None:
        shutil.rmtree(place.run_dir())
        raise FileNotFoundError(2, "No such file or directory")

    args = [place.write("rows.jsonl", token_rows((30, 40))), *GREEDY, "-o", place.output()]
    with monkeypatch.context() as patch:
        patch.setattr("echo_batch.io.writer.pq.write_table", removed)
        outcome = place.run(*args)
    assert outcome.code == 73 and "part-000001.parquet" in outcome.said
    assert place.run(*args).code == 0


def test_names_that_are_not_utf8(place: Workplace) -> None:
    """As Python has them: each byte that is not UTF-8 is half of a surrogate pair."""
    source = place.write("rows.jsonl", token_rows((30, 40)))
    names = [os.fsdecode(b"caf\xe9.jsonl"), os.fsdecode(b"caf\xe9.jsonl.gz")]
    Path(source).rename(names[0])
    with gzip.open(names[1], "wb") as file:
        file.write(Path(names[0]).read_bytes())
    for name in names:
        assert place.run(name, *GREEDY, "-o", place.output(), "--restart").code == 0
        assert len(place.rows()) == 2
        assert json.loads((place.run_dir() / "config.json").read_text())["input"]["paths"] == [name]
    outcome = place.run(names[0], *GREEDY, "-o", os.fsdecode(b"caf\xe9.parquet"))
    assert outcome.code == 2 and "not valid UTF-8" in outcome.said


class GoneScreen(io.StringIO):
    """Standard error after its reader has left."""

    def write(self, _text: str) -> int:
        raise BrokenPipeError

    def flush(self) -> None:
        raise BrokenPipeError


@pytest.mark.parametrize("terminal", [False, True])
def test_a_screen_that_goes_away_stops_nothing(
    place: Workplace, monkeypatch: pytest.MonkeyPatch, terminal: bool
) -> None:
    values = {
        "input.paths": [place.write("rows.jsonl", token_rows((30, 40)))],
        "output.path": place.output(),
        "model.path": str(place.model),
        "engine.device": "cpu",
        "sampling.max_tokens": 3,
    }
    monkeypatch.setattr("sys.stderr", GoneScreen())
    console = Console(file=GoneScreen(), force_terminal=terminal)
    monkeypatch.setattr("os.dup2", lambda *_args: None)  # rich points standard output to nowhere
    assert run_job(make_config(values), console=console) == 0
    assert len(place.rows()) == 2


# --- many rows ---


def test_thousands_of_rows_cost_little_beside_the_engine(place: Workplace, monkeypatch: pytest.MonkeyPatch) -> None:
    """With an engine that answers at once; anything quadratic in the rows would take minutes."""
    seen: list[int] = []

    def instant(core: EngineCore, requests: Iterable[Request]) -> Iterator[Completion | None]:
        for request in requests:
            seen.append(request.row_id)
            yield Completion(
                row_id=request.row_id, token_ids=(5,), text="x", finish_reason="length", num_input_tokens=2
            )

    monkeypatch.setattr(EngineCore, "run", instant)
    rows = [{"prompt_token_ids": [20 + i % 7, 30], "max_tokens": 1 + i % 5} for i in range(5000)]
    outcome = place.run(place.write("rows.jsonl", rows), "-o", place.output())
    assert outcome.code == 0 and sorted(seen) == list(range(5000))
    assert place.report()["seconds"]["total"] < 60
    assert [row["row_id"] for row in place.rows()] == list(range(5000))


def test_an_input_of_a_directory_is_never_replaced(place: Workplace) -> None:
    for name in ("a.jsonl", "b.jsonl"):
        (place.path / "data").mkdir(exist_ok=True)
        place.write(f"data/{name}", token_rows((20,)))
    before = (place.path / "data/b.jsonl").read_bytes()
    for source in ("data", "data/*.jsonl"):
        for more in ([], ["--restart"]):
            ended = place.run(str(place.path / source), *GREEDY, "-o", place.output("data/b.jsonl"), *more)
            assert ended.code == 2 and "is one of the input's files; give another -o" in ended.said
    assert (place.path / "data/b.jsonl").read_bytes() == before
    # Its own output beside the input is no input, and may be done again.
    job = [str(place.path / "data"), *GREEDY, "-o", place.output("data/out.jsonl")]
    assert place.run(*job).code == 0 and len(place.rows("data/out.jsonl")) == 2
    assert place.run(*job, "--restart").code == 0 and len(place.rows("data/out.jsonl")) == 2


def test_a_merge_of_many_parts_is_seen_to_advance(place: Workplace, monkeypatch: pytest.MonkeyPatch) -> None:
    """Parts are read before the first row is written: for minutes, after a long night."""
    monkeypatch.setattr("echo_batch.job.PartWriter", functools.partial(PartWriter, max_seconds=0))
    seen = []

    def step(reporter: Reporter) -> None:
        seen.append(reporter._metrics.snapshot())

    monkeypatch.setattr(Reporter, "step", step)
    source = place.write("rows.jsonl", [row | {"max_tokens": 1 + 3 * i} for i, row in enumerate(token_rows([20] * 5))])
    assert place.run(source, *GREEDY, "-o", place.output()).code == 0
    dealt = [snapshot for snapshot in seen if snapshot.stage == "merge" and snapshot.stage_done == 0]
    assert len(dealt) >= 3 and len({snapshot.work for snapshot in dealt}) == len(dealt)

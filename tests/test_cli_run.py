"""`echo-batch run` as a user meets it: outputs, bad rows, exit codes, resume. Everything for real, on tiny models."""

import gzip
import json
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from echo_batch.io.run_dir import RunDirectory
from tests import checkpoints
from tests.engine.engines import assert_greedy
from tests.jobs import GREEDY, Workplace, token_rows
from tests.models.oracle import CheckpointFixture


@pytest.fixture
def place(
    tiny_checkpoint: CheckpointFixture,
    tmp_path: Path,
    capfd: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> Workplace:
    monkeypatch.chdir(tmp_path)
    return Workplace(tmp_path, tiny_checkpoint("v32", "fp32") / "model", capfd)


@pytest.fixture(scope="module")
def glm(tiny_checkpoint: CheckpointFixture) -> Path:
    return tiny_checkpoint("glm5", "fp32") / "model"


# --- what the issue shows -------------------------------------------------------------------------------------------


def test_the_oracle_s_tokens_with_evictions_and_with_rows_that_wait(place: Workplace) -> None:
    rows = token_rows((96, 130, 40, 60))
    source = place.write("rows.jsonl", rows)
    options = "--device cpu --dtype float32 --temperature 0 --max-tokens 64 --ignore-eos --output-token-ids".split()
    options += ["--set", "model.rms_norm_eps_latent=1e-6"]
    for host_pool, name in (("4K", "a.parquet"), ("448", "b.parquet")):
        pools = ["--host-pool", host_pool, "--gpu-pool", "320"]
        assert place.run(source, "-o", place.output(name), *options, *pools, small=False).code == 0
        report = place.report(name)
        assert report["cache"]["evicted_rows"] > 0 and report["cache"]["recalled_rows"] > 0
        assert report["cache"]["offloaded_rows"] > 0 and 0 < report["cache"]["hit_rate"] < 1
        assert (report["scheduler"]["max_waiting"] > 0) == (host_pool == "448")
        for row, result in zip(rows, place.rows(name), strict=True):
            assert result["id"] == row["id"] and len(result["generated_token_ids"]) == 64
            assert_greedy(place.model.parent, row["prompt_token_ids"], result["generated_token_ids"])
    assert place.rows("a.parquet") == place.rows("b.parquet")


def test_what_is_planned_is_what_runs(place: Workplace) -> None:
    source = place.write("rows.jsonl", [*token_rows((40, 70)), {"prompt": ""}])
    auto = ["--host-pool", "auto", "--gpu-pool", "auto", "--metrics-textfile", str(place.path / "metrics.prom")]
    before = sorted(place.path.rglob("*"))
    planned = place.run(source, *auto, "--json", command="plan")
    assert planned.code == 0 and sorted(place.path.rglob("*")) == before  # it writes nothing
    assert place.run(source, *auto, *GREEDY, "-o", place.output()).code == 10
    plan, ran = json.loads(planned.out), place.report()["plan"]
    for varying in ("free_host_bytes", "host_budget", "device_budget"):  # free memory differs from moment to moment
        for part in (plan, ran):
            for section in (part["hardware"], part["bytes"]["per_worker"], part["bytes"]["total"]):
                section.pop(varying, None)
    assert plan == ran
    assert plan["input"]["rows"] == 3 and plan["input"]["longest_row_tokens"] == 75


# --- bad rows among good ones ---------------------------------------------------------------------------------------

GOOD: list[dict[str, Any]] = [
    {"id": "text", "prompt": "The quick brown fox"},
    {"id": "ids", "prompt_token_ids": [20, 30, 40]},
    {"id": "chat", "messages": [{"role": "user", "content": "hello"}]},
    {"id": "own", "prompt": "short", "max_tokens": 2},
]
BAD: list[tuple[str, Any]] = [
    ("bad_json", '{"id": "cut", "prompt": "a'),
    ("bad_json", "[1, 2]"),
    ("no_prompt", {"id": "nothing"}),
    ("no_prompt", {"id": "null", "prompt": None}),
    ("no_prompt", {"id": "two", "prompt": "a", "prompt_token_ids": [5]}),
    ("empty_prompt", {"id": "empty", "prompt": ""}),
    ("empty_prompt", {"id": "no ids", "prompt_token_ids": []}),
    ("bad_token", {"id": "large", "prompt_token_ids": [5, 512]}),
    ("bad_token", {"id": "negative", "prompt_token_ids": [-1]}),
    ("bad_params", {"id": "cold", "prompt": "a", "temperature": -1}),
    ("bad_params", {"id": "no tokens", "prompt": "a", "max_tokens": 0}),
    ("bad_params", {"id": "stops", "prompt": "a", "stop_token_ids": list(range(100, 200))}),
    ("too_long", {"id": "long", "prompt_token_ids": [7] * 3968}),
    ("tokenize_failed", {"id": "role", "messages": [{"role": "nobody", "content": "x"}]}),
    ("unsupported_param", {"id": "image", "messages": [{"role": "user", "content": [{"type": "image_url"}]}]}),
]
NOT_FINITE_TOKEN = 511


@pytest.fixture(scope="module")
def nan_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint in which one token's embedding is NaN: its rows become engine_failed."""
    directory = tmp_path_factory.mktemp("nan")
    state = checkpoints.random_state("v32")
    state["model.embed_tokens.weight"][NOT_FINITE_TOKEN] = float("nan")
    checkpoints.write_directory(directory / "model", checkpoints.hf_config("v32"), state)
    return directory / "model"


def results_by_id(rows: list[dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """Results by the input's id, without what depends on the position."""
    return {row["id"]: {k: v for k, v in row.items() if k not in ("row_id", "id")} for row in rows if row["id"]}


def test_bad_rows_in_json_lines(place: Workplace, nan_model: Path) -> None:
    place = Workplace(place.path, nan_model, place.capture)
    alone = place.run(place.write("good.jsonl", GOOD), *GREEDY, "-o", place.output("good.parquet"))
    assert alone.code == 0
    bad = [*BAD, ("engine_failed", {"id": "nan", "prompt_token_ids": [40, NOT_FINITE_TOKEN, 41]})]
    mixed: list[Any] = []
    for i, (_, row) in enumerate(bad):
        mixed += [row, *GOOD[i : i + 1]]
    outcome = place.run(place.write("rows.jsonl", mixed), *GREEDY, "-o", place.output())
    assert outcome.code == 10, outcome.err
    rows = place.rows()
    codes = {i: code for i, row in enumerate(mixed) for code, value in bad if value is row}
    assert [row["error_code"] for row in rows] == [codes.get(i) for i in range(len(mixed))]
    assert [row["row_id"] for row in rows] == list(range(len(mixed)))
    for row in rows:
        failed = row["error_code"] is not None
        assert failed == bool(row["error_message"]) == (row["generated_text"] is None) == (row["finish_reason"] is None)
    expected = results_by_id(place.rows("good.parquet"))
    got = results_by_id(rows)
    columns = ("generated_text", "finish_reason", "num_input_tokens", "num_generated_tokens", "reasoning_text")
    for name, result in expected.items():
        assert {c: got[name][c] for c in columns} == {c: result[c] for c in columns}
    # The same failures stand in errors.jsonl, in the report, and on the screen.
    assert {e["row_id"]: e["error_code"] for e in place.errors()} == codes
    report = place.report()
    assert report["job"]["exit_code"] == 10 and report["job"]["rows_failed"] == len(bad)
    assert report["job"]["failed_by_code"]["too_long"] == 1
    assert f"{len(bad)} (" in outcome.said and "errors.jsonl" in outcome.said


@pytest.mark.parametrize("form", ["json", "gz", "parquet"])
def test_bad_rows_in_other_forms(place: Workplace, form: str) -> None:
    rows = [*GOOD, *(row for _, row in BAD if isinstance(row, dict))]
    codes = [None] * len(GOOD) + [code for code, row in BAD if isinstance(row, dict)]
    if form == "json":
        source = place.path / "rows.json"
        source.write_text(json.dumps([*rows, 17]), encoding="utf-8")
        codes.append("bad_json")
    elif form == "gz":
        source = place.path / "rows.jsonl.gz"
        with gzip.open(source, "wt", encoding="utf-8") as file:
            file.writelines(json.dumps(row) + "\n" for row in rows)
            file.write("{broken\n")
        codes.append("bad_json")
    else:
        source = place.path / "rows.parquet"
        kept = [row for row in rows if row["id"] != "image"]  # Arrow has no lists of texts and objects
        codes.remove("unsupported_param")
        columns = dict.fromkeys(name for row in kept for name in row)
        pq.write_table(pa.table({name: [row.get(name) for row in kept] for name in columns}), source)
    outcome = place.run(str(source), *GREEDY, "-o", place.output())
    assert outcome.code == 10, outcome.err
    rows = place.rows()
    assert [row["error_code"] for row in rows] == codes
    place.run(place.write("good.jsonl", GOOD), *GREEDY, "-o", place.output("good.parquet"))
    texts = [row["generated_text"] for row in place.rows("good.parquet")]
    assert [row["generated_text"] for row in rows[: len(GOOD)]] == texts


def test_share_of_failed_rows_decides_between_0_and_10(place: Workplace) -> None:
    source = place.write("rows.jsonl", [GOOD[0], {"prompt": ""}])
    assert place.run(source, *GREEDY, "-o", place.output(), "--max-error-rate", "1").code == 0
    assert place.run(source, *GREEDY, "-o", place.output("b.parquet"), "--max-error-rate", "0.49").code == 10
    only_bad = place.run(place.write("bad.jsonl", ["{", "{}"]), "-o", place.output("c.jsonl"))
    assert only_bad.code == 10 and len(place.rows("c.jsonl")) == 2
    assert place.report("c.jsonl")["seconds"]["load"] == 0  # nothing to generate: no model was loaded


def openai_row(name: str | int | None, url: str = "/v1/chat/completions", **body: Any) -> dict[str, Any]:
    if url.endswith("chat/completions"):
        body = {"messages": [{"role": "user", "content": "hi"}]} | body
    return {"custom_id": name, "method": "POST", "url": url, "body": {"model": "m", "temperature": 0} | body}


def test_openai_batch_in_and_out(place: Workplace) -> None:
    completions = "/v1/completions"
    rows = [
        openai_row("chat", logprobs=True, top_logprobs=2, max_tokens=3),
        openai_row("text", completions, prompt="once upon"),
        openai_row("ids", completions, prompt=[20, 21, 22], logprobs=1, max_tokens=2),
        openai_row("text", completions, prompt="again"),
        openai_row("two", n=2),
        openai_row(None),
        openai_row(5),
        openai_row("far", "/v1/embeddings"),
        "{broken",
    ]
    outcome = place.run(place.write("batch.jsonl", rows), "-o", place.output("out.jsonl"), "--format", "openai")
    assert outcome.code == 10, outcome.err
    lines = place.rows("out.jsonl")
    assert [line["custom_id"] for line in lines[:5]] == ["chat", "text", "ids", "text", "two"]
    codes = [line["response"]["body"].get("error", {}).get("code") for line in lines]
    assert codes == [None] * 3 + ["duplicate_id", "unsupported_param", *["bad_params"] * 3, "bad_json"]
    assert [line["response"]["status_code"] for line in lines] == [200] * 3 + [400] * 6
    chat, text, ids = (line["response"]["body"] for line in lines[:3])
    assert chat["object"] == "chat.completion" and chat["choices"][0]["message"]["role"] == "assistant"
    assert len(chat["choices"][0]["logprobs"]["content"]) == chat["usage"]["completion_tokens"] <= 3
    assert all(len(entry["top_logprobs"]) == 2 for entry in chat["choices"][0]["logprobs"]["content"])
    assert text["object"] == "text_completion" and text["choices"][0]["finish_reason"] in ("length", "stop")
    assert ids["usage"]["prompt_tokens"] == 3 and len(ids["choices"][0]["logprobs"]["tokens"]) <= 2
    # The same input as a table.
    assert place.run(str(place.path / "batch.jsonl"), "-o", place.output()).code == 10
    assert [row["error_code"] for row in place.rows()] == codes


# --- exit codes -----------------------------------------------------------------------------------------------------


def test_unusable_inputs(place: Workplace) -> None:
    missing = place.run("nowhere.jsonl", "-o", place.output())
    assert missing.code == 66 and "nowhere.jsonl" in missing.said
    assert not place.run_dir().exists()
    (place.path / "broken.parquet").write_bytes(b"not a table")
    broken = place.run("broken.parquet", "-o", place.output())
    assert broken.code == 65 and "broken.parquet" in broken.said
    pq.write_table(pa.table({"text": ["a"]}), place.path / "column.parquet")
    column = place.run("column.parquet", "-o", place.output())
    assert column.code == 65 and "--prompt-column" in column.said
    assert place.run("column.parquet", "-o", place.output(), "--prompt-column", "text", *GREEDY).code == 0


def test_unwritable_outputs(place: Workplace) -> None:
    source = place.write("rows.jsonl", GOOD)
    (place.path / "file").write_text("x")
    for output in (str(place.path / "file" / "out.parquet"), "/proc/none/out.parquet", str(place.path)):
        outcome = place.run(source, "-o", output, "--format", "parquet")
        assert outcome.code == 73, (output, outcome.err)
        assert "error:" in outcome.said


def test_bad_settings_are_2_and_touch_nothing(place: Workplace) -> None:
    source = place.write("rows.jsonl", GOOD)
    for args in (
        ["--set", "engine.nothing=1"],
        ["--gpu-pool", "0"],
        ["--too-long", "explode"],
        ["--temperature", "-1"],
        ["--prompt-template", "{a.b}"],
        ["--chat-template-kwargs", '{"thinking": "maybe"}'],
        ["--tokenizer", "nowhere"],
        ["--set", "sampling.stop_token_ids=[600]"],
    ):
        outcome = place.run(source, "-o", place.output(), *args)
        assert outcome.code == 2, (args, outcome.err)
        assert not place.run_dir().exists(), args
    no_fit = place.run(source, "-o", place.output(), "--host-pool", "100TB", "--device", "cpu", small=False)
    assert no_fit.code == 2 and "does not fit" in no_fit.said
    # Mistakes are not starts that died: after any number of them the right command runs.
    for _ in range(3):
        assert place.run(source, *GREEDY, "-o", place.output(), "--host-pool", "100TB").code == 2
    assert place.run(source, *GREEDY, "-o", place.output()).code == 0


def test_stop_strings_need_a_tokenizer(place: Workplace) -> None:
    """Or every row would silently run to its max_tokens."""
    bare = place.path / "bare"
    bare.mkdir()
    for file in place.model.iterdir():
        if not file.name.startswith("tokenizer"):
            (bare / file.name).symlink_to(file)
    outcome = place.run(place.write("rows.jsonl", token_rows((3,))), "--model", str(bare), "--stop", "x")
    assert outcome.code == 2 and "stop_token_ids" in outcome.said


def test_an_output_that_is_not_ours_is_kept(place: Workplace) -> None:
    source = place.write("rows.jsonl", GOOD)
    (place.path / "out.parquet").write_text("precious")
    outcome = place.run(source, *GREEDY, "-o", place.output())
    assert outcome.code == 2 and "--restart" in outcome.said
    assert (place.path / "out.parquet").read_text() == "precious"
    assert place.run(source, "-o", source).code == 2  # the input itself
    assert place.run(source, *GREEDY, "-o", place.output(), "--restart").code == 0
    assert len(place.rows()) == 4


def test_complete_changed_and_restarted(place: Workplace) -> None:
    source = place.write("rows.jsonl", GOOD)
    args = [source, *GREEDY, "-o", place.output()]
    assert place.run(*args).code == 0

    def state() -> dict[str, tuple[int, int]]:
        # The lock names its last holder. The spool counts: making it again may take an hour.
        files = [f for f in (place.path / "out.parquet", *place.run_dir().rglob("*")) if f.is_file()]
        return {str(f): (f.stat().st_mtime_ns, f.stat().st_size) for f in files if f.suffix != ".lock"}

    before = state()
    again = place.run(*args, "--gpu-pool", "640")  # a pool size changes no output
    assert again.code == 0 and "already complete" in again.said
    assert state() == before
    for change, name in (
        (["--seed", "5"], "seed"),
        (["--max-tokens", "7"], "max_tokens"),
        (["--limit", "2"], "input"),
        (["--output-token-ids"], "output"),
    ):
        outcome = place.run(*args, *change)
        assert outcome.code == 2 and name in outcome.said and "--restart" in outcome.said, outcome.err
    assert state() == before
    place.write("rows.jsonl", [*GOOD, GOOD[0]])
    changed = place.run(*args)
    assert changed.code == 2 and "input" in changed.said
    assert place.run(*args, "--restart").code == 0
    assert len(place.rows()) == 5


def test_an_empty_input_and_a_limit(place: Workplace) -> None:
    empty = place.run(place.write("empty.jsonl", []), "-o", place.output())
    assert empty.code == 0, empty.err
    assert pq.read_table(place.output()).num_rows == 0 and "generated_text" in pq.read_schema(place.output()).names
    pq.write_table(pa.table({"prompt": pa.array([], pa.string()), "n": pa.array([], pa.int32())}), "none.parquet")
    assert place.run("none.parquet", "-o", place.output("b.parquet")).code == 0
    assert pq.read_schema(place.output("b.parquet")).names[:2] == ["prompt", "n"]
    limited = place.run(place.write("rows.jsonl", GOOD), *GREEDY, "-o", place.output("c.parquet"), "--limit", "2")
    assert limited.code == 0 and [row["id"] for row in place.rows("c.parquet")] == ["text", "ids"]


def test_a_held_lock_is_75_and_names_its_holder(place: Workplace) -> None:
    source = place.write("rows.jsonl", GOOD)
    with RunDirectory.lock(place.output()):
        outcome = place.run(source, *GREEDY, "-o", place.output())
    assert outcome.code == 75 and f"pid {os.getpid()}" in outcome.said
    assert place.run(source, *GREEDY, "-o", place.output()).code == 0


# --- interrupted and resumed ----------------------------------------------------------------------------------------

COMMIT_EVERY_ROW = (
    "import echo_batch.job as job, functools; job.PartWriter = functools.partial(job.PartWriter, max_seconds=0)"
)


def wait_for(condition: Callable[[], bool], process: Any) -> None:
    end = time.monotonic() + 120
    while not condition():
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < end
        time.sleep(0.02)


def test_killed_and_stopped_jobs_lose_and_double_nothing(place: Workplace) -> None:
    rows = [row | {"max_tokens": 3 + 2 * i} for i, row in enumerate(token_rows([40] * 12))]
    source = place.write("rows.jsonl", rows)
    args = [source, "--temperature", "1", "--ignore-eos", "--output-token-ids", "--max-num-seqs", "3"]
    assert place.run(*args, "-o", place.output("whole.parquet")).code == 0
    resumed = [*args, "-o", place.output()]
    parts = place.run_dir() / "parts"

    def num_parts() -> int:
        return len(list(parts.glob("part-*.parquet"))) if parts.is_dir() else 0

    killed = place.start(*resumed, setup=COMMIT_EVERY_ROW)
    wait_for(lambda: num_parts() >= 3, killed)
    killed.kill()
    assert killed.wait() == -signal.SIGKILL
    after_kill = num_parts()

    stopped = place.start(*resumed, setup=COMMIT_EVERY_ROW)
    wait_for(lambda: num_parts() >= after_kill + 3, stopped)
    asked = time.monotonic()
    stopped.send_signal(signal.SIGTERM)
    _, err = stopped.communicate(timeout=60)
    assert stopped.returncode == 75 and time.monotonic() - asked < 20
    assert "SIGTERM" in err and "the same command resumes the job" in err and "Traceback" not in err
    assert not Path(place.output()).exists()
    report = place.report()
    assert report["job"]["exit_code"] == 75 and report["job"]["rows_resumed"] >= 2
    assert 0 < report["job"]["rows_done"] < 12

    outcome = place.run(*resumed)
    assert outcome.code == 0 and "resuming" in outcome.said
    assert place.rows() == place.rows("whole.parquet")
    job = place.report()["job"]
    assert (job["rows_done"], job["starts"]) == (12, 3) and job["rows_resumed"] >= report["job"]["rows_done"]
    assert place.report()["tokens"]["generated"] == sum(3 + 2 * i for i in range(12))

"""`--schedule`: a job recorded and repeated, as a user meets it."""

import json
from pathlib import Path

import pytest

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


def test_a_job_is_recorded_and_repeated_bit_by_bit(place: Workplace) -> None:
    source = place.write("rows.jsonl", [*token_rows((96, 70, 40, 130)), {"prompt": ""}])
    schedule = place.path / "steps.jsonl"
    job = [source, *GREEDY, "--max-num-seqs", "3"]
    assert place.run(*job, "-o", place.output("a.parquet"), "--schedule", f"record:{schedule}").code == 10
    replay = [*job, "--schedule", f"replay:{schedule}"]
    for name, options in (
        ("b", ["--gpu-pool", "192"]),
        ("c", ["--offload", "off", "--gpu-pool", "4K"]),
        ("d", ["--gpu-pool", "4K", "--set", "cache.residency=off"]),
    ):
        assert place.run(*replay, *options, "-o", place.output(f"{name}.parquet")).code == 10
        assert place.rows(f"{name}.parquet") == place.rows("a.parquet")
        a, b = (place.report(f"{n}.parquet")["scheduler"] for n in ("a", name))
        assert (a["steps"], a["effective_batch"]) == (b["steps"], b["effective_batch"])
    assert place.report("b.parquet")["cache"]["evicted_rows"] > 0
    assert place.report("d.parquet")["scheduler"]["resident_steps"] == 0

    # Pools that do not hold the recorded batch.
    refused = place.run(*replay, "--gpu-pool", "64", "-o", place.output("e.parquet"))
    assert refused.code == 2 and "needs a GPU pool of" in refused.said

    # A difference: the last step of the file claims other logits.
    lines = schedule.read_text(encoding="utf-8").splitlines()
    at = max(i for i, line in enumerate(lines) if '"event":"step"' in line)
    event = json.loads(lines[at])
    event["result"]["logits"][0] = "0123456789abcdef"
    changed = place.path / "changed.jsonl"
    changed.write_text("\n".join([*lines[:at], json.dumps(event), *lines[at + 1 :]]) + "\n", encoding="utf-8")
    other = [*job, "--schedule", f"replay:{changed}", "-o", place.output("f.parquet")]
    ended = place.run(*other)
    row, request = event["rows"][0]
    assert ended.code == 11 and f"step {event['step']}, row {row} (request {request}): other logits" in ended.said
    assert place.report("f.parquet")["job"]["exit_code"] == 11
    # Finished rows are kept, so the job has begun: a schedule is not resumed in the middle.
    again = place.run(*replay, "-o", place.output("f.parquet"))
    assert again.code == 2 and "--restart" in again.said
    assert place.run(*replay, "-o", place.output("f.parquet"), "--restart").code == 10
    assert place.rows("f.parquet") == place.rows("a.parquet")


def test_the_option_has_two_modes(place: Workplace) -> None:
    source = place.write("rows.jsonl", token_rows((20,)))
    wrong = place.run(source, "--schedule", "steps.jsonl")
    assert wrong.code == 2 and "record:FILE or replay:FILE" in wrong.said
    missing = place.run(source, "--schedule", "replay:nowhere.jsonl")
    assert missing.code == 2 and "cannot read the schedule nowhere.jsonl" in missing.said
    unwritable = place.run(source, "--schedule", "record:no/such/folder.jsonl")
    assert unwritable.code == 73 and "cannot write the schedule" in unwritable.said

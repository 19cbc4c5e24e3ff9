import json
import os
import signal
import subprocess
import sys

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from echo_batch.errors import ConfigError, EchoBatchError, InterruptedJobError, OutputError
from echo_batch.files import temporary_name
from echo_batch.io.manifest import PartEntry
from echo_batch.io.run_dir import RunDirectory
from echo_batch.request import RowFailure

FINGERPRINT = {"model": "m1", "input": "i1", "sampling": "s1"}
CONFIG = {"sampling": {"temperature": 1.0}, "input": {"paths": ["a"]}}


@pytest.fixture
def output(tmp_path):
    return tmp_path / "out.jsonl"


def start(output, **kwargs):
    return RunDirectory.open(output, **{"fingerprint": FINGERPRINT, "config": CONFIG, **kwargs})


def commit(run, part, rows, failures=()):
    run.part_path(part).write_bytes(b"part")
    run.manifest.commit_part(
        part,
        PartEntry(
            rows=[(row, 1) for row in rows],
            failures=failures,
            num_input_tokens=0,
            num_cached_tokens=0,
            num_generated_tokens=0,
        ),
    )


def finish(run, content=b"{}\n"):
    temporary = temporary_name(run.output)
    temporary.write_bytes(content)
    run.publish_output(temporary)
    run.close()


def tree(directory):
    return {
        str(p.relative_to(directory)): (p.read_bytes(), p.stat().st_mtime_ns)
        for p in sorted(directory.rglob("*"))
        if p.is_file() and p.name != "echo-batch.lock"
    }


def test_new_then_resumed_then_complete(output):
    with start(output) as run:
        assert run.state == "new"
        assert run.path == output.parent / "out.jsonl.run"
        assert json.loads((run.path / "config.json").read_text()) == CONFIG
        run_id, created = run.run_id, run.created
        commit(run, 1, [0, 3])
    with start(output) as run:
        assert run.state == "resumed"
        assert (run.run_id, run.created, run.num_starts) == (run_id, created, 2)
        assert list(run.manifest.uncommitted(range(5))) == [1, 2, 4]
        finish(run, b"done\n")
    before = tree(output.parent)
    with start(output) as run:
        assert run.state == "complete"
    assert tree(output.parent) == before


def test_a_complete_job_whose_output_was_removed_is_merged_again(output):
    run = start(output)
    commit(run, 1, [0])
    finish(run)
    output.unlink()
    with start(output) as run:
        assert run.state == "resumed"
        assert run.manifest.num_committed() == 1


def test_another_fingerprint_is_exit_2_naming_what_changed(output):
    run = start(output)
    commit(run, 1, [0])
    run.close()
    before = tree(output.parent)
    other = {"fingerprint": {**FINGERPRINT, "sampling": "s2"}, "config": {"sampling": {"temperature": 0.0}}}
    with pytest.raises(ConfigError, match=r"changed: sampling \(temperature 1.0 -> 0.0\)\.") as caught:
        start(output, **other)
    assert caught.value.exit_code == 2
    assert "--restart" in str(caught.value)
    assert tree(output.parent).keys() - {"out.jsonl.run/manifest.sqlite-wal", "out.jsonl.run/manifest.sqlite-shm"} == (
        before.keys()
    )
    with start(output) as run:  # and the job itself still resumes
        assert run.manifest.num_committed() == 1


def test_restart_replaces_job_and_output(output):
    run = start(output)
    run_id = run.run_id
    (run.path / "index.sqlite").write_text("old")
    (run.path / "spool").mkdir()
    (run.path / "spool" / "x").write_text("kept")
    commit(run, 1, [0], [(0, RowFailure(code="too_long", message="m"))])
    finish(run)
    with start(output, restart=True) as run:
        assert (run.state, run.manifest.num_committed()) == ("new", 0)
        assert run.run_id != run_id
        assert not (run.path / "index.sqlite").exists()
        assert (run.path / "spool" / "x").exists()
        assert list(run.parts_dir.iterdir()) == []
        assert run.errors_path.read_text() == ""
        assert output.exists()  # until the new one takes its place
    with start(output) as run:  # killed and run again without --restart: the old output is no obstacle
        assert run.state == "resumed"
        finish(run, b"new\n")
    assert output.read_bytes() == b"new\n"


def test_a_foreign_output_is_exit_2_until_restart(output):
    output.write_text("precious\n")
    with pytest.raises(ConfigError, match=r"did not write it.*--restart"):
        start(output)
    assert not (output.parent / "out.jsonl.run").exists()  # no litter
    with start(output, restart=True) as run:
        assert run.state == "new"


def test_a_refused_start_leaves_no_spool_and_an_unbegun_one_keeps_it(output):
    run = RunDirectory.lock(output)
    (run.path / "spool").mkdir()
    run.close()  # interrupted while the input was spooled: the next start goes on with it
    assert (run.path / "spool").exists()
    output.write_text("precious\n")
    with pytest.raises(ConfigError, match="did not write it"):
        start(output)
    assert [p.name for p in output.parent.iterdir()] == ["out.jsonl"]


def test_an_output_changed_by_someone_else_is_not_ours_any_more(output):
    run = start(output)
    commit(run, 1, [0])
    finish(run)
    output.write_text("edited, longer\n")
    with pytest.raises(ConfigError, match="did not write it"):
        start(output)
    assert output.read_text() == "edited, longer\n"


def test_an_output_that_appears_during_the_job_is_not_ours(output):
    start(output).close()
    output.write_text("precious\n")
    with pytest.raises(ConfigError, match="did not write it"):
        start(output)


def write_parquet(path, metadata):
    schema = pa.schema([("a", pa.int64())], metadata={"echo_batch": json.dumps(metadata)})
    pq.write_table(pa.table({"a": [1]}, schema=schema), path)


def test_a_parquet_output_without_its_run_directory_is_known_by_its_metadata(tmp_path):
    output = tmp_path / "out.parquet"
    write_parquet(output, {"run_id": "x", "fingerprint": FINGERPRINT})
    before = tree(tmp_path)
    with start(output) as run:
        assert run.state == "complete"
    assert tree(tmp_path) == before
    assert not run.path.exists()
    with pytest.raises(ConfigError, match="output of another job, changed: model"):
        start(output, fingerprint={**FINGERPRINT, "model": "m2"})


def test_killed_between_rename_and_the_manifest_the_output_is_still_ours(output):
    run = start(output)
    commit(run, 1, [0])
    finish(run)
    with start(output) as run:
        run.manifest.reopen_for_writing()
        run.manifest.set(state="publishing")
    with start(output) as run:
        assert run.state == "resumed"


def test_leftovers_of_a_killed_start_are_removed_and_errors_written_anew(output):
    failure = RowFailure(code="bad_json", message="line 3: é")
    run = start(output)
    commit(run, 1, [3], [(3, failure)])
    run.append_errors([(3, failure), (3, failure)])
    run.part_path(2).write_bytes(b"renamed, not committed")
    temporary_name(run.part_path(2)).write_bytes(b"half")
    run.merge_dir.mkdir()
    (run.merge_dir / "range-000000.arrows").write_bytes(b"half")
    temporary_name(output).write_bytes(b"half")
    run.close()
    with start(output) as run:
        assert [p.name for p in run.parts_dir.iterdir()] == ["part-000001.parquet"]
        assert not run.merge_dir.exists()
        assert not temporary_name(output).exists()
        lines = [json.loads(line) for line in run.errors_path.read_text(encoding="utf-8").splitlines()]
        assert lines == [{"row_id": 3, "error_code": "bad_json", "error_message": "line 3: é"}]


def test_a_missing_part_is_a_clear_error(output):
    run = start(output)
    commit(run, 1, [3])
    run.part_path(1).unlink()
    run.close()
    with pytest.raises(ConfigError, match=r"part-000001.parquet is missing; --restart"):
        start(output)


def test_killed_while_the_manifest_was_made_it_is_a_new_job(output):
    run = start(output)
    run.close()
    (run.path / "manifest.sqlite").write_bytes(b"")
    (run.parts_dir / "part-000001.parquet").write_bytes(b"old")
    with start(output) as run:
        assert run.state == "new"
        assert list(run.parts_dir.iterdir()) == []


def test_the_third_start_without_a_row_ends_with_1(output):
    codes = []
    for _ in range(4):
        with start(output) as run:
            error = run.interrupted("SIGTERM")
            codes.append(error.exit_code)
            assert isinstance(error, InterruptedJobError) == (error.exit_code == 75)
            run.clear_in_flight()
    assert codes == [75, 75, 1, 75]


def test_a_committed_row_starts_the_count_again(output):
    codes = []
    for i in range(5):
        with start(output) as run:
            if i == 2:
                commit(run, 1, [0])
            codes.append(run.interrupted("SIGTERM").exit_code)
    assert codes == [75, 75, 75, 75, 75]


def test_three_starts_that_died_silently_are_refused_once_naming_the_rows(output):
    for _ in range(3):
        with start(output) as run:
            run.mark_in_flight([17])
    with pytest.raises(EchoBatchError, match=r"3 starts died.*row 17\)") as caught:
        start(output)
    assert caught.value.exit_code == 1
    start(output).close()


def test_a_start_that_the_user_can_put_right_blames_no_row(output):
    run = start(output)
    commit(run, 1, [0])
    run.mark_in_flight([3])
    run.excuse()
    run.close()
    run = start(output)
    assert run.losses(3) == 0
    run.close()


def test_rows_in_flight_at_engine_losses(output):
    with start(output) as run:
        run.mark_in_flight([1, 2])
        commit(run, 1, [2])
        run.record_engine_loss()
        assert (run.losses(1), run.losses(2), run.losses(9)) == (1, 0, 0)
        run.mark_in_flight([1, 5])
        run.clear_in_flight()
        assert (run.losses(1), run.losses(5)) == (1, 0)
    with start(output) as run:
        for expected in (2, 3):
            run.mark_in_flight([1])
            run.record_engine_loss()
            assert run.losses(1) == expected


def test_being_killed_makes_a_row_run_alone_but_never_fails_it(output):
    for i in range(5):
        with start(output) as run:
            assert run.losses(4) == min(i, 2)
            run.mark_in_flight([4])
            commit(run, i + 1, [100 + i])


def test_the_lock_is_held_from_lock_to_close(output):
    with RunDirectory.lock(output) as run:
        with pytest.raises(InterruptedJobError) as caught:
            start(output)
        assert caught.value.exit_code == 75
        assert str(os.getpid()) in str(caught.value)
        run.begin(FINGERPRINT, CONFIG)
        with pytest.raises(InterruptedJobError):
            start(output)
    start(output).close()


def test_a_killed_job_leaves_no_lock_and_its_commits(output):
    script = (
        "import os, sys\n"
        "from echo_batch.io.run_dir import RunDirectory\n"
        f"run = RunDirectory.open(sys.argv[1], fingerprint={FINGERPRINT!r}, config={CONFIG!r})\n"
        "run.mark_in_flight([8])\n"
        f"os.kill(os.getpid(), {int(signal.SIGKILL)})\n"
    )
    assert subprocess.run([sys.executable, "-c", script, str(output)]).returncode == -signal.SIGKILL
    with start(output) as run:
        assert (run.state, run.losses(8)) == ("resumed", 1)


def test_nothing_begun_leaves_nothing(output):
    RunDirectory.lock(output).close()
    assert list(output.parent.iterdir()) == []


def test_places_that_cannot_be_written_are_73(tmp_path):
    (tmp_path / "file").write_text("")
    (tmp_path / "dir.jsonl").mkdir()
    for output in (tmp_path / "file" / "out.jsonl", tmp_path / "dir.jsonl", tmp_path / f"{'x' * 300}.jsonl"):
        with pytest.raises(OutputError) as caught:
            RunDirectory.lock(output, inputs=[str(tmp_path / "file")])
        assert caught.value.exit_code == 73
    with pytest.raises(OutputError):
        RunDirectory.lock("/proc/echo/out.jsonl")


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_a_directory_without_permission_is_73(tmp_path):
    tmp_path.chmod(0o555)
    with pytest.raises(OutputError, match="Permission denied"):
        RunDirectory.lock(tmp_path / "out.jsonl")


def test_a_directory_that_echo_batch_did_not_make_is_left_alone(output):
    theirs = output.parent / "out.jsonl.run"
    theirs.mkdir()
    (theirs / "notes.txt").write_text("mine")
    with pytest.raises(ConfigError, match="was not made by echo-batch"):
        start(output, restart=True)
    assert [p.name for p in theirs.iterdir()] == ["notes.txt"]


def test_the_output_must_not_be_an_input(tmp_path):
    rows = tmp_path / "rows.jsonl"
    rows.write_text("{}\n")
    with pytest.raises(ConfigError, match="is the input"):
        RunDirectory.lock(rows, inputs=[str(rows)])
    assert [p.name for p in tmp_path.iterdir()] == ["rows.jsonl"]

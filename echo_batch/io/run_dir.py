"""The run directory `<output>.run/`: one job's lock, manifest, frozen configuration, parts and reports.

It decides whether a start is a new job, a resume, already complete, or somebody else's. Knows no rows' content.

    echo-batch.lock   manifest.sqlite   config.json   parts/part-000001.parquet   errors.jsonl   report.json   merge/
"""

import json
import os
import secrets
import shutil
import time
from collections.abc import Collection, Iterable, Mapping, Sequence
from contextlib import closing, suppress
from pathlib import Path
from types import TracebackType
from typing import Any, Literal

from echo_batch.errors import ConfigError, EchoBatchError, InterruptedJobError, OutputError
from echo_batch.files import fsync_dir, publish, temporary_name, write_errors, write_json_atomic, write_text_atomic
from echo_batch.io.fingerprint import describe_changes
from echo_batch.io.lock import FileLock, take_lock
from echo_batch.io.manifest import Manifest
from echo_batch.io.ownership import FileStamp, read_output_metadata
from echo_batch.request import RowFailure

StartState = Literal["new", "resumed", "complete"]

LOCK_NAME = "echo-batch.lock"
MAX_BARREN_STARTS = 3
"""Starts without a newly committed row after which the job ends with 1 instead of asking to be run again."""
LOSSES_ALONE = 2
"""Engine losses after which a row runs alone."""
LOSSES_FAILED = 3
"""Engine losses after which a row is `engine_failed`."""
DEFAULT_KEEP = ("spool",)


class RunDirectory:
    """A locked run directory. `lock` first (before the input is read), then `begin` with the job's fingerprint.

    Used by one thread. `close` (or the end of the process) gives the lock up.
    """

    def __init__(self, output: Path, path: Path, lock: FileLock) -> None:
        self.output = output
        self.path = path
        self.fingerprint: dict[str, str] = {}
        self.state: StartState | None = None
        self._lock = lock
        self._manifest: Manifest | None = None
        self._closed = False
        self._forgotten = False
        self._refused = False
        """Nothing here is of any use: the output belongs to another job, or is finished."""

    # --- opening and closing ---------------------------------------------------------------------------------------

    @classmethod
    def lock(cls, output: Path | str, *, inputs: Iterable[Path | str] = ()) -> "RunDirectory":
        """Makes `<output>.run/` and its parents, takes its lock and tries that the output can be written.

        Raises ConfigError when the output is one of `inputs` or the directory is not a run directory, OutputError
        when it cannot be written, InterruptedJobError (75) when another process holds the lock.
        """
        output = Path(output)
        path = output.with_name(output.name + ".run")
        for source in inputs:
            if os.path.exists(source) and os.path.exists(output) and output.samefile(source):
                raise ConfigError(f"output {output} is the input; give another -o")
        if os.path.isdir(output):  # unlike Path's, it takes a name that is too long
            raise OutputError(f"cannot write {output}: it is a directory")
        with write_errors(path):
            path.mkdir(parents=True, exist_ok=True)
            foreign = not (path / LOCK_NAME).exists() and any(path.iterdir())
        if foreign:
            raise ConfigError(f"{path} exists and was not made by echo-batch; move it away or give another -o")
        lock = take_lock(path / LOCK_NAME)
        run = cls(output, path, lock)
        try:
            with write_errors(output):
                probe = temporary_name(output)
                probe.write_bytes(b"")
                probe.unlink()
        except BaseException:
            run.close()
            raise
        return run

    @classmethod
    def open(
        cls,
        output: Path | str,
        *,
        fingerprint: Mapping[str, str],
        config: Mapping[str, Any],
        restart: bool = False,
        inputs: Iterable[Path | str] = (),
    ) -> "RunDirectory":
        """`lock` and `begin` in one call."""
        run = cls.lock(output, inputs=inputs)
        try:
            run.begin(fingerprint, config, restart=restart)
        except BaseException:
            run.close()
            raise
        return run

    def wrote_output(self) -> bool:
        """Whether the file at the output's place is known to come from a job: it says so (Parquet), or it is what this
        directory's job published."""
        if read_output_metadata(self.output) is not None:
            return True
        manifest = self._open_manifest(restart=False)
        if manifest is None:
            return False
        with closing(manifest):
            return bool(manifest.get("published") == FileStamp.of(self.output).as_list())

    def check(self, fingerprint: Mapping[str, str], config: Mapping[str, Any], *, restart: bool = False) -> None:
        """Raises the ConfigError that `begin` would, when the directory belongs to another job. Changes nothing."""
        manifest = self._open_manifest(restart)
        if manifest is not None:
            with closing(manifest):
                self._check_same_job(manifest, fingerprint, config)

    def begin(
        self,
        fingerprint: Mapping[str, str],
        config: Mapping[str, Any],
        *,
        restart: bool = False,
        keep: Collection[str] = DEFAULT_KEEP,
    ) -> StartState:
        """Starts the job anew, resumes it, or finds it complete (then nothing is changed).

        `fingerprint` names parts and their hashes (`fingerprint.job_fingerprint`), `config` is frozen as JSON. A new
        start clears the directory but for the names in `keep`, whose owners check their content themselves.
        Raises ConfigError (2) naming what changed when the directory or the output belongs to another job,
        EchoBatchError (1) when the last three starts died without a newly committed row.
        """
        assert self.state is None, "begun already"
        self.fingerprint = dict(fingerprint)
        manifest = self._open_manifest(restart)
        self._refused = manifest is None
        if manifest is not None:
            self._manifest = manifest
            self.state = self._resume(manifest, config)
        elif not restart and self._is_finished_output():
            self.state = "complete"
        else:
            self._refused = False
            self._create(config, keep)
            self.state = "new"
        return self.state

    def close(self) -> None:
        """Closes the manifest and gives up the lock; a directory without a job and without a spooled input that a next
        start could use is removed. Once is enough."""
        if self._closed:
            return
        self._closed = True
        if self._manifest is not None:
            self._manifest.close(tidy=self.state == "complete")
            self._manifest = None
        if self._forgotten:
            self._remove_manifest()
        if not self.path.is_dir():  # removed by somebody under the job
            self._lock.release()
            return
        if self._refused:
            for entry in self.path.iterdir():
                _remove(entry)
        unused = all(entry.name == LOCK_NAME for entry in self.path.iterdir())
        self._lock.release(remove=unused)
        if unused:
            with suppress(OSError):
                self.path.rmdir()

    def __enter__(self) -> "RunDirectory":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    # --- places ----------------------------------------------------------------------------------------------------

    @property
    def manifest(self) -> Manifest:
        assert self._manifest is not None, "the job has not begun, or its run directory is gone"
        return self._manifest

    @property
    def run_id(self) -> str:
        """Random name of this job, kept over its resumes."""
        return str(self.manifest.get("run_id"))

    @property
    def created(self) -> int:
        """Unix time in seconds at which the job was first started."""
        return int(self.manifest.get("created"))

    @property
    def num_starts(self) -> int:
        return int(self.manifest.get("starts"))

    @property
    def parts_dir(self) -> Path:
        return self.path / "parts"

    def part_path(self, part: int) -> Path:
        return self.parts_dir / f"part-{part:06d}.parquet"

    @property
    def errors_path(self) -> Path:
        return self.path / "errors.jsonl"

    @property
    def report_path(self) -> Path:
        return self.path / "report.json"

    @property
    def merge_dir(self) -> Path:
        return self.path / "merge"

    # --- how starts end --------------------------------------------------------------------------------------------

    def interrupted(self, reason: str) -> EchoBatchError:
        """The error that an interrupted start ends with: InterruptedJobError (75, run again to resume), or
        EchoBatchError (1) after three starts without a newly committed row, so that nothing requeues it for ever."""
        starts = int(self.manifest.get("barren_starts"))
        if starts < MAX_BARREN_STARTS:
            return InterruptedJobError(f"{reason}; the same command resumes the job")
        self.manifest.set(barren_starts=0)  # said once; whoever runs it again wants to try again
        return EchoBatchError(f"{reason}; {starts} starts in a row finished no row{self._suspects()}")

    def excuse(self) -> None:
        """This start ended with something that the user can put right (a plan that does not fit, a full disk): it is
        none of the starts that died, and no row in flight is to blame. Without a committed row the job is forgotten
        when this is closed, so that the next start may change anything; its report and log stay until then."""
        self._forgotten = self.manifest.num_committed() == 0
        self.manifest.clear_in_flight()
        self.manifest.set(barren_starts=max(0, int(self.manifest.get("barren_starts")) - 1))

    def publish_output(self, temporary: Path) -> None:
        """Gives the finished output its name and marks the job complete. Raises OutputError."""
        with write_errors(self.output):
            # Written before the rename, so that after a crash between the two the output is known as ours.
            self.manifest.set(state="publishing", published=FileStamp.of(temporary).as_list())
            publish(temporary, self.output)
        self.manifest.set(state="complete", barren_starts=0, replaces=None)
        self.state = "complete"

    # --- rows in flight at engine losses ---------------------------------------------------------------------------

    def mark_in_flight(self, row_ids: Iterable[int]) -> None:
        """Rows that the engine now works on; committing a row takes it out again."""
        self.manifest.mark_in_flight(row_ids)

    def clear_in_flight(self) -> None:
        """A clean stop: no row in flight is to blame for anything."""
        self.manifest.clear_in_flight()

    def record_engine_loss(self) -> None:
        """The engine was lost with the marked rows in flight: one more loss for each."""
        self.manifest.count_losses()

    def losses(self, row_id: int) -> int:
        """Engine losses of an uncommitted row: from LOSSES_ALONE on it runs alone, at LOSSES_FAILED it has failed."""
        return self.manifest.losses().get(row_id, 0)

    # --- errors.jsonl ----------------------------------------------------------------------------------------------

    def append_errors(self, failures: Sequence[tuple[int, RowFailure]]) -> None:
        """Adds committed failures to errors.jsonl (not fsynced: `begin` writes it anew from the manifest)."""
        if failures:
            with write_errors(self.errors_path), self.errors_path.open("a", encoding="utf-8") as file:
                file.writelines(_error_line(row_id, failure) for row_id, failure in failures)

    def rewrite_errors(self) -> None:
        """Writes errors.jsonl anew from the manifest, in row order."""
        temporary = temporary_name(self.errors_path)
        with write_errors(self.errors_path):
            with temporary.open("w", encoding="utf-8") as file:
                file.writelines(_error_line(row_id, failure) for row_id, failure in self.manifest.iter_failures())
            publish(temporary, self.errors_path)

    # ---------------------------------------------------------------------------------------------------------------

    def _open_manifest(self, restart: bool) -> Manifest | None:
        path = self.path / "manifest.sqlite"
        if restart or not path.exists():
            return None
        manifest = Manifest(path)
        if manifest.exists:
            return manifest
        manifest.close()  # killed while it was being made: nothing was committed
        return None

    def _resume(self, manifest: Manifest, config: Mapping[str, Any]) -> StartState:
        self._check_same_job(manifest, self.fingerprint, config)
        state = manifest.get("state")
        if self.output.exists():
            stamp = FileStamp.of(self.output).as_list()
            metadata = read_output_metadata(self.output)
            ours = metadata is not None and metadata.get("run_id") == manifest.get("run_id")
            published = manifest.get("published")
            if state == "complete" and (ours or (metadata is None and published[0] == stamp[0])):
                return "complete"
            if not ours and stamp not in (published, manifest.get("replaces")):
                raise ConfigError(self._foreign_output())
        self._remove_leftovers(manifest)
        manifest.reopen_for_writing()
        self._check_barren_starts(manifest)
        # Who died with rows in flight may have been killed by one of them, or by a preemption: that is reason to run
        # such a row alone, never to fail it (three barren starts end the job instead).
        manifest.count_losses(at_most=LOSSES_ALONE)
        manifest.set(
            state="running", starts=manifest.get("starts") + 1, barren_starts=manifest.get("barren_starts") + 1
        )
        self.rewrite_errors()
        return "resumed"

    def _check_same_job(self, manifest: Manifest, fingerprint: Mapping[str, str], config: Mapping[str, Any]) -> None:
        stored = manifest.get("fingerprint")
        if stored != fingerprint:
            changes = describe_changes(stored, fingerprint, manifest.get("config"), config)
            raise ConfigError(self._other_job(f"{self.path} belongs to another job", changes))

    def _check_barren_starts(self, manifest: Manifest) -> None:
        starts = manifest.get("barren_starts")
        if starts >= MAX_BARREN_STARTS:
            message = f"the last {starts} starts died without finishing a row{self._suspects()}"
            manifest.set(barren_starts=0)
            raise EchoBatchError(message + "; look at the log before running it again")

    def _suspects(self) -> str:
        rows = sorted(self.manifest.losses().keys() | set(self.manifest.in_flight()))
        shown = ", ".join(str(row) for row in rows[:10]) + (", ..." if len(rows) > 10 else "")
        return f" (in flight: row {shown})" if rows else ""

    def _is_finished_output(self) -> bool:
        """Without a manifest: True when the output is this very job's, whose run directory was removed."""
        if not self.output.exists():
            return False
        metadata = read_output_metadata(self.output)
        if metadata is None:
            raise ConfigError(self._foreign_output())
        stored = metadata.get("fingerprint") or {}
        if stored != self.fingerprint:
            changes = describe_changes(stored, self.fingerprint, {}, {})
            raise ConfigError(self._other_job(f"{self.output} is the output of another job", changes))
        return True

    def _other_job(self, what: str, changes: str) -> str:
        return f"{what}, changed: {changes}. Give another -o, or --restart to replace it"

    def _foreign_output(self) -> str:
        return f"{self.output} exists and this job did not write it. Give another -o, or --restart to replace it"

    def _create(self, config: Mapping[str, Any], keep: Collection[str]) -> None:
        replaces = FileStamp.of(self.output).as_list() if self.output.exists() else None
        with write_errors(self.path):
            # The manifest goes first: whatever is left of the old job without it counts as nothing.
            self._remove_manifest()
            fsync_dir(self.path)
            for entry in self.path.iterdir():
                if entry.name not in keep:
                    _remove(entry)
            self.parts_dir.mkdir()
        write_json_atomic(self.path / "config.json", config)
        write_text_atomic(self.errors_path, "")
        self._manifest = Manifest(self.path / "manifest.sqlite")
        self._manifest.create(
            {
                "run_id": secrets.token_hex(8),
                "created": int(time.time()),
                "fingerprint": self.fingerprint,
                "config": json.loads(json.dumps(config)),
                "state": "running",
                "starts": 1,
                "barren_starts": 1,
                "published": None,
                "replaces": replaces,
            }
        )
        fsync_dir(self.path)

    def _remove_manifest(self) -> None:
        for name in ("manifest.sqlite", "manifest.sqlite-wal", "manifest.sqlite-shm"):
            (self.path / name).unlink(missing_ok=True)

    def _remove_leftovers(self, manifest: Manifest) -> None:
        """Removes parts that no transaction names, temporary files and a half-done merge."""
        committed = {self.part_path(part).name for part in manifest.parts()}
        with write_errors(self.path):
            self.parts_dir.mkdir(exist_ok=True)
            present = {entry.name for entry in self.parts_dir.iterdir()}
            if missing := sorted(committed - present):
                raise ConfigError(f"{self.parts_dir / missing[0]} is missing; --restart starts the job anew")
            for name in present - committed:
                (self.parts_dir / name).unlink()
            if self.merge_dir.exists():
                shutil.rmtree(self.merge_dir)
            temporary_name(self.output).unlink(missing_ok=True)


def _remove(entry: Path) -> None:
    """Removes a file or a directory of a run directory; never the lock."""
    if entry.is_dir() and not entry.is_symlink():
        shutil.rmtree(entry)
    elif entry.name != LOCK_NAME:
        entry.unlink()


def _error_line(row_id: int, failure: RowFailure) -> str:
    entry = {"row_id": row_id, "error_code": failure.code, "error_message": failure.message}
    return json.dumps(entry, ensure_ascii=False) + "\n"

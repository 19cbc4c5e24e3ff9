"""One job from end to end: preflight -> reader -> tokenizer -> engine -> writer -> report. Read this first.

    Source --Record--> RequestBuilder --Request--> EngineCore --Completion--> PartWriter --parts--> output file

Everything is pulled: rows are read when the engine has room for them, so memory stays bounded for any input.
"""

import logging
import sqlite3
import sys
import tempfile
import traceback
from contextlib import ExitStack, closing, suppress
from dataclasses import replace
from datetime import datetime
from pathlib import Path
from typing import Any

from rich.console import Console

from echo_batch.config import RunConfig
from echo_batch.engine.hardware import Hardware, detect_hardware
from echo_batch.engine.plan import Plan, cache_formats, compute_dtype, row_limit
from echo_batch.engine.plan_table import plan_summary, plan_to_dict
from echo_batch.errors import (
    ConfigError,
    EchoBatchError,
    InputError,
    InterruptedJobError,
    ModelError,
    OutputError,
    ScheduleDivergedError,
)
from echo_batch.files import write_json_atomic
from echo_batch.generation import Generation
from echo_batch.hub import demo_model_dir
from echo_batch.io.fingerprint import config_as_dict, job_fingerprint, model_fingerprint, tokenizer_fingerprint
from echo_batch.io.index import RowIndex
from echo_batch.io.openai_output import OpenAIOutput
from echo_batch.io.output_file import write_output
from echo_batch.io.output_schema import ResultColumns
from echo_batch.io.ownership import local_output_path, output_format
from echo_batch.io.paths import is_among
from echo_batch.io.reader import Source, open_source
from echo_batch.io.requests import RequestBuilder
from echo_batch.io.run_dir import RunDirectory
from echo_batch.io.writer import PartWriter
from echo_batch.preflight import ModelFiles, check_options, inspect_model, make_builder, make_chat, plan_for, read_input
from echo_batch.report.metrics import Committed, JobMetrics, versions
from echo_batch.report.progress import make_progress
from echo_batch.report.summary import print_summary
from echo_batch.reporter import Reporter, log_file, logger, say, scan
from echo_batch.signals import StopFlag

LOG_NAME = "echo-batch.log"
"""In the run directory: what happened and when, over all starts of the job."""

TOO_MANY_FAILED_ROWS = 10
"""Exit code of a published output with more failed rows than --max-error-rate allows."""


def run_job(config: RunConfig, *, console: Console | None = None) -> int:
    """Run a job to its end; returns the exit code (0, or 10 when too many rows failed).

    `console` is where progress and the summary go (standard error). Raises EchoBatchError, whose `exit_code` says how
    the job ended; whatever happens after the run directory has begun is also in its report.json and log.
    """
    console = console or Console(stderr=True)
    output = local_output_path(config.output.path or "")
    form = output_format(output, config.output.format)
    with ExitStack() as stack:
        stop = stack.enter_context(StopFlag())
        hardware = detect_hardware(config.engine.device)
        model = inspect_model(config)
        check_options(config, model)
        # The lock comes before the input is read: a second copy of a nightly job ends here at once.
        run = stack.enter_context(closing(RunDirectory.lock(output, inputs=_local_paths(config))))
        if output.exists() and is_among(str(output), config.input.paths) and not run.wrote_output():
            # Left out of the input as the job's own, it would be lost with --restart.
            raise ConfigError(f"output {output} is one of the input's files; give another -o")
        metrics = JobMetrics()
        progress = make_progress(console, sys.stderr, interval=config.report.heartbeat_seconds)
        stack.enter_context(progress)
        job = Job(config, model, hardware, run, metrics, Reporter(config, metrics, progress, stop), console)
        source = stack.enter_context(closing(job.open_input(output)))
        fingerprint, frozen, restart = job.fingerprint(source, form), config_as_dict(config), config.output.restart
        # Another job is refused before reading its input has replaced the spool of this one.
        run.check(fingerprint, frozen, restart=restart)
        scan(source, metrics, job.reporter)
        if run.begin(fingerprint, frozen, restart=restart) == "complete":
            progress.close()
            say(console, f"already complete: {output} (--restart does it again)")
            return 0
        message: str | None = None
        exit_code = 1
        try:
            stack.enter_context(log_file(run.path / LOG_NAME))
            exit_code = job.run(source, form)
        except EchoBatchError as error:
            ended = run.interrupted(str(error)) if isinstance(error, InterruptedJobError) else error
            if isinstance(error, ConfigError | ModelError | InputError | OutputError | ScheduleDivergedError):
                with suppress(OutputError):  # the first error is the one to tell
                    run.excuse()
            message, exit_code = str(ended), ended.exit_code
            raise ended from error
        except Exception as error:
            logger.error("%s", traceback.format_exc())
            message = f"this is a bug in echo-batch: {type(error).__name__}: {error}"
            raise EchoBatchError(f"{message}\nThe traceback is in {run.path / LOG_NAME}") from error
        finally:
            progress.close()
            job.finish(exit_code, message)
        return exit_code


def plan_job(config: RunConfig, hardware: Hardware, *, console: Console | None = None) -> Plan:
    """What `run_job` would do on `hardware` with this input, without loading weights or writing anything."""
    with tempfile.TemporaryDirectory(prefix="echo-batch-") as directory, ExitStack() as stack:
        stop = stack.enter_context(StopFlag())
        model = inspect_model(config, check_weights=False)
        metrics = JobMetrics()
        progress = make_progress(console or Console(stderr=True), sys.stderr, interval=config.report.heartbeat_seconds)
        quiet = replace(config, report=replace(config.report, metrics_textfile=None))
        reporter = Reporter(quiet, metrics, stack.enter_context(progress), stop)
        source = stack.enter_context(
            closing(open_source(config.input.paths, spool_dir=Path(directory), config=config.input, scan=False))
        )
        scan(source, metrics, reporter)
        context_tokens = row_limit(model.config, config, hardware)
        chat = make_chat(config, model)
        builder = make_builder(config, model, chat, context_tokens=context_tokens, is_openai=source.is_openai)
        with metrics.in_stage("preflight", source.num_rows):
            path = Path(directory) / "index.sqlite"
            for done in read_input(config, model, source, builder, path, context_tokens):
                metrics.stage_done = done.num_rows
                reporter.step()
        index = stack.enter_context(closing(RowIndex(path)))
        return plan_for(config, model, hardware, index)


class Job:
    """The parts of one started job and the steps that join them."""

    def __init__(
        self,
        config: RunConfig,
        model: ModelFiles,
        hardware: Hardware,
        run: RunDirectory,
        metrics: JobMetrics,
        reporter: Reporter,
        console: Console,
    ) -> None:
        self.config, self.model, self.hardware = config, model, hardware
        self.directory, self.metrics, self.reporter, self.console = run, metrics, reporter, console
        self.plan: Plan | None = None

    def open_input(self, output: Path) -> Source:
        """The input, to be scanned; its spool lives in the run directory and survives a resume."""
        return open_source(
            self.config.input.paths,
            spool_dir=self.directory.path / "spool",
            config=self.config.input,
            exclude=[str(output)],
            scan=False,
        )

    def fingerprint(self, source: Source, form: str) -> dict[str, str]:
        """What must be the same for a resume."""
        assert self.config.model.path is not None
        row, _ = cache_formats(self.model.config, self.config, self.hardware)
        return job_fingerprint(
            self.config,
            model=model_fingerprint(self.config.model.path),
            tokenizer=tokenizer_fingerprint(self.model.tokenizer_path),
            input=source.fingerprint(),
            precision={"dtype": compute_dtype(self.config, self.hardware.kind), "rows": row.kind},
            output_format=form,
        )

    def run(self, source: Source, form: Any) -> int:
        """Preflight, plan, engine, merge. Returns the exit code."""
        config, metrics = self.config, self.metrics
        if config.engine.schedule is not None and self.directory.state == "resumed":
            raise ConfigError("--schedule covers a whole job, and this one has begun: add --restart, or another -o")
        self.metrics.resume(**self._committed())
        builder, context_tokens = self._make_builder(source)
        with closing(self._read_input(source, builder, context_tokens)) as index:
            metrics.rows_total = source.num_rows
            self.plan = plan = plan_for(config, self.model, self.hardware, index)
            self._announce(plan, index)
            columns = ResultColumns(
                cut_tokens=config.input.too_long != "fail",
                token_ids=config.output.output_token_ids,
                logprobs=config.sampling.logprobs is not None
                or "logprobs" in source.schema.names
                or (source.is_openai and form == "openai"),
            )
            with PartWriter(self.directory, columns) as writer:
                generation = Generation(
                    config=config,
                    model=self.model,
                    directory=self.directory,
                    metrics=metrics,
                    reporter=self.reporter,
                    source=source,
                    index=index,
                    builder=builder,
                    writer=writer,
                )
                generation.fail_rows()
                if next(generation.pending(), None) is not None:
                    plan.require_fit()
                    generation.run(plan)
        with metrics.in_stage("merge", source.num_rows):
            openai = OpenAIOutput(
                run_id=self.directory.run_id,
                model=Path(config.model.path or "").name,
                created=self.directory.created,
                tokenizer=self.model.tokenizer,
            )
            for rows in write_output(
                self.directory,
                source,
                num_rows=source.num_rows,
                columns=columns,
                form=form,
                versions=versions(),
                openai=openai,
                limited=config.input.limit is not None,
            ):
                metrics.stage_done = rows
                metrics.pieces += 1
                self.reporter.step()
        rate = metrics.rows_failed / source.num_rows if source.num_rows else 0.0
        return TOO_MANY_FAILED_ROWS if rate > config.output.max_error_rate else 0

    def finish(self, exit_code: int, message: str | None) -> None:
        """Leave report.json, the last metrics and the summary, however the job ended."""
        if message is not None:
            with suppress(sqlite3.Error):  # the disk may be the reason
                self.metrics.recount(**self._committed())
        report = self._report(exit_code, message)
        logger.log(logging.ERROR if message else logging.INFO, "end, exit code %d%s", exit_code, _after_colon(message))
        try:
            write_json_atomic(self.directory.report_path, report)
            self.reporter.finish(success=exit_code == 0)
        except OutputError as error:
            # Of a job that failed, the first error is the one to tell.
            logger.error("%s", error)
            if exit_code in (0, TOO_MANY_FAILED_ROWS):
                raise
        with suppress(OSError, SystemExit):
            print_summary(self.console, report)

    def _report(self, exit_code: int, message: str | None) -> dict[str, Any]:
        """The content of report.json."""
        return self.metrics.report(
            exit_code=exit_code,
            output=str(self.directory.output),
            model=str(self.config.model.path),
            demo_model=Path(self.config.model.path or "") == demo_model_dir(),
            num_starts=self.directory.num_starts,
            message=message,
            plan=plan_to_dict(self.plan) if self.plan is not None else None,
        )

    # ---------------------------------------------------------------------------------------------------------------

    def _committed(self) -> Committed:
        totals = self.directory.manifest.totals()
        return {
            "rows": totals.rows,
            "failed": totals.failed,
            "prompt_tokens": totals.input_tokens,
            "cached_tokens": totals.cached_tokens,
            "generated_tokens": totals.generated_tokens,
        }

    def _announce(self, plan: Plan, index: RowIndex) -> None:
        """Say what will be done, before the wait begins."""
        lines = [f"plan: {plan_summary(plan)}", *(f"note: {note}" for note in plan.notes)]
        failures = index.totals().failures
        if failures:
            codes = ", ".join(f"{count:,} {code}" for code, count in failures.items())
            lines.append(
                f"input: {sum(failures.values()):,} of {self.metrics.rows_total or 0:,} rows cannot run ({codes})"
            )
        if self.directory.state == "resumed":
            lines.append(f"resuming: {self.metrics.rows_done:,} rows are done already")
        logger.info("start %d of this job, versions %s", self.directory.num_starts, versions())
        for line in lines:
            logger.info("%s", line)
            say(self.console, line)

    def _make_builder(self, source: Source) -> tuple[RequestBuilder, int]:
        """The builder of this job's requests, and its context limit. What could differ between the starts of a job (the
        date in chat templates, the limit where memory decides it) is what it was at the first one."""
        manifest = self.directory.manifest
        limit = row_limit(self.model.config, self.config, self.hardware)
        limit = min(limit, manifest.get("context_tokens") or limit)
        manifest.set(context_tokens=limit)
        chat = make_chat(self.config, self.model, now=datetime.fromtimestamp(self.directory.created))
        builder = make_builder(self.config, self.model, chat, context_tokens=limit, is_openai=source.is_openai)
        return builder, limit

    def _read_input(self, source: Source, builder: RequestBuilder, context_tokens: int) -> RowIndex:
        """Tokenize every row once; returns the index of the input, which an earlier start may have left."""
        path = self.directory.path / "spool" / "index.sqlite"
        with self.metrics.in_stage("preflight", source.num_rows):
            for done in read_input(self.config, self.model, source, builder, path, context_tokens):
                self.metrics.stage_done = done.num_rows
                self.reporter.step()
        return RowIndex(path)


def _after_colon(message: str | None) -> str:
    return f": {message}" if message else ""


def _local_paths(config: RunConfig) -> list[str]:
    return [path for path in config.input.paths if "://" not in path]

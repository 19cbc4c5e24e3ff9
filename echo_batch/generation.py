"""The part of a job that generates: rows of the input in, completions to the writer. One engine, one start.

Rows are read and tokenized a few at a time, one pull ahead of the engine.
"""

import logging
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing
from dataclasses import dataclass
from typing import TYPE_CHECKING

from echo_batch.config import RunConfig
from echo_batch.engine.hardware import peak_device_bytes
from echo_batch.engine.plan import Plan
from echo_batch.errors import EngineLostError, InterruptedJobError
from echo_batch.io.index import IndexEntry, RowIndex
from echo_batch.io.reader import Source
from echo_batch.io.requests import RequestBuilder
from echo_batch.io.run_dir import LOSSES_ALONE, LOSSES_FAILED, RunDirectory
from echo_batch.io.writer import PartWriter
from echo_batch.preflight import ModelFiles
from echo_batch.report.metrics import JobMetrics
from echo_batch.reporter import Reporter
from echo_batch.request import Completion, Request, RowFailure

if TYPE_CHECKING:
    from echo_batch.engine.core import EngineCore

_PULL_ROWS = 32
_PULL_TOKENS = 262_144
"""Rows that are read and tokenized together, at most so many and (but for one row) of so many tokens."""
_CACHE_READ_SECONDS = 2.0
"""Cache counters live on the device: read them rarely."""

_Built = list[tuple[int, Request | RowFailure]]

logger = logging.getLogger("echo_batch")


@dataclass(frozen=True, slots=True, kw_only=True)
class Generation:
    """What generating needs of a job."""

    config: RunConfig
    model: ModelFiles
    directory: RunDirectory
    metrics: JobMetrics
    reporter: Reporter
    source: Source
    index: RowIndex
    builder: RequestBuilder
    writer: PartWriter

    def pending(self) -> Iterator[IndexEntry]:
        """Good rows without a committed result, in the order in which they should run."""
        manifest = self.directory.manifest
        return (entry for entry in self.index.iter_entries() if not manifest.is_committed(entry.row_id))

    def fail_rows(self) -> None:
        """Write the rows that the preflight found bad."""
        for row_id, failure in self.index.iter_failures():
            if not self.directory.manifest.is_committed(row_id):
                self._write(Completion(row_id=row_id, failure=failure))
                self.reporter.step()

    def run(self, plan: Plan) -> None:
        """Load the engine and run every pending row through it."""
        self.metrics.prefill_total = self.metrics.decode_bound = 0
        for entry in self.pending():
            self.metrics.prefill_total += entry.num_tokens
            self.metrics.decode_bound += entry.max_tokens
        core = self._load_engine(plan)
        with closing(core), self.metrics.in_stage("run"):
            suspects: list[IndexEntry] = []
            self._drain(core, self._requests(self.pending(), suspects))
            # Rows that were in flight at two engine losses run alone, last: they cannot take others with them.
            for entry in suspects:
                self._drain(core, self._requests(iter([entry]), None))
            if core.device.type == "cuda":
                self.metrics.peak_device_bytes = peak_device_bytes()
        self.directory.clear_in_flight()

    def _load_engine(self, plan: Plan) -> "EngineCore":
        metrics = self.metrics

        def loaded(done: int, total: int) -> None:
            metrics.stage_done, metrics.stage_total = done, total
            self.reporter.step()

        tokenizer = self.model.tokenizer
        with metrics.in_stage("load"):
            self.reporter.step()
            # torch is imported here and not before: a job that cannot work should say so without the wait.
            from echo_batch.engine.build import build_core
            from echo_batch.engine.losses import device_loss

            try:
                core = build_core(
                    self.model.config,
                    self.config,
                    plan,
                    make_detokenizer=None if tokenizer is None else tokenizer.make_detokenizer,
                    progress=loaded,
                )
            except Exception as error:
                if lost := device_loss(error):
                    raise EngineLostError(f"the device failed while the model was loaded: {lost}") from error
                raise
        metrics.load_parts = core.startup_seconds
        parts = ", ".join(f"{name} {seconds:.1f} s" for name, seconds in core.startup_seconds.items())
        logger.info("model loaded in %.1f s (%s)", metrics.seconds["load"], parts)
        metrics.host_pool_tokens = plan.cache.host_tokens
        metrics.gpu_pool_tokens = plan.cache.gpu_tokens
        metrics.bytes_per_recall = [len(layers) * plan.cache.row_format.row_bytes for layers in plan.cache.group_layers]
        return core

    def _requests(self, entries: Iterator[IndexEntry], suspects: list[IndexEntry] | None) -> Iterator[Request]:
        """Requests of these rows, read and tokenized a few at a time, the next few while the engine is busy with the
        last. Rows with engine losses go to `suspects`."""
        with ThreadPoolExecutor(1, thread_name_prefix="tokenizer") as tokenizer:
            ahead: Future[_Built] | None = None
            for batch in _pulls(entries):
                rows = self._rows_to_run(batch, suspects)
                following = tokenizer.submit(self._build, rows)
                if ahead is not None:
                    yield from self._started(ahead.result())
                ahead = following
            if ahead is not None:
                yield from self._started(ahead.result())

    def _rows_to_run(self, batch: list[IndexEntry], suspects: list[IndexEntry] | None) -> list[int]:
        all_losses = self.directory.manifest.losses()
        rows = []
        for entry in batch:
            losses = all_losses.get(entry.row_id, 0)
            if losses >= LOSSES_FAILED:
                text = f"in flight at {losses} losses of the engine, alone at the last"
                failure = RowFailure(code="engine_failed", message=text)
                self._write(Completion(row_id=entry.row_id, failure=failure))
            elif losses >= LOSSES_ALONE and suspects is not None:
                suspects.append(entry)
            else:
                rows.append(entry.row_id)
        return rows

    def _build(self, rows: list[int]) -> _Built:
        """On the tokenizer's thread, which alone reads the source meanwhile: a 100K-token text takes 0.2 s."""
        records = list(self.source.read_records(rows))
        return list(zip((record.row_id for record in records), self.builder.build_many(records), strict=True))

    def _started(self, built: _Built) -> Iterator[Request]:
        for row_id, request in built:
            if isinstance(request, RowFailure):
                self._write(Completion(row_id=row_id, failure=request))
                continue
            self.directory.mark_in_flight([row_id])
            yield request

    def _drain(self, core: "EngineCore", requests: Iterator[Request]) -> None:
        """Run requests to their end, writing completions as they come."""
        read_at = 0.0
        try:
            with closing(core.run(requests)) as completions:
                for completion in completions:
                    if completion is not None:
                        self._write(completion)
                    else:
                        self.writer.poll()
                    self.metrics.read_engine([core.stats])
                    now = time.monotonic()
                    if now - read_at >= _CACHE_READ_SECONDS:
                        self._read_cache(core)
                        read_at = now
                    self.reporter.step()
        except EngineLostError:
            self.writer.flush()
            self.directory.record_engine_loss()
            raise
        except InterruptedJobError:
            self.writer.flush()
            self.directory.clear_in_flight()
            raise
        self.metrics.read_engine([core.stats])
        self._read_cache(core)

    def _read_cache(self, core: "EngineCore") -> None:
        prefetched = core.cache.prefetch_counters()
        self.metrics.read_cache([core.cache.counters()], [] if prefetched is None else [prefetched])

    def _write(self, completion: Completion) -> None:
        self.metrics.add_completion(completion)
        self.writer.write([completion])


def _pulls(entries: Iterator[IndexEntry]) -> Iterator[list[IndexEntry]]:
    """Entries in batches of bounded rows and tokens."""
    batch: list[IndexEntry] = []
    tokens = 0
    for entry in entries:
        if batch and (len(batch) >= _PULL_ROWS or tokens + entry.num_tokens > _PULL_TOKENS):
            yield batch
            batch, tokens = [], 0
        batch.append(entry)
        tokens += entry.num_tokens
    if batch:
        yield batch

"""JobMetrics: every number that a job counts, and the two views of it: a Snapshot now, `report.json` at the end.

Plain counters; the job's loop is the only writer. Knows no files, no engine and no torch.
"""

import resource
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime
from importlib import metadata
from typing import Any, Protocol, TypedDict, Unpack

from echo_batch.request import Completion

REPORT_VERSION = 1
"""Of report.json: raised when a field changes its meaning or goes; new fields do not raise it."""

STAGES = ("preflight", "load", "run", "merge")


class EngineCounters(Protocol):
    """What is read of one engine (`engine.core.EngineStats` is one). Seconds are wall clock."""

    prompt_tokens: int
    cached_tokens: int
    generated_tokens: int
    decode_steps: int
    decode_row_steps: int
    resident_steps: int
    prefill_seconds: float
    decode_seconds: float
    running: int
    waiting: int
    max_waiting: int
    max_running: int
    host_tokens_used: int
    gpu_tokens_reserved: int


ENGINE_FIELDS = (
    "prompt_tokens",
    "cached_tokens",
    "generated_tokens",
    "decode_steps",
    "decode_row_steps",
    "resident_steps",
    "prefill_seconds",
    "decode_seconds",
    "running",
    "waiting",
    "max_waiting",
    "max_running",
    "host_tokens_used",
    "gpu_tokens_reserved",
)


class CacheCounters(Protocol):
    """What is read of one cache: rows since its start, one number per selection group."""

    @property
    def selected_rows(self) -> Sequence[int]: ...
    @property
    def hit_rows(self) -> Sequence[int]: ...
    @property
    def recalled_rows(self) -> Sequence[int]: ...
    @property
    def evicted_rows(self) -> Sequence[int]: ...
    @property
    def offloaded_rows(self) -> Sequence[int]: ...
    @property
    def fallback_rows(self) -> Sequence[int]: ...


class PrefetchCounters(Protocol):
    """The same of prefetch."""

    @property
    def candidates(self) -> Sequence[int]: ...
    @property
    def prefetched(self) -> Sequence[int]: ...
    @property
    def used(self) -> Sequence[int]: ...
    @property
    def wasted(self) -> Sequence[int]: ...
    @property
    def late(self) -> Sequence[int]: ...
    @property
    def dropped(self) -> Sequence[int]: ...


PREFETCH_FIELDS = ("candidates", "prefetched", "used", "wasted", "late", "dropped")
"""Of PrefetchCounters; see cache/prefetch.py."""
CACHE_FIELDS = ("selected_rows", "hit_rows", "evicted_rows", "recalled_rows", "offloaded_rows", "fallback_rows")
"""Of CacheCounters; see cache/counters.py."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Snapshot:
    """The job at one moment. Tokens and seconds are of this start; `rows_done` counts earlier starts too."""

    stage: str = "start"
    stage_done: int = 0
    stage_total: int | None = None
    """Of the stages other than "run": rows read, bytes loaded, rows written."""
    pieces: int = 0
    """Done of what is no unit of a stage: parts read before the merge writes its first row."""
    rows_done: int = 0
    rows_total: int | None = None
    rows_failed: int = 0
    finished_rows: int = 0
    """Rows that ended well in this start, and their generated tokens."""
    finished_tokens: int = 0
    prefill_tokens: int = 0
    prefill_cached: int = 0
    """Of them tokens of shared prefixes, which were not computed again."""
    prefill_total: int | None = None
    decode_tokens: int = 0
    decode_bound: int | None = None
    """The most tokens that this start can generate (sum of max_tokens)."""
    prefill_seconds: float = 0.0
    decode_seconds: float = 0.0
    steps: int = 0
    running: int = 0
    waiting: int = 0
    host_pool_used: int = 0
    host_pool_tokens: int = 0
    gpu_pool_used: int = 0
    gpu_pool_tokens: int = 0
    selected_rows: int = 0
    hit_rows: int = 0
    recalled_bytes: int = 0

    @property
    def prefill_computed(self) -> int:
        """What the speed of prefill is a matter of."""
        return self.prefill_tokens - self.prefill_cached

    @property
    def work(self) -> tuple[str | int, ...]:
        """Changes whenever anything advances."""
        tokens = (self.prefill_tokens, self.decode_tokens)
        return (self.stage, self.stage_done, self.pieces, *tokens, self.steps, self.rows_done)


class Committed(TypedDict):
    """What all starts of a job together have committed (`manifest.Totals`)."""

    rows: int
    failed: Iterable[tuple[str, int]]
    """Error code and number of rows, by code."""
    prompt_tokens: int
    cached_tokens: int
    generated_tokens: int


def usage(used: int, size: int) -> float:
    """Share of a pool in use, 0 to 1; a pool without room, like an empty one, is 0."""
    return used / size if size else 0.0


def ratio(part: float, whole: float) -> float | None:
    """part / whole, None when there is nothing to divide by."""
    return part / whole if whole else None


@dataclass(slots=True, kw_only=True)
class JobMetrics:
    """The counters of one start of a job. `clock` is monotonic, in seconds."""

    rows_total: int | None = None
    prefill_total: int | None = None
    decode_bound: int | None = None
    host_pool_tokens: int = 0
    gpu_pool_tokens: int = 0
    bytes_per_recall: Sequence[int] = ()
    """Bytes that recalling one row of each selection group copies: a KV row in each of the group's layers."""
    prefetch: dict[str, int] | None = None
    """Rows by PREFETCH_FIELDS, all groups together; None without prefetch."""
    peak_device_bytes: int | None = None
    """Most GPU memory held by this start; None on CPU."""
    clock: Callable[[], float] = time.monotonic

    stage: str = "start"
    stage_done: int = 0
    stage_total: int | None = None
    pieces: int = 0
    rows_done: int = 0
    rows_resumed: int = 0
    failed_by_code: dict[str, int] = field(default_factory=dict)
    prompt_tokens: int = 0
    cached_tokens: int = 0
    generated_tokens: int = 0
    cut_tokens: int = 0
    finished_rows: int = 0
    finished_tokens: int = 0
    finish_reasons: dict[str, int] = field(default_factory=dict)
    seconds: dict[str, float] = field(default_factory=dict)
    load_parts: dict[str, float] = field(default_factory=dict)
    """Seconds of the parts of loading, which overlap: weights, pools, capture."""
    cache: dict[str, list[int]] = field(default_factory=lambda: {name: [] for name in CACHE_FIELDS})
    started_at: datetime = field(default_factory=lambda: datetime.now(UTC))

    _engine: dict[str, float] = field(default_factory=dict, init=False)
    _began: float = field(default=0.0, init=False)
    _stage_began: float | None = field(default=None, init=False)

    def __post_init__(self) -> None:
        self._began = self.clock()

    def resume(self, **committed: Unpack[Committed]) -> None:
        """Takes over what earlier starts committed."""
        self.recount(**committed)
        self.rows_resumed = self.rows_done

    def recount(self, **committed: Unpack[Committed]) -> None:
        """Sets the counters of the whole job to what is committed: a row that the disk did not take is not done."""
        self.rows_done = committed["rows"]
        self.failed_by_code = dict(committed["failed"])
        self.prompt_tokens = committed["prompt_tokens"]
        self.cached_tokens = committed["cached_tokens"]
        self.generated_tokens = committed["generated_tokens"]

    def add_completion(self, completion: Completion) -> None:
        """Counts a row that has ended, well or not."""
        self.rows_done += 1
        if completion.failure is not None:
            code = completion.failure.code
            self.failed_by_code[code] = self.failed_by_code.get(code, 0) + 1
            return
        self.prompt_tokens += completion.num_input_tokens
        self.cached_tokens += completion.num_cached_tokens
        self.generated_tokens += len(completion.token_ids)
        self.cut_tokens += completion.num_cut_tokens
        self.finished_rows += 1
        reason = completion.finish_reason
        if reason is not None:
            self.finish_reasons[reason] = self.finish_reasons.get(reason, 0) + 1
        self.finished_tokens += len(completion.token_ids)

    @contextmanager
    def in_stage(self, name: str, total: int | None = None) -> Iterator[None]:
        """A stage of the job (one of STAGES): its seconds are counted, however it ends."""
        assert name in STAGES, name
        self.stage, self.stage_done, self.stage_total = name, 0, total
        self._stage_began = self.clock()
        try:
            yield
        finally:
            self.seconds[name] = self._stage_seconds(name)
            self._stage_began = None

    def read_engine(self, engines: Iterable[EngineCounters]) -> None:
        """Takes the counters of all engines over (they count from their start)."""
        engines = list(engines)
        self._engine = {name: sum(getattr(engine, name) for engine in engines) for name in ENGINE_FIELDS}

    def read_cache(self, caches: Iterable[CacheCounters], prefetched: Iterable[PrefetchCounters] = ()) -> None:
        """Takes the counters of all caches over (they count from their start), with prefetch those of `prefetched`."""
        counted = list(prefetched)
        if counted:
            self.prefetch = {name: sum(sum(getattr(one, name)) for one in counted) for name in PREFETCH_FIELDS}
        caches = list(caches)
        for name in CACHE_FIELDS:
            per_cache = [getattr(cache, name) for cache in caches]
            self.cache[name] = [int(sum(group)) for group in zip(*per_cache, strict=True)]

    @property
    def rows_failed(self) -> int:
        return sum(self.failed_by_code.values())

    def snapshot(self) -> Snapshot:
        """The numbers now."""
        return Snapshot(
            stage=self.stage,
            stage_done=self.stage_done,
            stage_total=self.stage_total,
            pieces=self.pieces,
            rows_done=self.rows_done,
            rows_total=self.rows_total,
            rows_failed=self.rows_failed,
            finished_rows=self.finished_rows,
            finished_tokens=self.finished_tokens,
            prefill_tokens=self._count("prompt_tokens"),
            prefill_cached=self._count("cached_tokens"),
            prefill_total=self.prefill_total,
            decode_tokens=self._count("generated_tokens"),
            decode_bound=self.decode_bound,
            prefill_seconds=self._engine.get("prefill_seconds", 0.0),
            decode_seconds=self._engine.get("decode_seconds", 0.0),
            steps=self._count("decode_steps"),
            running=self._count("running"),
            waiting=self._count("waiting"),
            host_pool_used=self._count("host_tokens_used"),
            host_pool_tokens=self.host_pool_tokens,
            gpu_pool_used=self._count("gpu_tokens_reserved"),
            gpu_pool_tokens=self.gpu_pool_tokens,
            selected_rows=sum(self.cache["selected_rows"]),
            hit_rows=sum(self.cache["hit_rows"]),
            recalled_bytes=self._recalled_bytes(),
        )

    def report(
        self,
        *,
        exit_code: int,
        output: str,
        model: str,
        demo_model: bool = False,
        num_starts: int = 1,
        message: str | None = None,
        plan: Mapping[str, Any] | None = None,
    ) -> dict[str, Any]:
        """The content of report.json (docs/input-output.md). Also of a start that was interrupted or failed: then
        `exit_code` and `message` say how. Rows and tokens are of the whole job, the rest is of this start."""
        elapsed = self.clock() - self._began
        now = self.snapshot()
        seconds = {name: round(self._stage_seconds(name), 3) for name in STAGES}
        seconds |= {"prefill": round(now.prefill_seconds, 3), "decode": round(now.decode_seconds, 3)}
        seconds |= {f"load_{name}": round(part, 3) for name, part in self.load_parts.items()}
        seconds["total"] = round(elapsed, 3)
        row_steps = self._count("decode_row_steps")
        return {
            "version": REPORT_VERSION,
            "job": {
                "output": output,
                "model": model,
                "demo_model": demo_model,
                "note": "the bundled demo model, which is for trying out only" if demo_model else None,
                "exit_code": exit_code,
                "message": message,
                "rows": self.rows_total,
                "rows_done": self.rows_done,
                "rows_failed": self.rows_failed,
                "failed_by_code": dict(sorted(self.failed_by_code.items())),
                "finish_reasons": dict(sorted(self.finish_reasons.items())),
                "rows_resumed": self.rows_resumed,
                "starts": num_starts,
                "started_at": self.started_at.isoformat(timespec="seconds"),
                "ended_at": datetime.now(UTC).isoformat(timespec="seconds"),
            },
            "tokens": {
                "prompt": self.prompt_tokens,
                "cached": self.cached_tokens,
                "generated": self.generated_tokens,
                "cut": self.cut_tokens,
            },
            "seconds": seconds,
            "throughput": {
                "prefill_tokens_per_s": _rounded(ratio(now.prefill_computed, now.prefill_seconds)),
                # A row's first token is prefill's work.
                "decode_tokens_per_s": _rounded(ratio(row_steps, now.decode_seconds)),
                "generated_tokens_per_s": _rounded(ratio(now.decode_tokens, seconds["run"])),
                "rows_per_s": _rounded(ratio(self.rows_done - self.rows_resumed, seconds["run"])),
            },
            "cache": self._cache_report(),
            "scheduler": {
                "max_waiting": self._count("max_waiting"),
                "max_running": self._count("max_running"),
                "effective_batch": _rounded(ratio(row_steps, now.steps)) or 0.0,
                "steps": now.steps,
                "resident_steps": self._count("resident_steps"),
            },
            "memory": {"peak_rss_bytes": _peak_rss_bytes(), "peak_device_bytes": self.peak_device_bytes},
            "plan": dict(plan or {}),
            "versions": versions(),
        }

    def _cache_report(self) -> dict[str, Any]:
        totals = {name: sum(self.cache[name]) for name in CACHE_FIELDS}
        groups = []
        for g in range(len(self.cache["selected_rows"])):
            counts = {name: self.cache[name][g] for name in CACHE_FIELDS}
            groups.append({"hit_rate": _rounded(ratio(counts["hit_rows"], counts["selected_rows"]), 6), **counts})
        return {
            "hit_rate": _rounded(ratio(totals["hit_rows"], totals["selected_rows"]), 6),
            **totals,
            "recalled_bytes": self._recalled_bytes(),
            "prefetch": self.prefetch,
            "groups": groups,
        }

    def _recalled_bytes(self) -> int:
        return sum(rows * size for rows, size in zip(self.cache["recalled_rows"], self.bytes_per_recall, strict=False))

    def _stage_seconds(self, name: str) -> float:
        running = self.clock() - self._stage_began if self.stage == name and self._stage_began is not None else 0.0
        return self.seconds.get(name, 0.0) + running

    def _count(self, name: str) -> int:
        return int(self._engine.get(name, 0))


def versions() -> dict[str, str]:
    """Versions of Python and of the packages that the results depend on, as installed (nothing is imported)."""
    found = {"python": ".".join(map(str, sys.version_info[:3]))}
    for name in ("echo-batch", "torch", "triton", "pyarrow", "tokenizers", "jinja2"):
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return found


def _peak_rss_bytes() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def _rounded(value: float | None, digits: int = 3) -> float | None:
    return None if value is None else round(value, digits)

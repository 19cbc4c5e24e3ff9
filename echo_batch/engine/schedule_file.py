"""The file of a recorded schedule: what an engine did, event by event, as JSON Lines (docs/lossless.md). No torch."""

import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, TextIO

from echo_batch.engine.plan import Plan
from echo_batch.errors import ConfigError, OutputError

VERSION = 1


@dataclass(slots=True, kw_only=True)
class Result:
    """What came out, one entry a row of the event: tokens (-1: the row took no part), finish codes, checksums of the
    logits (64 bits, hexadecimal)."""

    tokens: list[int]
    codes: list[int]
    logits: list[str]


@dataclass(slots=True, kw_only=True)
class PrefillRow:
    """One request of a prefill group. `context`: tokens at its longest; `cached`: tokens of its shared prefix;
    `prompt`: hash of its tokens."""

    request: int
    row: int
    context: int
    cached: int
    prompt: str
    blocks: list[int]


@dataclass(slots=True, kw_only=True)
class Prefill:
    """A group of requests joins the batch, in this order."""

    group: int
    rows: list[PrefillRow]
    result: Result | None = None


@dataclass(slots=True, kw_only=True)
class Step:
    """A decode step: `rows` are (row, request) pairs in the order of the result."""

    step: int
    bucket: int
    rows: list[tuple[int, int]]
    result: Result | None = None


@dataclass(slots=True, kw_only=True)
class Release:
    """The slots of these blocks are forgotten."""

    blocks: list[int]


@dataclass(slots=True, kw_only=True)
class Refuse:
    """A request that cannot run."""

    request: int
    code: str
    message: str


@dataclass(slots=True, kw_only=True)
class End:
    """The end of one run of the engine."""

    requests: int


Event = Prefill | Step | Release | Refuse | End
_KINDS: dict[str, type[Event]] = {
    "prefill": Prefill,
    "step": Step,
    "release": Release,
    "refuse": Refuse,
    "end": End,
}
_NAMES = {kind: name for name, kind in _KINDS.items()}


@dataclass(frozen=True, slots=True, kw_only=True)
class Header:
    """What must be the same for the same bits: the model and its formats, and every shape that the plan decides."""

    schedule: int
    architecture: str
    num_layers: int
    index_topk: int
    dtype: str
    rows: str
    max_model_len: int
    max_num_seqs: int
    decode_buckets: list[int] = field(default_factory=list)
    prefill_chunk_tokens: int
    lookahead_steps: int

    @staticmethod
    def of(plan: Plan) -> "Header":
        return Header(
            schedule=VERSION,
            architecture=plan.model.architecture,
            num_layers=plan.model.num_layers,
            index_topk=plan.cache.index_topk,
            dtype=plan.dtype,
            rows=plan.cache.row_format.kind,
            max_model_len=plan.max_model_len,
            max_num_seqs=plan.max_num_seqs,
            decode_buckets=list(plan.decode_buckets),
            prefill_chunk_tokens=plan.prefill_chunk_tokens,
            lookahead_steps=plan.lookahead_steps,
        )


class ScheduleWriter:
    """Writes events in the order in which they were begun; one without its result holds back those behind it."""

    def __init__(self, path: Path, header: Header) -> None:
        self._path = path
        self._waiting: list[Event] = []
        try:
            self._file: TextIO = path.open("w", encoding="utf-8")
        except OSError as error:
            raise OutputError(f"cannot write the schedule {path}: {error.strerror or error}") from None
        self._line(asdict(header))

    def add(self, event: Event) -> None:
        """Take an event; its result may come later."""
        self._waiting.append(event)
        self.flush()

    def flush(self) -> None:
        """Write what is complete."""
        while self._waiting:
            event = self._waiting[0]
            if isinstance(event, Prefill | Step) and event.result is None:
                return
            self._line({"event": _NAMES[type(event)], **asdict(event)})
            del self._waiting[0]

    def close(self) -> None:
        """Events without a result are lost."""
        try:
            self._file.close()
        except OSError as error:
            raise OutputError(f"cannot write the schedule {self._path}: {error.strerror or error}") from None

    def _line(self, value: dict[str, Any]) -> None:
        try:
            self._file.write(json.dumps(value, separators=(",", ":")) + "\n")
        except OSError as error:
            raise OutputError(f"cannot write the schedule {self._path}: {error.strerror or error}") from None


def read_header(path: Path) -> Header:
    """The first line. Raises ConfigError if this is no schedule of this version."""
    with _opened(path) as file:
        try:
            header = Header(**json.loads(file.readline()))
        except (ValueError, TypeError):
            raise ConfigError(f"{path} is not a schedule") from None
    if header.schedule != VERSION:
        raise ConfigError(f"{path}: version {header.schedule} of the schedule file, this release reads {VERSION}")
    return header


def read_events(path: Path) -> Iterator[Event]:
    """The events of a file, in order. Raises ConfigError naming the line of one that cannot be read."""
    with _opened(path) as file:
        file.readline()
        for number, line in enumerate(file, start=2):
            try:
                yield _event(json.loads(line))
            except (ValueError, TypeError, KeyError):
                raise ConfigError(f"{path}, line {number}: not an event of a schedule") from None


def _event(values: Any) -> Event:
    if not isinstance(values, dict):
        raise TypeError(values)
    kind = _KINDS[values.pop("event")]
    if isinstance(values.get("result"), dict):
        values["result"] = Result(**values["result"])
    event = kind(**values)
    if isinstance(event, Prefill):
        event.rows = [PrefillRow(**row) for row in values["rows"]]
    elif isinstance(event, Step):
        event.rows = [(int(row), int(request)) for row, request in event.rows]
    return event


def _opened(path: Path) -> TextIO:
    try:
        # A damaged byte then makes its own line unreadable, or a hash wrong.
        return path.open(encoding="utf-8", errors="replace")
    except OSError as error:
        raise ConfigError(f"cannot read the schedule {path}: {error.strerror or error}") from None

"""Recording what an engine does, and holding another run against it (`--schedule`). No torch.

Both have the same face, which the engine calls at the same places: `prefill` and `step` when work is launched, `result`
when its tokens are read, `released`, `refused` and `end`.
"""

import zlib
from array import array
from collections.abc import Mapping
from collections.abc import Sequence as Seq
from dataclasses import replace
from pathlib import Path

from echo_batch.cache.spec import CacheSpec, minimum_gpu_tokens
from echo_batch.engine.plan import Plan
from echo_batch.engine.schedule_file import (
    End,
    Event,
    Header,
    Prefill,
    PrefillRow,
    Refuse,
    Release,
    Result,
    ScheduleWriter,
    Step,
    read_events,
    read_header,
)
from echo_batch.engine.sequence import Sequence
from echo_batch.errors import ConfigError, ScheduleDivergedError
from echo_batch.kernels.formats import BLOCK_SIZE
from echo_batch.request import RowFailure


def open_schedule(text: str | None, plan: Plan) -> "tuple[Recorder | Replay | None, Plan]":
    """What `--schedule` asks for, and the plan to run: a replay takes every shape from the file.

    Raises ConfigError when the file cannot be replayed by this plan, OutputError when it cannot be written.
    """
    if text is None:
        return None, plan
    mode, _, path = text.partition(":")
    if mode == "record":
        return Recorder(Path(path), plan), plan
    schedule = Replay(Path(path))
    return schedule, schedule.adapt(plan)


class Recorder:
    """Writes the schedule of this run."""

    def __init__(self, path: Path, plan: Plan) -> None:
        self._writer = ScheduleWriter(path, Header.of(plan))
        self._num_groups = self._num_steps = self._num_requests = 0

    def prefill(self, group: Seq[Sequence]) -> Prefill:
        """A group that is launched now."""
        rows = [
            PrefillRow(
                request=s.request.row_id,
                row=s.row,
                context=s.max_context,
                cached=s.num_cached_tokens,
                prompt=prompt_hash(s),
                blocks=list(s.blocks),
            )
            for s in group
        ]
        event = Prefill(group=self._num_groups, rows=rows)
        self._writer.add(event)
        self._num_groups += 1
        self._num_requests += len(rows)
        return event

    def step(self, bucket: int, rows: Mapping[int, Sequence]) -> Step:
        """A decode step that is launched now."""
        pairs = [(row, sequence.request.row_id) for row, sequence in rows.items()]
        event = Step(step=self._num_steps, bucket=bucket, rows=pairs)
        self._writer.add(event)
        self._num_steps += 1
        return event

    def forced_tokens(self, event: Step) -> None:
        """Inputs of a step that do not come from the sampler: none."""
        return None

    def result(self, event: Prefill | Step, tokens: list[int], codes: list[int], checksums: list[int]) -> None:
        """What came out of a launch."""
        event.result = Result(tokens=tokens, codes=codes, logits=[checksum_text(c) for c in checksums])
        self._writer.flush()

    def released(self, blocks: Seq[int]) -> None:
        """Blocks whose slots were forgotten."""
        if blocks:
            self._writer.add(Release(blocks=list(blocks)))

    def refused(self, sequence: Sequence, failure: RowFailure) -> None:
        """A request that cannot run."""
        self._num_requests += 1
        self._writer.add(Refuse(request=sequence.request.row_id, code=failure.code, message=failure.message))

    def end(self) -> None:
        """All requests are done."""
        self._writer.add(End(requests=self._num_requests))
        self._num_requests = 0

    def close(self) -> None:
        self._writer.close()


class Replay:
    """The schedule of another run: says what comes next, and holds results against what came out there."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.header = read_header(path)
        self._events = read_events(path)
        self._next: Event | None = next(self._events, None)
        self._last_token: dict[int, int] = {}

    def adapt(self, plan: Plan) -> Plan:
        """The plan with the shapes of the schedule. Raises ConfigError if it cannot be replayed."""
        mine, header = Header.of(plan), self.header
        for name in ("architecture", "num_layers", "index_topk", "dtype", "rows"):
            if getattr(mine, name) != getattr(header, name):
                raise ConfigError(
                    f"the schedule {self.path} was recorded with {name} {getattr(header, name)}, "
                    f"this run has {getattr(mine, name)}"
                )
        self._check_pools(plan.cache)
        return replace(
            plan,
            max_model_len=header.max_model_len,
            max_num_seqs=header.max_num_seqs,
            decode_buckets=tuple(header.decode_buckets),
            prefill_chunk_tokens=header.prefill_chunk_tokens,
            lookahead_steps=header.lookahead_steps,
        )

    def peek(self) -> Event | None:
        """The next event, None behind the last one."""
        return self._next

    def pop(self) -> Event | None:
        """The next event, taken."""
        event, self._next = self._next, next(self._events, None)
        return event

    def prefill(self, group: Seq[Sequence]) -> Prefill:
        """The event of a group that is launched now (ReplayScheduler made it of that event)."""
        event = self.pop()
        assert isinstance(event, Prefill) and len(group) == len(event.rows)
        assert event.result is not None
        self._last_token |= {r.request: t for r, t in zip(event.rows, event.result.tokens, strict=True)}
        return event

    def step(self, bucket: int, rows: Mapping[int, Sequence]) -> Step:
        """The event of a step that is launched now. Raises ScheduleDivergedError if that has another batch."""
        event = self._next
        pairs = [(row, sequence.request.row_id) for row, sequence in rows.items()]
        if not isinstance(event, Step) or (event.bucket, event.rows) != (bucket, pairs):
            raise ScheduleDivergedError(f"{self._place(event)}: another batch runs: {_batch(bucket, pairs)}")
        self.pop()
        return event

    def forced_tokens(self, event: Step) -> list[int]:
        """The input token of each row of the step, as it was when the schedule was recorded."""
        assert event.result is not None
        tokens = [self._last_token[request] for _, request in event.rows]
        for (_, request), token in zip(event.rows, event.result.tokens, strict=True):
            if token >= 0:
                self._last_token[request] = token
        return tokens

    def result(self, event: Prefill | Step, tokens: list[int], codes: list[int], checksums: list[int]) -> None:
        """Raises ScheduleDivergedError naming the first row whose logits, token or finish code differ."""
        expected = event.result
        assert expected is not None
        pairs = [(r.row, r.request) for r in event.rows] if isinstance(event, Prefill) else event.rows
        texts = [checksum_text(c) for c in checksums]
        differing = []
        for i, (row, request) in enumerate(pairs):
            if expected.tokens[i] < 0 and tokens[i] < 0:
                continue  # took no part: its logits mean nothing
            same = (expected.logits[i] == texts[i], expected.tokens[i] == tokens[i], expected.codes[i] == codes[i])
            if not all(same):
                what = f"token {tokens[i]} where the schedule has {expected.tokens[i]}"
                if same[1]:
                    what = f"other logits (the same token {tokens[i]})" if same[2] else "another end"
                differing.append(f"row {row} (request {request}): {what}")
        if differing:
            more = f"; {len(differing)} of {len(pairs)} rows differ" if len(differing) > 1 else ""
            raise ScheduleDivergedError(f"{self._place(event)}, {differing[0]}{more}")

    def released(self, blocks: Seq[int]) -> None:
        """Nothing to do: releases come from the schedule."""

    def refused(self, sequence: Sequence, failure: RowFailure) -> None:
        """Nothing to do: refusals come from the schedule."""

    def end(self) -> None:
        """The run is done; the next one goes on behind it."""
        event = self.pop()
        assert isinstance(event, End), event

    def close(self) -> None:
        """Nothing to give back."""

    def _place(self, event: Event | None) -> str:
        if isinstance(event, Step):
            return f"step {event.step}"
        if isinstance(event, Prefill):
            return f"prefill group {event.group}"
        return "after the schedule's last step"

    def _check_pools(self, cache: CacheSpec) -> None:
        """The pools must hold what was in them; reads the whole file once."""
        last_block, contexts, ended = -1, dict[int, int](), False
        for event in read_events(self.path):
            ended = isinstance(event, End)
            if isinstance(event, Prefill):
                contexts |= {row.request: row.context for row in event.rows}
                last_block = max(last_block, *(max(row.blocks) for row in event.rows))
            elif isinstance(event, Step) and cache.offload:
                need = minimum_gpu_tokens((contexts[request] for _, request in event.rows), cache.index_topk)
                if need > cache.gpu_tokens:
                    raise ConfigError(
                        f"step {event.step} of the schedule {self.path} needs a GPU pool of {need} tokens, "
                        f"this run has {cache.gpu_tokens}: give --gpu-pool {-(-need // BLOCK_SIZE) * BLOCK_SIZE}"
                    )
        if not ended:
            raise ConfigError(f"the schedule {self.path} has no end: the run that recorded it did not finish")
        if last_block >= cache.num_blocks:
            need = (last_block + 1) * BLOCK_SIZE
            option = "--host-pool" if cache.offload else "--gpu-pool"
            raise ConfigError(
                f"the schedule {self.path} uses {need} token slots, this run has {cache.host_tokens}: "
                f"give {option} {need}"
            )


def prompt_hash(sequence: Sequence) -> str:
    """CRC-32 of a prompt's tokens, hexadecimal."""
    return f"{zlib.crc32(array('i', sequence.request.prompt_token_ids).tobytes()):08x}"


def checksum_text(value: int) -> str:
    """An int64 checksum as 16 hexadecimal digits."""
    return f"{value & ((1 << 64) - 1):016x}"


def _batch(bucket: int, pairs: list[tuple[int, int]]) -> str:
    rows = ", ".join(f"{row}: {request}" for row, request in pairs)
    return f"bucket {bucket}, requests by row {{{rows}}}"

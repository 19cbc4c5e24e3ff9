"""How a decode step is launched and its result read: eagerly, or as the replay of a captured CUDA graph.

Both run the same body (decode.decode_step) on the same state tensors; the host reads results later, in launch order.
"""

import time
from collections import deque
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from echo_batch.cache.manager import KVCache
from echo_batch.engine.batch import BatchState
from echo_batch.engine.checksum import row_checksums
from echo_batch.engine.decode import StepLogits, decode_step
from echo_batch.engine.sampler import StepOutput
from echo_batch.kernels.branch import Branch
from echo_batch.kernels.ops import Ops
from echo_batch.models.model import Model


@dataclass(frozen=True, slots=True, kw_only=True)
class StepShape:
    """What a step's launch depends on besides the state: the padded batch and which sampler it needs.

    `resident`: rows are addressed by slot, without the cache manager.
    """

    bucket: int
    greedy_only: bool
    resident: bool = False


@dataclass(frozen=True, slots=True)
class HostOutput:
    """A step's result as Python numbers, one entry a row."""

    tokens: list[int]
    codes: list[int]
    logprobs: list[float] | None = None
    top_logprobs: list[list[float]] | None = None
    top_ids: list[list[int]] | None = None
    checksums: list[int] | None = None


class PendingOutput:
    """A step's result on its way to the host. `read` waits for it."""

    def __init__(self, output: StepOutput, event: "torch.cuda.Event | None") -> None:
        self._output = output
        self._event = event

    def read(self) -> HostOutput:
        if self._event is not None:
            self._event.synchronize()
        output = self._output
        return HostOutput(
            tokens=output.tokens.tolist(),
            codes=output.codes.tolist(),
            logprobs=None if output.logprobs is None else output.logprobs.tolist(),
            top_logprobs=None if output.top_logprobs is None else output.top_logprobs.tolist(),
            top_ids=None if output.top_ids is None else output.top_ids.tolist(),
            checksums=None if output.checksums is None else output.checksums.tolist(),
        )


@dataclass(slots=True)
class EagerRunner:
    """Launches every step op by op: the CPU's way, and the oracle of the graphs."""

    model: Model
    cache: KVCache
    ops: Ops
    state: BatchState
    _branch: Branch = field(init=False)

    def __post_init__(self) -> None:
        self._branch = Branch(self.model.device)

    def launch(
        self, shape: StepShape, *, max_blocks: int, num_logprobs: int | None, checksums: bool = False
    ) -> PendingOutput:
        """One step over the first `shape.bucket` rows; `max_blocks` bounds every active row's context in blocks."""
        step = decode_step(
            self.model,
            self.cache.for_step(shape.resident),
            self.ops,
            self.state,
            bucket=shape.bucket,
            max_blocks=max_blocks,
            greedy_only=shape.greedy_only,
            branch=self._branch,
        )
        return PendingOutput(complete_output(step, self.ops, num_logprobs, checksums=checksums), None)


@dataclass(slots=True)
class CaptureReport:
    """What capturing cost, for the report."""

    num_graphs: int = 0
    num_resident: int = 0
    """Of these, graphs of steps without the cache manager."""
    seconds: float = 0.0
    memory_bytes: int = 0


@dataclass(slots=True)
class GraphRunner:
    """Launches a step as one graph replay. Graphs share one memory pool, the largest bucket first.

    The graph walks the whole block table, so `max_blocks` is not needed. Results are copied to a ring of pinned
    buffers, each guarded by an event, because the next replay overwrites the graph's own output.
    """

    model: Model
    cache: KVCache
    ops: Ops
    state: BatchState
    depth: int
    """Results that may be unread at once: the ring's size."""
    report: CaptureReport = field(default_factory=CaptureReport)
    _graphs: dict[StepShape, tuple[torch.cuda.CUDAGraph, StepLogits]] = field(default_factory=dict)
    _ring: deque[tuple[Tensor, torch.cuda.Event]] = field(default_factory=deque)
    _pool: Any = None
    _stream: torch.cuda.Stream | None = None
    _branch: Branch = field(init=False)

    def __post_init__(self) -> None:
        self._branch = Branch(self.model.device)

    def capture(self, shapes: list[StepShape]) -> None:
        """Capture the steps of these shapes. Rows are inactive meanwhile, so no request's state is touched."""
        started = time.perf_counter()
        # Beginning a capture gives back what the allocator keeps: before counting, or graphs would seem to free memory.
        torch.cuda.empty_cache()
        before = torch.cuda.memory_reserved()
        if not self._ring:
            capacity = self.state.token_ids.shape[0]
            for _ in range(self.depth + 1):
                buffer = torch.empty((3, capacity), dtype=torch.int64, pin_memory=True)
                self._ring.append((buffer, torch.cuda.Event()))
        active = self.state.active.clone()
        self.state.active.fill_(False)
        for shape in sorted(shapes, key=lambda s: -s.bucket):
            if shape not in self._graphs:
                self._capture(shape)
        self.state.active.copy_(active)
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        self.report.num_graphs = len(self._graphs)
        self.report.num_resident = sum(shape.resident for shape in self._graphs)
        self.report.seconds += time.perf_counter() - started
        self.report.memory_bytes += torch.cuda.memory_reserved() - before

    def launch(
        self, shape: StepShape, *, max_blocks: int, num_logprobs: int | None, checksums: bool = False
    ) -> PendingOutput:
        """One step over the first `shape.bucket` rows: one graph launch, and copies of its result."""
        if shape not in self._graphs:
            # A sampler that the job's defaults did not ask for (a row's own temperature, say), or a resident batch
            # larger than the plan expected.
            self.capture([shape])
        graph, step = self._graphs[shape]
        graph.replay()
        if num_logprobs is not None:
            # Rare: log-probabilities are computed behind the graph from its logits, in tensors of their own.
            output = complete_output(step, self.ops, num_logprobs, checksums=checksums)
            event = torch.cuda.Event()
            output = output._replace(tokens=output.tokens.clone(), codes=output.codes.clone())
            event.record()
            return PendingOutput(output, event)
        buffer, event = self._ring[0]
        self._ring.rotate(-1)
        packed = buffer[:, : shape.bucket]
        packed[0].copy_(step.output.tokens, non_blocking=True)
        packed[1].copy_(step.output.codes, non_blocking=True)
        if checksums:
            packed[2].copy_(row_checksums(step.logits), non_blocking=True)
        event.record()
        return PendingOutput(StepOutput(packed[0], packed[1], checksums=packed[2] if checksums else None), event)

    def logits(self, shape: StepShape) -> Tensor:
        """What the last replay of this shape sampled from: fp32 `[bucket, V]`, overwritten by the next."""
        return self._graphs[shape][1].logits

    def _capture(self, shape: StepShape) -> None:
        def body() -> StepLogits:
            return decode_step(
                self.model,
                self.cache.for_step(shape.resident),
                self.ops,
                self.state,
                bucket=shape.bucket,
                max_blocks=self.state.block_table.shape[1],
                greedy_only=shape.greedy_only,
                branch=self._branch,
            )

        # Libraries compile and allocate at their first calls, which must not happen under capture.
        if self._stream is None:
            # One for all graphs: what a graph allocates is given to others only for the same stream. The priority is
            # the graphs' too: the branch's kernels get what these leave of the multiprocessors.
            self._stream = torch.cuda.Stream(priority=-1)
        stream = self._stream
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(2):
                body()
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        if self._pool is None:
            self._pool = torch.cuda.graph_pool_handle()
        with torch.cuda.graph(graph, pool=self._pool, stream=stream):
            step = body()
        self._graphs[shape] = (graph, step)


Runner = EagerRunner | GraphRunner


def complete_output(step: StepLogits, ops: Ops, num_logprobs: int | None, *, checksums: bool = False) -> StepOutput:
    """The step's output, with log-probabilities of the chosen and the likeliest tokens and checksums of the logits, if
    asked for."""
    output = step.output
    if num_logprobs is not None:
        chosen, top, top_ids = ops.token_logprobs(step.logits, output.tokens.clamp(min=0), num_logprobs)
        output = output._replace(logprobs=chosen, top_logprobs=top, top_ids=top_ids)
    return output._replace(checksums=row_checksums(step.logits)) if checksums else output

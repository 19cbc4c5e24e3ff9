"""EngineCore: requests in, completions out. The loop of admission, prefill and decode on one worker.

Token level only: it knows no files and no chat. The host reads a step's tokens `lookahead_steps` launches later;
device-side finish flags make rows padding in the meantime. All device work is on one stream, so blocks released here
can be reused by the next launch.
"""

import time
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator
from dataclasses import dataclass, field

import torch

from echo_batch.cache.blocks import BlockAllocator
from echo_batch.cache.manager import KVCache, OffloadedCache
from echo_batch.engine.batch import MAX_STOP_IDS, BatchState
from echo_batch.engine.decode import StepLogits
from echo_batch.engine.losses import device_loss
from echo_batch.engine.plan import Plan
from echo_batch.engine.policy import loaded_token_share, modelled_costs, streamed_per_token
from echo_batch.engine.prefill import Prompt, prefill
from echo_batch.engine.replay import ReplayScheduler
from echo_batch.engine.runner import HostOutput, PendingOutput, Runner, StepShape, complete_output
from echo_batch.engine.sampler import sample_rows
from echo_batch.engine.schedule import Recorder, Replay
from echo_batch.engine.schedule_file import Prefill, Step
from echo_batch.engine.scheduler import Limits, Scheduler
from echo_batch.engine.sequence import Sequence
from echo_batch.engine.stops import Detokenizer, StopChecker
from echo_batch.errors import EngineLostError
from echo_batch.kernels.formats import BLOCK_SIZE
from echo_batch.kernels.ops import Ops
from echo_batch.kernels.reference.sampling import LENGTH, NO_BLOCK, NON_FINITE, RUNNING, STOPPED
from echo_batch.models.model import Model
from echo_batch.request import Completion, FinishReason, Request, RowFailure, TokenLogprobs


@dataclass(slots=True)
class EngineStats:
    """Counters of one engine since it was made; seconds are wall clock of the loop's phases."""

    prompt_tokens: int = 0
    """Prefilled, those of shared prefixes (`cached_tokens`) included."""
    cached_tokens: int = 0
    generated_tokens: int = 0
    decode_steps: int = 0
    decode_row_steps: int = 0
    """Rows summed over decode steps, which is the tokens that these gave. A row that has ended is padding in the steps
    launched before the host knew."""
    resident_steps: int = 0
    """Decode steps without the cache manager: everything was on the GPU."""
    prefill_groups: int = 0
    prefill_seconds: float = 0.0
    decode_seconds: float = 0.0
    running: int = 0
    waiting: int = 0
    max_waiting: int = 0
    max_running: int = 0
    host_tokens_used: int = 0
    gpu_tokens_reserved: int = 0

    @property
    def effective_batch(self) -> float:
        """Mean number of rows that took part in a decode step."""
        return self.decode_row_steps / self.decode_steps if self.decode_steps else 0.0


@dataclass(slots=True)
class _Launched:
    """A step whose result the host has not read: rows by index at launch time."""

    rows: dict[int, Sequence]
    output: PendingOutput
    event: Prefill | Step | None = None
    """Of the schedule that is recorded or replayed."""
    is_prefill: bool = False


@dataclass(slots=True)
class EngineCore:
    """One worker: model, cache, batch state and how steps are launched (`runner`, on the same state).

    `make_detokenizer` gives a fresh incremental detokenizer, or is None when there is no tokenizer (then no text and
    no stop strings). `eos_token_ids` end every request that does not ignore them.
    """

    model: Model
    cache: KVCache
    ops: Ops
    plan: Plan
    device: torch.device
    state: BatchState
    runner: Runner
    eos_token_ids: tuple[int, ...]
    make_detokenizer: Callable[[], Detokenizer] | None = None
    schedule: Recorder | Replay | None = None
    stats: EngineStats = field(default_factory=EngineStats)
    startup_seconds: dict[str, float] = field(default_factory=dict)
    """Of the parts of starting it, some of which ran beside each other: weights, pools, compile, capture."""

    @torch.inference_mode()
    def run(self, requests: Iterable[Request]) -> Generator[Completion | None, None, None]:
        """Yield completions as they finish, and None after every step that finished nothing (so callers can poll).

        Requests are pulled only when they may soon run. A request that can never fit, or that turns non-finite, comes
        back as a completion with a failure; the others go on. Closing the iterator abandons what is in flight.
        Raises EngineLostError when the device fails.
        """
        try:
            yield from self._run(requests)
        except Exception as error:
            lost = device_loss(error)
            if lost is None:
                raise
            raise EngineLostError(f"the device failed: {lost}") from error

    def close(self) -> None:
        """Give the host pool back."""
        self.cache.close()
        if self.schedule is not None:
            self.schedule.close()

    def _scheduler(self, requests: Iterable[Request]) -> Scheduler | ReplayScheduler:
        sequences = (self._sequence(r) for r in requests)
        if isinstance(self.schedule, Replay):
            return ReplayScheduler(sequences, self.schedule, self.cache.spec.index_topk)
        return Scheduler(
            sequences,
            BlockAllocator(self.cache.spec.num_blocks),
            Limits(
                max_num_seqs=self.plan.max_num_seqs,
                gpu_tokens=self.cache.spec.gpu_tokens,
                index_topk=self.cache.spec.index_topk,
                max_model_len=self.plan.max_model_len,
                prefill_group_tokens=self.plan.prefill_group_tokens,
                offload=self.cache.spec.offload,
                loaded_token_share=loaded_token_share(self.plan),
            ),
        )

    def _run(self, requests: Iterable[Request]) -> Iterator[Completion | None]:
        state, scheduler = self.state, self._scheduler(requests)
        costs = modelled_costs(self.plan)
        launched: deque[_Launched] = deque()
        lost = False
        try:
            while launched or not scheduler.done:
                staged = scheduler.stage()
                self._release(staged.released)
                for sequence, failure in staged.refused:
                    if self.schedule is not None:
                        self.schedule.refused(sequence, failure)
                    yield self._failed(sequence, failure.code, failure.message)
                if scheduler.wants_prefill(costs):
                    self._choose_residency(scheduler, state)
                    group = scheduler.start()
                    self._note(scheduler)
                    yield from self._start(group, scheduler, state)
                    continue
                # Nothing runs and the head of the line does not fit an empty batch: `refusal` must have said so.
                assert scheduler.running or launched or not scheduler.waiting, "admission stalled"
                started = time.perf_counter()
                finished: list[Completion] = []
                if scheduler.running:
                    launched.append(self._launch(scheduler, state))
                while len(launched) > self.plan.lookahead_steps or (launched and not scheduler.running):
                    finished += self._collect(launched.popleft(), scheduler, state)
                self.stats.decode_seconds += time.perf_counter() - started
                self._note(scheduler)
                yield from finished
                yield None
        except Exception as error:
            lost = device_loss(error) is not None
            raise
        finally:
            # A lost device cannot be tidied up; its error must not be hidden by another.
            if not lost:
                for sequence in list(scheduler.running.values()):
                    self._leave(sequence, scheduler, state)
                self._release(scheduler.close())
        if self.schedule is not None:
            self.schedule.end()

    def _sequence(self, request: Request) -> Sequence:
        # At least the one token that prefill gives: a prompt that leaves no room for it is refused like any too long.
        room = max(1, self.plan.max_model_len - len(request.prompt_token_ids))
        wanted = request.sampling.max_tokens
        sequence = Sequence(request, room if wanted is None else wanted)
        if self.make_detokenizer is not None:
            sequence.stops = StopChecker(self.make_detokenizer(), request.sampling.stop, request.thinking_end)
        if len(self._stop_ids(request)) > MAX_STOP_IDS:
            message = f"more than {MAX_STOP_IDS} stop token ids with EOS"
            sequence.refusal = RowFailure(code="bad_params", message=message)
        return sequence

    def _stop_ids(self, request: Request) -> tuple[int, ...]:
        eos = () if request.sampling.ignore_eos else self.eos_token_ids
        return tuple(dict.fromkeys((*eos, *request.sampling.stop_token_ids)))

    def _release(self, blocks: list[int]) -> None:
        """Forget the slots of blocks that nobody holds any more."""
        if self.schedule is not None:
            self.schedule.released(blocks)
        self.cache.release(blocks)

    def _choose_residency(self, scheduler: Scheduler | ReplayScheduler, state: BatchState) -> None:
        """Before the staged group is written: leave residency if its blocks do not all lie in the GPU pool; go back
        if they do and no block holds anything yet. Changes where rows are, and no result."""
        cache = self.cache
        if not isinstance(cache, OffloadedCache) or not cache.may_be_resident or not scheduler.staged:
            return
        room = cache.spec.gpu_tokens // BLOCK_SIZE
        fits = all(max(sequence.blocks) < room for sequence in scheduler.staged)
        if cache.resident and not fits:
            num_blocks = max((b for b in scheduler.live_blocks() if b < room), default=-1) + 1
            written = [state.written_slots(s.row, len(s.blocks)) for s in scheduler.running.values()]
            nothing = torch.empty(0, dtype=torch.int32, device=self.device)
            cache.leave_residency(num_blocks, torch.cat([nothing, *written]))
        elif not cache.resident and fits:
            unwritten = {b for s in scheduler.staged for b in s.blocks[s.num_cached_tokens // BLOCK_SIZE :]}
            if unwritten == set(scheduler.live_blocks()):
                cache.enter_residency()

    def _start(
        self, group: list[Sequence], scheduler: Scheduler | ReplayScheduler, state: BatchState
    ) -> Iterator[Completion | None]:
        """Prefill a group and sample its first tokens; None after every chunk."""
        started = time.perf_counter()
        event = None if self.schedule is None else self.schedule.prefill(group)
        for sequence in group:
            state.set_row(sequence, self._stop_ids(sequence.request))
        prompts = [
            Prompt(token_ids=s.request.prompt_token_ids, blocks=s.blocks, num_cached=s.num_cached_tokens) for s in group
        ]
        cached = sum(s.num_cached_tokens for s in group)
        self.stats.cached_tokens += cached
        self.stats.prompt_tokens += cached
        predicted = torch.empty((self.cache.spec.num_groups, len(group)), device=self.device)
        steps = prefill(
            self.model,
            self.cache,
            self.ops,
            prompts,
            chunk_tokens=self.plan.prefill_chunk_tokens,
            streamed_per_token=streamed_per_token(self.plan),
            predicted=predicted,
            on_device=self.device,
        )
        logits, done, before = None, 0, self.stats.prompt_tokens
        while logits is None:
            try:
                token_layers = next(steps)
            except StopIteration as end:
                logits = end.value
            else:
                done += token_layers
                self.stats.prompt_tokens = before + done // self.model.config.num_layers
                yield None
        rows = torch.tensor([s.row for s in group], device=self.device)
        state.active[rows] = True
        state.predicted[:, rows] = predicted
        step = StepLogits(
            *sample_rows(
                state,
                rows,
                logits,
                ops=self.ops,
                has_block=torch.ones_like(rows, dtype=torch.bool),
                greedy_only=_greedy(group),
            )
        )
        output = complete_output(step, self.ops, _num_logprobs(group), checksums=event is not None)
        launched = _Launched(dict(enumerate(group)), PendingOutput(output, None), event, is_prefill=True)
        completions = self._collect(launched, scheduler, state)
        self.stats.prefill_groups += 1
        self.stats.prefill_seconds += time.perf_counter() - started
        self._note(scheduler)
        yield from completions

    def _launch(self, scheduler: Scheduler | ReplayScheduler, state: BatchState) -> _Launched:
        """Launch one decode step over the running rows, padded to a bucket."""
        rows = dict(scheduler.running)
        running = list(rows.values())
        bucket = self.plan.bucket(max(rows) + 1)
        event = None
        if self.schedule is not None:
            event = self.schedule.step(bucket, rows)
            if (tokens := self.schedule.forced_tokens(event)) is not None:
                state.force_tokens(list(rows), tokens)
        # Context at most that many blocks: generated tokens known to the host, and those still in flight.
        longest = max(
            min(s.num_prompt_tokens + len(s.token_ids) + self.plan.lookahead_steps + 1, s.max_context) for s in running
        )
        output = self.runner.launch(
            StepShape(bucket=bucket, greedy_only=_greedy(running), resident=self.cache.resident),
            max_blocks=-(-longest // BLOCK_SIZE),
            num_logprobs=_num_logprobs(running),
            checksums=event is not None,
        )
        scheduler.note_step()
        self.stats.decode_steps += 1
        self.stats.resident_steps += self.cache.resident
        return _Launched(rows, output, event)

    def _collect(self, step: _Launched, scheduler: Scheduler | ReplayScheduler, state: BatchState) -> list[Completion]:
        """Read one step's tokens; finish rows whose device flag or stop string says so."""
        output = step.output.read()
        if self.schedule is not None and step.event is not None:
            assert output.checksums is not None
            columns = (output.tokens, output.codes, output.checksums)
            self.schedule.result(step.event, *([column[i] for i in step.rows] for column in columns))
        finished = []
        for index, sequence in step.rows.items():
            token, code = output.tokens[index], output.codes[index]
            if sequence.row < 0 or (token < 0 and code == RUNNING):
                # Left the batch (or finished on the device) after this step had been launched.
                continue
            if code in (NON_FINITE, NO_BLOCK):
                reason = "a non-finite value appeared" if code == NON_FINITE else "no block for the next token"
                self._leave(sequence, scheduler, state)
                message = f"{reason} after {len(sequence.token_ids)} tokens"
                finished.append(self._failed(sequence, "engine_failed", message))
                continue
            self.stats.generated_tokens += 1
            self.stats.decode_row_steps += not step.is_prefill
            sequence.token_ids.append(token)
            if output.logprobs is not None and sequence.request.sampling.logprobs is not None:
                sequence.logprobs.append(_logprobs(output, index, token, sequence.request.sampling.logprobs))
            reason_ = self._finish_reason(sequence, token, code)
            if reason_ is not None:
                self._leave(sequence, scheduler, state)
                finished.append(self._completed(sequence, reason_))
        return finished

    def _finish_reason(self, sequence: Sequence, token: int, code: int) -> FinishReason | None:
        if code == STOPPED:
            # The stop token itself is not text.
            return "stop"
        if sequence.stops is not None and sequence.stops.add(token):
            return "stop"
        return "length" if code == LENGTH else None

    def _leave(self, sequence: Sequence, scheduler: Scheduler | ReplayScheduler, state: BatchState) -> None:
        state.clear_row(sequence.row)
        self._release(scheduler.finish(sequence))

    def _completed(self, sequence: Sequence, reason: FinishReason) -> Completion:
        text = sequence.stops.finish() if sequence.stops is not None else None
        return Completion(
            row_id=sequence.request.row_id,
            token_ids=tuple(sequence.token_ids),
            text=None if text is None else text.text,
            reasoning_text=None if text is None else text.reasoning,
            finish_reason=reason,
            num_input_tokens=sequence.num_prompt_tokens,
            num_cached_tokens=sequence.num_cached_tokens,
            num_cut_tokens=sequence.request.num_cut_tokens,
            logprobs=tuple(sequence.logprobs) if sequence.request.sampling.logprobs is not None else None,
            seconds=time.monotonic() - sequence.started,
        )

    def _failed(self, sequence: Sequence, code: str, message: str) -> Completion:
        return Completion(
            row_id=sequence.request.row_id,
            num_input_tokens=sequence.num_prompt_tokens,
            num_cut_tokens=sequence.request.num_cut_tokens,
            failure=RowFailure(code=code, message=message),
            seconds=time.monotonic() - sequence.started,
        )

    def _note(self, scheduler: Scheduler | ReplayScheduler) -> None:
        stats = self.stats
        stats.running = len(scheduler.running)
        stats.waiting = len(scheduler.waiting) + len(scheduler.staged)
        stats.max_running = max(stats.max_running, stats.running)
        stats.max_waiting = max(stats.max_waiting, scheduler.max_waiting)
        stats.host_tokens_used = scheduler.host_tokens_used
        stats.gpu_tokens_reserved = scheduler.gpu_tokens_reserved


def _greedy(sequences: list[Sequence]) -> bool:
    return all(s.request.sampling.temperature == 0 for s in sequences)


def _num_logprobs(sequences: list[Sequence]) -> int | None:
    asked = (s.request.sampling.logprobs for s in sequences)
    return max((n for n in asked if n is not None), default=None)


def _logprobs(output: HostOutput, index: int, token: int, num_top: int) -> TokenLogprobs:
    assert output.logprobs is not None and output.top_ids is not None and output.top_logprobs is not None
    top = zip(output.top_ids[index][:num_top], output.top_logprobs[index][:num_top], strict=True)
    return TokenLogprobs(token_id=token, logprob=output.logprobs[index], top=tuple(top))

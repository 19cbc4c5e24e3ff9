"""A job on a clock instead of a machine: the real scheduler with a cost model, to compare policies by makespan."""

from array import array
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

from echo_batch.cache.blocks import BlockAllocator
from echo_batch.engine.policy import GroupState
from echo_batch.engine.scheduler import Limits, Scheduler
from echo_batch.engine.sequence import Sequence
from echo_batch.request import Request, SamplingParams

Policy = Callable[[GroupState], bool]


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One request: it generates `output` tokens though it may have `max_tokens`; its first `shared` prompt tokens are
    those of every row with the same `text`."""

    prompt: int
    output: int
    max_tokens: int
    text: int = 0
    shared: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """Seconds: a decode step of n rows takes step + row * n; a prefill group takes group + token * computed tokens +
    load * tokens of prefixes from the host pool."""

    step: float
    row: float
    group: float
    token: float
    load: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """`longest_wait`: most decode steps that a request which had its place waited for its prefill."""

    makespan: float
    steps: int
    groups: int
    cached_tokens: int
    longest_wait: int


def simulate(rows: Iterable[Row], limits: Limits, num_blocks: int, machine: Machine, policy: Policy) -> Outcome:
    """Run all rows in their order; raises AssertionError if the job stops moving."""
    outputs: dict[int, int] = {}
    scheduler = Scheduler(_sequences(rows, outputs), BlockAllocator(num_blocks), limits)
    clock, steps, groups, cached, longest_wait = 0.0, 0, 0, 0, 0
    while not scheduler.done:
        staged = scheduler.stage()
        assert not staged.refused, staged.refused
        state = scheduler.group_state()
        if state.num_rows and policy(state):
            group = scheduler.start()
            computed = sum(s.num_prompt_tokens - s.num_cached_tokens for s in group)
            clock += machine.group + machine.token * computed + machine.load * state.loaded_tokens
            groups += 1
            cached += sum(s.num_cached_tokens for s in group)
            longest_wait = max(longest_wait, state.waited_steps)
            running = group  # each has its first token from the prefill
        else:
            assert scheduler.running, "nothing runs and nothing starts"
            scheduler.note_step()
            running = list(scheduler.running.values())
            clock += machine.step + machine.row * len(running)
            steps += 1
        for sequence in running:
            outputs[sequence.request.row_id] -= 1
            if outputs[sequence.request.row_id] == 0:
                scheduler.finish(sequence)
    scheduler.close()
    return Outcome(makespan=clock, steps=steps, groups=groups, cached_tokens=cached, longest_wait=longest_wait)


def _sequences(rows: Iterable[Row], outputs: dict[int, int]) -> Iterator[Sequence]:
    for number, row in enumerate(rows):
        tokens = array("i", [row.text]) * row.shared + array("i", [number + 1_000_000]) * (row.prompt - row.shared)
        outputs[number] = row.output
        sampling = SamplingParams(max_tokens=row.max_tokens)
        yield Sequence(Request(row_id=number, prompt_token_ids=tokens, sampling=sampling), row.max_tokens)

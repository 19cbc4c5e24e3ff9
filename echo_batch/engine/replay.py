"""The scheduler of a replay: hands out what a recorded schedule says, where Scheduler decides. No torch."""

from collections import deque
from collections.abc import Iterator

from echo_batch.engine.policy import Costs
from echo_batch.engine.schedule import Replay, prompt_hash
from echo_batch.engine.schedule_file import End, Prefill, PrefillRow, Refuse, Release, Step
from echo_batch.engine.scheduler import Staged
from echo_batch.engine.sequence import Sequence
from echo_batch.errors import ConfigError, ScheduleDivergedError
from echo_batch.kernels.formats import BLOCK_SIZE
from echo_batch.request import RowFailure


class ReplayScheduler:
    """Same face as Scheduler. Rows, blocks, groups and releases are the file's; requests are found by their row id."""

    def __init__(self, source: Iterator[Sequence], schedule: Replay, index_topk: int) -> None:
        self._source = source
        self._schedule = schedule
        self._index_topk = index_topk
        self._pulled: dict[int, Sequence] = {}
        self._live: set[int] = set()
        self.waiting: deque[Sequence] = deque()
        self.running: dict[int, Sequence] = {}
        self.staged: list[Sequence] = []
        self.max_waiting = 0

    @property
    def done(self) -> bool:
        """The schedule's end. Raises ConfigError if requests are left that it does not know."""
        if self.running or self.staged or not isinstance(self._schedule.peek(), End | None):
            return False
        left = next(iter(self._pulled.values()), None) or next(self._source, None)
        if left is not None:
            raise ConfigError(
                f"request {left.request.row_id} is not in the schedule {self._schedule.path}: "
                "a schedule is replayed on the input and with the limits that it was recorded with"
            )
        return True

    @property
    def gpu_tokens_reserved(self) -> int:
        """GPU rows that the running and staged sequences need at their longest."""
        sequences = [*self.running.values(), *self.staged]
        return sum(min(self._index_topk, s.max_context) + 1 for s in sequences)

    @property
    def host_tokens_used(self) -> int:
        return len(self._live) * BLOCK_SIZE

    def live_blocks(self) -> list[int]:
        """Blocks in use, ascending."""
        return sorted(self._live)

    def stage(self) -> Staged:
        """Releases and refusals that come next, and the next group if that is next."""
        result = Staged([], [])
        while isinstance(event := self._schedule.peek(), Release | Refuse):
            if isinstance(event, Release):
                result.released.extend(event.blocks)
                self._live.difference_update(event.blocks)
            else:
                result.refused.append((self._pull(event.request), RowFailure(code=event.code, message=event.message)))
            self._schedule.pop()
        if isinstance(event, Prefill) and not self.staged:
            self.staged = [self._place(row) for row in event.rows]
        return result

    def wants_prefill(self, costs: Costs) -> bool:
        """Whether a group is next in the schedule."""
        if not self.running and isinstance(event := self._schedule.peek(), Step):
            raise ScheduleDivergedError(f"step {event.step}: no row runs any more")
        return bool(self.staged)

    def start(self) -> list[Sequence]:
        """The staged sequences, which are running from now on."""
        sequences, self.staged = self.staged, []
        self.running |= {sequence.row: sequence for sequence in sequences}
        return sequences

    def note_step(self) -> None:
        """Nothing to note."""

    def finish(self, sequence: Sequence) -> list[int]:
        """Take a sequence out of the batch. Its blocks are released when the schedule says so."""
        if self.running.get(sequence.row) is sequence:
            del self.running[sequence.row]
        else:
            self.staged.remove(sequence)
        sequence.row = -1
        return []

    def close(self) -> list[int]:
        """Take everybody out; returns the blocks that the cache must release."""
        for sequence in [*self.running.values(), *self.staged]:
            self.finish(sequence)
        released = self.live_blocks()
        self._live.clear()
        return released

    def _place(self, row: PrefillRow) -> Sequence:
        sequence = self._pull(row.request)
        if (prompt_hash(sequence), sequence.max_context) != (row.prompt, row.context):
            what = f"{row.context} tokens at its longest, here {sequence.max_context}"
            if prompt_hash(sequence) != row.prompt:
                what = "another prompt"
            raise ConfigError(f"request {row.request} had {what} when the schedule {self._schedule.path} was recorded")
        sequence.blocks, sequence.num_cached_tokens, sequence.row = list(row.blocks), row.cached, row.row
        self._live.update(row.blocks)
        return sequence

    def _pull(self, row_id: int) -> Sequence:
        """The request with this row id; those that come before it are kept."""
        while row_id not in self._pulled:
            sequence = next(self._source, None)
            if sequence is None:
                raise ConfigError(f"request {row_id} of the schedule {self._schedule.path} is not in the input")
            self._pulled[sequence.request.row_id] = sequence
        return self._pulled.pop(row_id)

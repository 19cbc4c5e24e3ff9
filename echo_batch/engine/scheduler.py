"""Continuous batching: who runs, who waits, who shares a prefix. Knows no torch.

Requests are pulled from an iterator, so nothing is read before it can soon run. `stage` gives those that fit their
place: host slots for prompt + max_tokens (blocks of a shared prefix count once) and the GPU pool's minimum for the
longest context that the request can reach. What has a place always finishes, nothing is preempted, and what does not
fit waits at the head of the line. `start` hands the staged requests out as one prefill group; when is the policy's.
"""

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

from echo_batch.cache.blocks import BlockAllocator
from echo_batch.cache.prefix import PrefixTree, block_keys
from echo_batch.engine.policy import Costs, GroupState, should_prefill
from echo_batch.engine.sequence import Sequence
from echo_batch.kernels.formats import BLOCK_SIZE
from echo_batch.request import RowFailure


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """What the batch must fit into; tokens per worker.

    `loaded_token_share`: memory of a prefix token that a prefill group reads from the cache, as a share of that of a
    token which it computes (the unit of `prefill_group_tokens`).
    """

    max_num_seqs: int
    gpu_tokens: int
    index_topk: int
    max_model_len: int
    prefill_group_tokens: int
    offload: bool = True
    loaded_token_share: float = 1.0


class Staged(NamedTuple):
    """What `stage` leaves to the caller: requests that can never run, and blocks to release in the cache (before
    anything is written to blocks of the staged requests)."""

    refused: list[tuple[Sequence, RowFailure]]
    released: list[int]


@dataclass(slots=True)
class _Group:
    """The staged requests and what their prefill takes."""

    sequences: list[Sequence]
    blocks: set[int]
    """Prompt blocks that the group computes or loads."""
    size: float = 0.0
    """In computed tokens."""
    loaded_tokens: int = 0
    complete: bool = False
    missed_row_steps: int = 0
    waited_steps: int = 0


class Scheduler:
    """Holds waiting, staged and running sequences and the blocks of the host pool."""

    def __init__(self, source: Iterator[Sequence], blocks: BlockAllocator, limits: Limits) -> None:
        self._source = source
        self._exhausted = False
        self.blocks = blocks
        self.prefixes = PrefixTree(blocks)
        self.limits = limits
        self.waiting: deque[Sequence] = deque()
        self.running: dict[int, Sequence] = {}
        self._group = _Group([], set())
        self._groups_since_step = 0
        self._free_rows = list(range(limits.max_num_seqs - 1, -1, -1))
        self._gpu_reserved = 0
        # The head of the line did not fit, and nothing has left the batch or the group since.
        self._stalled = False
        self.max_waiting = 0
        """Most sequences that were pulled and could not run at once."""

    @property
    def done(self) -> bool:
        """Nothing runs, nothing waits, and the source has ended."""
        return not self.running and not self.staged and not self.waiting and self._pull() is None

    @property
    def staged(self) -> list[Sequence]:
        """Sequences that have their place and wait for their prefill."""
        return self._group.sequences

    @property
    def gpu_tokens_reserved(self) -> int:
        return self._gpu_reserved

    @property
    def host_tokens_used(self) -> int:
        """Slots reserved by staged and running sequences (idle prefixes, which make room for others, do not count)."""
        return (self.blocks.num_blocks - self.blocks.num_free - self.prefixes.num_idle) * BLOCK_SIZE

    def gpu_minimum(self, sequence: Sequence) -> int:
        """GPU rows that the sequence needs at its longest: min(k, L) selected ones and the new token's."""
        return min(self.limits.index_topk, sequence.max_context) + 1 if self.limits.offload else 0

    def refusal(self, sequence: Sequence) -> RowFailure | None:
        """Why this sequence can never run, or None."""
        limits, context = self.limits, sequence.max_context
        if sequence.refusal is not None:
            return sequence.refusal
        text = None
        if context > limits.max_model_len:
            text = f"prompt and max_tokens need {context} tokens, the limit is {limits.max_model_len}"
        elif sequence.num_blocks_needed > self.blocks.num_blocks:
            need, pool = sequence.num_blocks_needed * BLOCK_SIZE, self.blocks.num_blocks * BLOCK_SIZE
            text = f"prompt and max_tokens need {need} host slots, the pool has {pool}"
        elif self.gpu_minimum(sequence) > limits.gpu_tokens:
            text = f"the request needs {self.gpu_minimum(sequence)} GPU rows, the pool has {limits.gpu_tokens}"
        return None if text is None else RowFailure(code="too_long", message=text)

    def stage(self) -> Staged:
        """Give the sequences that fit now their blocks and rows.

        Stops at the first that has to wait (nobody overtakes, so nobody starves) and when the group has
        `prefill_group_tokens` (one prompt may exceed it alone).
        """
        group, result = self._group, Staged([], [])
        while True:
            sequence = self.waiting[0] if self.waiting else self._pull()
            if sequence is None:
                group.complete = True
                break
            failure = self.refusal(sequence)
            if failure is not None:
                self.waiting.popleft()
                result.refused.append((sequence, failure))
                continue
            if self._stalled or not self._place(sequence, result.released):
                self._stalled = True
                break
            self.waiting.popleft()
        self.max_waiting = max(self.max_waiting, len(self.waiting))
        return result

    def group_state(self) -> GroupState:
        """What the policy looks at."""
        group = self._group
        return GroupState(
            num_rows=len(group.sequences),
            num_running=len(self.running),
            loaded_tokens=group.loaded_tokens,
            complete=group.complete,
            missed_row_steps=group.missed_row_steps,
            waited_steps=group.waited_steps,
            groups_since_step=self._groups_since_step,
            max_num_seqs=self.limits.max_num_seqs,
        )

    def wants_prefill(self, costs: Costs) -> bool:
        """Whether to prefill the staged group now (or else to decode)."""
        return should_prefill(self.group_state(), costs)

    def live_blocks(self) -> list[int]:
        """Blocks in use, ascending."""
        return self.blocks.live_blocks()

    def start(self) -> list[Sequence]:
        """The staged sequences, which are running from now on: a prefill group, providers of a prefix first."""
        sequences = self._group.sequences
        self._group = _Group([], set())
        self._stalled = False
        self._groups_since_step += 1
        self.running |= {sequence.row: sequence for sequence in sequences}
        return sequences

    def note_step(self) -> None:
        """A decode step was launched without the staged sequences."""
        self._groups_since_step = 0
        if self._group.sequences:
            self._group.missed_row_steps += len(self._group.sequences)
            self._group.waited_steps += 1

    def finish(self, sequence: Sequence) -> list[int]:
        """Take a sequence out of the batch; returns blocks that nobody uses any more (the cache must release them)."""
        if self.running.get(sequence.row) is sequence:
            del self.running[sequence.row]
        else:
            self._group.sequences.remove(sequence)
        self._free_rows.append(sequence.row)
        self._free_rows.sort(reverse=True)
        self._gpu_reserved -= self.gpu_minimum(sequence)
        self._stalled = False
        sequence.row = -1
        return self.prefixes.release(sequence.blocks)

    def close(self) -> list[int]:
        """Take everybody out and forget all prefixes; returns the blocks that the cache must release."""
        released = []
        for sequence in [*self.running.values(), *self.staged]:
            released += self.finish(sequence)
        released += self.prefixes.evict(self.prefixes.num_idle)
        assert self.blocks.num_free == self.blocks.num_blocks, "blocks leaked"
        return released

    def _place(self, sequence: Sequence, released: list[int]) -> bool:
        """Put the head of the line into the staged group; False if it has to wait."""
        group, limits = self._group, self.limits
        prompt_blocks = sequence.num_prompt_tokens // BLOCK_SIZE
        # The last token is computed even if its block is known: its logits are needed.
        shared = self.prefixes.match(sequence.block_keys[: (sequence.num_prompt_tokens - 1) // BLOCK_SIZE])
        computed = sequence.num_prompt_tokens - len(shared) * BLOCK_SIZE
        loaded = sum(block not in group.blocks for block in shared) * BLOCK_SIZE
        size = computed + loaded * limits.loaded_token_share
        if group.sequences and group.size + size > limits.prefill_group_tokens:
            group.complete = True
            return False
        minimum = self.gpu_minimum(sequence)
        if not self._free_rows or self._gpu_reserved + minimum > limits.gpu_tokens:
            return False
        needed = sequence.num_blocks_needed - len(shared)
        idle = sum(self.blocks.references(block) == 1 for block in shared)
        if needed > self.blocks.num_free + self.prefixes.num_idle - idle:
            return False
        self.prefixes.hold(shared)
        released += self.prefixes.evict(needed - self.blocks.num_free)
        own = self.blocks.allocate(needed)
        assert own is not None
        sequence.blocks = [*shared, *own]
        sequence.num_cached_tokens = len(shared) * BLOCK_SIZE
        self.prefixes.insert(sequence.block_keys, sequence.blocks)
        sequence.block_keys = []
        sequence.row = self._free_rows.pop()
        self._gpu_reserved += minimum
        group.sequences.append(sequence)
        group.blocks.update(sequence.blocks[:prompt_blocks])
        group.size += size
        group.loaded_tokens += loaded
        return True

    def _pull(self) -> Sequence | None:
        """Next sequence of the source, put at the end of the waiting line."""
        if self._exhausted:
            return None
        sequence = next(self._source, None)
        if sequence is None:
            self._exhausted = True
        else:
            sequence.block_keys = block_keys(sequence.request.prompt_token_ids)
            self.prefixes.want(sequence.block_keys)
            self.waiting.append(sequence)
        return sequence

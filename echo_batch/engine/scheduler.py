"""Continuous batching: who runs, who waits. Knows no torch.

Requests are pulled from an iterator, so nothing is read before it can soon run. Admission reserves host slots for
prompt + max_tokens and the GPU pool's minimum for the longest context that the request can reach: what is admitted
always finishes, nothing is preempted, and what does not fit waits at the head of the line.
"""

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass

from echo_batch.cache.blocks import BlockAllocator
from echo_batch.engine.sequence import Sequence
from echo_batch.kernels.formats import BLOCK_SIZE


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """What the batch must fit into; tokens per worker."""

    max_num_seqs: int
    gpu_tokens: int
    index_topk: int
    max_model_len: int
    prefill_group_tokens: int
    offload: bool = True


class Scheduler:
    """Holds waiting and running sequences and the blocks of the host pool."""

    def __init__(self, source: Iterator[Sequence], blocks: BlockAllocator, limits: Limits) -> None:
        self._source = source
        self._exhausted = False
        self.blocks = blocks
        self.limits = limits
        self.waiting: deque[Sequence] = deque()
        self.running: dict[int, Sequence] = {}
        self._free_rows = list(range(limits.max_num_seqs - 1, -1, -1))
        self._gpu_reserved = 0
        self.max_waiting = 0
        """Most sequences that were pulled and could not run at once."""

    @property
    def done(self) -> bool:
        """Nothing runs, nothing waits, and the source has ended."""
        return not self.running and not self.waiting and self._pull() is None

    @property
    def gpu_tokens_reserved(self) -> int:
        return self._gpu_reserved

    def gpu_minimum(self, sequence: Sequence) -> int:
        """GPU rows that the sequence needs at its longest: min(k, L) selected ones and the new token's."""
        return min(self.limits.index_topk, sequence.max_context) + 1 if self.limits.offload else 0

    def never_fits(self, sequence: Sequence) -> str | None:
        """Why this sequence can never run, or None."""
        limits, context = self.limits, sequence.max_context
        if context > limits.max_model_len:
            return f"prompt and max_tokens need {context} tokens, the limit is {limits.max_model_len}"
        if sequence.num_blocks_needed > self.blocks.num_blocks:
            need, pool = sequence.num_blocks_needed * BLOCK_SIZE, self.blocks.num_blocks * BLOCK_SIZE
            return f"prompt and max_tokens need {need} host slots, the pool has {pool}"
        if self.gpu_minimum(sequence) > limits.gpu_tokens:
            return f"the request needs {self.gpu_minimum(sequence)} GPU rows, the pool has {limits.gpu_tokens}"
        return None

    def admit(self) -> tuple[list[Sequence], list[tuple[Sequence, str]]]:
        """Sequences that join now (blocks and rows assigned) and those that can never run, with the reason.

        Stops at the first that has to wait (nobody overtakes, so nobody starves) and when the group's prompts reach
        `prefill_group_tokens` (one prompt may exceed it alone).
        """
        admitted: list[Sequence] = []
        refused: list[tuple[Sequence, str]] = []
        group_tokens = 0
        while True:
            sequence = self.waiting[0] if self.waiting else self._pull()
            if sequence is None:
                break
            reason = self.never_fits(sequence)
            if reason is not None:
                self.waiting.popleft()
                refused.append((sequence, reason))
                continue
            if admitted and group_tokens + sequence.num_prompt_tokens > self.limits.prefill_group_tokens:
                break
            if not self._reserve(sequence):
                break
            self.waiting.popleft()
            group_tokens += sequence.num_prompt_tokens
            admitted.append(sequence)
        self.max_waiting = max(self.max_waiting, len(self.waiting))
        return admitted, refused

    def finish(self, sequence: Sequence) -> list[int]:
        """Take a sequence out of the batch; returns blocks that nobody uses any more (the cache must release them)."""
        del self.running[sequence.row]
        self._free_rows.append(sequence.row)
        self._free_rows.sort(reverse=True)
        self._gpu_reserved -= self.gpu_minimum(sequence)
        sequence.row = -1
        return self.blocks.free(sequence.blocks)

    def _reserve(self, sequence: Sequence) -> bool:
        minimum = self.gpu_minimum(sequence)
        if not self._free_rows or self._gpu_reserved + minimum > self.limits.gpu_tokens:
            return False
        blocks = self.blocks.allocate(sequence.num_blocks_needed)
        if blocks is None:
            return False
        sequence.blocks = blocks
        sequence.row = self._free_rows.pop()
        self.running[sequence.row] = sequence
        self._gpu_reserved += minimum
        return True

    def _pull(self) -> Sequence | None:
        """Next sequence of the source, put at the end of the waiting line."""
        if self._exhausted:
            return None
        sequence = next(self._source, None)
        if sequence is None:
            self._exhausted = True
        else:
            self.waiting.append(sequence)
        return sequence

"""One request inside the engine: its blocks, its row, what it has generated. Knows no torch."""

import time
from dataclasses import dataclass, field

from echo_batch.engine.stops import StopChecker
from echo_batch.kernels.formats import BLOCK_SIZE
from echo_batch.request import Request, TokenLogprobs


@dataclass(slots=True)
class Sequence:
    """Mutable state of one admitted request.

    `blocks` hold every token that it can ever have (prompt + max_tokens), reserved at admission, so that nothing is
    ever preempted. `row` is its place in the decode batch while it runs.
    """

    request: Request
    max_tokens: int
    blocks: list[int] = field(default_factory=list)
    row: int = -1
    num_cached_tokens: int = 0
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    stops: StopChecker | None = None
    started: float = field(default_factory=time.monotonic)

    @property
    def num_prompt_tokens(self) -> int:
        return len(self.request.prompt_token_ids)

    @property
    def max_context(self) -> int:
        """Tokens of context at its longest."""
        return self.num_prompt_tokens + self.max_tokens

    @property
    def num_blocks_needed(self) -> int:
        return -(-self.max_context // BLOCK_SIZE)

    def slots(self, start: int, end: int) -> list[int]:
        """Token slots of positions start..end-1."""
        return [self.blocks[p // BLOCK_SIZE] * BLOCK_SIZE + p % BLOCK_SIZE for p in range(start, end)]

"""One request inside the engine: its blocks, its row, what it has generated. Knows no torch."""

import time
from dataclasses import dataclass, field

from echo_batch.engine.stops import StopChecker
from echo_batch.kernels.formats import BLOCK_SIZE
from echo_batch.request import Request, RowFailure, TokenLogprobs


@dataclass(slots=True)
class Sequence:
    """Mutable state of one request.

    `blocks` hold every token that it can ever have (prompt + max_tokens), reserved at admission, so that nothing is
    ever preempted; the first ones may be shared (`num_cached_tokens`). `row` is its place in the decode batch while it
    runs. `block_keys` name its prompt's whole blocks until it is admitted. `refusal`: it must not run at all.
    """

    request: Request
    max_tokens: int
    blocks: list[int] = field(default_factory=list)
    row: int = -1
    block_keys: list[bytes] = field(default_factory=list)
    num_cached_tokens: int = 0
    refusal: RowFailure | None = None
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

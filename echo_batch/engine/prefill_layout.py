"""Where the tokens of prompts that are prefilled together are: packed one after another, cut into chunks and slices."""

from bisect import bisect_right
from collections.abc import Sequence as Seq
from dataclasses import dataclass

from echo_batch.kernels.formats import BLOCK_SIZE

SLICE_TOKENS = 4096
"""Tokens of a chunk that go through attention at once: enough for its GEMMs, and their absorbed queries are wide."""
SCORE_BYTES = 1 << 30
"""Index scores (fp32) that are there at once."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Prompt:
    """Token ids of one prompt and its blocks, in order (more than it needs do no harm).

    The first `num_cached` tokens (whole blocks, not all of the prompt) are in the cache or in an earlier prompt of the
    group.
    """

    token_ids: Seq[int]
    blocks: Seq[int]
    num_cached: int = 0

    def __post_init__(self) -> None:
        assert self.num_cached % BLOCK_SIZE == 0 and 0 <= self.num_cached < len(self.token_ids), self.num_cached
        assert len(self.blocks) * BLOCK_SIZE >= len(self.token_ids)


@dataclass(frozen=True, slots=True)
class Layout:
    """Where the tokens of a group are: packed tokens are the computed ones of all prompts, one prompt after another.

    `starts` are the prompts' first packed tokens and, last, their number. The KV rows of a selection group lie in one
    buffer: first those of `loaded_blocks`, then those of the packed tokens. `block_rows[i]` are the buffer rows where
    the blocks of prompt i begin.
    """

    starts: list[int]
    loaded_blocks: list[int]
    block_rows: list[list[int]]

    @property
    def num_loaded(self) -> int:
        return len(self.loaded_blocks) * BLOCK_SIZE

    @property
    def num_packed(self) -> int:
        return self.starts[-1]


def make_layout(prompts: Seq[Prompt]) -> Layout:
    """Lay a group out; its order is that of `prompts`. A shared block is there once."""
    starts, packed_row, loaded_row = [0], dict[int, int](), dict[int, int]()
    for prompt in prompts:
        num_blocks, num_shared = -(-len(prompt.token_ids) // BLOCK_SIZE), prompt.num_cached // BLOCK_SIZE
        for block in prompt.blocks[:num_shared]:
            if block not in packed_row:
                loaded_row.setdefault(block, len(loaded_row) * BLOCK_SIZE)
        for i, block in enumerate(prompt.blocks[num_shared:num_blocks]):
            assert block not in packed_row and block not in loaded_row, f"block {block} is computed after its use"
            packed_row[block] = starts[-1] + i * BLOCK_SIZE
        starts.append(starts[-1] + len(prompt.token_ids) - prompt.num_cached)
    first = len(loaded_row) * BLOCK_SIZE
    rows = loaded_row | {block: first + row for block, row in packed_row.items()}
    block_rows = [[rows[b] for b in p.blocks[: -(-len(p.token_ids) // BLOCK_SIZE)]] for p in prompts]
    return Layout(starts, list(loaded_row), block_rows)


@dataclass(frozen=True, slots=True)
class Segment:
    """A part of one prompt inside a slice: packed tokens lo..hi of prompt number `prompt`.

    `end`: position after the last of them; `is_last`: that is the prompt's last token.
    """

    prompt: int
    lo: int
    hi: int
    end: int
    is_last: bool


@dataclass(frozen=True, slots=True)
class Slice:
    """Packed tokens lo..hi that go through attention at once; `longest`: positions that the one with most sees."""

    lo: int
    hi: int
    segments: tuple[Segment, ...]
    longest: int


def cut(prompts: Seq[Prompt], starts: Seq[int], chunk_tokens: int, slice_tokens: int) -> list[list[Slice]]:
    """The packed tokens in chunks, each a list of slices; `starts` as in Layout."""
    chunks = []
    for lo in range(0, starts[-1], chunk_tokens):
        hi = min(lo + chunk_tokens, starts[-1])
        chunks.append(
            [
                _slice(prompts, starts, at, min(at + slice_tokens, hi))
                for at in range(lo, hi, min(slice_tokens, hi - lo))
            ]
        )
    return chunks


def _slice(prompts: Seq[Prompt], starts: Seq[int], lo: int, hi: int) -> Slice:
    segments, at = [], lo
    while at < hi:
        number = bisect_right(starts, at) - 1
        end = min(starts[number + 1], hi)
        position = prompts[number].num_cached + end - starts[number]
        segments.append(Segment(number, at, end, position, end == starts[number + 1]))
        at = end
    return Slice(lo, hi, tuple(segments), max(s.end for s in segments))

"""Layer-major prefill: a group of prompts goes through one selection group of layers at a time, in token chunks.

Only the layers of one selection group have their KV rows outside the host pool, so prompts never evict rows of other
requests and extra memory does not grow with the number of layers. When a group's layers are done its rows go to the
host pool, and those that the last query selected go to free rows of the GPU pool (warm start).

A prompt may begin with blocks that it does not compute. Those of earlier requests are read back from the pools, once
for all prompts of the group that share them; those of an earlier prompt of the same group are simply there.
"""

from collections.abc import Generator
from collections.abc import Sequence as Seq
from dataclasses import dataclass

import torch
from torch import Tensor

from echo_batch.cache.manager import KVCache, slots_of_blocks
from echo_batch.kernels.formats import BLOCK_SIZE
from echo_batch.kernels.ops import Ops
from echo_batch.models.dsa import AttentionInputs
from echo_batch.models.model import Model, Stream


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
    """A part of one prompt inside a chunk: packed tokens lo..hi of prompt number `prompt`."""

    prompt: int
    lo: int
    hi: int


def segments_of_chunk(starts: Seq[int], lo: int, hi: int) -> list[Segment]:
    """Cut packed tokens lo..hi at prompt borders; `starts` as in Layout."""
    segments = []
    for prompt, (start, end) in enumerate(zip(starts, starts[1:], strict=False)):
        if start < hi and end > lo:
            segments.append(Segment(prompt, max(lo, start), min(hi, end)))
    return segments


@torch.inference_mode()
def prefill(
    model: Model, cache: KVCache, ops: Ops, prompts: Seq[Prompt], *, chunk_tokens: int, on_device: torch.device
) -> Generator[int, None, Tensor]:
    """Run prompts to their ends through the model; returns logits fp32 `[num_prompts, V]` of their last tokens.

    Writes the KV rows and index keys of all computed tokens into the cache. `chunk_tokens` bounds the tokens that are
    inside a layer at once, over all prompts together. Yields the number of tokens times layers done after every chunk,
    so that the caller can watch for signals in a long prefill.
    """
    spec = cache.spec
    layout = make_layout(prompts)
    first, total = layout.num_loaded, layout.num_packed
    token_ids = torch.tensor(
        [t for p in prompts for t in p.token_ids[p.num_cached :]], dtype=torch.int64, device=on_device
    )
    positions = torch.cat(
        [torch.arange(p.num_cached, len(p.token_ids), dtype=torch.int32, device=on_device) for p in prompts]
    )
    places = [_Place.of(p, rows, on_device) for p, rows in zip(prompts, layout.block_rows, strict=True)]
    slots = torch.cat([place.slots[p.num_cached :] for p, place in zip(prompts, places, strict=True)])
    loaded_slots = slots_of_blocks(torch.tensor(layout.loaded_blocks, dtype=torch.int32, device=on_device))
    hidden = model.embed(token_ids).sum()
    lasts = [end - 1 for end in layout.starts[1:]]
    for group, layers in enumerate(spec.group_layers):
        kv_rows = [_byte_rows(first + total, spec.row_format.row_bytes, on_device) for _ in layers]
        keys = _byte_rows(first + total, spec.index_format.row_bytes, on_device)
        if first:
            keys[:first] = ops.read_index_keys(cache.index_pages(group), loaded_slots, spec.index_format)
            for layer, rows in zip(layers, kv_rows, strict=True):
                rows[:first] = cache.read_host(layer, loaded_slots)
        last_selected: dict[int, Tensor] = {}
        for lo in range(0, total, chunk_tokens):
            hi = min(lo + chunk_tokens, total)
            segments = segments_of_chunk(layout.starts, lo, hi)
            stream, angles = Stream(hidden[lo:hi], None), model.angles(positions[lo:hi])
            indices = None
            for layer, rows in zip(layers, kv_rows, strict=True):
                stream, inputs = model.attention_inputs(layer, stream, angles)
                rows[first + lo : first + hi] = inputs.kv_row
                if indices is None:
                    # The group's first layer selects; the others reuse its selection (IndexShare).
                    assert inputs.index_key is not None
                    keys[first + lo : first + hi] = inputs.index_key
                    selected = []
                    for segment in segments:
                        place = places[segment.prompt]
                        end = prompts[segment.prompt].num_cached + segment.hi - layout.starts[segment.prompt]
                        chosen = _select(
                            inputs,
                            slice(segment.lo - lo, segment.hi - lo),
                            place.take(keys, end),
                            positions[segment.lo : segment.hi] + 1,
                            ops,
                            cache,
                        )
                        if segment.hi - 1 in lasts:
                            last_selected[segment.prompt] = chosen[-1]
                        selected.append(place.rows_at(chosen))
                    indices = _stack(selected)
                latent = ops.sparse_mla(inputs.query, rows, indices, model.config.softmax_scale, spec.row_format)
                stream = model.attention_output(layer, stream, latent)
                stream = model.ffn(layer, stream, None)
            hidden[lo:hi] = stream.sum()
            yield (hi - lo) * len(layers)
        for layer, rows in zip(layers, kv_rows, strict=True):
            cache.write_host(layer, slots, rows[first:])
        cache.write_index(group, slots, keys[first:])
        for number, place in enumerate(places):
            chosen = last_selected[number]
            chosen = chosen[chosen >= 0]
            taken = place.rows_at(chosen)
            cache.warm(group, place.slots[chosen], [rows[taken] for rows in kv_rows])
    return model.logits(Stream(hidden[torch.tensor(lasts, device=on_device)], None))


@dataclass(frozen=True, slots=True)
class _Place:
    """Token slots (int32 `[P]`) of a prompt's positions, and its buffer rows: `first` + position, or else a table."""

    slots: Tensor
    first: int
    table: Tensor | None

    @staticmethod
    def of(prompt: Prompt, block_rows: list[int], device: torch.device) -> "_Place":
        length = len(prompt.token_ids)
        numbers = torch.tensor([prompt.blocks[: len(block_rows)], block_rows], dtype=torch.int32)
        slots = slots_of_blocks(numbers[0].to(device))[:length]
        first = block_rows[0]
        if block_rows == list(range(first, first + length, BLOCK_SIZE)):
            return _Place(slots, first, None)
        offsets = torch.arange(BLOCK_SIZE, dtype=torch.int32, device=device)
        return _Place(slots, first, (numbers[1].to(device)[:, None] + offsets).flatten()[:length])

    def take(self, rows: Tensor, end: int) -> Tensor:
        """Buffer rows of positions 0..end, in order."""
        return rows[self.first : self.first + end] if self.table is None else rows[self.table[:end]]

    def rows_at(self, positions: Tensor) -> Tensor:
        """Buffer row numbers of positions (int32, -1 stays -1)."""
        if self.table is None:
            return torch.where(positions >= 0, positions + self.first, -1)
        return torch.where(positions >= 0, self.table[positions.clamp(min=0)], -1)


def _select(inputs: AttentionInputs, part: slice, keys: Tensor, row_ends: Tensor, ops: Ops, cache: KVCache) -> Tensor:
    """Top-k of one prompt's tokens `part` among their own past: int32 `[n, <= k]` positions in the prompt, -1 padded.

    keys: index keys of the prompt up to its last token in the chunk; row_ends int32 `[n]`: position + 1 of each token.
    """
    spec = cache.spec
    length = keys.shape[0]
    if length <= spec.index_topk:
        # Every token sees all of its past: scoring would change nothing.
        everything = torch.arange(length, dtype=torch.int32, device=row_ends.device)
        return torch.where(everything[None, :] < row_ends[:, None], everything, -1)
    assert inputs.index_query is not None and inputs.index_weights is not None
    scores = ops.index_scores_contiguous(
        inputs.index_query[part], inputs.index_weights[part], keys, row_ends, spec.index_format
    )
    return ops.topk_positions(scores, row_ends, spec.index_topk)[0]


def _stack(selections: list[Tensor]) -> Tensor:
    """Selections int32 `[n, any width]` under each other, padded with -1 to the widest."""
    width = max(s.shape[1] for s in selections)
    return torch.cat([torch.nn.functional.pad(s, (0, width - s.shape[1]), value=-1) for s in selections])


def _byte_rows(tokens: int, row_bytes: int, device: torch.device) -> Tensor:
    return torch.empty((tokens, row_bytes), dtype=torch.uint8, device=device)

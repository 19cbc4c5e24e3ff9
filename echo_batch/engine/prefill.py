"""Layer-major prefill: a group of prompts goes through one selection group of layers at a time, in token chunks.

Only the layers of one selection group have their KV rows outside the host pool, so prompts never evict rows of other
requests and extra memory does not grow with the number of layers. When a group's layers are done its rows go to the
host pool, and those that the last query selected go to free rows of the GPU pool (warm start).
"""

from collections.abc import Generator
from collections.abc import Sequence as Seq
from dataclasses import dataclass

import torch
from torch import Tensor

from echo_batch.cache.manager import KVCache
from echo_batch.kernels.ops import Ops
from echo_batch.models.dsa import AttentionInputs
from echo_batch.models.model import Model, Stream


@dataclass(frozen=True, slots=True, kw_only=True)
class Prompt:
    """Token ids of one prompt and the slot of each (int32 `[P]` on the device)."""

    token_ids: Seq[int]
    slots: Tensor


@dataclass(frozen=True, slots=True)
class Segment:
    """A part of one prompt inside a chunk: packed positions lo..hi of a prompt that starts at `start`."""

    start: int
    lo: int
    hi: int


def segments_of_chunk(starts: Seq[int], lo: int, hi: int) -> list[Segment]:
    """Cut packed positions lo..hi at prompt borders; `starts` are the prompts' first positions and the total length."""
    segments = []
    for start, end in zip(starts, starts[1:], strict=False):
        if start < hi and end > lo:
            segments.append(Segment(start, max(lo, start), min(hi, end)))
    return segments


@torch.inference_mode()
def prefill(
    model: Model, cache: KVCache, ops: Ops, prompts: Seq[Prompt], *, chunk_tokens: int, on_device: torch.device
) -> Generator[int, None, Tensor]:
    """Run whole prompts through the model; returns logits fp32 `[num_prompts, V]` of their last tokens.

    Writes every KV row and index key of the prompts into the cache. `chunk_tokens` bounds the tokens that are inside a
    layer at once, over all prompts together. Yields the number of tokens times layers done after every chunk, so that
    the caller can watch for signals in a long prefill.
    """
    spec = cache.spec
    starts = [0]
    for prompt in prompts:
        starts.append(starts[-1] + len(prompt.token_ids))
    total = starts[-1]
    token_ids = torch.tensor([t for p in prompts for t in p.token_ids], dtype=torch.int64, device=on_device)
    positions = torch.cat([torch.arange(len(p.token_ids), dtype=torch.int32, device=on_device) for p in prompts])
    slots = torch.cat([p.slots for p in prompts])
    hidden = model.embed(token_ids).sum()
    lasts = [end - 1 for end in starts[1:]]
    for group, layers in enumerate(spec.group_layers):
        kv_rows = [_byte_rows(total, spec.row_format.row_bytes, on_device) for _ in layers]
        keys = _byte_rows(total, spec.index_format.row_bytes, on_device)
        selected_by_last: dict[int, Tensor] = {}
        for lo in range(0, total, chunk_tokens):
            hi = min(lo + chunk_tokens, total)
            segments = segments_of_chunk(starts, lo, hi)
            stream = Stream(hidden[lo:hi], None)
            selections: list[Tensor] = []
            for layer, rows in zip(layers, kv_rows, strict=True):
                inputs = model.attention_inputs(layer, stream, positions[lo:hi])
                rows[lo:hi] = inputs.kv_row
                if not selections:
                    assert inputs.index_key is not None
                    keys[lo:hi] = inputs.index_key
                    selections = [_select(inputs, s, lo, keys, positions, ops, cache) for s in segments]
                latents = [
                    ops.sparse_mla(
                        inputs.query[s.lo - lo : s.hi - lo],
                        rows[s.start : s.hi],
                        selection,
                        model.config.softmax_scale,
                        spec.row_format,
                    )
                    for s, selection in zip(segments, selections, strict=True)
                ]
                stream = model.attention_output(layer, stream, torch.cat(latents))
                stream = model.ffn(layer, stream, None)
            hidden[lo:hi] = stream.sum()
            for segment, selection in zip(segments, selections, strict=True):
                if segment.hi - 1 in lasts:
                    selected_by_last[segment.start] = selection[-1]
            yield (hi - lo) * len(layers)
        for layer, rows in zip(layers, kv_rows, strict=True):
            cache.write_host(layer, slots, rows)
        cache.write_index(group, slots, keys)
        for start in starts[:-1]:
            chosen = selected_by_last[start].to(torch.int64)
            chosen = chosen[chosen >= 0] + start
            cache.warm(group, slots[chosen], [rows[chosen] for rows in kv_rows])
    return model.logits(Stream(hidden[torch.tensor(lasts, device=on_device)], None))


def _select(
    inputs: AttentionInputs, segment: Segment, lo: int, keys: Tensor, positions: Tensor, ops: Ops, cache: KVCache
) -> Tensor:
    """Top-k of a segment's tokens among their own prompt: int32 `[n, k]` positions in the prompt, -1 padded."""
    spec = cache.spec
    length = segment.hi - segment.start
    row_ends = positions[segment.lo : segment.hi] + 1
    if length <= spec.index_topk:
        # Every token sees all of its past: scoring would change nothing.
        everything = torch.arange(length, dtype=torch.int32, device=row_ends.device)
        return torch.where(everything[None, :] < row_ends[:, None], everything, -1)
    part = slice(segment.lo - lo, segment.hi - lo)
    assert inputs.index_query is not None and inputs.index_weights is not None
    scores = ops.index_scores_contiguous(
        inputs.index_query[part],
        inputs.index_weights[part],
        keys[segment.start : segment.hi],
        row_ends,
        spec.index_format,
    )
    return ops.topk_positions(scores, row_ends, spec.index_topk)[0]


def _byte_rows(tokens: int, row_bytes: int, device: torch.device) -> Tensor:
    return torch.empty((tokens, row_bytes), dtype=torch.uint8, device=device)

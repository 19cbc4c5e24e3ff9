"""Layer-major prefill: a group of prompts goes through one selection group of layers at a time, in token chunks.

Only the layers of one selection group have their KV rows outside the host pool, so prompts never evict rows of other
requests and extra memory does not grow with the number of layers. When a group's layers are done its rows go to the
host pool under the next layers' compute, and those that the last query selected go to free rows of the GPU pool (warm
start).

A chunk is what the experts see at once: many tokens, so that each expert's part is large. Attention, whose queries are
ten times as wide as the residual stream, takes a chunk in slices.

A prompt may begin with blocks that it does not compute. Those of earlier requests are read back from the pools, once
for all prompts of the group that share them; those of an earlier prompt of the same group are simply there.
"""

from collections.abc import Generator
from collections.abc import Sequence as Seq
from dataclasses import dataclass

import torch
from torch import Tensor

from echo_batch.cache.manager import KVCache, slots_of_blocks
from echo_batch.cache.spec import NUM_CANDIDATES
from echo_batch.engine.prefill_copies import HostCopies
from echo_batch.engine.prefill_layout import SCORE_BYTES, SLICE_TOKENS, Layout, Prompt, Slice, cut, make_layout
from echo_batch.engine.prefill_select import Selector, to_device
from echo_batch.kernels.formats import RowFormat
from echo_batch.kernels.ops import Ops
from echo_batch.models.dsa import Angles
from echo_batch.models.model import Model, Stream

__all__ = ["Prompt", "make_layout", "prefill"]

_WARM_ROWS = NUM_CANDIDATES
"""Rows that go to the GPU pool together: a call finds no more free ones."""


@torch.inference_mode()
def prefill(
    model: Model,
    cache: KVCache,
    ops: Ops,
    prompts: Seq[Prompt],
    *,
    chunk_tokens: int,
    on_device: torch.device,
    slice_tokens: int = SLICE_TOKENS,
    score_bytes: int = SCORE_BYTES,
    streamed_per_token: float = float("inf"),
    predicted: Tensor | None = None,
) -> Generator[int, None, Tensor]:
    """Run prompts to their ends through the model; returns logits fp32 `[num_prompts, V]` of their last tokens.

    Writes the KV rows and index keys of all computed tokens into the cache. `chunk_tokens` and `slice_tokens` bound the
    tokens that are inside a layer and inside its attention at once, over all prompts together.
    Prefixes in the host pool: all their rows are read, under the compute of the layers before, unless that takes longer
    than the compute, which is as long as `streamed_per_token` of them for every computed token; then only what is
    selected is read. `predicted` (fp32 `[groups, num_prompts]`) receives the k-th scores of the last tokens, NaN where
    there is none. Yields the number of tokens times layers done after every chunk, so that the caller can watch for
    signals in a long prefill.
    """
    layout = make_layout(prompts)
    chunks = cut(prompts, layout.starts, chunk_tokens, slice_tokens)
    work = _Group(model, cache, ops, prompts, layout, chunks, on_device, score_bytes)
    # Selections are needed before any row is read: only a single slice can know them.
    single = work.total <= min(slice_tokens, chunk_tokens)
    recall = single and work.first > streamed_per_token * work.total
    if predicted is not None:
        predicted.fill_(float("nan"))
    try:
        work.read_ahead(0, recall)
        for group, layers in enumerate(cache.spec.group_layers):
            buffers = work.open_layers(group, recall)
            work.read_ahead(group + 1, recall)
            for chunk in chunks:
                work.run_chunk(group, buffers, chunk, recall)
                yield (chunk[-1].hi - chunk[0].lo) * len(layers)
            work.close_layers(group, buffers)
            if predicted is not None:
                for number, kth in buffers.last_kth.items():
                    predicted[group, number : number + 1] = torch.where(kth.isfinite(), kth, float("nan"))
            del buffers  # before there is room for the next ones
    finally:
        work.copies.join()
    return work.logits()


@dataclass(frozen=True, slots=True)
class _Buffers:
    """One selection group's rows outside the pools; row numbers as in Layout.

    kv_rows: uint8 `[rows, row_bytes]` of each layer. wide: the same rows in the format in which attention reads them
    (the same tensor if that is the cache's). last_rows: buffer rows that the prompts' last tokens select, in the order
    of the prompts: int32 `[n, <= k]` of each slice in which n > 0 of them end.
    """

    kv_rows: list[Tensor]
    wide: list[Tensor]
    keys: Tensor
    last_rows: list[Tensor]
    last_kth: dict[int, Tensor]


class _Group:
    """A group of prompts on its way through the model."""

    def __init__(
        self,
        model: Model,
        cache: KVCache,
        ops: Ops,
        prompts: Seq[Prompt],
        layout: Layout,
        chunks: list[list[Slice]],
        device: torch.device,
        score_bytes: int,
    ) -> None:
        self._model, self._cache, self._ops, self._device = model, cache, ops, device
        self.layout = layout
        self.first, self.total = layout.num_loaded, layout.num_packed
        self._selector = Selector(prompts, layout, cache.spec, ops, device, score_bytes)
        ends = {part.lo: [s.hi - 1 - part.lo for s in part.segments if s.is_last] for parts in chunks for part in parts}
        # Where prompts end in a slice, by its first token.
        self._ends = {lo: to_device(index, torch.int64, device) for lo, index in ends.items() if index}
        self._loaded_slots = slots_of_blocks(to_device(self.layout.loaded_blocks, torch.int32, device))
        places = zip(prompts, self._selector.places, strict=True)
        self._slots = torch.cat([place.slots[p.num_cached :] for p, place in places])
        tokens = to_device([t for p in prompts for t in p.token_ids[p.num_cached :]], torch.int64, device)
        self._hidden = model.sum(model.embed(tokens))
        self._angles = model.angles(self._selector.positions)
        self._wide_format: RowFormat = ops.prefill_row_format(cache.spec.row_format)
        self.copies = HostCopies(cache, device)

    def read_ahead(self, group: int, recall: bool) -> None:
        """Start to read the prefixes' rows for the layers of a group, if there are both."""
        if self.first and not recall and group < self._cache.spec.num_groups:
            for layer in self._cache.spec.group_layers[group]:
                self.copies.read_ahead(layer, self._loaded_slots)

    def open_layers(self, group: int, recall: bool) -> _Buffers:
        """Room for the rows of a group's layers, with those of prefixes (with `recall` their keys only)."""
        spec, first = self._cache.spec, self.first
        rows = first + self.total
        kv_rows = [self._bytes(rows, spec.row_format.row_bytes) for _ in spec.group_layers[group]]
        keys = self._bytes(rows, spec.index_format.row_bytes)
        wide = kv_rows
        if self._wide_format != spec.row_format:
            wide = [self._bytes(rows, self._wide_format.row_bytes) for _ in kv_rows]
        buffers = _Buffers(kv_rows, wide, keys, [], {})
        if first:
            pages = self._cache.index_pages(group)
            keys[:first] = self._ops.read_index_keys(pages, self._loaded_slots, spec.index_format)
            if not recall:
                for number, layer in enumerate(spec.group_layers[group]):
                    self._put(buffers, number, slice(0, first), self.copies.take(layer))
        return buffers

    def run_chunk(self, group: int, buffers: _Buffers, chunk: list[Slice], recall: bool) -> None:
        """All layers of a selection group for one chunk."""
        layers = self._cache.spec.group_layers[group]
        hidden = self._hidden[chunk[0].lo : chunk[-1].hi]
        # The group's first layer selects; the others reuse its selection (IndexShare).
        selections: list[Tensor] = []
        for number, layer in enumerate(layers):
            delta = self._attend(buffers, number, layer, chunk, selections, recall)
            self._model.sum(self._model.ffn(layer, Stream(hidden, delta), None), out=hidden)

    def close_layers(self, group: int, buffers: _Buffers) -> None:
        """Write the finished rows and keys to the cache and warm the GPU pool."""
        cache, first = self._cache, self.first
        for layer, rows in zip(cache.spec.group_layers[group], buffers.kv_rows, strict=True):
            self.copies.write(layer, self._slots, rows[first:])
        cache.write_index(group, self._slots, buffers.keys[first:])
        slots = torch.cat((self._loaded_slots, self._slots)) if first else self._slots
        for lasts in buffers.last_rows:
            for part in lasts.split(max(1, _WARM_ROWS // lasts.shape[1])):
                rows = part.flatten()
                index = rows.clamp(min=0)
                cache.warm(group, torch.where(rows >= 0, slots[index], -1), [kv[index] for kv in buffers.kv_rows])

    def logits(self) -> Tensor:
        """fp32 `[num_prompts, V]` of the prompts' last tokens."""
        lasts = to_device([end - 1 for end in self.layout.starts[1:]], torch.int64, self._device)
        return self._model.logits(Stream(self._hidden[lasts], None))

    def _attend(
        self, buffers: _Buffers, number: int, layer: int, chunk: list[Slice], selections: list[Tensor], recall: bool
    ) -> Tensor:
        """Attention of a group's layer for a chunk: its output `[n, D]`. The first layer appends its selections."""
        parts = []
        for place, part in enumerate(chunk):
            lo, hi = part.lo, part.hi
            own = slice(self.first + lo, self.first + hi)
            angles = Angles(self._angles.cos[lo:hi], self._angles.sin[lo:hi])
            stream, inputs = self._model.attention_inputs(layer, Stream(self._hidden[lo:hi], None), angles)
            self._put(buffers, number, own, inputs.kv_row)
            if number == 0:
                assert inputs.index_key is not None
                buffers.keys[own] = inputs.index_key
                selections.append(self._selector.select(part, inputs, buffers.keys, buffers.last_kth))
                if lo in self._ends:
                    buffers.last_rows.append(selections[place][self._ends[lo]])
            if recall:
                self._recall(buffers, number, layer, selections[place])
            query = inputs.query
            del inputs  # the largest tensors of a slice should not outlive their use
            latent = self._ops.sparse_mla(
                query, buffers.wide[number], selections[place], self._model.config.softmax_scale, self._wide_format
            )
            del query
            delta = self._model.attention_output(layer, stream, latent).delta
            del latent
            assert delta is not None
            parts.append(self._ops.add_parts(delta))
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def _put(self, buffers: _Buffers, number: int, rows: slice, values: Tensor) -> None:
        """Write KV rows of a group's layer into its buffers."""
        buffers.kv_rows[number][rows] = values
        if buffers.wide[number] is not buffers.kv_rows[number]:
            self._ops.convert_kv_rows(values, self._cache.spec.row_format, buffers.wide[number][rows])

    def _recall(self, buffers: _Buffers, number: int, layer: int, selected: Tensor) -> None:
        """Read the prefix rows that are selected (int32, any shape) from the pools; zeros stand for the others."""
        chosen = torch.zeros(self.first + 1, dtype=torch.bool, device=self._device)
        # Everything that is no row of a prefix falls on one more entry.
        chosen[torch.where((selected >= 0) & (selected < self.first), selected, self.first).flatten()] = True
        slots = torch.where(chosen[:-1], self._loaded_slots, -1)
        self._put(buffers, number, slice(0, self.first), self._cache.read_host(layer, slots))

    def _bytes(self, rows: int, row_bytes: int) -> Tensor:
        return torch.empty((rows, row_bytes), dtype=torch.uint8, device=self._device)

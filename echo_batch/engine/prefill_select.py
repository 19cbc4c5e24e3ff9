"""Which earlier tokens each token of a prefill attends to: index scores and top-k, prompt by prompt, as buffer rows."""

from collections.abc import Sequence as Seq
from dataclasses import dataclass

import torch
from torch import Tensor

from echo_batch.cache.manager import slots_of_blocks
from echo_batch.cache.spec import CacheSpec
from echo_batch.engine.prefill_layout import Layout, Prompt, Segment, Slice
from echo_batch.kernels.formats import BLOCK_SIZE
from echo_batch.kernels.ops import Ops
from echo_batch.models.dsa import AttentionInputs


@dataclass(frozen=True, slots=True)
class Place:
    """Token slots (int32 `[P]`) of a prompt's positions, and its buffer rows: `first` + position, or else a table."""

    slots: Tensor
    first: int
    table: Tensor | None

    @staticmethod
    def of(prompt: Prompt, block_rows: list[int], device: torch.device) -> "Place":
        length = len(prompt.token_ids)
        numbers = to_device([prompt.blocks[: len(block_rows)], block_rows], torch.int32, device)
        slots = slots_of_blocks(numbers[0])[:length]
        first = block_rows[0]
        if block_rows == list(range(first, first + length, BLOCK_SIZE)):
            return Place(slots, first, None)
        offsets = torch.arange(BLOCK_SIZE, dtype=torch.int32, device=device)
        return Place(slots, first, (numbers[1][:, None] + offsets).flatten()[:length])

    def take(self, rows: Tensor, end: int) -> Tensor:
        """Buffer rows (uint8, a multiple of 4 bytes each) of positions 0..end, in order."""
        if self.table is None:
            return rows[self.first : self.first + end]
        return rows.view(torch.int32)[self.table[:end]].view(torch.uint8)

    def rows_at(self, positions: Tensor) -> Tensor:
        """Buffer row numbers of positions (int32, -1 stays -1) of a prompt with a table."""
        assert self.table is not None
        return torch.where(positions >= 0, self.table[positions.clamp(min=0)], -1)


class Selector:
    """Selections of one group of prompts, for any layer."""

    def __init__(
        self, prompts: Seq[Prompt], layout: Layout, spec: CacheSpec, ops: Ops, device: torch.device, score_bytes: int
    ) -> None:
        self._spec = spec
        self._ops = ops
        self._max_scores = score_bytes // 4
        self.places = [Place.of(p, rows, device) for p, rows in zip(prompts, layout.block_rows, strict=True)]
        self.positions = torch.cat(
            [torch.arange(p.num_cached, len(p.token_ids), dtype=torch.int32, device=device) for p in prompts]
        )
        self._row_ends = self.positions + 1
        # Buffer row of each packed token's position 0, where its prompt lies in one piece.
        firsts = to_device([place.first for place in self.places], torch.int32, device)
        counts = to_device([len(p.token_ids) - p.num_cached for p in prompts], torch.int64, device)
        self._firsts = firsts.repeat_interleave(counts, output_size=layout.num_packed)[:, None]

    def select(self, part: Slice, inputs: AttentionInputs, keys: Tensor, last_kth: dict[int, Tensor]) -> Tensor:
        """Buffer rows that the tokens of a slice attend to: int32 `[n, <= k]`, ascending positions, -1 padded.

        keys: index keys of the buffer (uint8), written up to the slice's end. The k-th score of a prompt's last token
        goes to `last_kth` (fp32 `[1]`) if it has more than k positions.
        """
        width = min(self._spec.index_topk, part.longest)
        if part.longest <= width and all(self.places[s.prompt].table is None for s in part.segments):
            return self._everything(part.lo, part.hi, width)
        out = torch.empty((part.hi - part.lo, width), dtype=torch.int32, device=keys.device)
        for segment in part.segments:
            self._select_segment(segment, part.lo, inputs, keys, out, last_kth)
        return out

    def _everything(self, lo: int, hi: int, width: int) -> Tensor:
        """Every token sees all of its past: scoring would change nothing."""
        columns = torch.arange(width, dtype=torch.int32, device=self._firsts.device)
        return torch.where(columns < self._row_ends[lo:hi, None], columns + self._firsts[lo:hi], -1)

    def _select_segment(
        self,
        segment: Segment,
        slice_lo: int,
        inputs: AttentionInputs,
        keys: Tensor,
        out: Tensor,
        last_kth: dict[int, Tensor],
    ) -> None:
        place, width = self.places[segment.prompt], out.shape[1]
        target = out[segment.lo - slice_lo : segment.hi - slice_lo]
        if segment.end <= width:
            chosen = self._everything(segment.lo, segment.hi, width)
            if place.table is not None:
                chosen = place.rows_at(torch.where(chosen >= 0, chosen - place.first, -1))
            target.copy_(chosen)
            return
        assert inputs.index_query is not None and inputs.index_weights is not None
        segment_keys = place.take(keys, segment.end)
        step = max(1, self._max_scores // segment.end)
        for lo in range(segment.lo, segment.hi, step):
            hi = min(lo + step, segment.hi)
            rows = slice(lo - slice_lo, hi - slice_lo)
            ends = self._row_ends[lo:hi]
            scores = self._ops.index_scores_contiguous(
                inputs.index_query[rows],
                inputs.index_weights[rows],
                segment_keys[: segment.end - (segment.hi - hi)],
                ends,
                self._spec.index_format,
            )
            kth = self._ops.topk_rows(scores, ends, out[rows], first=place.first if place.table is None else 0)
            del scores
            if segment.is_last and hi == segment.hi:
                last_kth[segment.prompt] = kth[-1:]
        if place.table is not None:
            target.copy_(place.rows_at(target))


def to_device(numbers: Seq[int] | Seq[Seq[int]], dtype: torch.dtype, device: torch.device) -> Tensor:
    """A tensor of these numbers on the device, without waiting for what runs there."""
    tensor = torch.tensor(numbers, dtype=dtype, pin_memory=device.type == "cuda")
    return tensor.to(device, non_blocking=True)

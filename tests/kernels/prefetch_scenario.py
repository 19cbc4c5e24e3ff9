"""A decode step with missing rows, for the tests of all versions of prefetch, and the rules that must hold after it."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from echo_batch.kernels.contracts import GroupMaps, make_maps
from echo_batch.kernels.formats import BLOCK_SIZE, IndexFormat
from echo_batch.kernels.prefetch_state import CANDIDATES, DROPPED, LATE, PREFETCHED, PrefetchState, make_prefetch_state
from echo_batch.kernels.reference import indexer, rows
from echo_batch.kernels.reference.cache_ops import violations
from tests.kernels.triton.common import difference

FP8 = IndexFormat("fp8")


class Scenario:
    """Rows of a batch that share their first blocks, in a pool of 16-byte rows; host row s holds s in every word."""

    def __init__(
        self,
        device: torch.device,
        *,
        lengths: tuple[int, ...] = (300, 0, 1, 200, 449),
        num_blocks: int = 24,
        shared_blocks: int = 2,
        num_heads: int = 32,
        gpu_tokens: int = 256,
        set_aside: int = 64,
        seed: int = 0,
    ) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.device = device
        num_slots = num_blocks * BLOCK_SIZE
        self.maps: GroupMaps = make_maps(
            1, gpu_tokens=gpu_tokens, host_tokens=num_slots, num_candidates=gpu_tokens, device=device
        )
        self.state: PrefetchState = make_prefetch_state(1, set_aside, device)
        words = torch.arange(num_slots, dtype=torch.int32)[:, None].expand(-1, 4).contiguous()
        self.host = words.view(torch.uint8)
        if device.type == "cuda":
            self.host = self.host.pin_memory()
        self.gpu = torch.full((gpu_tokens, 16), 0xFF, dtype=torch.uint8, device=device)
        self.step = torch.zeros(1, dtype=torch.int32, device=device)
        self.pages = torch.zeros(num_blocks, FP8.page_bytes, dtype=torch.uint8, device=device)
        keys = torch.randn(num_slots, 128, generator=generator).to(device)
        every_slot = torch.arange(num_slots, dtype=torch.int32, device=device)
        rows.write_index_keys(self.pages, every_slot, rows.pack_index_keys(keys, FP8, True), FP8)
        most = max(-(-length // BLOCK_SIZE) for length in lengths)
        table = torch.full((len(lengths), most + 1), -1, dtype=torch.int32)
        blocks = torch.randperm(num_blocks, generator=generator).tolist()
        common, blocks = blocks[:shared_blocks], blocks[shared_blocks:]
        for b, length in enumerate(lengths):
            own = -(-length // BLOCK_SIZE)
            mine = (common + blocks)[:own] if own > shared_blocks else blocks[:own]
            table[b, :own] = torch.tensor(mine, dtype=torch.int32)
            blocks = [block for block in blocks if block not in mine]
        self.table, self.lengths = table.to(device), torch.tensor(lengths, dtype=torch.int32, device=device)
        query = torch.randn(len(lengths), num_heads, 128, generator=generator).to(device)
        self.query, _ = rows.quantize_index_query(query, True)
        self.weights = torch.randn(len(lengths), num_heads, generator=generator).to(device)
        self.scores = indexer.index_scores_paged(self.query, self.weights, self.pages, self.table, self.lengths, FP8)
        self.generator = generator

    def threshold(self, num_above: int) -> Tensor:
        """Thresholds between two scores of each row, with about `num_above` scores above; NaN for empty rows."""
        values = self.scores.sort(1, descending=True).values
        found = (values[:, num_above - 1] + values[:, num_above]) / 2
        return torch.where(torch.isfinite(found), found, torch.nan)

    def slots(self, row: int, positions: Tensor) -> Tensor:
        return self.table[row, positions // BLOCK_SIZE] * BLOCK_SIZE + positions % BLOCK_SIZE

    def new_slots(self) -> Tensor:
        """The slot of every row's newest token."""
        last = (self.lengths - 1).clamp(min=0)
        slots = self.table.gather(1, (last // BLOCK_SIZE)[:, None].long())[:, 0] * BLOCK_SIZE + last % BLOCK_SIZE
        return torch.where(self.lengths > 0, slots, -1).to(torch.int32)

    def candidates(self, scores: Tensor, predicted: Tensor) -> list[int]:
        """Slots of all positions above the prediction, the newest tokens' left out, with repetitions."""
        found: list[int] = []
        for b, length in enumerate(self.lengths.tolist()):
            positions = (scores[b, : max(0, length - 1)] > predicted[b]).nonzero()[:, 0]
            found += self.slots(b, positions).tolist()
        return found

    def make_resident(self, append: Callable[[Tensor], Tensor], slots: Tensor) -> None:
        """Link `slots` through `append` (of one step) and give their rows the right bytes."""
        got = append(slots)[0]
        valid = got >= 0
        self.gpu[got[valid]] = self.host[slots[valid].cpu()].to(self.device)


def check_step(
    scenario: Scenario,
    ops: Any,
    prefetch: Any,
    scores_prefetch: Callable[..., Tensor],
    predicted: Tensor,
    *,
    complete: bool = True,
) -> list[int]:
    """Run a step (begin, append, set aside, prefetch) and check every rule; returns the totals as a list.

    `ops`: a module of cache ops. `prefetch`: one with `set_aside`. `complete`: this version never leaves a candidate
    behind.
    """
    s = scenario
    before_totals = s.state.totals[0].clone()
    ops.begin_step(s.maps, s.step)
    s.make_resident(lambda slots: ops.append(s.maps, slots, s.step), s.new_slots())
    prefetch.set_aside(s.maps, s.state, s.step, s.lengths.shape[0])
    set_aside = s.state.rows[0][s.state.rows[0] >= 0]
    assert not violations(s.maps, s.step).any()
    assert bool((s.maps.priority[0, set_aside] == -1).all()) and set_aside.unique().numel() == set_aside.numel()
    linked = s.maps.host_to_gpu.clone()
    priority = s.maps.priority.clone()
    scores = scores_prefetch(
        s.query,
        s.weights,
        s.pages,
        s.table,
        s.lengths,
        FP8,
        predicted=predicted,
        maps=s.maps,
        state=s.state,
        step=s.step,
        host_rows=s.host,
        gpu_rows=s.gpu,
    )
    for b, length in enumerate(s.lengths.tolist()):
        assert difference(scores[b, :length], s.scores[b, :length]) < 1e-6
    assert not violations(s.maps, s.step).any()
    # Nothing that was resident has moved or lost its priority.
    resident = linked[0] >= 0
    assert torch.equal(s.maps.host_to_gpu[0][resident], linked[0][resident])
    kept = linked[0][resident]
    assert torch.equal(s.maps.priority[0][kept], priority[0][kept])
    # What is new was missing, scored above the prediction, took a row that was set aside, and is the host's row.
    candidates = s.candidates(scores, predicted)
    missing = {slot for slot in candidates if int(linked[0, slot]) < 0}
    new = ((s.maps.host_to_gpu[0] >= 0) & ~resident).nonzero()[:, 0]
    assert set(new.tolist()) <= missing
    new_rows = s.maps.host_to_gpu[0, new]
    assert set(new_rows.tolist()) <= set(set_aside.tolist())
    assert bool((s.maps.priority[0, new_rows] == int(s.step) - 1).all())
    assert torch.equal(s.gpu[new_rows].cpu(), s.host[new.cpu()])
    totals = (s.state.totals[0] - before_totals).tolist()
    assert totals[CANDIDATES] == len(candidates) and totals[PREFETCHED] == new.numel()
    if complete:
        assert totals[LATE] == 0 and new.numel() == min(len(missing), set_aside.numel())
        assert (totals[DROPPED] > 0) == (len(missing) > set_aside.numel())
    assert totals[PREFETCHED] + totals[DROPPED] + totals[LATE] <= len(candidates)
    return totals


def check_resolve(scenario: Scenario, resolve: Callable[..., Any], k: int) -> None:
    """After the prefetch the exact top-k is resolved: all of it is resident, protected, and has the right bytes."""
    s = scenario
    selected = torch.full((s.lengths.shape[0], k), -1, dtype=torch.int32)
    for b, length in enumerate(s.lengths.tolist()):
        positions = s.scores[b, :length].topk(min(k, length)).indices.sort().values
        selected[b, : positions.numel()] = s.slots(b, positions).cpu()
    selected = selected.to(s.device)
    got = resolve(s.maps, selected, s.step, s.host, s.gpu).rows
    valid = selected >= 0
    assert torch.equal(got >= 0, valid)
    assert torch.equal(s.gpu[got[valid]].cpu(), s.host[selected[valid].cpu()])
    assert bool((s.maps.priority[0, got[valid]] == s.step).all())
    assert not violations(s.maps, s.step).any()

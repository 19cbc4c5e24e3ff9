"""A batch whose queries drift, with its caches; a layer's scores, top-k and recall in every prefetch mode."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, Protocol

import torch
from torch import Tensor

from echo_batch.bench.cache_ops import replay_us
from echo_batch.cache.spec import NUM_CANDIDATES
from echo_batch.kernels.cache_layout import LATE_LISTS
from echo_batch.kernels.contracts import GroupMaps, Marked, make_maps
from echo_batch.kernels.cuda import indexer as cuda_indexer
from echo_batch.kernels.cuda.indexer import SCORES_ONLY, WITH_PREFETCH, Instance
from echo_batch.kernels.cuda.topk import Late, mark_topk, topk_positions
from echo_batch.kernels.cuda.topk_lists import THREADS, mark_topk_lists
from echo_batch.kernels.formats import BLOCK_SIZE, IndexFormat, RowFormat
from echo_batch.kernels.libs.deep_gemm import DeepGemm
from echo_batch.kernels.prefetch_state import PrefetchState, make_prefetch_state
from echo_batch.kernels.score_lists import COUNT, POSITION_BITS, ScoreLists, make_margins
from echo_batch.kernels.triton import cache_ops, indexer_prefetch
from echo_batch.kernels.triton.row_copy import copy_rows

HEADS = 64
INDEX = IndexFormat("fp8")
ROWS = RowFormat("fp8")
LAYERS = 4
FEW_LAYERS = 1
REPLAYS = 25
SEARCH_STEPS = 80

Stage = Literal["scores", "top-k", "recall"]
"""How far a mode goes; what each stage takes is the difference to the one before."""


class Mode(Protocol):
    """One layer: scores (with whatever is prefetched meanwhile), top-k, resolve. Returns the tensors that it made."""

    def __call__(self, layer: int, until: Stage = "recall") -> tuple[Tensor, ...]: ...


@dataclass(frozen=True, slots=True)
class Shape:
    """Sizes of the benchmark. `set_aside`: rows that prefetch may take in a step and layer."""

    batch: int = 13
    length: int = 98304
    topk: int = 2048
    host_tokens: int = 1_800_000
    gpu_tokens: int = 200_000
    set_aside: int = 4096
    weights_drift: bool = False


class Workload:
    """A batch whose queries drift, with LAYERS selection groups and the caches of their rows."""

    def __init__(self, shape: Shape, deep_gemm: DeepGemm | None) -> None:
        self.shape = shape
        self.deep_gemm = deep_gemm
        device = torch.device("cuda")
        num_blocks = shape.host_tokens // BLOCK_SIZE
        num_slots = num_blocks * BLOCK_SIZE
        self.pages = torch.empty(num_blocks, INDEX.page_bytes, dtype=torch.uint8, device=device)
        keys = torch.randn(num_blocks, BLOCK_SIZE * INDEX.head_dim, device=device).to(torch.float8_e4m3fn)
        self.pages[:, : BLOCK_SIZE * INDEX.head_dim] = keys.view(torch.uint8)
        scales = torch.rand(num_blocks, BLOCK_SIZE, device=device) * 0.2 + 0.9
        self.pages[:, BLOCK_SIZE * INDEX.head_dim :] = scales.view(torch.uint8)
        blocks_each = -(-shape.length // BLOCK_SIZE)
        self.table = torch.randperm(num_blocks, device=device)[: shape.batch * blocks_each].to(torch.int32)
        self.table = self.table.view(shape.batch, blocks_each).contiguous()
        self.lengths = torch.full((shape.batch,), shape.length, dtype=torch.int32, device=device)
        self.host = torch.empty(num_slots, ROWS.row_bytes, dtype=torch.uint8, pin_memory=True)
        for start in range(0, num_slots, 1 << 18):
            part = self.host[start : start + (1 << 18)]
            part.copy_(torch.randint(0, 256, part.shape, dtype=torch.uint8, device=device))
        self.gpu = torch.zeros(LAYERS, shape.gpu_tokens, ROWS.row_bytes, dtype=torch.uint8, device=device)
        self.maps: GroupMaps = make_maps(
            LAYERS,
            gpu_tokens=shape.gpu_tokens,
            host_tokens=num_slots,
            num_candidates=min(NUM_CANDIDATES, shape.gpu_tokens),
            device=device,
        )
        self.state: PrefetchState = make_prefetch_state(LAYERS, shape.set_aside, device, num_late_lists=LATE_LISTS)
        self.step = torch.zeros(1, dtype=torch.int32, device=device)
        self.predicted = torch.empty(LAYERS, shape.batch, device=device)
        self.margins = make_margins(LAYERS, shape.batch, device)
        self.query = torch.empty(LAYERS, shape.batch, HEADS, INDEX.head_dim, device=device)
        self.weights = torch.empty(LAYERS, shape.batch, HEADS, device=device)
        self.fp8_query = torch.empty_like(self.query, dtype=torch.float8_e4m3fn)
        self.used_weights = torch.empty_like(self.weights)
        self.schedule = None if deep_gemm is None else deep_gemm.index_schedule(self.lengths)
        self.groups = [self.maps.group(g) for g in range(LAYERS)]
        self.states = [self.state.group(g) for g in range(LAYERS)]
        self.side = torch.cuda.Stream()

    # --- the workload
    def restart(self) -> None:
        """New queries, no prediction; the pool full of random rows that were used lately."""
        num_rows = self.shape.gpu_tokens
        self.maps.reset()
        self.state.reset()
        self.query.normal_()
        self.weights.normal_().mul_(HEADS**-0.5)
        self.predicted.fill_(float("nan"))
        self.margins.fill_(float("nan"))
        self.step.fill_(100)
        positions = torch.randperm(self.shape.batch * self.shape.length, device="cuda")[:num_rows]
        rows, columns = positions // self.shape.length, positions % self.shape.length
        slots = self.table[rows, columns // BLOCK_SIZE] * BLOCK_SIZE + (columns % BLOCK_SIZE).to(torch.int32)
        self.maps.gpu_to_host[:, : slots.numel()] = slots
        self.maps.host_to_gpu[:, slots] = torch.arange(slots.numel(), dtype=torch.int32, device="cuda")
        self.maps.priority[:, : slots.numel()] = torch.randint(
            1, 100, (LAYERS, slots.numel()), dtype=torch.int32, device="cuda"
        )
        for layer in range(LAYERS):
            copy_rows(self.host, slots, self.gpu[layer], None, None)

    def drift(self, factor: float) -> None:
        """One step of the process, for all layers; in the second half of them all heads have positive weights."""
        rest = (1 - factor * factor) ** 0.5
        self.query.mul_(factor).add_(torch.randn_like(self.query), alpha=rest)
        if self.shape.weights_drift:
            self.weights.mul_(factor).add_(torch.randn_like(self.weights), alpha=rest * HEADS**-0.5)
        self.fp8_query.copy_(self.query)
        self.used_weights.copy_(self.weights)
        self.used_weights[LAYERS // 2 :].abs_()

    def warm_up(self, factor: float, num_steps: int, *, lists: bool = False) -> float:
        """Decode steps without prefetch; returns the hit rate of the last third. `lists`: margins get to know them."""
        counted = None
        for number in range(num_steps):
            self.drift(factor)
            cache_ops.begin_step(self.maps, self.step)
            if number == num_steps - num_steps // 3:
                counted = self.maps.totals.clone()
            for layer in range(LAYERS):
                (self.serial_lists if lists else self.serial)(layer)
        cache_ops.begin_step(self.maps, self.step)  # adds the counts of the last one
        assert counted is not None
        selected, missing = (self.maps.totals - counted)[:, :2].sum(0).tolist()
        return 1 - missing / selected

    def find_drift(self, hit_rate: float) -> float:
        """The factor at which the hit rate is nearest to the wanted one (bisection)."""
        low, high = 0.0, 0.9999
        for _ in range(9):
            # Hit rates change fastest near one.
            middle = 1 - ((1 - low) * (1 - high)) ** 0.5
            self.restart()
            if self.warm_up(middle, SEARCH_STEPS) < hit_rate:
                low = middle
            else:
                high = middle
        return 1 - ((1 - low) * (1 - high)) ** 0.5

    # --- one layer in each mode
    def to_score(self, layer: int) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, IndexFormat]:
        """What every version of the scores takes."""
        return self.fp8_query[layer], self.used_weights[layer], self.pages, self.table, self.lengths, INDEX

    def scores(self, layer: int) -> Tensor:
        if self.deep_gemm is None:
            return cuda_indexer.index_scores_paged(*self.to_score(layer))
        return self.deep_gemm.index_scores_paged(*self.to_score(layer), self.schedule)

    def finish(
        self,
        layer: int,
        scores: Tensor,
        skip: int,
        until: Stage,
        before_resolve: Callable[[], None] = lambda: None,
    ) -> tuple[Tensor, ...]:
        """Top-k and resolve, the look-up in a launch of its own; `skip` candidates are taken."""
        if until == "scores":
            return (scores,)
        selected, _ = topk_positions(
            scores, self.lengths, self.shape.topk, self.predicted[layer], update=True, block_table=self.table
        )
        if until == "top-k":
            return scores, selected
        before_resolve()
        resolution = cache_ops.resolve(self.groups[layer], selected, self.step, self.host, self.gpu[layer], skip=skip)
        return scores, resolution.rows

    def finish_marked(
        self,
        layer: int,
        scores: Tensor,
        skip: int,
        until: Stage,
        lists: ScoreLists | None = None,
        threads: int = THREADS,
        overlap: bool = False,
        late: PrefetchState | None = None,
    ) -> tuple[Tensor, ...]:
        """The same with the look-up in the top-k, which selects from `lists` where they are given; the prefetch of
        `late` goes on beside it."""
        if until == "scores":
            return (scores,)
        maps, k, predicted = self.groups[layer], self.shape.topk, self.predicted[layer]
        if lists is None:
            rest = None if late is None else Late(late, self.host, self.gpu[layer])
            marked: Marked = mark_topk(maps, scores, self.lengths, k, predicted, self.table, self.step, late=rest)
        else:
            marked = mark_topk_lists(
                maps,
                scores,
                self.lengths,
                k,
                predicted,
                self.margins[layer],
                lists,
                self.table,
                self.step,
                threads=threads,
                overlap=overlap,
            )
        if until == "top-k":
            return scores, marked.rows
        resolution = cache_ops.place(
            maps, marked, self.step, self.host, self.gpu[layer], skip=skip, dependent=lists is None
        )
        return scores, resolution.rows

    def serial(self, layer: int, until: Stage = "recall") -> tuple[Tensor, ...]:
        """Scores (DeepGEMM where it is there), top-k, resolve with all copies."""
        return self.finish(layer, self.scores(layer), self.shape.batch, until)

    def serial_marked(self, layer: int, until: Stage = "recall") -> tuple[Tensor, ...]:
        """The same with the look-up in the top-k."""
        return self.finish_marked(layer, self.scores(layer), self.shape.batch, until)

    def serial_own(
        self, layer: int, until: Stage = "recall", *, instance: Instance = SCORES_ONLY
    ) -> tuple[Tensor, ...]:
        """The same with this project's scores."""
        scores = cuda_indexer.index_scores_paged(*self.to_score(layer), instance=instance)
        return self.finish_marked(layer, scores, self.shape.batch, until)

    def serial_lists(self, layer: int, until: Stage = "recall") -> tuple[Tensor, ...]:
        """The same with a top-k from lists that the scoring kernel makes."""
        lists = cuda_indexer.make_lists(self.pages.device)
        scores = cuda_indexer.index_scores_paged(
            *self.to_score(layer), predicted=self.predicted[layer], margins=self.margins[layer], lists=lists
        )
        return self.finish_marked(layer, scores, self.shape.batch, until, lists)

    def fused(
        self,
        layer: int,
        until: Stage = "recall",
        *,
        instance: Instance = WITH_PREFETCH,
        lists: bool = False,
        threads: int = THREADS,
        overlap: bool = False,
        late: bool = True,
    ) -> tuple[Tensor, ...]:
        """Scores and prefetch in one kernel, which with `lists` also lists for the top-k. `late`: the prefetch goes on
        beside the top-k."""
        # Every instance has as many lists of late candidates as warps.
        num_late_lists = cuda_indexer.num_late_lists(self.pages.device, instance) if late and not lists else 0
        state = self.states[layer]
        state = state._replace(late=state.late[:, :num_late_lists])
        made = cuda_indexer.make_lists(self.pages.device) if lists else None
        scores = cuda_indexer.index_scores_prefetch(
            *self.to_score(layer),
            predicted=self.predicted[layer],
            maps=self.groups[layer],
            state=state,
            step=self.step,
            host_rows=self.host,
            gpu_rows=self.gpu[layer],
            margins=self.margins[layer] if lists else None,
            lists=made,
            instance=instance,
        )
        skip = self.shape.batch + self.shape.set_aside
        return self.finish_marked(layer, scores, skip, until, made, threads, overlap, state if late else None)

    def branch(self, layer: int, until: Stage = "recall", *, num_parts: int, last: bool = True) -> tuple[Tensor, ...]:
        """Scores of one range of the context after the other; a second branch prefetches each when it is scored.

        `last`: the last range too, beside the top-k.
        """
        main = torch.cuda.current_stream()
        blocks = self.table.shape[1]
        scores = torch.empty(self.shape.batch, blocks * BLOCK_SIZE, device="cuda")
        predicted = self.predicted[layer].clone()  # top-k updates it beside the last range
        for part in range(num_parts):
            first, end = blocks * part // num_parts, blocks * (part + 1) // num_parts
            cuda_indexer.index_scores_paged(*self.to_score(layer), out=scores, first_block=first, end_block=end)
            if part == num_parts - 1 and not last:
                break
            self.side.wait_stream(main)
            with torch.cuda.stream(self.side):
                indexer_prefetch.prefetch_rows(
                    self.groups[layer],
                    self.states[layer].part(part, num_parts),
                    scores,
                    self.table,
                    self.lengths,
                    predicted,
                    self.step,
                    self.host,
                    self.gpu[layer],
                    first=first * BLOCK_SIZE,
                    end=end * BLOCK_SIZE,
                )
        skip = self.shape.batch + self.shape.set_aside
        return self.finish(layer, scores, skip, until, lambda: main.wait_stream(self.side))

    # --- measuring
    def snapshot(self) -> list[tuple[Tensor, Tensor]]:
        """Every tensor that a mode changes, with a copy."""
        state = self.state._replace(certain=self.state.certain[:1])  # of all layers
        changed = [*self.maps, *state, self.predicted, self.margins, self.step, self.gpu]
        return [(tensor, tensor.clone()) for tensor in changed]

    def measure(
        self,
        mode: Mode,
        saved: list[tuple[Tensor, Tensor]],
        *,
        aside: bool,
        until: Stage = "recall",
    ) -> tuple[float, list[tuple[Tensor, ...]], Tensor]:
        """us a layer, the layers' last results, and what was counted (totals of the prefetch)."""
        times: list[float] = []

        def before() -> None:
            for tensor, copy in saved:
                tensor.copy_(copy)
            if aside:
                indexer_prefetch.set_aside(self.maps, self.state, self.step, self.shape.batch)

        results: list[tuple[Tensor, ...]] = []
        for num_layers in (FEW_LAYERS, LAYERS):
            before()
            for layer in range(num_layers):
                mode(layer, until)  # compiles
            torch.cuda.synchronize()
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                results = [mode(layer, until) for layer in range(num_layers)]
            times.append(replay_us(graph, before, replays=REPLAYS))
            kept = [tuple(tensor.clone() for tensor in result) for result in results]
        counted = self.state.totals.clone()
        if until == "recall":
            self.check(kept)
        return (times[1] - times[0]) / (LAYERS - FEW_LAYERS), kept, counted

    def selected_slots(self, layer: int, scores: Tensor) -> Tensor:
        """int32 [B, k]: the slots of the exact top-k, by a kernel that takes no prediction."""
        return topk_positions(scores, self.lengths, self.shape.topk, block_table=self.table)[0]

    def check(self, results: list[tuple[Tensor, ...]]) -> None:
        """After a replay: what the scores select is resident and protected, with the host's bytes, where it was said to
        be; the maps are right."""
        assert not cache_ops.violations(self.maps, self.step).any(), "broken maps"
        for layer, (scores, rows) in enumerate(results):
            slots = self.selected_slots(layer, scores)
            valid = slots >= 0
            assert torch.equal(valid, rows >= 0), "selected rows are missing"
            assert torch.equal(self.maps.host_to_gpu[layer][slots[valid]], rows[valid]), "SELECTIONS DIFFER"
            assert bool((self.maps.priority[layer][rows[valid]] == self.step).all())
            got = self.gpu[layer][rows[valid]].cpu()
            assert torch.equal(got, self.host[slots[valid].cpu()]), "wrong bytes"

    def listed(self, layer: int) -> Tensor:
        """int64 [B]: how many scores of each row the kernel would list for the next step."""
        lists = cuda_indexer.make_lists(self.pages.device)
        cuda_indexer.index_scores_paged(
            *self.to_score(layer), predicted=self.predicted[layer], margins=self.margins[layer], lists=lists
        )
        inside = torch.arange(lists.entries.shape[1], device="cuda") < lists.headers[:, COUNT, None]
        return torch.bincount(lists.entries[inside][:, 1] >> POSITION_BITS, minlength=self.shape.batch)

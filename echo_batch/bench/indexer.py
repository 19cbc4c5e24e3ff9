"""Times scores, top-k and resolve of a decode layer with and without prefetch on one GPU, on a drifting workload.

`python -m echo_batch.bench.indexer [--hit-rates 0.97,0.9,0.5] [--json PATH]`. Queries (with `--head-weights drifting`
the heads' weights too, which moves the k-th score far more) follow an AR(1) process over random keys; its factor is
searched so that the cache of N_G rows, run for many steps, has the wanted hit rate. So the predicted thresholds, the
missing rows and what else is resident are those of such a drift, not drawn by hand.

All modes start from the same state and resolve the same selection, each as one CUDA graph of a few layers; times are
medians in microseconds a layer, without the graph's own launch: the difference between graphs of many and of few
layers, divided by the difference in layers. After the timing every mode's result is checked: scores and selections
equal, all selected rows resident with the host's bytes, maps consistent.
"""

import argparse
import json
import statistics
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from echo_batch.bench.kernels import measure_us
from echo_batch.cache.spec import NUM_CANDIDATES
from echo_batch.kernels.cache_layout import MISSING
from echo_batch.kernels.contracts import GroupMaps, make_maps
from echo_batch.kernels.cuda import indexer as cuda_indexer
from echo_batch.kernels.cuda.indexer import SCORES_ONLY, WITH_PREFETCH, Instance
from echo_batch.kernels.cuda.topk import topk_positions
from echo_batch.kernels.formats import BLOCK_SIZE, IndexFormat, RowFormat
from echo_batch.kernels.libs.deep_gemm import DeepGemm, load_deep_gemm
from echo_batch.kernels.prefetch_state import PrefetchState, make_prefetch_state
from echo_batch.kernels.triton import cache_ops, indexer_prefetch
from echo_batch.kernels.triton.row_copy import copy_rows
from echo_batch.kernels.triton.slots import positions_to_slots

HEADS = 64
INDEX = IndexFormat("fp8")
ROWS = RowFormat("fp8")
LAYERS = 4
FEW_LAYERS = 1
REPLAYS = 25
WARM_STEPS = 100
SEARCH_STEPS = 80
STUDY_STEPS = 12


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

    def __init__(self, shape: Shape, library: DeepGemm | None) -> None:
        self.shape = shape
        self.library = library
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
        self.state: PrefetchState = make_prefetch_state(LAYERS, shape.set_aside, device)
        self.step = torch.zeros(1, dtype=torch.int32, device=device)
        self.predicted = torch.empty(LAYERS, shape.batch, device=device)
        self.query = torch.empty(LAYERS, shape.batch, HEADS, INDEX.head_dim, device=device)
        self.weights = torch.empty(LAYERS, shape.batch, HEADS, device=device)
        self.fp8_query = torch.empty_like(self.query, dtype=torch.float8_e4m3fn)
        self.used_weights = torch.empty_like(self.weights)
        self.schedule = None if library is None else library.index_schedule(self.lengths)
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

    def warm_up(self, factor: float, num_steps: int) -> float:
        """Decode steps without prefetch; returns the hit rate of the last third."""
        counted = None
        for number in range(num_steps):
            self.drift(factor)
            cache_ops.begin_step(self.maps, self.step)
            if number == num_steps - num_steps // 3:
                counted = self.maps.totals.clone()
            for layer in range(LAYERS):
                self.serial(layer)
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
    def scores(self, layer: int) -> Tensor:
        arguments = (self.fp8_query[layer], self.used_weights[layer], self.pages, self.table, self.lengths, INDEX)
        if self.library is None:
            return cuda_indexer.index_scores_paged(*arguments)
        return self.library.index_scores_paged(*arguments, self.schedule)

    def finish(self, layer: int, scores: Tensor, skip: int, before_resolve: Callable[[], None]) -> tuple[Tensor, ...]:
        """Top-k and resolve; the candidates before `skip` are set aside."""
        selected, _ = topk_positions(scores, self.lengths, self.shape.topk, self.predicted[layer], update=True)
        slots = positions_to_slots(selected, self.table)
        before_resolve()
        resolution = cache_ops.resolve(self.groups[layer], slots, self.step, self.host, self.gpu[layer], skip=skip)
        return scores, slots, resolution.rows

    def serial(self, layer: int) -> tuple[Tensor, ...]:
        """Scores (DeepGEMM where it is there), top-k, resolve with all copies."""
        return self.finish(layer, self.scores(layer), self.shape.batch, lambda: None)

    def serial_own(self, layer: int, *, instance: Instance = SCORES_ONLY) -> tuple[Tensor, ...]:
        """The same with this project's scores."""
        arguments = (self.fp8_query[layer], self.used_weights[layer], self.pages, self.table, self.lengths, INDEX)
        scores = cuda_indexer.index_scores_paged(*arguments, instance=instance)
        return self.finish(layer, scores, self.shape.batch, lambda: None)

    def fused(self, layer: int, *, instance: Instance = WITH_PREFETCH) -> tuple[Tensor, ...]:
        """Scores and prefetch in one kernel."""
        scores = cuda_indexer.index_scores_prefetch(
            self.fp8_query[layer],
            self.used_weights[layer],
            self.pages,
            self.table,
            self.lengths,
            INDEX,
            predicted=self.predicted[layer],
            maps=self.groups[layer],
            state=self.states[layer],
            step=self.step,
            host_rows=self.host,
            gpu_rows=self.gpu[layer],
            instance=instance,
        )
        return self.finish(layer, scores, self.shape.batch + self.shape.set_aside, lambda: None)

    def branch(self, layer: int, *, num_parts: int, last: bool = True) -> tuple[Tensor, ...]:
        """Scores of one range of the context after the other; a second branch prefetches each when it is scored.

        `last`: the last range too, beside the top-k.
        """
        main = torch.cuda.current_stream()
        blocks = self.table.shape[1]
        scores = torch.empty(self.shape.batch, blocks * BLOCK_SIZE, device="cuda")
        predicted = self.predicted[layer].clone()  # top-k updates it beside the last range
        for part in range(num_parts):
            first, end = blocks * part // num_parts, blocks * (part + 1) // num_parts
            cuda_indexer.index_scores_paged(
                self.fp8_query[layer],
                self.used_weights[layer],
                self.pages,
                self.table,
                self.lengths,
                INDEX,
                out=scores,
                first_block=first,
                end_block=end,
            )
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
        return self.finish(layer, scores, skip, lambda: main.wait_stream(self.side))

    # --- measuring
    def snapshot(self) -> list[tuple[Tensor, Tensor]]:
        """Every tensor that a mode changes, with a copy."""
        changed = [*self.maps, *self.state, self.predicted, self.step, self.gpu]
        return [(tensor, tensor.clone()) for tensor in changed]

    def measure(
        self, mode: Callable[[int], tuple[Tensor, ...]], saved: list[tuple[Tensor, Tensor]], *, aside: bool
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
                mode(layer)  # compiles
            torch.cuda.synchronize()
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                results = [mode(layer) for layer in range(num_layers)]
            samples = []
            for _ in range(REPLAYS):
                before()
                start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
                start.record()
                graph.replay()
                end.record()
                end.synchronize()
                samples.append(start.elapsed_time(end) * 1000)
            times.append(statistics.median(samples[3:]))
            kept = [tuple(tensor.clone() for tensor in result) for result in results]
        counted = self.state.totals.clone()
        self.check(kept)
        return (times[1] - times[0]) / (LAYERS - FEW_LAYERS), kept, counted

    def check(self, results: list[tuple[Tensor, ...]]) -> None:
        """After a replay: all selected rows are resident and protected, with the host's bytes; the maps are right."""
        assert not cache_ops.violations(self.maps, self.step).any(), "broken maps"
        for layer, (_, slots, rows) in enumerate(results):
            valid = slots >= 0
            assert torch.equal(valid, rows >= 0), "selected rows are missing"
            assert torch.equal(self.maps.host_to_gpu[layer][slots[valid]], rows[valid])
            assert bool((self.maps.priority[layer][rows[valid]] == self.step).all())
            got = self.gpu[layer][rows[valid]].cpu()
            assert torch.equal(got, self.host[slots[valid].cpu()]), "wrong bytes"


@dataclass(frozen=True, slots=True)
class Study:
    """Predictions over STUDY_STEPS steps of one kind of layer. Errors and margins in standard deviations of scores."""

    weights: str
    error: float
    """Mean absolute error of the EMA."""
    error_of_last: float
    """The same of the last step's k-th score as the prediction."""
    candidates: tuple[float, float, float]
    """Scores above the prediction over k: 5th, 50th, 95th percentile."""
    found: dict[str, float]
    """Part of the missing selected rows that are above prediction plus margin, by margin."""
    wasted: dict[str, float]
    """Missing rows above prediction plus margin that are not selected, over the missing selected ones."""


def study(work: Workload, factor: float) -> list[Study]:
    """Goes on decoding without prefetch and looks at the predictions."""
    margins = (-0.05, -0.02, 0.0, 0.02, 0.05)
    k = work.shape.topk
    rows: dict[int, dict[str, list[Tensor]]] = {layer: {} for layer in range(LAYERS)}
    last: dict[int, Tensor] = {}
    for _ in range(STUDY_STEPS):
        for layer in range(LAYERS):
            scores = work.scores(layer)[:, : work.shape.length]
            kth = scores.topk(k).values[:, -1:]
            deviation = scores.std(1, keepdim=True)
            predicted = work.predicted[layer][:, None]
            positions = torch.arange(work.shape.length, device="cuda")
            slots = work.table[:, positions // BLOCK_SIZE] * BLOCK_SIZE + (positions % BLOCK_SIZE).to(torch.int32)
            missing = work.maps.host_to_gpu[layer][slots] < 0
            found = rows[layer]
            found.setdefault("error", []).append((kth - predicted).abs() / deviation)
            if layer in last:
                found.setdefault("last", []).append((kth - last[layer]).abs() / deviation)
            last[layer] = kth
            found.setdefault("ratio", []).append((scores > predicted).sum(1) / k)
            selected = missing & (scores >= kth)
            for margin in margins:
                above = missing & (scores > predicted + margin * deviation)
                found.setdefault(f"found {margin}", []).append((above & selected).sum() / selected.sum())
                found.setdefault(f"wasted {margin}", []).append((above & ~selected).sum() / selected.sum())
            work.serial(layer)
        cache_ops.begin_step(work.maps, work.step)
        work.drift(factor)
    studies = []
    for weights, layers in (("signed", range(LAYERS // 2)), ("positive", range(LAYERS // 2, LAYERS))):

        def mean(name: str, layers: Sequence[int] = layers) -> float:
            return float(torch.stack([torch.stack(rows[layer][name]).mean() for layer in layers]).mean())

        ratios = torch.cat([torch.stack(rows[layer]["ratio"]).flatten() for layer in layers])
        low, half, high = ratios.quantile(torch.tensor((0.05, 0.5, 0.95), device="cuda")).tolist()
        studies.append(
            Study(
                weights,
                mean("error"),
                mean("last"),
                (low, half, high),
                {str(margin): mean(f"found {margin}") for margin in margins},
                {str(margin): mean(f"wasted {margin}") for margin in margins},
            )
        )
        print(f"  {studies[-1]}", flush=True)
    return studies


@dataclass(slots=True)
class Case:
    """What was measured at one hit rate: us a layer by mode, and what the prefetch counted (a layer)."""

    hit_rate: float
    drift: float
    missing: float
    predictions: list[Study]
    us: dict[str, float] = field(default_factory=dict)
    counted: dict[str, list[float]] = field(default_factory=dict)


def run_case(work: Workload, hit_rate: float, instances: dict[str, Instance], parts: Sequence[int]) -> Case:
    """All modes at one hit rate."""
    factor = work.find_drift(hit_rate)
    work.restart()
    reached = work.warm_up(factor, WARM_STEPS)
    work.drift(factor)
    predictions = study(work, factor)
    saved = work.snapshot()
    _, reference, _ = work.measure(work.serial, saved, aside=False)
    missing = float(work.maps.counts[:, MISSING].float().mean())
    case = Case(reached, factor, missing, predictions)
    modes: dict[str, tuple[Callable[[int], tuple[Tensor, ...]], bool]] = {
        "serial": (work.serial, False),
        "serial, own scores": (work.serial_own, False),
    }
    for name, instance in instances.items():
        modes[f"fused {name}"] = (partial(work.fused, instance=instance), True)
    for num_parts in parts:
        modes[f"branch {num_parts}"] = (partial(work.branch, num_parts=num_parts), True)
        modes[f"branch {num_parts}, not the last"] = (partial(work.branch, num_parts=num_parts, last=False), True)
    modes["serial again"] = (work.serial, False)
    own: list[tuple[Tensor, ...]] | None = None
    print(
        f"hit rate {reached:.3f} (drift {factor:.5f}): {missing:.0f} of {work.shape.batch * work.shape.topk} missing",
        flush=True,
    )
    for name, (mode, aside) in modes.items():
        try:
            us, results, counted = work.measure(mode, saved, aside=aside)
        except (RuntimeError, AssertionError) as failure:
            print(f"  {name:52} FAILED: {failure}"[:400], flush=True)
            continue
        case.us[name] = us
        equal = all(torch.equal(a[1], b[1]) for a, b in zip(results, reference, strict=True))
        same = "selections equal" if equal else "SELECTIONS DIFFER"
        if own is None and name == "serial, own scores":
            own = results
        if own is not None and "serial" not in name:
            bits = all(torch.equal(a[0], b[0]) for a, b in zip(results, own, strict=True))
            same += ", scores equal" if bits else ", SCORES DIFFER"
        counts = counted.double().mean(0)
        case.counted[name] = counts.tolist()
        ratio_to_serial = case.us["serial"] / us
        print(
            f"  {name:50} {us:8.2f} us {ratio_to_serial:6.3f}x  {same}  {[round(x) for x in counts.tolist()]}",
            flush=True,
        )
    return case


def time_scores(work: Workload, scoring: dict[str, Instance], fused: dict[str, Instance]) -> dict[str, float]:
    """The scoring kernels alone, and what goes with a prefetch."""
    arguments = (work.fp8_query[0], work.used_weights[0], work.pages, work.table, work.lengths, INDEX)
    calls: dict[str, Callable[[], object]] = {}
    if work.library is not None:
        calls["DeepGEMM"] = partial(work.library.index_scores_paged, *arguments, work.schedule)
    for name, instance in scoring.items():
        calls[f"own {name}"] = partial(cuda_indexer.index_scores_paged, *arguments, instance=instance)
    nothing = torch.full_like(work.predicted[0], float("inf"))
    for name, instance in fused.items():
        calls[f"fused {name}, nothing to prefetch"] = partial(
            cuda_indexer.index_scores_prefetch,
            *arguments,
            predicted=nothing,
            maps=work.groups[0],
            state=work.states[0],
            step=work.step,
            host_rows=work.host,
            gpu_rows=work.gpu[0],
            instance=instance,
        )
    scores = cuda_indexer.index_scores_paged(*arguments)
    exact = scores.topk(work.shape.topk).values[:, -1].contiguous()
    calls["top-k"] = partial(topk_positions, scores, work.lengths, work.shape.topk, exact)
    result = {}
    for name, call in calls.items():
        result[name] = measure_us([call])
        rate = work.shape.batch * work.shape.length * INDEX.row_bytes / result[name] / 1000
        print(f"{name:52} {result[name]:8.2f} us {rate:8.0f} GB/s of keys", flush=True)
    if work.library is not None:
        theirs = work.library.index_scores_paged(*arguments, work.schedule)
        equal = torch.equal(theirs[:, : work.shape.length], scores[:, : work.shape.length])
        error = (theirs - scores).abs().max()
        print(f"same bits as DeepGEMM: {equal}; largest difference {float(error):.3g}", flush=True)
    return result


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path, help="also write the results here")
    parser.add_argument("--hit-rates", default="0.97,0.9,0.5")
    parser.add_argument("--batch", type=int, default=13)
    parser.add_argument("--length", type=int, default=98304)
    parser.add_argument("--head-weights", choices=("fixed", "drifting"), default="fixed")
    parser.add_argument("--parts", default="2,3,4", help="ranges of the context of the branch modes")
    parser.add_argument("--set-aside", type=int, default=4096)
    parser.add_argument("--tune", action="store_true", help="also try other instances of the kernel")
    options = parser.parse_args(arguments)
    shape = Shape(
        batch=options.batch,
        length=options.length,
        set_aside=options.set_aside,
        weights_drift=options.head_weights == "drifting",
    )
    torch.manual_seed(0)
    work = Workload(shape, load_deep_gemm(torch.device("cuda", torch.cuda.current_device())))
    scoring, fused = {"scores": SCORES_ONLY}, {"": WITH_PREFETCH}
    if options.tune:
        for groups, stages, once in ((3, 4, False), (3, 3, True), (3, 5, True), (2, 6, True)):
            scoring[f"{groups} groups, {stages} stages, read once {once}"] = Instance(stages, groups, once)
        for warps, rows, early in ((2, 4, 0), (2, 4, 16), (2, 8, 8), (4, 4, 8)):
            instance = WITH_PREFETCH._replace(prefetch_warps=warps, rows=rows, early=early, queue=1024 // warps)
            fused[f"{warps} warps of {rows} rows, early {early}"] = instance
    work.restart()
    work.drift(0.9)
    report: dict[str, Any] = {"gpu": torch.cuda.get_device_name(), "torch": torch.__version__, "shape": asdict(shape)}
    print(f"{report['gpu']}; {shape}")
    report["kernels_us"] = time_scores(work, scoring, fused)
    report["cases"] = []
    for hit_rate in map(float, options.hit_rates.split(",")):
        case = run_case(work, hit_rate, fused, [int(part) for part in options.parts.split(",")])
        report["cases"].append(asdict(case))
        if options.json is not None:
            options.json.write_text(json.dumps(report, indent=1))


if __name__ == "__main__":
    main()

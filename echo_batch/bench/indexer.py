"""Times scores, top-k and resolve of a decode layer with and without prefetch on one GPU, on a drifting workload.

`python -m echo_batch.bench.indexer [--hit-rates 0.97,0.9,0.5] [--json PATH]`. Queries (with `--head-weights drifting`
the heads' weights too, which moves the k-th score far more) follow an AR(1) process over random keys; its factor is
searched so that the cache of N_G rows, run for many steps, has the wanted hit rate. So the predicted thresholds, the
missing rows and what else is resident are those of such a drift, not drawn by hand.

All modes start from the same state and resolve the same selection, each as one CUDA graph of a few layers; times are
medians in microseconds a layer, without the graph's own launch: the difference between graphs of many and of few
layers, divided by the difference in layers. Stages are timed as graphs that end behind them. After the timing every
mode's result is checked: the same scores, all rows that these select resident with the host's bytes, maps consistent.
"""

import argparse
import json
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from echo_batch.bench.indexer_workload import INDEX, LAYERS, Mode, Shape, Stage, Workload
from echo_batch.bench.kernels import measure_us
from echo_batch.kernels.cache_layout import MISSING
from echo_batch.kernels.cuda import indexer as cuda_indexer
from echo_batch.kernels.cuda.indexer import SCORES_ONLY, WITH_PREFETCH, Instance
from echo_batch.kernels.cuda.topk import topk_positions
from echo_batch.kernels.cuda.topk_lists import topk_lists
from echo_batch.kernels.formats import BLOCK_SIZE
from echo_batch.kernels.libs.deep_gemm import load_deep_gemm
from echo_batch.kernels.triton import cache_ops

WARM_STEPS = 100
STUDY_STEPS = 12


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
            work.serial_lists(layer)
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
    stages: dict[str, dict[Stage, float]] = field(default_factory=dict)
    """us until the end of a stage, by mode."""
    listed: list[int] = field(default_factory=list)
    """Scores that the lists of this step hold, by layer and batch row."""


def run_case(work: Workload, hit_rate: float, instances: dict[str, Instance], parts: Sequence[int]) -> Case:
    """All modes at one hit rate."""
    factor = work.find_drift(hit_rate)
    work.restart()
    reached = work.warm_up(factor, WARM_STEPS, lists=True)
    work.drift(factor)
    predictions = study(work, factor)
    saved = work.snapshot()
    work.measure(work.serial, saved, aside=False)
    missing = float(work.maps.counts[:, MISSING].float().mean())
    case = Case(reached, factor, missing, predictions)
    for tensor, copy in saved:
        tensor.copy_(copy)
    case.listed = torch.cat([work.listed(layer) for layer in range(LAYERS)]).tolist()
    modes: dict[str, tuple[Mode, bool]] = {
        "serial": (work.serial, False),
        "serial, look-up in the top-k": (work.serial_marked, False),
        "serial, own scores": (work.serial_own, False),
        "serial, own scores, lists": (work.serial_lists, False),
    }
    for name, instance in instances.items():
        modes[f"fused {name}"] = (partial(work.fused, instance=instance), True)
        modes[f"fused {name}, over when scored"] = (partial(work.fused, instance=instance, late=False), True)
    modes["fused , lists"] = (partial(work.fused, lists=True), True)
    modes["fused , lists, 512 threads"] = (partial(work.fused, lists=True, threads=512), True)
    modes["fused , lists, overlap"] = (partial(work.fused, lists=True, overlap=True), True)
    for num_parts in parts:
        modes[f"branch {num_parts}"] = (partial(work.branch, num_parts=num_parts), True)
        modes[f"branch {num_parts}, not the last"] = (partial(work.branch, num_parts=num_parts, last=False), True)
    modes["serial again"] = (work.serial, False)
    in_stages = (
        "serial",
        "serial, look-up in the top-k",
        "fused ",
        "fused , over when scored",
        "fused , lists",
    )
    own: list[tuple[Tensor, ...]] | None = None
    print(
        f"hit rate {reached:.3f} (drift {factor:.5f}): {missing:.0f} of {work.shape.batch * work.shape.topk} missing; "
        f"{min(case.listed)} to {max(case.listed)} scores of a row listed",
        flush=True,
    )
    for name, (mode, aside) in modes.items():
        try:
            us, results, counted = work.measure(mode, saved, aside=aside)
        except (RuntimeError, AssertionError) as failure:
            print(f"  {name:52} FAILED: {failure}"[:400], flush=True)
            continue
        case.us[name] = us
        same = "selections right"
        if own is None and name == "serial, own scores":
            own = results
        if own is not None:
            bits = all(torch.equal(a[0], b[0]) for a, b in zip(results, own, strict=True))
            same += ", scores equal" if bits else ", SCORES DIFFER"
        counts = counted.double().mean(0)
        case.counted[name] = counts.tolist()
        split = ""
        if name in in_stages:
            stages: dict[Stage, float] = {"recall": us}
            for until in ("top-k", "scores"):
                stages[until] = work.measure(mode, saved, aside=aside, until=until)[0]
            case.stages[name] = stages
            scores_us, topk_us = stages["scores"], stages["top-k"] - stages["scores"]
            split = f"= {scores_us:.1f} + {topk_us:.1f} + {us - stages['top-k']:.1f}"
        print(
            f"  {name:42} {us:8.2f} us {case.us['serial'] / us:6.3f}x {split:22} {same}  "
            f"{[round(x) for x in counts.tolist()]}",
            flush=True,
        )
    return case


def time_scores(work: Workload, scoring: dict[str, Instance], fused: dict[str, Instance]) -> dict[str, float]:
    """The scoring kernels alone, and what goes with a prefetch."""
    arguments = work.to_score(0)
    calls: dict[str, Callable[[], object]] = {}
    if work.deep_gemm is not None:
        calls["DeepGEMM"] = partial(work.deep_gemm.index_scores_paged, *arguments, work.schedule)
    for name, instance in scoring.items():
        calls[f"own {name}"] = partial(cuda_indexer.index_scores_paged, *arguments, instance=instance)
    nothing = torch.full_like(work.predicted[0], float("inf"))
    for name, instance in fused.items():
        calls[f"fused {name}, nothing to prefetch"] = partial(
            cuda_indexer.index_scores_prefetch,
            *arguments,
            predicted=nothing,
            maps=work.groups[0],
            state=work.states[0]._replace(
                late=work.states[0].late[:, : cuda_indexer.num_late_lists(work.pages.device, instance)]
            ),
            step=work.step,
            host_rows=work.host,
            gpu_rows=work.gpu[0],
            instance=instance,
        )
    scores = cuda_indexer.index_scores_paged(*arguments)
    exact = scores.topk(work.shape.topk).values[:, -1].contiguous()
    calls["top-k"] = partial(topk_positions, scores, work.lengths, work.shape.topk, exact)
    best = scores[:, : work.shape.length].topk(2 * work.shape.topk).values
    margins, lists = exact - best[:, -1], cuda_indexer.make_lists(scores.device)
    listing = partial(cuda_indexer.index_scores_paged, *arguments, predicted=exact, margins=margins, lists=lists)
    listing()
    calls["own scores, 2 k of a row listed"] = listing
    # Both keep up the prediction and the margin of what they are given: the same scores each time.
    for threads in (512, 1024):
        calls[f"top-k from lists, {threads} threads"] = partial(
            topk_lists, scores, work.lengths, work.shape.topk, exact.clone(), margins.clone(), lists, threads=threads
        )
    none = lists._replace(headers=torch.zeros_like(lists.headers))
    calls["top-k from lists, none of use"] = partial(
        topk_lists, scores, work.lengths, work.shape.topk, exact.clone(), margins.clone(), none
    )
    result = {}
    for name, call in calls.items():
        result[name] = measure_us([call])
        rate = work.shape.batch * work.shape.length * INDEX.row_bytes / result[name] / 1000
        print(f"{name:52} {result[name]:8.2f} us {rate:8.0f} GB/s of keys", flush=True)
    if work.deep_gemm is not None:
        theirs = work.deep_gemm.index_scores_paged(*arguments, work.schedule)
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
        for warps, rows, early in ((4, 2, 8), (4, 2, 10), (3, 2, 6), (4, 1, 6)):
            instance = WITH_PREFETCH._replace(prefetch_warps=warps, rows=rows, early=early, queue=768 // warps)
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

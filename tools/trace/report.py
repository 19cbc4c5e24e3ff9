"""Plots and tables of a trace (docs/locality.md): hit rates by pool size, policies compared, prediction of scores.

    python -m tools.trace.report TRACE.npz docs/locality [--triton-steps 96] [--pools 1280,2048,4096]

Needs matplotlib (pip install 'echo-batch[report]'). `--triton-steps`: also run the GPU's Triton cache ops over so many
steps, through Triton's interpreter where there is no GPU (seconds a step).
"""

import argparse
import os
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from echo_batch.kernels.cache_ops import CacheOps, reference_cache_ops
from tools.trace.simulate import HitRates, Prediction, exact_lru, prediction_quality, run_cache_ops, stays
from tools.trace.trace import MARGINS, Trace, load_trace

_WARMUP_STEPS = 32  # of the single-step hit rates that a table calls "later"


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A Markdown table."""
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def interpreted_triton() -> CacheOps:
    """The GPU's ops on this CPU: few programs, because the interpreter runs them one after another."""
    os.environ["TRITON_INTERPRET"] = "1"  # before the kernels are imported
    from echo_batch.kernels.cache_ops import triton_cache_ops
    from echo_batch.kernels.triton import cache_ops

    cache_ops.PLACE_PROGRAMS = 4
    return triton_cache_ops()


def default_pools(trace: Trace) -> list[int]:
    """Pool sizes from the smallest legal one to all tokens."""
    _, _, rows, length = trace.selected.shape
    low = rows * (int(trace.selected.sum(-1).max()) + 1)
    sizes = np.geomspace(low, rows * length, 9)
    return sorted({-(-int(s) // 64) * 64 for s in sizes})


def policy_rows(trace: Trace, pools: Sequence[int], ops: CacheOps) -> list[list[str]]:
    """Exact LRU and one implementation of the cache ops, averaged over groups, and the largest gap of a group."""
    rows = []
    for pool in pools:
        exact, ours = exact_lru(trace, pool).overall, run_cache_ops(trace, pool, ops).overall
        gap = ours - exact
        worst = gap[np.abs(gap).argmax()]
        rows.append([f"{pool:,}", f"{exact.mean():.4f}", f"{ours.mean():.4f}", f"{100 * worst:+.3f}"])
    return rows


def plot_hit_rates(pools: Sequence[int], rates: Sequence[HitRates], path: Path) -> None:
    """Hit rate of each layer against the pool."""
    import matplotlib.pyplot as plt

    figure, (left, right) = plt.subplots(1, 2, figsize=(10, 3.6), layout="constrained")
    for group in range(len(rates[0].overall)):
        left.plot(pools, [r.overall[group] for r in rates], marker="o", markersize=3, label=f"layer {group}")
    left.set(xscale="log", xlabel="GPU pool N_G (tokens)", ylabel="hit rate, exact LRU", title="by pool size")
    left.legend()
    left.set_xticks(pools, [f"{p:,}" for p in pools], rotation=45, fontsize=7)
    left.minorticks_off()
    for pool, rate in list(zip(pools, rates, strict=True))[::2]:
        mean = rate.by_step.mean(1)
        smooth = np.convolve(mean, np.ones(16) / 16, mode="valid")
        right.plot(np.arange(len(smooth)) + 16, smooth, label=f"N_G {pool:,}", linewidth=1)
    right.set(xlabel="decode step (mean of 16)", title="by step, mean of the layers")
    right.legend(fontsize=7)
    for axes in (left, right):
        axes.grid(alpha=0.3)
    figure.savefig(path, dpi=90)
    plt.close(figure)


def plot_prediction(trace: Trace, quality: Prediction, path: Path) -> None:
    """One row's k-th score and its prediction; errors; candidates against the margin."""
    import matplotlib.pyplot as plt

    figure, (score, error, count) = plt.subplots(1, 3, figsize=(13, 3.6), layout="constrained")
    part, group = slice(0, min(128, trace.num_steps)), 1
    score.plot(trace.kth[part, group, 0], label="k-th score", linewidth=1)
    score.plot(trace.predicted[part, group, 0], label="prediction", linewidth=1)
    score.set(xlabel="decode step", title=f"layer {group}, row 0")
    score.legend()
    for g in range(trace.num_groups):
        sizes = np.sort(np.abs(trace.predicted - trace.kth)[1:, g].ravel() / trace.spread[1:, g].ravel())
        error.plot(sizes, np.linspace(0, 1, len(sizes)), label=f"layer {g}")
        count.plot(quality.candidates[g], quality.enough[g], marker="o", markersize=3, label=f"layer {g}")
    error.set(xlabel="|prediction - k-th score| / std of scores", title="share of selections with less error")
    count.set(xlabel="candidates / k", title=f"share with all of the top k, margin to {MARGINS[-1]:g} std")
    for axes in (score, error, count):
        axes.grid(alpha=0.3)
    count.legend()
    figure.savefig(path, dpi=90)
    plt.close(figure)


def prediction_table(quality: Prediction) -> str:
    """Errors and candidates of every group."""
    rows = []
    for g in range(len(quality.mean_error)):
        pairs = zip(quality.candidates[g], quality.enough[g], strict=True)
        rows.append([
            str(g), f"{quality.mean_error[g]:.2f}", f"{quality.mean_error_of_last[g]:.2f}",
            f"{quality.worst_error[g]:.2f}", *(f"{c:.2f} ({100 * e:.0f} %)" for c, e in pairs),
        ])  # fmt: skip
    return table(["Layer", "Mean error", "of the last score", "99 %", *(f"{m:g}" for m in MARGINS)], rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("trace", type=Path)
    parser.add_argument("output", type=Path, help="folder for the plots")
    parser.add_argument("--pools", default="", help="pool sizes in tokens, separated by commas")
    parser.add_argument("--triton-steps", type=int, default=0)
    args = parser.parse_args()
    trace = load_trace(args.trace)
    pools = [int(p) for p in args.pools.split(",")] if args.pools else default_pools(trace)
    args.output.mkdir(parents=True, exist_ok=True)
    if args.triton_steps:
        short = trace.first_steps(args.triton_steps)
        print(f"\nTriton's cache ops, {short.num_steps} steps")
        print(table(["N_G", "exact LRU", "ours", "largest gap of a layer (points)"],
                    policy_rows(short, pools, interpreted_triton())))  # fmt: skip
        return
    rates = [exact_lru(trace, pool) for pool in pools]
    quality = prediction_quality(trace)
    print(f"{trace.num_steps} steps, {trace.selected.shape[2]} rows; of a selection the step before had:", end=" ")
    print(", ".join(f"{100 * s:.1f} %" for s in stays(trace)))
    engine = trace.engine_hits / trace.engine_selected
    print(f"hit rates that the engine counted at N_G = {trace.gpu_tokens:,}: {engine.round(4).tolist()}\n")
    print("Hit rate by layer, exact LRU")
    later = [r.by_step[_WARMUP_STEPS:].mean() for r in rates]
    print(table(["N_G", *(f"layer {g}" for g in range(trace.num_groups)), f"all, after {_WARMUP_STEPS} steps"],
                [[f"{p:,}", *(f"{x:.4f}" for x in r.overall), f"{x:.4f}"]
                 for p, r, x in zip(pools, rates, later, strict=True)]))  # fmt: skip
    print("\nReference cache ops")
    print(table(["N_G", "exact LRU", "ours", "largest gap of a layer (points)"],
                policy_rows(trace, pools, reference_cache_ops())))  # fmt: skip
    print("\nPrediction, in standard deviations of the scores; candidates / k (share of whole top k) by margin")
    print(prediction_table(quality))
    plot_hit_rates(pools, rates, args.output / "hit-rates.png")
    plot_prediction(trace, quality, args.output / "prediction.png")


if __name__ == "__main__":
    main()

"""How well the k-th index score of a decode step predicts that of the next, on synthetic drifts (docs/prefetch.md).

    python tools/studies/prefetch_thresholds.py [--length 98304] [--drifts 0.999,0.99] [--json PATH]

One request: random unit-variance keys, 64 index heads whose queries follow an AR(1) process, a least-recently-used
cache of the request's share of the GPU pool. Three kinds of head weights: fixed and positive, fixed of both signs, and
both signs drifting like the queries. Runs on the CPU in fp32; a step at 98,304 tokens takes about a tenth of a second.
"""

import argparse
import json
from dataclasses import asdict, dataclass, field
from pathlib import Path

import torch
from torch import Tensor

HEADS, DIM, TOPK = 64, 128, 2048
WARM_STEPS, STEPS = 40, 24
MARGINS = (-0.05, -0.02, 0.0, 0.02)
"""Added to the prediction, in standard deviations of the scores."""


@dataclass(slots=True)
class Result:
    """One drift. Errors are means of absolute values in standard deviations of the scores; counts are over k."""

    weights: str
    drift: float
    hit_rate: float
    kth: float
    """Mean k-th score, in standard deviations from the mean score."""
    error: dict[str, float] = field(default_factory=dict)
    """By predictor: `ema` (a half of the old prediction), `last` (the last step's k-th score)."""
    candidates: dict[str, list[float]] = field(default_factory=dict)
    """By margin: scores above the EMA's prediction, 5th, 50th and 95th percentile over the steps."""
    found: dict[str, float] = field(default_factory=dict)
    """By margin: part of the missing selected rows that are above it."""
    wasted: dict[str, float] = field(default_factory=dict)
    """By margin: missing rows above it that are not selected, over the missing selected rows."""


def scores_of(keys: Tensor, query: Tensor, weights: Tensor) -> Tensor:
    """sum_h weight[h] * relu(query[h] . key) for keys [L, DIM], query [HEADS, DIM], weights [HEADS]."""
    return torch.cat([(part @ query.T).relu_() @ weights for part in keys.split(8192)])


def run(keys: Tensor, kind: str, drift: float, cache_rows: int, generator: torch.Generator) -> Result:
    """WARM_STEPS steps, then STEPS that are counted."""

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator)

    query, head = normal(HEADS, DIM), normal(HEADS)
    change = (1 - drift * drift) ** 0.5
    last_used = torch.randint(-100, 0, (keys.shape[0],), generator=generator)
    prediction = last = float("nan")
    errors: dict[str, list[float]] = {"ema": [], "last": []}
    ratios: dict[float, list[float]] = {margin: [] for margin in MARGINS}
    counts: dict[float, list[int]] = {margin: [0, 0] for margin in MARGINS}
    num_missing = 0
    kths = []
    for step in range(WARM_STEPS + STEPS):
        query = drift * query + change * normal(HEADS, DIM)
        if kind == "drifting":
            head = drift * head + change * normal(HEADS)
        scores = scores_of(keys, query, head.abs() if kind == "positive" else head)
        top = scores.topk(TOPK)
        kth, deviation = float(top.values[-1]), float(scores.std())
        if step >= WARM_STEPS:
            resident = torch.zeros(keys.shape[0], dtype=torch.bool)
            resident[last_used.topk(cache_rows).indices] = True
            selected = torch.zeros_like(resident)
            selected[top.indices] = True
            missing = selected & ~resident
            num_missing += int(missing.sum())
            kths.append((kth - float(scores.mean())) / deviation)
            errors["ema"].append(abs(kth - prediction) / deviation)
            errors["last"].append(abs(kth - last) / deviation)
            for margin in MARGINS:
                above = scores > prediction + margin * deviation
                ratios[margin].append(float(above.sum()) / TOPK)
                counts[margin][0] += int((above & missing).sum())
                counts[margin][1] += int((above & ~selected & ~resident).sum())
        last_used[top.indices] = step
        prediction = kth if prediction != prediction else 0.5 * prediction + 0.5 * kth
        last = kth

    def mean(values: list[float]) -> float:
        return sum(values) / len(values)

    result = Result(kind, drift, 1 - num_missing / (STEPS * TOPK), mean(kths))
    result.error = {name: mean(values) for name, values in errors.items()}
    at = torch.tensor((0.05, 0.5, 0.95))
    for margin in MARGINS:
        result.candidates[str(margin)] = torch.tensor(ratios[margin]).quantile(at).tolist()
        result.found[str(margin)] = counts[margin][0] / max(1, num_missing)
        result.wasted[str(margin)] = counts[margin][1] / max(1, num_missing)
    return result


def table(results: list[Result]) -> str:
    """Markdown, for margin 0 and the error of both predictors."""
    lines = [
        "| head weights | drift | hit rate | k-th score | error, EMA | error, last | candidates / k (5, 50, 95 %) "
        "| found | wasted |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for r in results:
        ratios = ", ".join(f"{ratio:.2f}" for ratio in r.candidates["0.0"])
        cells = [
            r.weights,
            r.drift,
            f"{r.hit_rate:.3f}",
            f"{r.kth:.2f}",
            f"{r.error['ema']:.3f}",
            f"{r.error['last']:.3f}",
        ]
        cells += [ratios, f"{r.found['0.0']:.2f}", f"{r.wasted['0.0']:.2f}"]
        lines.append(f"| {' | '.join(map(str, cells))} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--length", type=int, default=98304)
    parser.add_argument("--cache-rows", type=int, default=200_000 // 13, help="the request's share of the GPU pool")
    parser.add_argument("--drifts", default="0.9995,0.998,0.99,0.97,0.9,0.7")
    parser.add_argument("--weights", default="positive,signed,drifting")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    generator = torch.Generator().manual_seed(0)
    keys = torch.randn(options.length, DIM, generator=generator)
    results = []
    for kind in options.weights.split(","):
        for drift in map(float, options.drifts.split(",")):
            results.append(run(keys, kind, drift, options.cache_rows, generator))
            if options.json is not None:
                options.json.write_text(json.dumps([asdict(result) for result in results], indent=1))
    print(table(results))


if __name__ == "__main__":
    main()

"""What a trace says about caching and prediction: hit rates by pool size and policy, errors of the predicted scores.

`exact_lru` is a plain simulation. `run_cache_ops` drives an implementation of the engine's cache ops with the trace:
the torch reference, which the CPU runs, or the Triton kernels, which the GPU runs (interpreted where there is none).
"""

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from echo_batch.cache.spec import NUM_CANDIDATES
from echo_batch.kernels.cache_layout import MISSING, NUM_TOTALS, SELECTED
from echo_batch.kernels.cache_ops import CacheOps
from echo_batch.kernels.contracts import make_maps
from tools.trace.trace import MARGINS, Trace

_ROW_BYTES = 16  # of the pools that `run_cache_ops` moves: the fewest that the kernels take


@dataclass(frozen=True, slots=True)
class HitRates:
    """Share of selected rows that were on the GPU, by selection group [G], and the share in each step [S, G]."""

    overall: NDArray[np.float64]
    by_step: NDArray[np.float64]


def exact_lru(trace: Trace, gpu_tokens: int) -> HitRates:
    """Evict what was used longest ago (ties: the earlier slot). A step's own tokens are there without a miss."""
    steps, groups, rows, length = trace.selected.shape
    hits, total = np.zeros((steps, groups)), np.zeros((steps, groups))
    own = np.arange(rows) * length + trace.lengths - 1  # [S, B]: slots of the steps' own tokens
    for group in range(groups):
        resident = trace.warm[group].reshape(-1).copy()
        resident[resident.nonzero()[0][gpu_tokens:]] = False
        last_use = np.where(resident, 0, -1)
        for step in range(steps):
            now = step + 1
            # The step's tokens get a row before anything is selected, so their victims may be selected afterwards.
            _bring(own[step], resident, last_use, now, gpu_tokens)
            chosen = trace.selected[step, group].reshape(-1).nonzero()[0]
            found = resident[chosen]
            hits[step, group], total[step, group] = found.sum(), len(chosen)
            last_use[chosen[found]] = now
            _bring(chosen[~found], resident, last_use, now, gpu_tokens)
    return HitRates(hits.sum(0) / total.sum(0), hits / total)


def _bring(
    slots: NDArray[np.int64], resident: NDArray[np.bool_], last_use: NDArray[np.int64], now: int, gpu_tokens: int
) -> None:
    """Make `slots` resident and used `now`; evict as many as do not fit."""
    there = resident.nonzero()[0]
    too_many = len(there) + len(slots) - gpu_tokens
    if too_many > 0:
        oldest = there[np.argsort(last_use[there], kind="stable")[:too_many]]
        assert (last_use[oldest] < now).all(), "the pool is smaller than a step's selection"
        resident[oldest] = False
    resident[slots] = True
    last_use[slots] = now


def run_cache_ops(trace: Trace, gpu_tokens: int, ops: CacheOps) -> HitRates:
    """Hit rates of the engine's own cache ops on the trace, called as a decode step calls them."""
    steps, groups, rows, length = trace.selected.shape
    device = torch.device("cpu")
    maps = make_maps(
        groups, gpu_tokens=gpu_tokens, host_tokens=rows * length, num_candidates=NUM_CANDIDATES, device=device
    )
    host = torch.zeros(rows * length, _ROW_BYTES, dtype=torch.uint8)
    gpu = torch.zeros(gpu_tokens, _ROW_BYTES, dtype=torch.uint8)
    now = torch.zeros(1, dtype=torch.int32)
    for group in range(groups):
        warm = torch.from_numpy(trace.warm[group].reshape(-1).nonzero()[0].astype(np.int32))
        ops.warm(maps.group(group), warm, now)
    most = int(trace.selected.sum(-1).max())
    seen = np.zeros((steps + 1, groups, 2), dtype=np.int64)
    for step in range(steps):
        ops.begin_step(maps, now)
        own = np.arange(rows) * length + trace.lengths[step] - 1
        ops.append(maps, torch.from_numpy(own.astype(np.int32)), now)
        for group in range(groups):
            slots = torch.full((rows, most), -1, dtype=torch.int32)
            for row in range(rows):
                chosen = trace.selected[step, group, row].nonzero()[0] + row * length
                slots[row, : len(chosen)] = torch.from_numpy(chosen.astype(np.int32))
            ops.resolve(maps.group(group), slots, now, host, gpu)
        totals = (maps.totals + maps.counts[:, :NUM_TOTALS]).numpy()
        seen[step + 1] = totals[:, [SELECTED, MISSING]]
    by_step = np.diff(seen, axis=0)
    overall = 1 - seen[-1, :, 1] / seen[-1, :, 0]
    return HitRates(overall, 1 - by_step[..., 1] / by_step[..., 0])


@dataclass(frozen=True, slots=True)
class Prediction:
    """How well a running mean foretells the k-th score, by selection group [G]; errors in standard deviations of the
    row's scores."""

    mean_error: NDArray[np.float64]
    """|predicted - actual|, averaged over steps and rows."""
    mean_error_of_last: NDArray[np.float64]
    """The same when the step before is the prediction (no mean)."""
    worst_error: NDArray[np.float64]
    """99th percentile of |predicted - actual|."""
    candidates: NDArray[np.float64]
    """[G, margins]: scores above predicted - margin, as a multiple of k, averaged."""
    enough: NDArray[np.float64]
    """[G, margins]: share of selections with at least k such scores, so that the true top k is among them."""


def prediction_quality(trace: Trace) -> Prediction:
    """Over all steps whose k-th score was predicted (all but the first)."""
    known = np.isfinite(trace.predicted)
    assert known[1:].all(), "a prediction is missing after the first step"
    k = trace.selected.sum(-1)[1:]
    error = np.abs(trace.predicted - trace.kth)[1:] / trace.spread[1:]
    of_last = np.abs(trace.kth[:-1] - trace.kth[1:]) / trace.spread[1:]
    above = trace.above[1:] / k[..., None]
    assert above.shape[-1] == len(MARGINS)
    return Prediction(
        mean_error=error.mean((0, 2)),
        mean_error_of_last=of_last.mean((0, 2)),
        worst_error=np.quantile(error, 0.99, axis=(0, 2)),
        candidates=above.mean((0, 2)),
        enough=(trace.above[1:] >= k[..., None]).mean((0, 2)),
    )


def stays(trace: Trace) -> NDArray[np.float64]:
    """[G]: share of a step's selection that the step before had selected too, averaged over steps and rows."""
    both = (trace.selected[1:] & trace.selected[:-1]).sum(-1)
    share: NDArray[np.float64] = (both / trace.selected[1:].sum(-1)).mean((0, 2))
    return share

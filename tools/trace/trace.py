"""A trace of index selections over many decode steps, and its compact file. Knows no model and no engine.

From one step to the next a selection hardly changes, so the file holds the positions as bits, each step's XORed with
the step before, compressed: some 100 bytes for each selection of 256 tokens.
"""

from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

MARGINS = (0.0, 0.1, 0.2, 0.4, 0.8, 1.6)
"""Candidates are counted so far below the predicted k-th score, in standard deviations of the row's scores."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Trace:
    """Selections of B rows in S consecutive decode steps of G selection groups; every row is active in every step."""

    selected: NDArray[np.bool_]
    """[S, G, B, L]: positions that were selected."""
    lengths: NDArray[np.int32]
    """[S, B]: tokens that were scored, the step's own included."""
    kth: NDArray[np.float32]
    """[S, G, B]: the k-th largest score."""
    predicted: NDArray[np.float32]
    """[S, G, B]: what the running mean expected it to be; NaN before the first."""
    spread: NDArray[np.float32]
    """[S, G, B]: standard deviation of the row's scores."""
    above: NDArray[np.int32]
    """[S, G, B, len(MARGINS)]: scores above predicted - margin * spread."""
    warm: NDArray[np.bool_]
    """[G, B, L]: positions on the GPU before the first step."""
    gpu_tokens: int
    """GPU pool of the engine that was recorded."""
    engine_selected: NDArray[np.int64]
    """[G]: rows that it selected."""
    engine_hits: NDArray[np.int64]
    """[G]: of these, rows that were on the GPU."""

    def __post_init__(self) -> None:
        steps, groups, rows, length = self.selected.shape
        assert self.lengths.shape == (steps, rows) and self.warm.shape == (groups, rows, length)
        assert self.kth.shape == self.predicted.shape == self.spread.shape == (steps, groups, rows)
        assert self.above.shape == (steps, groups, rows, len(MARGINS)) and int(self.lengths.max()) <= length

    @property
    def num_steps(self) -> int:
        return self.selected.shape[0]

    @property
    def num_groups(self) -> int:
        return self.selected.shape[1]

    def first_steps(self, num_steps: int) -> "Trace":
        """The same trace, shorter. The engine's counters, which are of the whole, become zero."""
        part = slice(0, num_steps)
        none = np.zeros_like(self.engine_hits)
        return Trace(
            selected=self.selected[part], lengths=self.lengths[part], kth=self.kth[part], above=self.above[part],
            predicted=self.predicted[part], spread=self.spread[part], warm=self.warm, gpu_tokens=self.gpu_tokens,
            engine_selected=none, engine_hits=none,
        )  # fmt: skip


def save_trace(trace: Trace, path: Path) -> None:
    """Write `path` (.npz)."""
    bits = np.packbits(trace.selected, axis=-1)
    bits[1:] ^= bits[:-1].copy()
    np.savez_compressed(
        path,
        allow_pickle=False,
        changed=bits,
        warm=np.packbits(trace.warm, axis=-1),
        length=np.int64(trace.selected.shape[-1]),
        lengths=trace.lengths,
        kth=trace.kth,
        predicted=trace.predicted,
        spread=trace.spread,
        above=trace.above,
        gpu_tokens=np.int64(trace.gpu_tokens),
        engine_selected=trace.engine_selected,
        engine_hits=trace.engine_hits,
    )


def load_trace(path: Path) -> Trace:
    """Read what save_trace wrote. Raises FileNotFoundError, or KeyError for another kind of file."""
    with np.load(path) as file:
        length = int(file["length"])
        bits = np.bitwise_xor.accumulate(file["changed"], axis=0)
        return Trace(
            selected=np.unpackbits(bits, axis=-1, count=length).astype(np.bool_),
            warm=np.unpackbits(file["warm"], axis=-1, count=length).astype(np.bool_),
            lengths=file["lengths"],
            kth=file["kth"],
            predicted=file["predicted"],
            spread=file["spread"],
            above=file["above"],
            gpu_tokens=int(file["gpu_tokens"]),
            engine_selected=file["engine_selected"],
            engine_hits=file["engine_hits"],
        )

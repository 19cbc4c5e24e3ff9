"""Traces of selections: the file, the simulation of caches against the engine's own counters, the recording itself."""

from collections import OrderedDict
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from echo_batch.kernels.cache_ops import reference_cache_ops
from tools.trace.record import record
from tools.trace.simulate import exact_lru, prediction_quality, run_cache_ops, stays
from tools.trace.trace import MARGINS, Trace, load_trace, save_trace

FIXTURE = Path(__file__).with_name("data") / "echo-tiny-trace.npz"
TOP_K = 256


@pytest.fixture(scope="module")
def fixture() -> Trace:
    return load_trace(FIXTURE)


def test_the_fixture_is_small_and_whole(fixture: Trace) -> None:
    assert FIXTURE.stat().st_size < 300_000
    assert fixture.selected.shape[:3] == (192, 4, 2)
    assert (fixture.selected.sum(-1) == TOP_K).all()
    past = np.arange(fixture.selected.shape[-1]) >= fixture.lengths[:, None, :, None]
    assert not (fixture.selected & past).any()
    assert (np.diff(fixture.lengths, axis=0) == 1).all()
    assert 0.6 < stays(fixture).min() < stays(fixture).max() < 0.9


def test_files_come_back_as_they_were(fixture: Trace, tmp_path: Path) -> None:
    short = fixture.first_steps(5)
    save_trace(short, tmp_path / "t.npz")
    again = load_trace(tmp_path / "t.npz")
    for name in Trace.__slots__:
        assert np.array_equal(getattr(short, name), getattr(again, name), equal_nan=True), name


def test_the_ops_hit_as_often_as_the_engine_counted(fixture: Trace) -> None:
    ours = run_cache_ops(fixture, fixture.gpu_tokens, reference_cache_ops())
    hits = ours.overall * fixture.engine_selected
    assert fixture.engine_selected.tolist() == [192 * 2 * TOP_K] * 4
    assert np.rint(hits).tolist() == fixture.engine_hits.tolist()


@pytest.mark.parametrize("gpu_tokens", [704, 1024])
def test_the_reference_is_close_to_exact_lru(fixture: Trace, gpu_tokens: int) -> None:
    ours, exact = run_cache_ops(fixture, gpu_tokens, reference_cache_ops()), exact_lru(fixture, gpu_tokens)
    assert np.abs(ours.overall - exact.overall).max() < 0.003  # they break ties differently
    assert exact_lru(fixture, gpu_tokens + 640).overall.min() > exact.overall.min()


def test_exact_lru_is_an_ordered_dict_where_no_two_uses_tie() -> None:
    """One row that selects one token a step: then the least recently used one is known."""
    steps, length, pool = 400, 464, 24
    generator = np.random.default_rng(1)
    chosen = np.minimum(generator.geometric(0.12, steps), 40)
    selected = np.zeros((steps, 1, 1, length), dtype=np.bool_)
    selected[np.arange(steps), 0, 0, chosen] = True
    base = np.zeros((steps, 1, 1), dtype=np.float32)
    trace = Trace(
        selected=selected, lengths=64 + np.arange(steps, dtype=np.int32)[:, None],
        kth=base, predicted=base, spread=base,
        above=np.zeros((steps, 1, 1, len(MARGINS)), dtype=np.int32), warm=np.zeros((1, 1, length), dtype=np.bool_),
        gpu_tokens=pool, engine_selected=np.zeros(1, dtype=np.int64), engine_hits=np.zeros(1, dtype=np.int64),
    )  # fmt: skip
    cache: OrderedDict[int, None] = OrderedDict()
    hits = 0
    for step, token in enumerate(chosen.tolist()):
        own = 63 + step  # gets its place first, and counts as used after the selected token: its slot is the later one
        for used in (own, token):
            hits += used in cache
            cache[used] = None
            cache.move_to_end(used)
            if len(cache) > pool:
                cache.popitem(last=False)
        cache.move_to_end(own)
    assert exact_lru(trace, pool).overall[0] == hits / steps
    assert 0.3 < hits / steps < 0.9


def test_prediction_is_measured_against_the_next_score(fixture: Trace) -> None:
    quality = prediction_quality(fixture)
    # The running mean of the fixture is that of the engine: half the old mean, half the new score.
    mean = 0.5 * fixture.predicted[1:-1] + 0.5 * fixture.kth[1:-1]
    assert np.allclose(fixture.predicted[2:], mean, atol=1e-6)
    assert (quality.mean_error < quality.mean_error_of_last).all()
    assert (np.diff(quality.candidates, axis=1) > 0).all() and (np.diff(quality.enough, axis=1) >= 0).all()
    perfect = replace(fixture, predicted=fixture.kth)
    assert prediction_quality(perfect).mean_error.max() == 0.0


def test_recording_runs_the_engine() -> None:
    trace = record(num_rows=1, context=576, num_steps=3, gpu_tokens=320)
    assert trace.selected.shape[:3] == (3, 4, 1) and (trace.selected.sum(-1) == TOP_K).all()
    assert trace.lengths[:, 0].tolist() == [577, 578, 579]
    first = np.where(np.isnan(trace.predicted[0]), trace.kth[0], 0.5 * trace.predicted[0] + 0.5 * trace.kth[0])
    assert np.allclose(trace.predicted[1], first, atol=1e-6)
    ours = run_cache_ops(trace, 320, reference_cache_ops())
    assert np.rint(ours.overall * trace.engine_selected).tolist() == trace.engine_hits.tolist()
    assert (trace.engine_selected == 3 * TOP_K).all() and (trace.engine_hits < trace.engine_selected).all()

import pytest

from echo_batch.report.metrics import Snapshot
from echo_batch.report.pace import Pace, eta_seconds, expected_decode_tokens


def test_rates_are_of_the_last_seconds_and_fall_while_nothing_comes():
    pace = Pace(window=10.0)
    assert pace.rate("decode_tokens", 0.0) == 0.0
    for second in range(100):
        tokens = second * 100 if second < 50 else 5000 + (second - 50) * 10
        pace.add(float(second), Snapshot(decode_tokens=tokens))
    assert pace.rate("decode_tokens", 99.0) == pytest.approx(10.0, rel=0.2)
    assert pace.rate("decode_tokens", 999.0) < 1.0


def test_many_updates_do_not_pile_up():
    pace = Pace(window=10.0)
    for i in range(20_000):
        pace.add(i / 1000, Snapshot(decode_tokens=i))
    assert len(pace._marks) <= 20
    assert pace.rate("decode_tokens", 20.0) == pytest.approx(1000.0, rel=0.01)


def test_idle_seconds_count_since_the_last_advance():
    pace = Pace()
    assert pace.idle_seconds(5.0) == 0.0
    pace.add(0.0, Snapshot())
    pace.add(3.0, Snapshot(decode_tokens=1))
    pace.add(9.0, Snapshot(decode_tokens=1, waiting=4))
    assert pace.idle_seconds(10.0) == 7.0


def running(**kwargs):
    return Snapshot(stage="run", **kwargs)


def test_expected_decode_tokens_follow_the_finished_rows_within_the_bound():
    known = {"rows_total": 10, "decode_bound": 1000}
    assert expected_decode_tokens(running(rows_total=10)) is None
    assert expected_decode_tokens(running(**known)) == 1000
    finished = {"rows_done": 2, "finished_rows": 2, "finished_tokens": 40}
    assert expected_decode_tokens(running(**known, **finished)) == 40 + 8 * 20
    assert expected_decode_tokens(running(**known, **finished, decode_tokens=300)) == 300
    assert expected_decode_tokens(running(rows_total=10, decode_bound=100, **finished)) == 100


def test_eta_is_what_a_token_of_each_phase_has_cost():
    half = {
        "rows_total": 4, "rows_done": 2, "finished_rows": 2, "finished_tokens": 20, "decode_bound": 400,
        "prefill_tokens": 100, "prefill_total": 300, "prefill_seconds": 1.0, "decode_tokens": 25, "decode_seconds": 5.0,
    }  # fmt: skip
    assert eta_seconds(running(**half)) == pytest.approx(2.0 + 3.0)
    assert eta_seconds(running(**{**half, "decode_tokens": 0, "decode_seconds": 0.0})) is None
    assert eta_seconds(running(**{**half, "prefill_total": None})) is None
    assert eta_seconds(Snapshot(**half)) is None  # not in the run stage
    done = {**half, "rows_done": 4, "prefill_total": 100, "decode_tokens": 20}
    assert eta_seconds(running(**done)) == 0.0

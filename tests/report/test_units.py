import pytest

from echo_batch.report import units


@pytest.mark.parametrize(
    "value, text",
    [(0, "0"), (9_999, "9,999"), (10_000, "10K"), (1_234_567, "1.23M"), (999_900, "1M"), (2.5e9, "2.5G"), (3e12, "3T")],
)
def test_count(value, text):
    assert units.count(value) == text


@pytest.mark.parametrize("value, text", [(0, "0 B"), (1024, "1 KiB"), (1.5 * 2**30, "1.5 GiB"), (2**40, "1 TiB")])
def test_size(value, text):
    assert units.size(value) == text


@pytest.mark.parametrize(
    "value, text",
    [(0, "0.0s"), (7.26, "7.3s"), (59.97, "1m00s"), (185, "3m05s"), (3599.7, "1h00m"), (90_000, "25h00m")],
)
def test_duration(value, text):
    assert units.duration(value) == text


def test_share():
    assert units.share(None) == "-"
    assert units.share(0.1234) == "12.3 %"

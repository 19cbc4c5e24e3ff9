"""Sizes in words."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from echo_batch.config import Size
from echo_batch.errors import ConfigError
from echo_batch.sizes import format_bytes, parse_bytes, parse_size, short_tokens


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("auto", Size("auto")),
        ("AUTO", Size("auto")),
        ("1.8M", Size("tokens", 1_800_000)),
        ("4K", Size("tokens", 3_968)),
        ("4Ki", Size("tokens", 4_096)),
        ("1Mi", Size("tokens", 1_048_576)),
        ("320", Size("tokens", 320)),
        (320, Size("tokens", 320)),
        ("447", Size("tokens", 384)),
        ("320tok", Size("tokens", 320)),
        ("1.8Mtok", Size("tokens", 1_800_000)),
        ("4Ktokens", Size("tokens", 3_968)),
        ("2.3M", Size("tokens", 2_299_968)),
        ("1_000_000", Size("tokens", 1_000_000)),
        ("80GiB", Size("bytes", 80 * 2**30)),
        ("80GB", Size("bytes", 80e9)),
        ("80 gb", Size("bytes", 80e9)),
        ("1.5TB", Size("bytes", 1.5e12)),
        ("60%", Size("percent", 60.0)),
        ("12.5%", Size("percent", 12.5)),
    ],
)
def test_grammar(text: str | int, size: Size) -> None:
    assert parse_size(text, "--host-pool") == size


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("", "not a size"),
        ("-3", "not a size"),
        ("1e6", "not a size"),
        ("two", "not a size"),
        ("3X", "unknown unit 'X'"),
        ("80G", "80GB for bytes"),
        ("80Gi", "80GiB for bytes"),
        ("63", "less than one block"),
        ("0", "less than one block"),
        ("0GB", "no memory"),
        ("0%", "percentage"),
        ("101%", "percentage"),
        ("50%B", "unknown unit"),
    ],
)
def test_bad_sizes_say_what_to_write(text: str, complaint: str) -> None:
    with pytest.raises(ConfigError, match="--host-pool") as caught:
        parse_size(text, "--host-pool")
    assert complaint in str(caught.value)
    assert caught.value.exit_code == 2


def test_parse_bytes_wants_a_unit() -> None:
    assert parse_bytes("1.5TB", "--host-memory") == 1_500_000_000_000
    assert parse_bytes("512 GiB", "--host-memory") == 512 * 2**30
    for text in ("512", "1.5T", "0GB", "x", "60%"):
        with pytest.raises(ConfigError, match="--host-memory"):
            parse_bytes(text, "--host-memory")


@given(st.integers(64, 10**10))
def test_short_tokens_never_promises_more(tokens: int) -> None:
    size = parse_size(short_tokens(tokens), "x")
    assert size.kind == "tokens"
    assert 0.98 * tokens - 64 <= size.value <= tokens


@pytest.mark.parametrize(
    ("num_bytes", "text"),
    [
        (0, "0 B"),
        (999, "999 B"),
        (1_000, "1.00 kB"),
        (72_028_800_000, "72.0 GB"),
        (999_600_000, "1.00 GB"),
        (178_125_000_000, "178 GB"),
        (1_500_000_000_000, "1.50 TB"),
    ],
)
def test_format_bytes(num_bytes: int, text: str) -> None:
    assert format_bytes(num_bytes) == text

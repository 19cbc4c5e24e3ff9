"""Sizes in words: "1.8M", "4Ki", "320", "80GiB", "60%", "auto" into `Size`, and numbers back into words.

K and M are 1,000 and 1,000,000 tokens, Ki and Mi their 1,024-based forms; a B at the end means bytes.
"""

import re
from decimal import Decimal

from echo_batch.config import Size
from echo_batch.errors import ConfigError
from echo_batch.kernels.formats import BLOCK_SIZE

_NUMBER = re.compile(r"(\d+(?:_\d+)*(?:\.\d+)?|\.\d+)\s*([a-z%]*)", re.IGNORECASE)
_FACTORS = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12} | {
    "ki": 2**10,
    "mi": 2**20,
    "gi": 2**30,
    "ti": 2**40,
}
_GRAMMAR = "write tokens as 1.8M, 4K, 4Ki or 320, bytes as 80GiB or 80GB, a share of free memory as 60%, or auto"


def round_down_to_block(tokens: int) -> int:
    """The largest multiple of BLOCK_SIZE that is not above `tokens`."""
    return tokens // BLOCK_SIZE * BLOCK_SIZE


def round_up_to_block(tokens: int) -> int:
    """The smallest multiple of BLOCK_SIZE that is not below `tokens`."""
    return -(-tokens // BLOCK_SIZE) * BLOCK_SIZE


def parse_size(text: str | int, name: str) -> Size:
    """Read a pool size; token counts are rounded down to whole blocks of 64.

    `name` is the option or key for messages. Raises ConfigError when the text is no size or is less than one block.
    """
    word = str(text).strip()
    if word.lower() == "auto":
        return Size("auto")
    match = _NUMBER.fullmatch(word)
    if match is None:
        raise ConfigError(f"{name}: {word!r} is not a size: {_GRAMMAR}")
    number, unit = Decimal(match[1].replace("_", "")), match[2].lower()
    if unit == "%":
        if not 0 < number <= 100:
            raise ConfigError(f"{name}: a percentage must be above 0 and at most 100, got {word}")
        return Size("percent", float(number))
    if unit.endswith("b") and unit[:-1] in _FACTORS:
        num_bytes = int(number * _FACTORS[unit[:-1]])
        if num_bytes == 0:
            raise ConfigError(f"{name}: {word} is no memory at all")
        return Size("bytes", float(num_bytes))
    factor = re.sub(r"(tok|tokens)$", "", unit)
    if factor in ("g", "gi", "t", "ti"):
        raise ConfigError(
            f"{name}: is {word!r} bytes or tokens? Write {word}B for bytes; tokens are counted in K and M"
        )
    if factor not in _FACTORS:
        raise ConfigError(f"{name}: unknown unit {match[2]!r} in {word!r}: {_GRAMMAR}")
    tokens = round_down_to_block(int(number * _FACTORS[factor]))
    if tokens == 0:
        raise ConfigError(f"{name}: {word} is less than one block of {BLOCK_SIZE} tokens")
    return Size("tokens", float(tokens))


def parse_bytes(text: str, name: str) -> int:
    """Read an amount of memory ("1.5TB", "512GiB"); raises ConfigError when it is none."""
    match = _NUMBER.fullmatch(text.strip())
    unit = match[2].lower() if match else ""
    if match is None or not unit.endswith("b") or unit[:-1] not in _FACTORS or Decimal(match[1].replace("_", "")) == 0:
        raise ConfigError(f"{name}: {text!r} is not an amount of memory: write 1.5TB or 512GiB")
    return int(Decimal(match[1].replace("_", "")) * _FACTORS[unit[:-1]])


def short_tokens(tokens: int) -> str:
    """A size of at most `tokens` with three digits, for a suggestion that is easy to type: 1_372_416 as "1.37M"."""
    for factor, letter in ((10**6, "M"), (10**3, "K")):
        if tokens >= 10 * factor:
            digits = 3 - len(str(tokens // factor))
            scale = 10 ** max(digits, 0)
            return f"{tokens * scale // factor / scale:g}{letter}"
        if factor == 10**6 and tokens >= factor:
            return f"{tokens * 100 // factor / 100:g}{letter}"
    return str(round_down_to_block(tokens) or tokens)


def format_bytes(num_bytes: int) -> str:
    """Bytes in decimal units with three digits, as memory is sold: 72_028_800_000 as "72.0 GB"."""
    value = float(num_bytes)
    for unit in ("B", "kB", "MB", "GB"):
        if value < 999.5:
            return (
                f"{value:.0f} {unit}"
                if unit == "B" or value >= 99.95
                else f"{value:.{1 if value >= 9.995 else 2}f} {unit}"
            )
        value /= 1000
    return f"{value:.2f} TB"

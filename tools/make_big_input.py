"""Write a large input file to measure with: N rows of text of a given size, seeded. Memory stays small.

    python tools/make_big_input.py big.jsonl --rows 200000 --row-bytes 50000

The suffix decides the form: .jsonl, .json (one array), .parquet, and .gz of the text forms.
"""

import argparse
import gzip
import json
import random
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import IO, Any, cast

import pyarrow as pa
import pyarrow.parquet as pq

_POOL_BYTES = 4_000_000


def make_pool(rng: random.Random) -> str:
    """Text of made-up words, from which rows are cut."""
    syllables = [a + b for a in "bcdfghklmnprstvw" for b in ("a", "e", "i", "o", "u", "an", "er")]
    words = ["".join(rng.choices(syllables, k=rng.randint(1, 4))) for _ in range(5_000)]
    pieces, size = [], 0
    while size < _POOL_BYTES:
        sentence = " ".join(rng.choices(words, k=rng.randint(4, 20))) + rng.choice([". ", "? ", ".\n"])
        pieces.append(sentence)
        size += len(sentence)
    return "".join(pieces)


def make_rows(num_rows: int, row_bytes: int, seed: int) -> Iterator[dict[str, Any]]:
    """Rows of `row_bytes` bytes of prompt, give or take a half; no two are alike."""
    rng = random.Random(seed)
    pool = make_pool(rng)
    for i in range(num_rows):
        length = int(row_bytes * rng.uniform(0.5, 1.5))
        text = ""
        while len(text) < length:
            at = rng.randrange(len(pool))
            text += pool[at : at + length - len(text)]
        yield {"id": i, "prompt": text, "max_tokens": rng.choice([16, 128, 1024])}


def write_rows(path: Path, rows: Iterator[dict[str, Any]]) -> None:
    """Write rows in the form that the suffix names."""
    if path.suffix == ".parquet":
        schema = pa.schema([("id", pa.int64()), ("prompt", pa.large_string()), ("max_tokens", pa.int64())])
        with pq.ParquetWriter(path, schema, compression="zstd") as writer:
            batch: list[dict[str, Any]] = []
            for row in rows:
                batch.append(row)
                if len(batch) == 1_000:
                    writer.write_table(pa.Table.from_pylist(batch, schema=schema))
                    batch = []
            writer.write_table(pa.Table.from_pylist(batch, schema=schema))
        return
    is_array = path.name.removesuffix(".gz").endswith(".json")
    with ExitStack() as stack:
        file: IO[str] = stack.enter_context(path.open("w", encoding="utf-8"))
        if path.suffix == ".gz":
            file = cast(IO[str], stack.enter_context(gzip.open(path, "wt", compresslevel=1)))
        for i, row in enumerate(rows):
            file.write(("[" if i == 0 else ",\n") * is_array + json.dumps(row) + "\n" * (not is_array))
        file.write("]" * is_array)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0] if __doc__ else None)
    parser.add_argument("path", type=Path)
    parser.add_argument("--rows", type=int, default=20_000)
    parser.add_argument("--row-bytes", type=int, default=50_000)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    write_rows(args.path, make_rows(args.rows, args.row_bytes, args.seed))
    print(f"{args.path}: {args.rows} rows, {args.path.stat().st_size / 1e6:.0f} MB")


if __name__ == "__main__":
    main()

"""Write examples/demo.parquet: 16 questions for echo-tiny (10 of 2K tokens, 4 of 4K, 1 of 8K, 1 of 16K).

    python -m tools.train_tiny.make_demo [OUTPUT]

Columns id, prompt, answer. Passkey and key-value questions alternate; the longest is a key-value question. The seed is
not one of the evaluation's.
"""

import argparse
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from tools.train_tiny.tasks import TaskName, load_generator

SIZES: tuple[tuple[int, int], ...] = ((2048, 10), (4096, 4), (8192, 1), (16384, 1))
DEMO_SEED = 2026
DEFAULT_OUTPUT = Path(__file__).parents[2] / "examples" / "demo.parquet"


def demo_rows() -> list[dict[str, str]]:
    """The rows in file order."""
    generator = load_generator(seed=DEMO_SEED)
    tasks: tuple[TaskName, ...] = ("passkey", "kv")
    rows: list[dict[str, str]] = []
    for tokens, count in SIZES:
        for _ in range(count):
            task = tasks[len(rows) % len(tasks)]
            made = generator.make(task, len(rows), tokens)
            rows.append({"id": f"{task}-{tokens}-{len(rows):02d}", "prompt": made.prompt, "answer": made.answer})
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("output", type=Path, nargs="?", default=DEFAULT_OUTPUT)
    args = parser.parse_args()
    rows = demo_rows()
    args.output.parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(pa.Table.from_pylist(rows), args.output, compression="zstd")
    print(f"{len(rows)} questions -> {args.output} ({args.output.stat().st_size / 1e3:.0f} kB)")


if __name__ == "__main__":
    main()
